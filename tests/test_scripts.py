"""The root scripts end to end on the tiny target, and one clear line for every mistake a user can make."""

import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from accelerate import PartialState
from gguf import GGUFReader
from hydra.core.global_hydra import GlobalHydra
from safetensors.torch import load_file, save_file

from models.drafter_files import step_folders
from models.target import TargetConfig
from tests.conftest import counting_chat, tiny_tokenizer
from tests.test_conf import load_script

Script = Callable[..., str]


@pytest.fixture
def script(tiny_target_config: TargetConfig, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> Script:
    """`script(name, *overrides)`: run a root script in this process on the tiny target; returns its standard output."""

    def run(name: str, *overrides: str, target: Path | None = None) -> str:
        path = target or Path(tiny_target_config.path)
        common = ["target=custom", f"target.path={path}", "target.name=tiny", "target.dtype=float32"]
        common += ["target.layer_ids=[0,1,2]", f"target.mask_token_id={tiny_target_config.mask_token_id}"]
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *common, *overrides])
        GlobalHydra.instance().clear()
        PartialState._reset_state()
        module = load_script(name)
        module.main.__wrapped__.__module__ = "__main__"  # Hydra then finds conf/ beside the file, as when it is run
        capsys.readouterr()
        module.main()
        return capsys.readouterr().out

    return run


@pytest.fixture
def fails(script: Script, capsys: pytest.CaptureFixture) -> Callable[..., str]:
    """Like `script`, but demands one line on standard error and a status other than 0; returns that line."""

    def run(name: str, *overrides: str, target: Path | None = None) -> str:
        with pytest.raises(SystemExit) as stop:
            script(name, *overrides, target=target)
        assert stop.value.code not in (0, None)
        error = capsys.readouterr().err
        assert "Traceback" not in error
        return error

    return run


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import random

    rng = random.Random(2)
    path = tmp_path_factory.mktemp("prompts") / "counting.jsonl"
    chats = [counting_chat(rng)[:1] for _ in range(32)]
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return path


@pytest.fixture(scope="module")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Filled by the first test of the pipeline and read by the others."""
    return tmp_path_factory.mktemp("run")


TINY_MODEL = ["model.num_layers=1", "model.num_draft_tokens=3", "model.markov_rank=8"]


def test_the_whole_path_on_a_tiny_target(script: Script, prompts_file: Path, finished_run: Path) -> None:
    out = f"output_dir={finished_run}"
    evaluate = [out, f"tasks=[{prompts_file}]", "num_prompts=6", "max_new_tokens=16", "batch_size=4"]
    script("generate", out, f"prompts={prompts_file}", "max_new_tokens=20", "batch_size=8")
    script("extract", out, "feature_dtype=float32", "records_per_shard=10")
    script("train", out, "num_steps=30", "batch_size=8", "optim.learning_rate=5e-3", *TINY_MODEL)
    shown = script("eval", *evaluate, "temperature=[0,1]", "num_draft_tokens=auto", "check_transformers=2")
    exported = script("export", out)
    report = json.loads((finished_run / "summary.json").read_text())
    assert report["drafter"] == "dspark" and report["num_draft_tokens"] == 3
    assert report["outputs_identical_to_vanilla"] and report["transformers_generate"]["outputs_identical_to_vanilla"]
    assert set(report["seconds"]) >= {"generate", "extract", "train", "eval", "export"}
    assert {row["drafter"] for row in report["rows"]} == {"vanilla", "ngram", "dspark"}
    assert "acceptance length" in shown and "| dspark" in shown
    assert f"in {finished_run / 'export'}: README.md, config.json, model.safetensors" in exported
    assert (finished_run / "export" / "README.md").read_text().count("| dspark") >= 2


def test_eval_calibrates_schedules_and_simulates(
    script: Script, finished_run: Path, prompts_file: Path, tmp_path: Path
) -> None:
    """Temperatures are fitted on other prompts, kept beside the weights, and used by every schedule from then on."""
    draft = step_folders(shutil.copytree(finished_run / "checkpoints", tmp_path / "checkpoints"))[-1]
    common = [f"tasks=[{prompts_file}]", "num_prompts=6", "max_new_tokens=16", "batch_size=4", "baselines=[]"]
    common += [f"draft={draft}", "temperature=[1,0]", "check_transformers=0"]
    first = [*common, f"output_dir={tmp_path / 'first'}", "simulate.enabled=true", "simulate.loads=[1,3]"]
    first += ["simulate.num_rounds=20", "calibrate.enabled=true", "calibrate.num_prompts=8"]
    shown = script("eval", *first)
    report = json.loads((tmp_path / "first" / "eval" / "report.json").read_text())
    calibration = json.loads((draft / "calibration.json").read_text())
    num_drafts = report["num_draft_tokens"]
    assert len(calibration["temperatures"]) == num_drafts == len(report["calibration"]["after"]["ece"])
    assert report["calibration"]["scaling"] == calibration["scaling"]
    assert "<svg" in (tmp_path / "first" / "eval" / "reliability.svg").read_text()
    exported = tmp_path / "exported"
    script("export", f"output_dir={tmp_path}", f"draft={draft}", f"out={exported}")
    assert json.loads((exported / "calibration.json").read_text()) == calibration
    assert "--speculative-dspark-confidence-sts-path" in (exported / "README.md").read_text()
    script("export", f"output_dir={tmp_path}", f"draft={finished_run / 'checkpoints'}", f"out={exported}")
    assert not (exported / "calibration.json").exists()
    assert "before and after calibration" in shown and "Simulated tokens a second" in shown
    schedules = report["simulation"]["schedules"]
    assert {"vanilla", "fixed 1", "confidence", "algorithm1", "async, gate"} < schedules.keys()
    assert [row["num_requests"] for row in schedules["async"]] == [1, 3]
    for schedule in ("algorithm1", "async"):
        script("eval", *common, f"output_dir={tmp_path / schedule}", f"schedule={schedule}", "gate=true")
        report = json.loads((tmp_path / schedule / "eval" / "report.json").read_text())
        assert report["schedule"] == f"{schedule}, gate" and report["lossless"]
        greedy = next(r for r in report["rows"] if r["temperature"] == 0 and r["drafter"] == "dspark")
        assert greedy["rounds"] > 0
        (costs,) = (tmp_path / schedule / "eval").glob("costs_*.json")
        assert json.loads(costs.read_text())["loads"] == [1, 2, 4]


def test_a_lossy_rule_is_reported_as_lossy(
    script: Script, finished_run: Path, prompts_file: Path, tmp_path: Path
) -> None:
    common = [f"tasks=[{prompts_file}]", "num_prompts=3", "max_new_tokens=8", f"output_dir={tmp_path}", "baselines=[]"]
    common += [f"draft={finished_run / 'checkpoints'}", "temperature=[1,0]", "rule=lossy_threshold"]
    shown = script("eval", *common)
    report = json.loads((tmp_path / "eval" / "report.json").read_text())
    assert "LOSSY: dspark T=1 (lossy_threshold)" in shown and report["lossless"] is False
    assert [row["lossless"] for row in report["rows"] if row["drafter"] == "vanilla"] == [True, True]


def test_a_lossy_sweep_of_a_drafter_that_drafts_nothing_alters_nothing(script: Script, tmp_path: Path) -> None:
    (tmp_path / "once.jsonl").write_text(json.dumps({"turns": ["3"]}) + "\n")
    common = [f"output_dir={tmp_path}", "draft=ngram", f"tasks=[{tmp_path / 'once.jsonl'}]", "max_new_tokens=3"]
    shown = script("eval", *common, "temperature=1", "lossy_sweep=[0.5]", "check_transformers=0")
    assert "lossy from 0.5 on" in shown and "0.0% of the tokens altered" in shown
    assert (tmp_path / "eval" / "report.html").is_file()


def test_missing_tasks_are_named_and_the_protocol_fixes_its_options(
    script: Script, finished_run: Path, prompts_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eval.config.DEEPSPEC_SEED", 5)
    shutil.copy(prompts_file, tmp_path / "gsm8k.jsonl")
    common = ["tasks=[gsm8k,livecodebench]", f"prompts_dir={tmp_path}", "num_prompts=2", "baselines=[]"]
    common += [f"draft={finished_run / 'checkpoints'}", f"output_dir={tmp_path}", "check_transformers=0"]
    shown = script("eval", *common, "protocol=deepspec", "max_new_tokens=3")
    report = json.loads((tmp_path / "eval" / "report.json").read_text())
    assert f"NOT MEASURED: tasks: livecodebench: there is no {tmp_path / 'livecodebench.jsonl'}" in shown
    assert (report["temperature"], report["max_new_tokens"], report["num_prompts"]) == (1.0, 2048, 2)
    assert list(report["per_domain"]) == ["gsm8k"] and len(report["missing_tasks"]) == 1


def test_calibration_on_measured_prompts_is_refused(
    fails: Callable[..., str], finished_run: Path, prompts_file: Path, tmp_path: Path
) -> None:
    common = [f"tasks=[{prompts_file}]", f"draft={finished_run / 'checkpoints'}", f"output_dir={tmp_path}"]
    error = fails("eval", *common, "calibrate.enabled=true", f"calibrate.prompts={prompts_file}")
    assert "are among the measured prompts" in error


def test_eval_accepts_the_exported_folder_and_measures_the_same(
    script: Script, prompts_file: Path, finished_run: Path, tmp_path: Path
) -> None:
    evaluate = [
        f"tasks=[{prompts_file}]",
        "num_prompts=6",
        "max_new_tokens=16",
        "batch_size=4",
        f"output_dir={tmp_path}",
    ]
    script("eval", *evaluate, f"draft={finished_run / 'export'}")
    ours = json.loads((finished_run / "eval" / "report.json").read_text())
    again = json.loads((tmp_path / "eval" / "report.json").read_text())
    ours |= ours["per_domain"]["counting"]  # what does not depend on speed, of the one task
    again |= again["per_domain"]["counting"]
    for key in ("rounds", "proposed", "accepted", "acceptance_length", "survival", "recall_at_16", "oracle_length"):
        assert again[key] == ours[key], key


def test_every_drafter_trains_and_is_measured_by_the_same_commands(
    script: Script, prompts_file: Path, finished_run: Path, tmp_path: Path
) -> None:
    small = ["num_steps=30", "batch_size=8", "optim.learning_rate=5e-3"]
    for model in ("dflash", "eagle3"):
        layers = [] if model == "eagle3" else ["model.num_layers=1"]
        out = [f"model={model}", f"output_dir={tmp_path / model}", f"store={finished_run / 'store'}"]
        script("train", *out, *small, *layers, "model.num_draft_tokens=3")
    compared = ",".join(str(tmp_path / model / "checkpoints") for model in ("dflash", "eagle3"))
    evaluate = [f"tasks=[{prompts_file}]", "num_prompts=6", "max_new_tokens=16", "batch_size=4"]
    evaluate += [f"draft={finished_run / 'checkpoints'}", f"compare=[{compared}]", f"output_dir={tmp_path}"]
    shown = script("eval", *evaluate)
    rows = {row["drafter"]: row for row in json.loads((tmp_path / "eval" / "report.json").read_text())["rows"]}
    assert set(rows) == {"vanilla", "ngram", "dspark", "dflash", "eagle3"}
    for name in ("dspark", "dflash", "eagle3"):
        assert rows[name]["outputs_identical_to_vanilla"] and rows[name]["accepted"] > 0, name
        assert len(rows[name]["conditional_acceptance"]) == 3
        assert f"| {name}" in shown.split("Conditional acceptance")[1]
    assert rows["eagle3"]["slot_layout"] is None


def test_export_writes_gguf_with_the_tokens_of_the_target(script: Script, finished_run: Path, tmp_path: Path) -> None:
    script("export", f"output_dir={finished_run}", "engine=gguf", "dtype=bfloat16", f"out={tmp_path / 'out'}")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"dspark.gguf", "README.md"}
    assert "llama-server" in (tmp_path / "out" / "README.md").read_text()
    strings = GGUFReader(tmp_path / "out" / "dspark.gguf").fields["tokenizer.ggml.tokens"].contents()
    assert strings == tiny_tokenizer().convert_ids_to_tokens(list(range(len(strings))))


def test_an_unknown_engine_is_named_with_the_choices(
    fails: Callable[..., str], finished_run: Path, tmp_path: Path
) -> None:
    error = fails("export", f"output_dir={finished_run}", "engine=ggml", f"out={tmp_path / 'out'}")
    assert "deepspec, vllm, speculators, sglang, gguf" in error and "ggml" in error and not (tmp_path / "out").exists()


def test_a_gguf_target_is_written_with_gguf_drafters_alone(
    fails: Callable[..., str], finished_run: Path, tmp_path: Path
) -> None:
    error = fails("export", f"output_dir={finished_run}", "with_target=true", f"out={tmp_path / 'out'}")
    assert "with_target=true" in error and "engine=vllm" in error and not (tmp_path / "out").exists()


def test_a_second_run_keeps_finished_work(script: Script, prompts_file: Path, finished_run: Path) -> None:
    before = {
        path: path.stat().st_mtime_ns
        for part in ("responses.jsonl", "store", "checkpoints", "eval/passes")
        for path in (finished_run / part).rglob("*")
    }
    out = f"output_dir={finished_run}"
    script("generate", out, f"prompts={prompts_file}", "max_new_tokens=20", "batch_size=8")
    script("extract", out, "feature_dtype=float32", "records_per_shard=10")
    script("train", out, "num_steps=30", "batch_size=8", "optim.learning_rate=5e-3", *TINY_MODEL)
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_a_store_is_looked_at_before_and_after(script: Script, finished_run: Path, tmp_path: Path) -> None:
    out = [f"output_dir={tmp_path}", f"responses={finished_run / 'responses.jsonl'}"]
    shown = script("extract", *out, "preview=2")
    assert "record 1:" in shown and "⟦" in shown and "tokens supervised" in shown
    assert not (tmp_path / "store").exists()
    script("extract", *out, "feature_dtype=fp8", "last_hidden_dtype=fp8")
    checked = script("extract", *out, "verify=true", "verify_records=3")
    assert "every checksum is right" in checked and "3 chats computed again" in checked
    stats = script("extract", *out, "stats=true")
    for part in ("types        features fp8, last hidden fp8", "supervised (", "top tokens   '<end>'", "█", "a token"):
        assert part in stats, part


def test_a_drafter_trains_and_is_measured_on_rounded_features(
    script: Script, prompts_file: Path, finished_run: Path, tmp_path: Path
) -> None:
    small = ["num_steps=30", "batch_size=8", "optim.learning_rate=5e-3", *TINY_MODEL]
    online = [f"online.responses={finished_run / 'responses.jsonl'}", "online.feature_dtype=fp8"]
    script("train", f"output_dir={tmp_path}", "store=online", *online, *small)
    evaluate = [f"tasks=[{prompts_file}]", "num_prompts=12", "max_new_tokens=16", "batch_size=12", "baselines=[]"]
    lengths = {}
    for dtype in ("null", "fp8", "nf4"):
        out = tmp_path / dtype
        script("eval", *evaluate, f"output_dir={out}", f"draft={tmp_path / 'checkpoints'}", f"feature_dtype={dtype}")
        report = json.loads((out / "eval" / "report.json").read_text())
        assert report["outputs_identical_to_vanilla"] and report["feature_dtype"] in (dtype, "float32")
        lengths[dtype] = report["acceptance_length"]
    assert lengths["null"] > 1.2
    assert abs(lengths["fp8"] / lengths["null"] - 1) < 0.05


def test_a_wrong_type_names_the_key(fails: Callable[..., str]) -> None:
    assert "batch_size" in fails("generate", "batch_size=many")


def test_an_unknown_key_is_named(fails: Callable[..., str]) -> None:
    assert "batchsize" in fails("train", "batchsize=3")


def test_an_unknown_drafter_is_named_with_the_choices(fails: Callable[..., str]) -> None:
    error = fails("train", "model=dsparc")
    assert "dsparc" in error and "dspark" in error


def test_a_missing_prompt_file_is_named(fails: Callable[..., str], tmp_path: Path) -> None:
    error = fails("generate", f"output_dir={tmp_path}", f"prompts={tmp_path / 'nowhere.jsonl'}")
    assert error.startswith("generate.py: error:") and "nowhere.jsonl" in error


def test_missing_responses_say_what_to_run_first(fails: Callable[..., str], tmp_path: Path) -> None:
    assert "run generate.py first" in fails("extract", f"output_dir={tmp_path}")


def test_empty_responses_are_refused(fails: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "responses.jsonl").touch()
    assert "responses.jsonl is empty" in fails("extract", f"output_dir={tmp_path}")


def test_a_chat_without_an_assistant_turn_is_refused(fails: Callable[..., str], tmp_path: Path) -> None:
    line = {"id": "a", "messages": [{"role": "user", "content": "1 2"}], "finish_reason": "stop"}
    (tmp_path / "responses.jsonl").write_text(json.dumps(line) + "\n")
    error = fails("extract", f"output_dir={tmp_path}")
    assert "assistant turn" in error and "responses.jsonl:1" in error


def test_a_response_without_messages_is_named(fails: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "responses.jsonl").write_text('{"id": "a"}\n')
    assert "responses.jsonl:1: none of messages" in fails("extract", f"output_dir={tmp_path}")


def test_a_missing_store_says_how_to_make_one(fails: Callable[..., str], tmp_path: Path) -> None:
    assert "extract.py" in fails("train", f"output_dir={tmp_path}", *TINY_MODEL)


def test_a_store_of_another_version_is_refused(fails: Callable[..., str], finished_run: Path, tmp_path: Path) -> None:
    shutil.copytree(finished_run / "store", tmp_path / "store")
    manifest = json.loads((tmp_path / "store" / "manifest.json").read_text())
    (tmp_path / "store" / "manifest.json").write_text(json.dumps({**manifest, "version": 99}))
    error = fails("train", f"output_dir={tmp_path}", *TINY_MODEL)
    assert "version 99" in error and "extract.py" in error


def other_target(tiny: Path, folder: Path) -> Path:
    """The tiny target with one weight changed."""
    shutil.copytree(tiny, folder)
    weights = load_file(folder / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_store_of_another_target_is_refused(
    fails: Callable[..., str], finished_run: Path, tmp_path: Path, tiny_target_config: TargetConfig
) -> None:
    other = other_target(Path(tiny_target_config.path), tmp_path / "target")
    overrides = [f"output_dir={tmp_path}", f"store={finished_run / 'store'}", *TINY_MODEL]
    error = fails("train", *overrides, target=other)
    assert "was made by target tiny" in error and "weights" in error


def test_a_drafter_of_another_target_is_refused(
    fails: Callable[..., str], finished_run: Path, tmp_path: Path, tiny_target_config: TargetConfig
) -> None:
    other = other_target(Path(tiny_target_config.path), tmp_path / "target")
    error = fails("eval", f"output_dir={tmp_path}", f"draft={finished_run / 'checkpoints'}", target=other)
    assert "was trained for target tiny" in error and "weights_sha256" in error


@pytest.mark.parametrize("damage", ["missing", "extra"])
def test_a_checkpoint_with_a_missing_or_an_extra_key_is_refused(
    fails: Callable[..., str], finished_run: Path, tmp_path: Path, damage: str
) -> None:
    shutil.copytree(finished_run / "export", tmp_path / "draft")
    weights = load_file(tmp_path / "draft" / "model.safetensors")
    if damage == "missing":
        del weights["norm.weight"]
    else:
        weights["norm.bias"] = weights["norm.weight"].clone()
    save_file(weights, tmp_path / "draft" / "model.safetensors")
    error = fails("eval", f"output_dir={tmp_path}", f"draft={tmp_path / 'draft'}")
    assert {"missing": "missing norm.weight", "extra": "unexpected norm.bias"}[damage] in error


def test_a_missing_drafter_folder_is_named(fails: Callable[..., str], tmp_path: Path) -> None:
    error = fails("eval", f"output_dir={tmp_path}", f"draft={tmp_path / 'nowhere'}")
    assert "no such folder" in error and "first_layers:N" in error
    (tmp_path / "dspark.gguf").touch()
    assert "holds GGUF files" in fails("eval", f"output_dir={tmp_path}", f"draft={tmp_path}")


def test_a_missing_target_folder_is_named(fails: Callable[..., str], tmp_path: Path) -> None:
    error = fails("train", f"output_dir={tmp_path}", target=tmp_path / "nowhere")
    assert "target.path" in error and "nowhere" in error


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["lossy_sweep=[0.3]", "temperature=0"], "lossy_sweep=[0.3] needs a temperature above 0"),
        (["lossy_sweep=[0.3,2]", "temperature=1"], "lossy_sweep=[0.3, 2.0]: 2.0 must be in (0, 1]"),
        (["replay=2"], "replay=2 must be null or a measured prompt, 0..1"),
    ],
)
def test_sweeps_and_races_that_cannot_be_are_refused(
    fails: Callable[..., str], prompts_file: Path, tmp_path: Path, options: list[str], said: str
) -> None:
    common = [f"output_dir={tmp_path}", f"tasks=[{prompts_file}]", "num_prompts=2", "draft=ngram"]
    assert said in fails("eval", *common, *options)
    assert not (tmp_path / "eval" / "passes").exists()


def test_a_length_that_the_drafter_was_not_trained_for_is_refused(
    fails: Callable[..., str], finished_run: Path, prompts_file: Path
) -> None:
    error = fails("eval", f"output_dir={finished_run}", f"tasks=[{prompts_file}]", "num_draft_tokens=9")
    assert "num_draft_tokens must be auto, null or 1..3" in error


def test_processes_that_would_not_know_of_each_other_are_refused(
    fails: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert "WORLD_SIZE is not" in fails("train", f"output_dir={tmp_path}", *TINY_MODEL)


def test_a_world_that_accelerate_does_not_see_is_refused(
    fails: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "WORLD_SIZE=2" in fails("train", f"output_dir={tmp_path}", *TINY_MODEL)


def test_scripts_that_run_in_one_process_refuse_two() -> None:
    from data.run import check_single

    with pytest.raises(ValueError, match="runs in one process, the launcher started 2"):
        check_single(2)


def test_the_tiny_tokenizer_is_the_one_of_the_target(tiny_target_config: TargetConfig) -> None:
    from models.target import load_tokenizer

    assert load_tokenizer(tiny_target_config).get_vocab() == tiny_tokenizer().get_vocab()
