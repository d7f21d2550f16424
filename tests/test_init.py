"""Runs that start from a drafter's weights: from our own folders and public ones, or not at all."""

import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from accelerate import Accelerator

from data.collate import collate
from data.dataset import TrainingData
from data.store import FeatureStore
from models.base import Drafter, Engine, SlotLayout
from models.checkpoint import load_drafter, save_drafter
from models.drafter_files import step_folders
from models.export import export_drafter
from models.target import Target, load_tokenizer
from tests.conftest import (
    build_drafter,
    dflash_config,
    dspark_config,
    eagle3_config,
    planted_fault,
    run_killed,
)
from tests.draft_batches import enliven
from tests.draft_checks import IDENTITY
from tests.published_files import write
from tests.resumed_training import (  # noqa: F401 (fixtures among them)
    Runs,
    assert_same_run,
    config_of,
    largest_difference,
    logged,
    plain_step,
    runs,
    steps_of,
    weights,
    whole,
)
from tests.test_train import OPTIM, train_config
from train import setup, trainer
from train.config import TrainConfig


class Starts:
    """Builds drafters as train.py does, and gives them a folder's weights as a run does."""

    def __init__(self, runs: Runs) -> None:
        self.runs = runs

    def build(self, model: Any, folder: Path, *, layer_ids: tuple[int, ...] | None = None) -> Drafter:
        target = self.runs.config if layer_ids is None else replace(self.runs.config, layer_ids=layer_ids)
        config = train_config(folder / "run", init=str(folder))
        tokenizer = load_tokenizer(target)
        torch.manual_seed(99)  # other initial weights than the folder's
        return setup.build_drafter(config, model, target, tokenizer, self.runs.store, Accelerator(cpu=True))

    def start(self, model: Any, folder: Path, *, layer_ids: tuple[int, ...] | None = None) -> Drafter:
        drafter = self.build(model, folder, layer_ids=layer_ids)
        setup.start_from_folder(drafter, str(folder), allow_pickle=False)
        return drafter


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
    monkeypatch.setattr(trainer, "optimiser_step", plain_step)
    return runs


def test_a_run_starts_from_a_checkpoint_of_ours(plain_runs: Runs, tmp_path: Path) -> None:
    run = plain_runs.train(train_config(tmp_path / "first", optim=replace(OPTIM, learning_rate=2e-2)))
    folder = step_folders(run / "checkpoints")[-1]
    check_start(plain_runs, folder, dspark_config())


def test_init_takes_the_newest_checkpoint_of_a_run(plain_runs: Runs, tmp_path: Path) -> None:
    run = plain_runs.train(train_config(tmp_path / "first"))
    drafter = Starts(plain_runs).start(dspark_config(), run / "checkpoints")
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
    folder.rename(tmp_path / "gone")  # it has its own weights by now
    train(tmp_path / "killed")
    assert_same_run(tmp_path / "killed", tmp_path / "whole")
    with pytest.raises(ValueError, match=r"init \(was .*, now None\)"):
        plain_runs.train(train_config(tmp_path / "killed"))


def test_a_run_starts_from_an_exported_dflash(plain_runs: Runs, tmp_path: Path) -> None:
    drafter = enliven(build_drafter(dflash_config(), plain_runs.target, plain_runs.config))
    export_drafter(drafter, tmp_path, engine=Engine.deepspec, dtype=torch.float32, card="")
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
    save_drafter(drafter, tmp_path, target=IDENTITY)
    with pytest.raises(ValueError, match=rf"init=.* holds another drafter: .*{differing}.*Set model.\* and target.\*"):
        Starts(plain_runs).start(model, tmp_path)


def test_other_layers_of_the_target_are_refused_with_the_list(plain_runs: Runs, tmp_path: Path) -> None:
    drafter = build_drafter(dspark_config(), plain_runs.target, plain_runs.config)
    save_drafter(drafter, tmp_path, target=IDENTITY)
    with pytest.raises(ValueError, match=r"target_layer_ids is \[0, 1, 2\] there, \[1, 2, 3\] here"):
        Starts(plain_runs).start(dspark_config(), tmp_path, layer_ids=(1, 2, 3))


def test_another_way_of_learning_is_no_other_drafter(plain_runs: Runs, tmp_path: Path) -> None:
    drafter = build_drafter(dspark_config(), plain_runs.target, plain_runs.config)
    save_drafter(drafter, tmp_path, target=IDENTITY)
    started = Starts(plain_runs).start(dspark_config(decay=2.0, confidence_weight=0.5), tmp_path)
    assert largest_difference(started.state_dict(), drafter.state_dict()) == 0


def test_a_start_that_forgets_the_weights_is_noticed(
    plain_runs: Runs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with planted_fault(monkeypatch, setup, "load_weights", lambda *_: None):
        test_a_run_starts_from_an_exported_dflash(plain_runs, tmp_path)


def test_weights_that_were_trained_with_other_rotations_are_refused(plain_runs: Runs, tmp_path: Path) -> None:
    """Shapes do not tell, and every feature would be read at a wrong angle."""
    target, rope = plain_runs.target, {"rope_type": "default", "rope_theta": 500.0}
    spec = replace(target.spec, rope_parameters=rope, rms_norm_eps=1e-3)
    other = SimpleNamespace(spec=spec, embedding=target.embedding, head=target.head)
    save_drafter(build_drafter(dspark_config(), other, plain_runs.config), tmp_path, target=IDENTITY)  # type: ignore[arg-type]
    message = r"target rms_norm_eps is 0.001 there, 1e-06 here; target rope_parameters is .*500\.0.* there"
    with pytest.raises(ValueError, match=message):
        Starts(plain_runs).start(dspark_config(), tmp_path)


def test_a_start_from_nowhere_names_the_option(plain_runs: Runs, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"init=.*nowhere: no such folder"):
        Starts(plain_runs).start(dspark_config(), tmp_path / "nowhere")
    assert not (tmp_path / "nowhere").exists()
