"""Attention of training blocks: dense products document by document and FlexAttention, against one big softmax."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._dynamo.utils import counters
from torch.nn.attention.flex_attention import create_mask, flex_attention
from torch.utils.data._utils.pin_memory import pin_memory

from models import attention
from models.attention import training_mixer
from models.base import DraftBatch
from models.masks import block_mask_mod
from models.target import Target, TargetConfig
from tests.conftest import build_drafter, dspark_config, eagle3_config, planted_fault
from tests.draft_batches import mixed_batch
from tests.flex_against_dense import (
    SHAPES,
    TOLERANCE,
    AttentionInputs,
    Shape,
    attend,
    attention_inputs,
    check_attention,
    relative_error,
)
from tests.gpu_setting import setting_of

TINY = setting_of("cpu", tiny=True)
LIMIT = 8  # graphs of one function that torch keeps before it runs it uncompiled, with every score in memory
by_shape = pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: shape.name)


def one_big_softmax(inputs: AttentionInputs, shape: Shape) -> list[Tensor]:
    """Output and gradients by a mask of all queries against all keys, heads repeated; the unused anchor left out."""
    leaves = [leaf.detach().requires_grad_() for leaf in inputs.leaves]
    queries, *own = (leaf.flatten(1, 2).transpose(1, 2) for leaf in leaves[:3])
    keys, values = (torch.cat((row, block), dim=2) for row, block in zip(leaves[3:], own, strict=True))
    rule = block_mask_mod(inputs.anchors, inputs.document_ids, shape.num_slots, shape.num_keys, shape.window)
    mask = create_mask(rule, 1, 1, queries.shape[2], keys.shape[2], device="cpu").clone()
    mask[:, :, -shape.num_slots :] = True  # the unused anchor's queries, for a softmax of something
    mixed = F.scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
    mixed = mixed.transpose(1, 2).reshape(leaves[0].shape)
    mixed.backward(inputs.upstream)
    gradients: list[Any] = [leaf.grad for leaf in leaves]
    return [mixed.detach()[:, :-1], *(grad[:, :-1] for grad in gradients[:3]), *gradients[3:]]


@by_shape
def test_dense_products_equal_one_big_softmax_forward_and_backward(shape: Shape) -> None:
    inputs = attention_inputs(TINY, shape, torch.float32)
    found, _ = attend(inputs, shape, torch.float32, flex=False, with_grad=True)
    for ours, theirs in zip(found, one_big_softmax(inputs, shape), strict=True):
        assert relative_error(ours, theirs) < 1e-5


@by_shape
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_equals_dense_forward(shape: Shape, dtype: torch.dtype) -> None:
    """Uncompiled, on a CPU, which has no backward of it."""
    passed, text, _ = check_attention(TINY, shape, dtype)
    assert passed and "no backward on a CPU" in text, text


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_the_comparison_notices_a_mask_that_is_off_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    original = attention.flex_block_mask

    def shifted(anchors: Tensor, *args: Any, **kwargs: Any) -> Any:
        return original((anchors + 1).clamp(max=95), *args, **kwargs)

    with planted_fault(monkeypatch, attention, "flex_block_mask", shifted):
        test_flex_equals_dense_forward(SHAPES[0], torch.bfloat16)


@pytest.mark.parametrize("options", [dspark_config(num_layers=2), eagle3_config()], ids=["dspark", "eagle3"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_gives_the_loss_of_dense_attention_under_autocast(
    tiny_target: Target, tiny_target_config: TargetConfig, options: Any
) -> None:
    """Norms leave queries and keys in float32 there, values in bf16: flex wants one type."""
    drafter = build_drafter(options, tiny_target, tiny_target_config)
    batch, totals = mixed_batch(drafter), []
    for flex in (False, True):
        drafter.flex_attention = flex
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            totals.append(torch.stack(list(drafter(batch).numerators.values())))
    torch.testing.assert_close(*totals, rtol=5e-3, atol=0)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_flex_sees_values_queries_and_keys_of_one_type(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[set[torch.dtype]] = []

    def spy(queries: Tensor, keys: Tensor, values: Tensor, **options: Any) -> Any:
        seen.append({queries.dtype, keys.dtype, values.dtype})
        return flex_attention(queries, keys, values, **options)

    monkeypatch.setattr(attention, "flex_attention", spy)
    inputs = attention_inputs(TINY, SHAPES[0], torch.float32)
    queries, keys, values, row_keys, row_values = inputs.leaves
    mix = training_mixer(inputs.anchors, inputs.document_ids, TINY.device, num_slots=7, flex=True)
    mix(queries, (keys, values.bfloat16()), (row_keys, row_values.bfloat16()))
    assert seen == [{torch.bfloat16}]


@pytest.mark.parametrize("flex", [False, True])
def test_a_batch_without_a_block_attends_to_nothing_and_keeps_its_gradients(flex: bool) -> None:
    """Fillers of a step have none: every weight has to have a gradient all the same."""
    inputs = attention_inputs(TINY, SHAPES[0], torch.float32)
    leaves = [leaf[:, :0].clone().requires_grad_() for leaf in inputs.leaves[:3]]
    leaves += [leaf.clone().requires_grad_() for leaf in inputs.leaves[3:]]
    mix = training_mixer(inputs.anchors[:, :0], inputs.document_ids, TINY.device, num_slots=7, flex=flex)
    mixed = mix(leaves[0], (leaves[1], leaves[2]), (leaves[3], leaves[4]))
    assert mixed.shape == leaves[0].shape
    mixed.sum().backward()
    assert all(leaf.grad is not None and not leaf.grad.any() for leaf in leaves)


@pytest.fixture
def compiled_graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """FlexAttention through torch's tracer, without a compiler behind it."""
    torch.compiler.reset()
    counters.clear()
    monkeypatch.setattr(attention, "flex_attention", torch.compile(flex_attention, dynamic=True, backend="eager"))
    yield
    torch.compiler.reset()


@pytest.mark.slow
def test_batches_of_all_sizes_share_few_graphs(compiled_graphs: None) -> None:
    """A training run sees a new length, count of anchors and step with every batch."""
    generator = torch.Generator().manual_seed(0)
    for length, count in ((300, 20), (411, 133), (512, 50), (777, 61), (640, 200), (555, 111), (901, 300), (330, 9)):
        documents = (torch.arange(length) // 150)[None]
        anchors = torch.randperm(length, generator=generator)[:count].sort().values[None]
        for num_slots, num_keys in ((7, 7), *((1, step) for step in range(1, 8))):
            leaves = [torch.randn(1, count, n, h, 16) for n, h in ((num_slots, 2), (num_keys, 1), (num_keys, 1))]
            row = torch.randn(1, 1, length, 16), torch.randn(1, 1, length, 16)
            mix = training_mixer(anchors, documents, TINY.device, num_slots=num_slots, flex=True)
            with torch.no_grad():
                mix(leaves[0], (leaves[1], leaves[2]), row)
    assert counters["stats"]["unique_graphs"] < LIMIT


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler on a CPU")
@by_shape
def test_compiled_flex_equals_dense_forward(monkeypatch: pytest.MonkeyPatch, shape: Shape) -> None:
    """Fixed sizes: torch 2.13 writes C++ that does not compile for FlexAttention of dynamic sizes."""
    torch.compiler.reset()
    monkeypatch.setattr(attention, "flex_attention", torch.compile(flex_attention, dynamic=False))
    passed, text, _ = check_attention(TINY, shape, torch.float32)
    assert passed, text


def test_a_data_loader_pins_a_whole_batch(
    tiny_target: Target, tiny_target_config: TargetConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A DataLoader asks objects that are no tensors for this method, and leaves those without it as they are."""
    drafter = build_drafter(dspark_config(), tiny_target, tiny_target_config)
    pinned: list[Tensor] = []
    monkeypatch.setattr(Tensor, "pin_memory", lambda tensor, *_: pinned.append(tensor) or tensor)
    batch = mixed_batch(drafter)
    assert isinstance(pin_memory(batch), DraftBatch)
    assert len(pinned) == len(batch.tensors())


@pytest.mark.gpu
@by_shape
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_flex_equals_dense_forward_and_backward_on_a_gpu(shape: Shape, dtype: torch.dtype) -> None:
    torch.compiler.reset()
    passed, text, _ = check_attention(setting_of("cuda", tiny=True), shape, dtype)
    assert passed, text


@pytest.mark.gpu
@by_shape
def test_flex_equals_dense_at_published_sizes_on_a_gpu(shape: Shape) -> None:
    torch.compiler.reset()
    passed, text, _ = check_attention(setting_of("cuda", tiny=False), shape, torch.bfloat16)
    assert passed, text


@pytest.mark.gpu
def test_a_batch_without_a_block_trains_on_a_gpu() -> None:
    inputs = attention_inputs(setting_of("cuda", tiny=True), SHAPES[0], torch.float32)
    queries, keys, values = (leaf[:, :0].clone().requires_grad_() for leaf in inputs.leaves[:3])
    mix = training_mixer(inputs.anchors[:, :0], inputs.document_ids, queries.device, num_slots=7, flex=True)
    mix(queries, (keys, values), (inputs.leaves[3], inputs.leaves[4])).sum().backward()
    assert queries.grad is not None
