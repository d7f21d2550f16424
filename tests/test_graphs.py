"""Steps of static caches: their shapes and what they wait for, and decoding by replays of them.

Without a GPU a stand-in runs the recorded function again on the recorded tensors, and hands out the recorded outputs.
"""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import models.target as target_module
from eval.decode import decode
from eval.schedule import Schedule, ScheduleName
from models.dspark import DSpark
from models.graphs import Replay
from models.target import Target
from tests.test_decode import SAMPLED, config_of
from tests.tiny_families import FAMILIES, build, check_close, random_ids

WAITS = {f"aten::{name}" for name in ("item", "_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select")}


class NothingIsRead(TorchDispatchMode):
    """Raises where a value of a tensor is looked at, which a GPU would have to be waited for."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name().split(".")[0]
        by_mask = name.startswith("aten::index") and any(
            index is not None and index.dtype is torch.bool for index in (args[1] if isinstance(args[1], list) else [])
        )
        assert name not in WAITS and not by_mask, f"{func.name()} waits for the device"
        return func(*args, **(kwargs or {}))


class Rerun:
    """`Replay` for a CPU."""

    made = 0

    def __init__(self, function: Callable[..., tuple[Tensor, ...]], *inputs: Tensor) -> None:
        self.function, self.inputs = function, [x.clone() for x in inputs]
        self.outputs = tuple(output.clone() for output in function(*self.inputs))
        Rerun.made += 1

    def __call__(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        for own, new in zip(self.inputs, inputs, strict=True):
            own.copy_(new)
        for own, new in zip(self.outputs, self.function(*self.inputs), strict=True):
            own.copy_(new)
        return self.outputs


@pytest.mark.parametrize("family", FAMILIES)
def test_a_step_of_a_static_cache_waits_for_nothing_and_equals_another(family: str) -> None:
    target, lengths = build(family), torch.tensor([9, 3])
    static, plain = target.new_cache(2, 20, is_static=True), target.new_cache(2, 20)
    for cache in (static, plain):
        target.forward(random_ids(2, 9, seed=1), cache)
        cache.advance(lengths)
    for seed in (2, 3):
        ids = random_ids(2, 4, seed=seed)
        with NothingIsRead(), torch.inference_mode():
            hidden, features = target._step(static, True, ids, static.begin(4))
        expected = target.forward(ids, plain)
        check_close(hidden, expected.hidden)
        check_close(features, expected.features)
        for cache in (static, plain):
            cache.advance(torch.tensor([2, 3]))


def test_reading_a_value_is_noticed() -> None:
    target, static = build("qwen3"), build("qwen3").new_cache(2, 8, is_static=True)
    with pytest.raises(AssertionError, match="item waits"), NothingIsRead():
        target.forward(random_ids(2, 3), target.new_cache(2, 4))
    with pytest.raises(AssertionError, match=r"index\.Tensor waits"), NothingIsRead():
        target.forward(random_ids(2, 3), static, counts=torch.tensor([1, 3]))


@pytest.mark.parametrize("schedule", [ScheduleName.fixed, ScheduleName.confidence])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_decoding_by_replays_equals_decoding_without(
    monkeypatch: pytest.MonkeyPatch,
    tiny_target: Target,
    tiny_prompts: list[list[int]],
    tiny_dspark: DSpark,
    batch_size: int,
    schedule: ScheduleName,
) -> None:
    """Rows are refilled and close up on the way; a shape is recorded once for every batch that it occurs in."""
    monkeypatch.setattr(target_module, "Replay", Rerun)
    monkeypatch.setattr(Rerun, "made", 0)
    outputs = []
    for cuda_graphs in (False, True):
        options = {"batch_size": batch_size, "num_draft_tokens": 3, "cuda_graphs": cuda_graphs}
        config = config_of(sampling=SAMPLED, schedule=Schedule(schedule, 0.5), **options)
        generations = decode(tiny_target, tiny_dspark, tiny_prompts, config).generations
        outputs.append([(g.tokens, g.rounds) for g in generations])
    assert outputs[0] == outputs[1]
    num_rounds = sum(len(rounds) for _, rounds in outputs[1])
    widths = 1 if schedule is ScheduleName.fixed else 4
    assert 0 < Rerun.made <= batch_size * widths < num_rounds


def test_rows_that_move_are_recorded_anew() -> None:
    target = build("qwen3")
    cache = target.new_cache(2, 8, is_static=True)
    cache.replays["step"] = Replay.__new__(Replay)
    cache.select(torch.tensor([1, 0]))
    assert not cache.replays


def test_graphs_are_refused_without_a_gpu(tiny_target: Target, tiny_prompts: list[list[int]]) -> None:
    config = config_of(max_new_tokens=4, batch_size=2, num_draft_tokens=0, cuda_graphs=True)
    with pytest.raises(ValueError, match="cuda_graphs=true needs a CUDA device, got cpu; use cuda_graphs=false"):
        decode(tiny_target, None, tiny_prompts[:2], config)


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_replayed_steps_on_a_gpu_equal_plain_ones(family: str) -> None:
    target = build(family)
    target = Target(copy.deepcopy(target.model).cuda(), target.spec, target.layer_ids)
    caches = target.new_cache(2, 40, is_static=True), target.new_cache(2, 40)
    lengths, ids = torch.tensor([9, 3]).cuda(), random_ids(2, 9, seed=1).cuda()
    for cache in caches:
        target.forward(ids, cache)
        cache.advance(lengths)
    for seed in range(2, 6):
        ids = random_ids(2, 4, seed=seed).cuda()
        ours, expected = (target.forward(ids, cache, replay=cache.is_static) for cache in caches)
        torch.testing.assert_close(ours.hidden, expected.hidden, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(ours.features, expected.features, rtol=1e-4, atol=1e-4)
        for cache in caches:
            cache.advance(torch.tensor([2, 3]).cuda())
