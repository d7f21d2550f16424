"""Tests of train/resume.py: which checkpoint a run goes on from, how long, and that what it contradicts is kept; and of
runs that start from a drafter's weights."""

import json
import random
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from data.collate import collate
from data.dataset import TrainingData
from data.store import FeatureStore
from models.base import Drafter, SlotLayout
from models.checkpoint import load_drafter, save_drafter, step_folders
from models.export import export_drafter
from models.target import Target, load_tokenizer
from tests.conftest import (
    build_drafter,
    dflash_config,
    dspark_config,
    eagle3_config,
    files_of,
    planted_fault,
    run_killed,
)
from tests.draft_batches import enliven
from tests.published_files import write
from tests.resumed_training import (  # noqa: F401 (fixtures among them)
    Runs,
    assert_same_run,
    config_of,
    largest_difference,
    logged,
    runs,
    steps_of,
    weights,
    whole,
)
from tests.test_train import OPTIM, train_config
from tests.test_train_checkpoints import flip
from train import resume, setup, trainer
from train.config import TrainConfig
from train.resume import Found, find_checkpoint, on_main, put_aside


def test_a_finished_run_trains_no_further(runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs.train(config_of(tmp_path))
    before = files_of(tmp_path)
    monkeypatch.setattr(trainer, "optimiser_step", None)  # would raise if called
    runs.train(config_of(tmp_path))
    assert files_of(tmp_path) == before


def test_resuming_with_other_options_is_refused(runs: Runs, tmp_path: Path) -> None:
    runs.train(config_of(tmp_path))
    with pytest.raises(ValueError, match=r"seed \(was 3, now 4\).*resume=none"):
        runs.train(config_of(tmp_path, seed=4))
    with pytest.raises(ValueError, match=r"learning_rate"):
        runs.train(config_of(tmp_path, optim=replace(OPTIM, learning_rate=1e-3)))
    with pytest.raises(ValueError, match=r"num_steps \(was 6, now 9\).*extend=true goes on from step 6"):
        runs.train(config_of(tmp_path, num_steps=9))


def test_a_resume_path_that_is_no_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"resume=.*nowhere.*trainer.json"):
        find_checkpoint(str(tmp_path / "nowhere"), tmp_path)


def test_an_error_of_the_main_process_keeps_its_words() -> None:
    def refuse() -> None:
        raise ValueError("seed=4 does not fit")

    assert on_main(Accelerator(cpu=True), lambda: 7) == 7
    with pytest.raises(ValueError, match=r"^seed=4 does not fit$"):
        on_main(Accelerator(cpu=True), refuse)


def test_every_process_raises_what_the_main_one_found(runs: Runs, tmp_path: Path) -> None:
    """None waits for another that has ended."""
    runs.train(config_of(tmp_path))
    with pytest.raises(Exception, match=r"seed \(was 3, now 4\)"):
        runs.train_together(config_of(tmp_path, seed=4), 2)


# ---- longer


def extended(folder: Path, **changes: Any) -> TrainConfig:
    return config_of(folder, num_steps=12, log_every=1, **changes)


def test_extending_trains_on_by_a_schedule_of_its_own(runs: Runs, tmp_path: Path) -> None:
    runs.train(config_of(tmp_path, log_every=1))
    before = weights(tmp_path)
    runs.train(extended(tmp_path, extend=True))
    lines = [line for line in logged(tmp_path) if "learning_rate" in line]
    rates = [line["learning_rate"] for line in lines]
    assert [line["step"] for line in lines] == list(range(1, 13))
    assert min(rates) > 0 and rates[6] == OPTIM.learning_rate > rates[5]  # a warm-up of one step
    assert rates[6:] == sorted(rates[6:], reverse=True)
    assert largest_difference(weights(tmp_path), before) > 1e-3


@pytest.mark.parametrize("call", [1, 2, 3])
@pytest.mark.parametrize("says_so_again", [True, False])
def test_an_extension_killed_and_resumed_goes_on_by_the_same_schedule(
    runs: Runs, tmp_path: Path, call: int, says_so_again: bool
) -> None:
    """Once it has a checkpoint, extend=true need not be repeated."""
    for name in ("whole", "killed"):
        runs.train(config_of(tmp_path / name, log_every=1))
    runs.train(extended(tmp_path / "whole", extend=True))
    config = extended(tmp_path / "killed", extend=True)
    assert run_killed(lambda: runs.train(config), kill_at=(torch, "save", call)) == -9
    assert steps_of(tmp_path / "killed")[-1] == 4 + 2 * call
    if call == 1 and not says_so_again:
        with pytest.raises(ValueError, match="extend=true goes on from step 6"):
            runs.train(extended(tmp_path / "killed"))
        return
    runs.train(extended(tmp_path / "killed", extend=says_so_again))
    assert_same_run(tmp_path / "killed", tmp_path / "whole")


def test_an_extension_to_no_further_step_is_refused(runs: Runs, tmp_path: Path) -> None:
    runs.train(config_of(tmp_path))
    with pytest.raises(ValueError, match=r"extend=true: num_steps=5 is not beyond step 6"):
        runs.train(config_of(tmp_path, num_steps=5, extend=True))


# ---- back, and anew


def everything(folder: Path) -> set[tuple[str, bytes]]:
    """Files of checkpoints as `step_x/name`, wherever they lie, and every line of metrics."""
    found = set()
    for root in [folder / "checkpoints", *folder.glob("before_*")]:
        for path in step_folders(root):
            found |= {(f"{path.name}/{name}", content) for name, content in files_of(path).items()}
    lines = {line for path in folder.rglob("metrics.jsonl") for line in path.read_bytes().splitlines()}
    return found | {("metrics", line) for line in lines}


def kept(folder: Path, before: set[tuple[str, bytes]]) -> bool:
    return before <= everything(folder)


def test_starting_anew_moves_everything_and_loses_nothing(runs: Runs, tmp_path: Path, whole: Path) -> None:
    runs.train(config_of(tmp_path, keep_checkpoints=5))
    (tmp_path / "wandb_run_id").write_text("abc")
    before = everything(tmp_path)
    runs.train(config_of(tmp_path, resume="none"))
    assert kept(tmp_path, before) and steps_of(tmp_path) == [6]
    assert (tmp_path / "before_1" / "wandb_run_id").read_text() == "abc" and not (tmp_path / "wandb_run_id").exists()
    assert [path.name for path in step_folders(tmp_path / "before_1")] == [f"step_{step:08d}" for step in (2, 4, 6)]
    assert_same_run(tmp_path, whole)


def test_going_back_moves_what_is_newer_and_loses_nothing(runs: Runs, tmp_path: Path, whole: Path) -> None:
    runs.train(config_of(tmp_path, keep_checkpoints=5))
    before = everything(tmp_path)
    back = str(tmp_path / "checkpoints" / "step_00000004")
    runs.train(config_of(tmp_path, resume=back, keep_checkpoints=5))
    assert kept(tmp_path, before)
    assert [path.name for path in step_folders(tmp_path / "before_1")] == ["step_00000006"]
    runs.train(config_of(tmp_path))  # keeps fewer
    assert_same_run(tmp_path, whole)


def test_the_best_can_be_gone_back_to_by_its_link(runs: Runs, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    assert run_killed(lambda: runs.train(config), kill_at=(trainer, "optimiser_step", 6)) == -9
    assert (tmp_path / "checkpoints" / "best").readlink().name == "step_00000002" and steps_of(tmp_path) == [2, 4]
    before = everything(tmp_path)
    runs.train(config_of(tmp_path, resume=str(tmp_path / "checkpoints" / "best"), keep_checkpoints=5))
    assert kept(tmp_path, before) and steps_of(tmp_path) == [2, 4, 6]
    assert [path.name for path in step_folders(tmp_path / "before_1")] == ["step_00000004"]


def test_the_best_that_is_moved_leaves_the_link_to_the_best_that_stays(runs: Runs, tmp_path: Path) -> None:
    runs.train(config_of(tmp_path, keep_checkpoints=5))
    root = tmp_path / "checkpoints"
    assert (root / "best").readlink().name == "step_00000006"
    put_aside(tmp_path, found=found_at(root / "step_00000004"))
    assert (root / "best").readlink().name == "step_00000002"
    put_aside(tmp_path, found=None)
    assert not (root / "best").is_symlink() and not step_folders(root)


def found_at(folder: Path) -> Found:
    return resume.read_progress(folder, saved_options(folder), num_steps=6, extend=False)


def saved_options(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "trainer.json").read_text())["options"]


def test_a_run_that_goes_on_from_elsewhere_moves_all_of_its_own(runs: Runs, tmp_path: Path, whole: Path) -> None:
    """Those of equal names among them."""
    runs.train(config_of(tmp_path / "other", seed=4, keep_checkpoints=5))
    runs.train(config_of(tmp_path, keep_checkpoints=5))
    before = everything(tmp_path / "other")
    source = tmp_path / "checkpoints" / "step_00000004"
    runs.train(config_of(tmp_path / "other", resume=str(source)))
    assert kept(tmp_path / "other", before)
    assert torch.equal(weights(tmp_path / "other")["norm.weight"], weights(whole)["norm.weight"])
    assert [path.name for path in step_folders(tmp_path / "other" / "before_1")] == [
        f"step_{step:08d}" for step in (2, 4, 6)
    ]
    assert min(line["step"] for line in logged(tmp_path / "other")) > 4  # no metrics of a run that it is not
    # and back to what was put aside
    before = everything(tmp_path / "other")
    aside = tmp_path / "other" / "before_1" / "step_00000006"
    runs.train(config_of(tmp_path / "other", seed=4, resume=str(aside), num_steps=8, extend=True))
    assert kept(tmp_path / "other", before) and steps_of(tmp_path / "other") == [8]


@pytest.mark.parametrize("refused", [{"seed": 4}, {"num_steps": 9}])
def test_a_refused_command_moves_nothing(runs: Runs, tmp_path: Path, refused: dict[str, Any]) -> None:
    runs.train(config_of(tmp_path, keep_checkpoints=5))
    before = files_of(tmp_path)
    with pytest.raises(ValueError, match="cannot resume"):
        runs.train(config_of(tmp_path, resume=str(tmp_path / "checkpoints" / "step_00000002"), **refused))
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("back_to", ["none", "step_00000002"])
@pytest.mark.parametrize("before", [True, False])
@pytest.mark.parametrize(
    "write", [(shutil, "copyfile"), (Path, "replace"), (Path, "rename"), (Path, "unlink"), (Path, "mkdir")]
)
def test_a_kill_while_things_are_moved_loses_nothing(
    tmp_path: Path, kept_all: Path, back_to: str, before: bool, write: tuple[Any, str]
) -> None:
    """Nor does what the user does next: the same command, or resume=auto."""
    for call in range(1, 4):
        folder = tmp_path / str(call)
        shutil.copytree(kept_all, folder, symlinks=True)
        had = everything(folder)
        found = None if back_to == "none" else found_at(folder / "checkpoints" / back_to)
        run_killed(lambda: put_aside(folder, found=found), kill_at=(*write, call), before=before)  # noqa: B023
        assert kept(folder, had)
        steps = steps_of(folder)
        assert steps == [2, 4, 6][: len(steps)]  # the newest went first: what stays is a run
        if steps and back_to != "none":
            assert (folder / "metrics.jsonl").is_file()
        put_aside(folder, found=found)
        assert kept(folder, had)
        assert steps_of(folder) == ([] if back_to == "none" else [2])
        assert (folder / "metrics.jsonl").is_file() == (back_to != "none")


@pytest.fixture
def kept_all(runs: Runs, tmp_path: Path) -> Path:
    return runs.train(config_of(tmp_path / "kept", keep_checkpoints=5))


def test_a_run_with_a_damaged_checkpoint_goes_on_from_the_one_that_is_offered(
    runs: Runs, tmp_path: Path, whole: Path
) -> None:
    """And then by resume=auto again."""
    config = config_of(tmp_path, keep_checkpoints=5)
    assert run_killed(lambda: runs.train(config), kill_at=(trainer, "optimiser_step", 5)) == -9
    damaged = step_folders(tmp_path / "checkpoints")[-1] / "optimizer.safetensors"
    flip(damaged)
    with pytest.raises(ValueError, match=r"step_00000004/optimizer.safetensors is damaged") as error:
        runs.train(config)
    offered = re.search(r"resume=(\S+)", str(error.value))
    assert offered is not None
    config = replace(config, resume=offered[1])
    assert run_killed(lambda: runs.train(config), kill_at=(trainer, "optimiser_step", 4)) == -9
    assert (tmp_path / "before_1" / "step_00000004").is_dir() and steps_of(tmp_path) == [2, 4]
    runs.train(config_of(tmp_path))
    assert_same_run(tmp_path, whole)


# ---- from weights alone


class Starts:
    """Builds drafters as train.py does."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs

    def build(self, model: Any, folder: Path, *, layer_ids: tuple[int, ...] | None = None, **changes: Any) -> Drafter:
        target = self.runs.config if layer_ids is None else replace(self.runs.config, layer_ids=layer_ids)
        config = train_config(folder / "run", init=str(folder), **changes)
        tokenizer = load_tokenizer(target)
        torch.manual_seed(99)  # other initial weights than the folder's
        return setup.build_drafter(config, model, target, tokenizer, self.runs.store, Accelerator(cpu=True))


def first_loss(drafter: Drafter, store: FeatureStore, config: TrainConfig) -> float:
    """Of the first step's records, all in one batch."""
    data = TrainingData(store, layer_ids=drafter.target_layer_ids, num_anchors=config.num_anchors, seed=config.seed)
    plan = trainer.step_plan(config, store, 1)
    batch = collate([data[record, 0] for record in plan.members(0)], packing=False)
    with torch.no_grad():
        loss, denominators = drafter(batch), drafter.denominators(batch)
    return float(sum(loss.numerators[term].double() / denominators[term] for term in loss.numerators))


def check_start(runs: Runs, folder: Path, model: Any) -> None:
    """The first logged loss is that of the folder's drafter, and not that of other weights."""
    drafter = Starts(runs).build(model, folder)
    config = train_config(folder / "run", init=str(folder), log_every=1, num_steps=2)
    trainer.train(config, drafter, runs.store, runs.identity, Accelerator(cpu=True), run_config={})
    found = load_drafter(folder, target=runs.target.spec).drafter
    again = build_drafter(model, runs.target, runs.config)  # the losses are the run's, the weights the folder's
    again.load_state_dict(found.state_dict())
    expected, other = (
        first_loss(again, runs.store, config),
        first_loss(build_drafter(model, runs.target, runs.config, seed=7), runs.store, config),
    )
    assert logged(folder / "run")[0]["loss"] == pytest.approx(expected, rel=1e-5)
    assert abs(expected - other) > 1e-3


@pytest.fixture
def plain_runs(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> Runs:
    from tests.resumed_training import plain_step

    monkeypatch.setattr(trainer, "optimiser_step", plain_step)
    return runs


def test_a_run_starts_from_a_checkpoint_of_ours(plain_runs: Runs, tmp_path: Path) -> None:
    run = plain_runs.train(train_config(tmp_path / "first", optim=replace(OPTIM, learning_rate=2e-2)))
    folder = step_folders(run / "checkpoints")[-1]
    check_start(plain_runs, folder, dspark_config())


def test_init_takes_the_newest_checkpoint_of_a_run(plain_runs: Runs, tmp_path: Path) -> None:
    run = plain_runs.train(train_config(tmp_path / "first"))
    drafter = Starts(plain_runs).build(dspark_config(), run / "checkpoints")
    assert largest_difference(drafter.state_dict(), weights(run)) == 0


def test_a_run_that_started_from_weights_resumes_to_the_same_bits(plain_runs: Runs, tmp_path: Path) -> None:
    run = plain_runs.train(train_config(tmp_path / "first"))
    folder = step_folders(run / "checkpoints")[-1]

    def train(out: Path) -> None:
        config = train_config(out, init=str(folder))
        drafter = Starts(plain_runs).build(dspark_config(), folder)
        random.seed(5), np.random.seed(5)
        trainer.train(config, drafter, plain_runs.store, plain_runs.identity, Accelerator(cpu=True), run_config={})

    train(tmp_path / "whole")
    code = run_killed(lambda: train(tmp_path / "killed"), kill_at=(torch, "save", 2))
    assert code == -9
    train(tmp_path / "killed")
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    with pytest.raises(ValueError, match=r"init \(was .*, now None\)"):
        plain_runs.train(train_config(tmp_path / "killed"))


def test_a_run_starts_from_an_exported_dflash(plain_runs: Runs, tmp_path: Path) -> None:
    drafter = enliven(build_drafter(dflash_config(), plain_runs.target, plain_runs.config))
    export_drafter(drafter, tmp_path, engine="deepspec", dtype=torch.float32, card="")
    check_start(plain_runs, tmp_path, dflash_config())


def test_a_run_starts_from_a_classic_eagle3(plain_runs: Runs, tmp_path: Path) -> None:
    model = eagle3_config(own_head=True, num_draft_tokens=7)  # as the reader takes a file that is silent
    drafter = enliven(build_drafter(model, plain_runs.target, plain_runs.config))
    write_classic(tmp_path, drafter, plain_runs.target)
    check_start(plain_runs, tmp_path, model)


def write_classic(folder: Path, drafter: Any, target: Target) -> None:
    spec = target.spec
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_attention_heads": spec.num_heads,
        "num_key_value_heads": spec.num_kv_heads,
        "head_dim": spec.head_dim,
        "hidden_act": spec.hidden_act,
        "rms_norm_eps": spec.rms_norm_eps,
        "max_position_embeddings": spec.max_position_embeddings,
        "rope_theta": spec.rope_parameters["rope_theta"],
        "num_target_layers": spec.num_layers,
        "tie_word_embeddings": True,
        "target_layer_ids": list(drafter.target_layer_ids),
    }
    write(folder, config, {n.replace("layers.0.", "midlayer."): t for n, t in drafter.state_dict().items()})


@pytest.mark.parametrize(
    ("model", "differing"),
    [
        (dspark_config(num_layers=2), r"num_layers is 1 there, 2 here"),
        (dspark_config(slot_layout=SlotLayout.in_place), r"slot_layout is anchor_first there, in_place here"),
        (dflash_config(), r"confidence is True there, None here; .*drafter is dspark there, dflash here"),
        (eagle3_config(), r"drafter is dspark there, eagle3 here"),
    ],
)
def test_another_drafter_is_refused_with_the_list(plain_runs: Runs, tmp_path: Path, model: Any, differing: str) -> None:
    drafter = build_drafter(dspark_config(), plain_runs.target, plain_runs.config)
    save_drafter(drafter, tmp_path, target={"name": "tiny", "config_sha256": "", "weights_sha256": ""})
    with pytest.raises(ValueError, match=rf"init=.* holds another drafter: .*{differing}.*Set model.\* and target.\*"):
        Starts(plain_runs).build(model, tmp_path)


def test_other_layers_of_the_target_are_refused_with_the_list(plain_runs: Runs, tmp_path: Path) -> None:
    drafter = build_drafter(dspark_config(), plain_runs.target, plain_runs.config)
    save_drafter(drafter, tmp_path, target={"name": "tiny", "config_sha256": "", "weights_sha256": ""})
    with pytest.raises(ValueError, match=r"target_layer_ids is \[0, 1, 2\] there, \[1, 2, 3\] here"):
        Starts(plain_runs).build(dspark_config(), tmp_path, layer_ids=(1, 2, 3))


def test_another_way_of_learning_is_no_other_drafter(plain_runs: Runs, tmp_path: Path) -> None:
    drafter = build_drafter(dspark_config(), plain_runs.target, plain_runs.config)
    save_drafter(drafter, tmp_path, target={"name": "tiny", "config_sha256": "", "weights_sha256": ""})
    started = Starts(plain_runs).build(dspark_config(decay=2.0, confidence_weight=0.5), tmp_path)
    assert largest_difference(started.state_dict(), drafter.state_dict()) == 0


def test_a_start_that_forgets_the_weights_is_noticed(
    plain_runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with planted_fault(monkeypatch, setup, "load_weights", lambda *_: None):
        test_a_run_starts_from_an_exported_dflash(plain_runs, tmp_path)
