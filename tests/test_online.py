"""Training without a store: the features, the batches and the weights are those of training from one."""

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator

import data.online as online_module
import train.setup as training_setup
from data.collate import collate
from data.dataset import TrainingData
from data.extract import extract
from data.store import FeatureStore
from models.base import DraftBatch
from models.target import Target, TargetConfig, TargetIdentity
from tests.conftest import build_dspark, planted_fault, tiny_tokenizer
from tests.extraction_cases import chats_config, config_of, write_responses
from tests.test_train import OnlineConfig, train_config
from train.setup import open_features
from train.trainer import train

DTYPES = [("float32", "float32"), ("bf16", "bf16"), ("fp8", "bf16"), ("nf4", "fp8")]


@pytest.fixture
def sources(
    tmp_path: Path,
    tiny_target: Target,
    tiny_target_config: TargetConfig,
    tiny_identity: TargetIdentity,
    monkeypatch: pytest.MonkeyPatch,
) -> Any:
    """`sources(feature_dtype, last_hidden_dtype)`: the finished store of some chats, and the online twin of it."""
    monkeypatch.setattr(training_setup, "load_target", lambda *_, **__: tiny_target)

    def make(feature_dtype: str, last_hidden_dtype: str, **changes: Any) -> tuple[Any, Any]:
        config = config_of(tmp_path, feature_dtype=feature_dtype, last_hidden_dtype=last_hidden_dtype)
        extract(config, tiny_target_config, Accelerator(cpu=True), lambda *_, **__: tiny_target)
        online = OnlineConfig(config.responses, feature_dtype, last_hidden_dtype, tokens_per_batch=60)
        options = train_config(tmp_path, store="online", online=online, chats=chats_config(), **changes)
        twin = open_features(options, tiny_target_config, tiny_tokenizer(), tiny_identity, Accelerator(cpu=True))
        return FeatureStore(Path(config.store)), twin

    return make


@pytest.mark.parametrize(("feature_dtype", "last_hidden_dtype"), DTYPES)
def test_the_online_mode_gives_the_features_of_the_store(
    sources: Any, feature_dtype: str, last_hidden_dtype: str
) -> None:
    """In other batches: float32 sums differ by some 1e-6, which may move a rounded value to the next step."""
    store, online = sources(feature_dtype, last_hidden_dtype)
    assert replace(online.header, records_per_shard=store.header.records_per_shard) == store.header
    assert online.ids == store.ids
    assert torch.equal(online.lengths, store.lengths) and torch.equal(online.num_supervised, store.num_supervised)
    assert torch.equal(online.count_supervised_tokens(55), store.count_supervised_tokens(55))
    order = random.Random(0).sample(range(len(store)), len(store))
    for ours, theirs in zip(online.read_many(order), store.read_many(order), strict=True):
        assert ours.id == theirs.id
        assert torch.equal(ours.input_ids, theirs.input_ids) and torch.equal(ours.loss_mask, theirs.loss_mask)
        for name in ("features", "last_hidden"):
            left, right = getattr(ours, name), getattr(theirs, name)
            assert left.dtype == right.dtype
            error = (left.float() - right.float()).abs()
            assert (error <= 1e-5 * (1 + right.float().abs())).float().mean() > (0.99 if name == "features" else 0.97)
            if feature_dtype == "float32":
                torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


def test_a_batch_of_training_is_the_same_from_either(sources: Any) -> None:
    store, online = sources("float32", "float32")
    keys = [(3, 0), (1, 0), (7, 1)]
    batches: list[DraftBatch] = [
        collate(TrainingData(source, layer_ids=(0, 2), num_anchors=4, seed=1).__getitems__(keys), packing=True)
        for source in (store, online)
    ]
    for name, value in vars(batches[0]).items():
        torch.testing.assert_close(vars(batches[1])[name], value, rtol=1e-5, atol=1e-5)


def test_a_batch_is_one_forward_pass_of_the_target(sources: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    _, online = sources("float32", "float32")
    shapes = []
    right = Target.forward_whole
    monkeypatch.setattr(
        Target, "forward_whole", lambda target, ids: shapes.append(tuple(ids.shape)) or right(target, ids)
    )
    online.tokens_per_batch = 4096
    TrainingData(online, layer_ids=(0,), num_anchors=4, seed=1).__getitems__([(0, 0), (1, 0), (2, 0)])
    assert len(shapes) == 1 and shapes[0][0] == 3


def test_training_online_gives_the_weights_of_training_from_the_store(
    sources: Any,
    tmp_path: Path,
    tiny_target: Target,
    tiny_target_config: TargetConfig,
    tiny_identity: TargetIdentity,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = []
    for name, source in zip(("store", "online"), sources("float32", "float32"), strict=True):
        folder = tmp_path / name
        online = OnlineConfig("", "float32", "float32", 60)
        options = train_config(folder, store="online", online=online, batch_size=8, num_steps=4)
        drafter = build_dspark(tiny_target, tiny_target_config)
        train(options, drafter, source, tiny_identity, Accelerator(cpu=True), run_config={})
        weights.append(torch.cat([parameter.flatten() for parameter in drafter.parameters()]))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=1e-5)

    def unrounded(values: Any, *_rest: Any) -> Any:
        return 1.01 * values

    with planted_fault(monkeypatch, online_module, "round_trip", unrounded):
        test_a_batch_of_training_is_the_same_from_either(sources)


def test_the_online_mode_refuses_loader_processes_and_empty_chats(
    sources: Any, tmp_path: Path, tiny_target_config: TargetConfig, tiny_identity: TargetIdentity
) -> None:
    with pytest.raises(ValueError, match="set num_workers=0, got 2"):
        sources("float32", "float32", num_workers=2)
    write_responses(
        tmp_path / "empty.jsonl", [[{"role": "user", "content": "1"}, {"role": "assistant", "content": ""}]]
    )
    online = OnlineConfig(str(tmp_path / "empty.jsonl"), "bf16", "bf16", 60)
    options = replace(train_config(tmp_path), store="online", online=online)
    with pytest.raises(ValueError, match="no chat has 2 supervised tokens"):
        open_features(options, tiny_target_config, tiny_tokenizer(), tiny_identity, Accelerator(cpu=True))


def test_a_resumed_run_may_move_its_responses_but_not_change_their_rounding(tmp_path: Path) -> None:
    from train.resume import trajectory

    def options_of(**changes: Any) -> str:
        online = OnlineConfig(**{"responses": "a", "feature_dtype": "bf16", "last_hidden_dtype": "bf16"} | changes)
        return json.dumps(trajectory(train_config(tmp_path, store="online", online=online)), sort_keys=True)

    same = {"tokens_per_batch": 60}
    assert options_of(**same) == options_of(responses="b", tokens_per_batch=80)
    assert options_of(**same) != options_of(feature_dtype="fp8", **same)
