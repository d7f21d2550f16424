"""Tests of the trainer: resuming, splitting, processes, and what it writes."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, debug_launcher
from accelerate.state import AcceleratorState
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from data.chat import Supervise
from data.collate import collate
from data.dataset import UNSUPERVISED, RankSampler, StepPlan, TrainingData, sample_anchors
from data.responses import ChatOptions
from data.store import FeatureStore
from models.drafter_files import step_folders
from models.target import Target, TargetConfig, TargetIdentity
from tests.conftest import build_dspark, planted_fault, run_killed
from train import trainer
from train.config import (
    AttentionBackend,
    OnlineConfig,
    OptimConfig,
    ProbeConfig,
    TrackerName,
    TrainConfig,
    WandbConfig,
)
from train.metrics import MetricSums, expected_acceptance_length
from train.optim import Schedule, learning_rate

NUM_STEPS = 6
SPEEDS = {"seconds_per_step", "tokens_per_second", "supervised_slots_per_second", "tflops", "peak_memory_gib"}
# eps well above float32 noise: AdamW divides by gradients, and would turn rounding into steps of full size otherwise.
OPTIM = OptimConfig(
    learning_rate=2e-3, warmup_ratio=0.2, weight_decay=0.0, beta1=0.9, beta2=0.999, eps=1e-4, max_grad_norm=1.0
)


def train_config(folder: Path, **changes: Any) -> TrainConfig:
    values: dict[str, Any] = {
        "name": "test",
        "output_dir": str(folder),
        "store": "",
        "online": OnlineConfig(responses="", feature_dtype="bf16", last_hidden_dtype="bf16", tokens_per_batch=64),
        "chats": ChatOptions(Supervise.all, max_length=64, min_supervised_tokens=2),
        "target": {"name": "tiny"},
        "model": {"kind": "dspark"},
        "seed": 3,
        "num_steps": NUM_STEPS,
        "num_epochs": 1.0,
        "batch_size": 16,
        "tokens_per_batch": 256,
        "packing": True,
        "num_anchors": 4,
        "num_workers": 0,
        "optim": OPTIM,
        "warm_start": False,
        "init": None,
        "allow_pickle": False,
        "resume": "auto",
        "extend": False,
        "log_every": 2,
        "checkpoint_every": 2,
        "keep_checkpoints": 2,
        "probe": ProbeConfig(every=None, prompts=None, num_prompts=4, max_new_tokens=8, temperature=0.0),
        "mixed_precision": "no",
        "attention": AttentionBackend.auto,
        "compile": False,
        "peak_tflops": None,
        "estimate": False,
        "tracker": TrackerName.none,
        "wandb": WandbConfig(project="test", mode="offline"),
    }
    return TrainConfig(**values | changes)


@pytest.fixture
def run_training(
    tiny_target: Target, tiny_target_config: TargetConfig, tiny_identity: TargetIdentity, tiny_store: FeatureStore
) -> Any:
    """`run_training(config, world_size=1)`: train a fresh DSpark; returns the final weights."""

    def run(config: TrainConfig, *, world_size: int = 1) -> dict[str, torch.Tensor]:
        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == world_size
        drafter = build_dspark(tiny_target, tiny_target_config)
        folder = trainer.train(config, drafter, tiny_store, tiny_identity, accelerator, run_config={})
        return load_file(folder / "model.safetensors")

    return run


def logged(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def assert_equal(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name in ours:
        torch.testing.assert_close(ours[name], theirs[name], rtol=tolerance, atol=tolerance, msg=name)


def test_training_lowers_the_loss_and_logs_every_metric(tmp_path: Path, run_training: Any) -> None:
    run_training(train_config(tmp_path, num_steps=90, log_every=30, optim=replace(OPTIM, learning_rate=5e-3, eps=1e-8)))
    lines = logged(tmp_path)
    assert [line["step"] for line in lines] == [30, 60, 90]
    assert lines[-1]["loss"] < 0.9 * lines[0]["loss"]
    expected = {"loss", "learning_rate", "grad_norm", "cross_entropy", "l1", "confidence_bce", "confidence_error"}
    expected |= {f"accept_rate@{k}" for k in range(4)} | {f"top1_agreement@{k}" for k in range(4)}
    assert expected <= lines[-1].keys()


@pytest.mark.parametrize("packing", [True, False])
@pytest.mark.parametrize("tokens_per_batch", [32, 128, 2048])
def test_how_a_batch_is_split_changes_no_weight(
    tmp_path: Path, run_training: Any, tokens_per_batch: int, packing: bool
) -> None:
    whole = run_training(train_config(tmp_path / "reference"))
    split = run_training(train_config(tmp_path / "split", tokens_per_batch=tokens_per_batch, packing=packing))
    assert_equal(split, whole, 1e-5)  # float32 sums in another order


def test_splits_matter_when_each_micro_batch_normalises_itself(
    tmp_path: Path, run_training: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def per_micro_batch(run: trainer.Run, batches: list[Any]) -> dict[str, torch.Tensor]:
        local = run.drafter.denominators(batches[0])
        return {term: (value * len(batches)).float() for term, value in local.items()}

    with planted_fault(monkeypatch, trainer, "global_denominators", per_micro_batch):
        test_how_a_batch_is_split_changes_no_weight(tmp_path, run_training, 32, True)


def test_two_processes_equal_one(tmp_path: Path, run_training: Any) -> None:
    alone = run_training(train_config(tmp_path / "one"))

    def work() -> None:
        AcceleratorState._reset_state(reset_partial_state=True)  # inherited from the run above
        run_training(train_config(tmp_path / "two"), world_size=2)

    debug_launcher(work, num_processes=2)
    (folder,) = step_folders(tmp_path / "two" / "checkpoints")[-1:]
    assert folder.name == f"step_{NUM_STEPS:08d}"
    assert_equal(load_file(folder / "model.safetensors"), alone, 1e-5)
    for ours, theirs in zip(logged(tmp_path / "two"), logged(tmp_path / "one"), strict=True):
        for name in set(ours) - SPEEDS:
            assert ours[name] == pytest.approx(theirs[name], rel=1e-4, abs=1e-5), name
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-5)


def plan_of(lengths: torch.Tensor, batch_size: int, **changes: Any) -> StepPlan:
    values: dict[str, Any] = {"tokens_per_batch": 256, "packing": True, "num_processes": 1, "seed": 0}
    return StepPlan(lengths, batch_size, **values | changes)


def test_a_resumed_run_has_the_rates_and_weights_of_an_undisturbed_one(tmp_path: Path, run_training: Any) -> None:
    """20 steps, and 10 of them, a kill and the rest."""
    options = {"num_steps": 20, "checkpoint_every": 10, "log_every": 1}
    whole = run_training(train_config(tmp_path / "whole", **options))
    config = train_config(tmp_path / "resumed", **options)
    assert run_killed(lambda: run_training(config), kill_at=(trainer, "save_checkpoint", 2)) == -9
    resumed = run_training(config)
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    rates = [[line["learning_rate"] for line in logged(tmp_path / name)] for name in ("whole", "resumed")]
    assert rates[0] == rates[1] and len(rates[0]) == 20


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peak_tflops": 0.0}, r"peak_tflops=0.0 must be positive, or null"),
        ({"num_workers": -1}, r"num_workers=-1 must be 0"),
        ({"probe": ProbeConfig(None, None, 4, 8, temperature=-1.0)}, r"probe.temperature=-1.0 must be 0"),
    ],
)
def test_options_out_of_range_are_refused_before_training(
    tmp_path: Path, run_training: Any, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        run_training(train_config(tmp_path, **changes))


def test_a_run_does_not_go_on_with_other_records(
    tmp_path: Path, run_training: Any, tiny_store: FeatureStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The order of data would be another one from there on; where the store lies does not matter."""
    config = train_config(tmp_path, num_steps=4)
    assert run_killed(lambda: run_training(config), kill_at=(trainer, "save_checkpoint", 2)) == -9
    monkeypatch.setattr(tiny_store, "ids", [f"other-{id}" for id in tiny_store.ids])
    with pytest.raises(ValueError, match=r"with other options: records \(was"):
        run_training(config)


def test_a_plan_may_be_asked_from_two_threads(tiny_store: FeatureStore) -> None:
    """Another epoch, asked for in the middle of an answer, does not change it."""
    plan = plan_of(tiny_store.lengths, 16)
    expected = plan_of(tiny_store.lengths, 16).members(1)
    right = torch.randperm

    def interrupted(*arguments: Any, **options: Any) -> torch.Tensor:
        torch.randperm = right
        found = right(*arguments, **options)
        plan.members(4)
        return found

    try:
        torch.randperm = interrupted
        assert plan.members(1) == expected
    finally:
        torch.randperm = right


def test_a_batch_smaller_than_the_processes_is_refused(tiny_store: FeatureStore) -> None:
    with pytest.raises(ValueError, match=r"batch_size=2 leaves some of 3 processes without a record"):
        plan_of(tiny_store.lengths, 2, num_processes=3)


def test_a_batch_larger_than_the_store_is_refused(tiny_store: FeatureStore) -> None:
    with pytest.raises(ValueError, match="larger than the store's 48 records"):
        plan_of(tiny_store.lengths, 64)


def test_a_chat_longer_than_a_forward_pass_is_refused(tiny_store: FeatureStore) -> None:
    longest = int(tiny_store.lengths.max())
    with pytest.raises(ValueError, match=rf"tokens_per_batch={longest - 1} is less than the {longest} tokens"):
        plan_of(tiny_store.lengths, 16, tokens_per_batch=longest - 1)


def test_a_plan_visits_every_record_once_an_epoch_and_reshuffles(tiny_store: FeatureStore) -> None:
    plan = plan_of(tiny_store.lengths, 16)
    epochs = [[i for step in range(3 * e, 3 * e + 3) for i in plan.members(step)] for e in (0, 1)]
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(48))
    assert epochs[0] != epochs[1]
    assert plan.members(1) == plan_of(tiny_store.lengths, 16).members(1)  # whatever was asked for before


@given(st.lists(st.integers(1, 40), min_size=9, max_size=30), st.integers(40, 90), st.integers(1, 5), st.booleans())
def test_processes_share_a_step_in_equal_numbers_of_micro_batches(
    lengths: list[int], tokens_per_batch: int, num_processes: int, packing: bool
) -> None:
    """Every record once, no micro-batch over the budget or empty, as many for every process."""
    options = {"packing": packing, "num_processes": num_processes, "tokens_per_batch": tokens_per_batch}
    plan = plan_of(torch.tensor(lengths), 8, **options)
    parts = plan.micro_batches(0)
    assert len(parts) == num_processes and len({len(of_rank) for of_rank in parts}) == 1
    visits = [visit for of_rank in parts for part in of_rank for visit in part]
    assert sorted(record for record, epoch in visits if epoch != UNSUPERVISED) == sorted(plan.members(0))
    for part in (part for of_rank in parts for part in of_rank):
        tokens = [lengths[record] for record, _ in part]
        assert part and (sum(tokens) if packing else len(tokens) * max(tokens)) <= tokens_per_batch
        assert all(epoch != UNSUPERVISED for _, epoch in part) or len(part) == 1
    for rank, of_rank in enumerate(parts):
        assert list(RankSampler(plan, first_step=0, last_step=1, rank=rank)) == of_rank


def test_packing_fills_micro_batches_evenly(tiny_store: FeatureStore) -> None:
    """Two processes wait for the slower one: the loads differ by less than the shortest record."""
    parts = plan_of(tiny_store.lengths, 48, tokens_per_batch=4096, num_processes=2).micro_batches(0)
    loads = [sum(int(tiny_store.lengths[record]) for record, _ in part) for of_rank in parts for part in of_rank]
    assert max(loads) - min(loads) < int(tiny_store.lengths.min())


def test_a_filler_trains_nothing(tiny_store: FeatureStore) -> None:
    data = TrainingData(tiny_store, layer_ids=(0, 1, 2), num_anchors=3, seed=0)
    filler = data[5, UNSUPERVISED]
    assert not filler.record.loss_mask.any() and not len(filler.anchors) and not len(filler.record.last_hidden)
    assert len(filler.record.input_ids) == tiny_store.lengths[5]


def test_anchors_depend_on_seed_epoch_and_record_only(tiny_store: FeatureStore) -> None:
    data = TrainingData(tiny_store, layer_ids=(0, 1, 2), num_anchors=3, seed=5)
    again = TrainingData(tiny_store, layer_ids=(0, 1, 2), num_anchors=3, seed=5)
    assert torch.equal(data[4, 0].anchors, again[4, 0].anchors)
    assert any(not torch.equal(data[i, 0].anchors, data[i, 1].anchors) for i in range(8))


def test_anchors_and_their_next_tokens_are_supervised() -> None:
    mask = torch.tensor([0, 1, 1, 1, 0, 1, 0, 1, 1]).bool()
    generator = torch.Generator().manual_seed(0)
    assert sample_anchors(mask, 99, generator).tolist() == [1, 2, 7]
    drawn = [tuple(sample_anchors(mask, 2, generator).tolist()) for _ in range(60)]
    assert set(drawn) == {(1, 2), (1, 7), (2, 7)}


def test_collated_rows_point_at_their_last_hidden_states(tiny_store: FeatureStore) -> None:
    data = TrainingData(tiny_store, layer_ids=(0, 1, 2), num_anchors=3, seed=0)
    batch = collate([data[i, 0] for i in (3, 0, 7)], packing=False)
    for row, index in enumerate((3, 0, 7)):
        record = tiny_store[index]
        length = len(record.input_ids)
        assert batch.input_ids[row, :length].tolist() == record.input_ids.tolist()
        assert batch.document_ids[row].tolist() == [0] * length + [-1] * (batch.input_ids.shape[1] - length)
        supervised = record.loss_mask.nonzero().squeeze(1)
        rows = batch.last_hidden_ids[row, supervised - 1]
        assert torch.equal(batch.last_hidden[rows], record.last_hidden)
        assert (batch.last_hidden_ids[row] >= 0).sum() == len(supervised)


def test_the_learning_rate_warms_up_then_falls_and_never_reaches_zero() -> None:
    rates = [learning_rate(step, Schedule(0, 100), OPTIM) for step in range(100)]
    assert rates[19] == pytest.approx(2e-3) and rates[0] == pytest.approx(1e-4)
    assert rates[:20] == sorted(rates[:20]) and rates[20:] == sorted(rates[20:], reverse=True)
    assert 0 < rates[-1] < 1e-5


def test_metrics_divide_sums_by_counts_over_all_batches() -> None:
    sums = MetricSums()
    sums.add({"a": (torch.tensor(3.0), torch.tensor(1.0)), "b": (torch.ones(2), torch.ones(2))})
    sums.add({"a": (torch.tensor(1.0), torch.tensor(3.0)), "b": (torch.ones(2), torch.zeros(2))})
    assert sums.report(Accelerator(cpu=True)) == {"a": 1.0, "b@0": 2.0, "b@1": 2.0}


def test_the_expected_acceptance_length_counts_the_bonus() -> None:
    report = expected_acceptance_length({"accept_rate@0": 0.5, "accept_rate@1": 0.5})
    assert report == {"teacher_forced_acceptance_length": 1.75}
