"""A race of drafters: equal conditions in every cell, each cell done once, and the same result however it was ended."""

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

from eval.cells import (
    FULL_MINUTES,
    ROOT,
    RaceConfig,
    cells_of,
    finished_cells,
    plan_of,
    run_race,
    run_script,
    training_of,
)
from models.config import to_dataclass
from models.files import read_json
from models.target import TargetConfig
from tests.test_conf import CONF, compose_and_type, load_script
from tests.test_scripts import Script, prompts_file, script  # noqa: F401 (fixtures)

load_script("race")  # registers its schema


def configured(*overrides: str) -> RaceConfig:
    with initialize_config_dir(str(CONF), version_base=None):
        return to_dataclass(RaceConfig, compose("race", list(overrides)), section="race")


@pytest.fixture
def tiny_race(tmp_path: Path, prompts_file: Path) -> RaceConfig:
    """A trained drafter with two seeds and two untrained ones, on a tiny target."""
    config = configured("drafters=[ngram,first_10_layers,dflash2]", "seeds=[1,2]", "num_draft_tokens=3")
    config.output_dir, config.results, config.budget_minutes = str(tmp_path), str(tmp_path / "results"), 4
    config.untrained["first_10_layers"] = "first_layers:2"
    config.options.generate = [f"prompts={prompts_file}", "max_new_tokens=20", "batch_size=8"]
    config.options.extract = ["feature_dtype=float32"]
    config.options.train = ["model.num_layers=1"]
    config.options.eval = [f"tasks=[{prompts_file}]", "num_prompts=6", "max_new_tokens=16", "batch_size=6"]
    return config


class Stages:
    """Runs stages in this process, notes them, and ends the race in the place of stage number `last`."""

    def __init__(self, script: Script, last: int | None = None) -> None:
        self.script, self.last, self.ran = script, last, list[tuple[str, Sequence[str]]]()

    def __call__(self, name: str, options: Sequence[str]) -> None:
        if len(self.ran) == self.last:
            raise KeyboardInterrupt
        self.ran.append((name, options))
        self.script(name, *options)

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.ran]


def without_times(folder: Path) -> dict[str, Any]:
    """Of every cell what does not depend on how fast it went."""
    found = {}
    for path in folder.glob("*.json"):
        record = read_json(path)
        rows = [{k: v for k, v in row.items() if not k.endswith("per_second")} for row in record["measured"]]
        last = None if record["training"] is None else record["training"]["last"]
        found[path.name] = [record["cell"], record["plan"], record["trained_parameters"], rows, last]
    return found


def test_a_race_trains_and_measures_every_cell_alike_and_once(
    script: Script, tiny_race: RaceConfig, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    whole = Stages(script)
    shown = run_race(tiny_race, whole)
    results = Path(tiny_race.results)
    cells = [path.stem for path in results.glob("*.json")]
    assert sorted(cells) == sorted(["ngram", "first_10_layers", "dflash2_seed1", "dflash2_seed2"])
    assert whole.names == ["eval", "eval", "generate", "extract", *["train", "eval"] * 2]
    records = {name: read_json(results / f"{name}.json") for name in cells}
    assert len({json.dumps(record["plan"], sort_keys=True) for record in records.values()}) == 1
    for name, record in records.items():
        greedy, sampled = record["measured"]
        assert (greedy["temperature"], sampled["temperature"], greedy["num_draft_tokens"]) == (0.0, 1.0, 3)
        assert greedy["outputs_identical_to_vanilla"] and greedy["lossless"] and sampled["lossless"]
        assert sum(len(part) for part in greedy["requests"].values()) == 6
        tokens, rounds = (sum(r[i] for part in greedy["requests"].values() for r in part) for i in (0, 1))
        assert tokens / rounds == greedy["acceptance_length"]
        assert all(seconds >= 0 for seconds in record["alone"].values()) and record["alone"]["vanilla_seconds"] > 0
        assert (record["training"] is None) == (not record["trained_parameters"]) == ("seed" not in name)
        if record["training"] is not None:
            lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
            assert lines[-1]["step"] == record["training"]["num_steps"] == record["plan"]["num_steps"] == 15
            assert record["training"]["last"]["loss"] == lines[-1]["loss"]
    assert shown == (results / "standings.md").read_text() and "dflash2 (in_place)" in shown
    assert "identical to vanilla decoding in every cell" in shown and "NOT" not in shown

    nothing = Stages(script)
    run_race(tiny_race, nothing)
    assert nothing.names == []
    assert f"all 4 cells asked for are finished in {results}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_race_goes_on_where_it_was_ended(script: Script, tiny_race: RaceConfig, tmp_path: Path) -> None:
    """In the place of the second training and of the extraction after it, then left to itself: its cells are those of a
    race that was not disturbed."""
    run_race(tiny_race, Stages(script))
    copy = replace(tiny_race, output_dir=str(tmp_path / "again"), results=str(tmp_path / "again" / "results"))
    ran = []
    for last in (6, 1, None):
        stages = Stages(script, last)
        try:
            run_race(copy, stages)
        except KeyboardInterrupt:
            assert last is not None
        ran.append(stages.names)
    assert ran[0] == ["eval", "eval", "generate", "extract", "train", "eval"]
    assert ran[1] == ["generate"] and ran[2] == ["generate", "extract", "train", "eval"]
    assert without_times(Path(copy.results)) == without_times(Path(tiny_race.results))


def test_a_cell_of_another_race_is_refused_and_left_alone(
    script: Script, tiny_race: RaceConfig, tmp_path: Path
) -> None:
    tiny_race.drafters = ["ngram"]
    run_race(tiny_race, Stages(script))
    path = Path(tiny_race.results) / "ngram.json"
    before, stages = path.read_bytes(), Stages(script)
    for changed, said in (
        (replace(tiny_race, budget_minutes=24), "budget_minutes: 4.* there, 24.* here; num_steps: 15 there, 90 here"),
        (replace(tiny_race, num_draft_tokens=2), "num_draft_tokens: 3 there, 2 here"),
        (replace(tiny_race, untrained={"ngram": "vanilla"}), "draft: ngram there, vanilla here"),
    ):
        with pytest.raises(ValueError, match=rf"ngram\.json is a cell of another race \({said}.*take another name="):
            run_race(changed, stages)
    assert path.read_bytes() == before and not stages.ran
    (cell,) = cells_of(tiny_race)
    with pytest.raises(ValueError, match=r"options: \[\] there, \['seed=3'\] here"):
        finished_cells(path.parent, [replace(cell, options=("seed=3",))], plan_of(tiny_race))
    with pytest.raises(ValueError, match=r"ngram\.json is a cell of another race \(num_draft_tokens: 3 there, 2 here"):
        finished_cells(path.parent, [], plan_of(replace(tiny_race, num_draft_tokens=2)))  # not asked for, but there
    elsewhere = replace(tiny_race, budget_minutes=24, results=str(tmp_path / "other"))
    with pytest.raises(ValueError, match=r"plan\.json says that this folder holds another race .*take another name="):
        run_race(elsewhere, stages)
    assert not stages.ran and not (tmp_path / "other").exists()
    (tmp_path / "demo").mkdir()
    (tmp_path / "demo" / "responses.jsonl").touch()
    with pytest.raises(ValueError, match=r"output_dir=.*demo holds answers of another run; take another name="):
        run_race(replace(elsewhere, output_dir=str(tmp_path / "demo")), stages)
    with pytest.raises(ValueError, match=r"results=.*demo must be another folder than output_dir"):
        run_race(replace(elsewhere, output_dir=str(tmp_path / "demo"), results=str(tmp_path / "demo")), stages)


@pytest.mark.slow
def test_options_of_a_user_cannot_make_cells_unequal(script: Script, tiny_race: RaceConfig) -> None:
    """Greedily and sampled, by lossless rules, with the race's own numbers of drafts and steps."""
    tiny_race.drafters, tiny_race.seeds = ["ngram", "dspark_vanilla"], [1]
    tiny_race.options.train += ["num_steps=3", "model.num_draft_tokens=5"]
    tiny_race.options.eval += ["num_draft_tokens=1", "rule=lossy_threshold", "temperature=1", "baselines=[ngram]"]
    tiny_race.options.eval += ["cost_loads=[1,2]"]
    shown = run_race(tiny_race, Stages(script))
    for path in Path(tiny_race.results).glob("*.json"):
        record = read_json(path)
        assert [(row["temperature"], row["num_draft_tokens"], row["lossless"]) for row in record["measured"]] == [
            (0.0, 3, True),
            (1.0, 3, True),
        ]
        assert len({row["drafter"] for row in record["measured"]}) == 1
    metrics = Path(tiny_race.output_dir) / "dspark_vanilla_seed1" / "metrics.jsonl"
    assert json.loads(metrics.read_text().splitlines()[-1])["step"] == 15
    assert "generate.py prompts=" in shown and "a real difference" not in shown


def test_the_committed_race_is_the_one_that_the_readme_asks_for() -> None:
    """`python race.py results=results/race` finds all of its cells finished."""
    config = configured("results=results/race")
    cells = cells_of(config)
    assert finished_cells(ROOT / config.results, cells, plan_of(config)) == {cell.name for cell in cells}


@pytest.mark.slow
def test_two_depths_of_the_target_are_timed_apart(script: Script, tiny_race: RaceConfig) -> None:
    """They are measured in one folder, where costs are kept."""
    tiny_race.drafters = ["first_10_layers", "first_27_layers"]
    tiny_race.untrained |= {"first_10_layers": "first_layers:1", "first_27_layers": "first_layers:3"}
    run_race(tiny_race, Stages(script))
    shallow, deep = (read_json(Path(tiny_race.results) / f"{name}.json")["alone"] for name in tiny_race.drafters)
    assert shallow["draft_seconds"] != deep["draft_seconds"]
    assert len(list((Path(tiny_race.output_dir) / "eval").glob("costs_1_*.json"))) == 2


def test_a_training_that_was_ended_early_makes_no_cell(tmp_path: Path) -> None:
    """train.py ends well after a SIGTERM, with a checkpoint of fewer steps."""
    metrics = tmp_path / "metrics.jsonl"
    lines = [{"step": step, "seconds_per_step": 0.1 * step, "loss": 1.0} for step in (1, 2, 3)]
    metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
    with pytest.raises(ValueError, match=r"metrics\.jsonl ends after 3 of 4 steps; the same command goes on"):
        training_of(metrics, 4)
    found = training_of(metrics, 3)
    assert found["seconds"] == pytest.approx(3 * 0.2) and found["last"] == {"loss": 1.0}
    metrics.unlink()
    with pytest.raises(ValueError, match="ends after 0 of 3 steps"):
        training_of(metrics, 3)


def test_a_launcher_that_is_not_there_is_named() -> None:
    with pytest.raises(ValueError, match=r"launcher=\['nowhere'\] cannot be started"):
        run_script(["nowhere"], "train", [])


@pytest.mark.slow
@pytest.mark.parametrize("sent", [signal.SIGTERM, signal.SIGINT])
def test_a_race_that_is_ended_ends_its_stage_first(tmp_path: Path, sent: signal.Signals) -> None:
    """By Ctrl-C or a SIGTERM to race.py alone: the stage has a SIGTERM's time to keep its work, and none is left.
    One line says so."""
    kept, began = tmp_path / "kept", tmp_path / "began"
    stage = f"trap 'echo work > {kept}; exit 0' TERM; touch {began}; while :; do sleep 0.05; done"
    program = f"""
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have started the tests with it ignored
import eval.cells as cells
cells.run_race = lambda config: cells.run_script(["bash", "-c", {stage!r}], "train", [])
sys.argv = ["race.py"]
runpy.run_path("race.py", run_name="__main__")
"""
    process = subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    while not began.exists():
        assert process.poll() is None, process.stderr and process.stderr.read()
        time.sleep(0.05)
    process.send_signal(sent)
    _, error = process.communicate(timeout=30)
    assert process.returncode == 130 and kept.read_text() == "work\n"
    lines = [line for line in error.splitlines() if line.startswith("race.py") or "Traceback" in line]
    assert lines == ["race.py: stopped; finished cells are kept, and the same command goes on from there"]


def test_a_budget_scales_steps_answers_and_prompts_and_nothing_else() -> None:
    full, half = configured(f"budget_minutes={FULL_MINUTES}"), configured(f"budget_minutes={FULL_MINUTES / 2}")
    scaled = {name: value for name, value in plan_of(half).items() if value != plan_of(full)[name]}
    assert scaled == {"budget_minutes": 60.0, **{name: value // 2 for name, value in asdict(full.full).items()}}
    assert plan_of(configured("budget_minutes=0.01"))["num_steps"] >= 1
    assert cells_of(half) == cells_of(full)


def test_a_race_has_every_drafter_and_every_head_with_every_seed() -> None:
    """And a race that is ended early has compared all of them with one seed before any has a second."""
    cells = cells_of(configured())
    trained = [cell for cell in cells if cell.seed is not None]
    names = ["eagle3", "dflash", "dspark_vanilla", "dspark_gated", "dspark_rnn", "dflash2"]
    assert [(cell.drafter, cell.seed) for cell in trained] == [(name, seed) for seed in (1, 2, 3) for name in names]
    assert {cell.draft for cell in cells if cell.seed is None} == {"ngram", "first_layers:10", "first_layers:27"}


def test_all_drafters_train_under_equal_conditions() -> None:
    """Their configs differ in the drafter alone, which has one layer and a sample of the vocabulary each."""
    composed = {}
    for name, options in configured().trained.items():
        node = compose_and_type("train", ["experiment=race", *options])
        found = dict(OmegaConf.to_container(node))
        model = found.pop("model")
        assert model["sampled_vocabulary"] == 3000 and model.get("num_layers", 1) == 1, name
        composed[name] = found
    assert all(found == composed["eagle3"] for found in composed.values())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["budget_minutes=0"], r"budget_minutes must be above 0 and finite, got 0"),
        (["budget_minutes=inf"], r"budget_minutes must be above 0 and finite, got inf"),
        (["full.num_steps=0"], r"full\.num_steps must be at least 1, got 0"),
        (["num_draft_tokens=0"], r"num_draft_tokens must be at least 1, got 0"),
        (["seeds=[]"], r"seeds must be one or more different numbers from 0 to .*, got \[\]"),
        (["seeds=[1,1]"], r"seeds must be one or more different numbers from 0 to .*, got \[1, 1\]"),
        (["seeds=[-1]"], r"seeds must be .* from 0 to .*, got \[-1\]"),
        (["recipe=nowhere"], r"recipe=nowhere: no conf/experiment/train/nowhere\.yaml; there are .*'race'"),
        (["drafters=[medusa]"], r"drafters=\['medusa'\]: no medusa; there are ngram, .*dflash2"),
        (["drafters=[]"], r"drafters=\[\]: none is left to race"),
        (["+untrained.Ngram=ngram"], r"'Ngram' becomes a file's name"),
        (["+untrained.dflash=ngram"], r"trained and untrained share the names \['dflash'\]"),
    ],
)
def test_options_that_make_no_race_are_named(overrides: list[str], message: str) -> None:
    stages: list[Any] = []
    with pytest.raises(ValueError, match=message):
        run_race(configured(*overrides), lambda *stage: stages.append(stage))
    assert not stages


def test_a_stage_that_fails_is_named_and_leaves_no_cell(tmp_path: Path) -> None:
    config = configured("drafters=[ngram]", f"output_dir={tmp_path}")
    with pytest.raises(
        ValueError, match=r"train\.py ended with status 1 .* goes on from there when it is started again"
    ):
        run_race(config, lambda *_: run_script(["false"], "train", []))
    assert not list(Path(config.results).glob("*.json"))


@pytest.mark.slow
def test_a_script_that_fails_is_named_with_its_status(tiny_target_config: TargetConfig, tmp_path: Path) -> None:
    """By the real script: the draft does not exist."""
    config = configured("drafters=[ngram]", f"output_dir={tmp_path}")
    config.untrained["ngram"] = str(tmp_path / "nowhere")
    config.target_options = ["target=custom", f"target.path={tiny_target_config.path}"]
    with pytest.raises(ValueError, match=r"eval\.py ended with status 2 .* goes on from there"):
        run_race(config)
    assert not list(Path(config.results).glob("*.json"))


@pytest.mark.slow
def test_race_py_races_all_drafters_in_a_tiny_budget(
    tiny_target_config: TargetConfig, prompts_file: Path, tmp_path: Path
) -> None:
    """The script itself with processes of its own, every drafter, then once more, which runs nothing."""
    target = [f"target.path={tiny_target_config.path}", f"target.mask_token_id={tiny_target_config.mask_token_id}"]
    target += ["target=custom", "target.name=tiny", "target.dtype=float32", "target.layer_ids=[0,1,2]"]
    asked = [f"output_dir={tmp_path}", "budget_minutes=2", "seeds=[1]", f"target_options={listed(*target)}"]
    asked += ["untrained.first_10_layers=first_layers:1", "untrained.first_27_layers=first_layers:3"]
    asked.append(f"options.generate={listed(f'prompts={prompts_file}', 'max_new_tokens=20')}")
    asked.append(f"options.eval={listed(f'tasks=[{prompts_file}]', 'num_prompts=4', 'max_new_tokens=12')}")
    run_script([], "race", asked)
    results = tmp_path / "results"
    first = {path.name: path.stat().st_mtime_ns for path in results.glob("*.json")}
    assert len(first) == 9
    shown = (results / "standings.md").read_text()
    assert all(name in shown for name in ("eagle3", "dspark rnn", "dflash2 (in_place)", "first 27 layers", "ngram"))
    shutil.rmtree(tmp_path / "store")
    run_script([], "race", asked)
    assert {path.name: path.stat().st_mtime_ns for path in results.glob("*.json")} == first


def listed(*options: str) -> str:
    """As Hydra reads a list of texts."""
    return "[" + ",".join(f"'{option}'" for option in options) + "]"
