"""FlexAttention against dense products, both as training calls them, on packed chats."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from models.attention import training_mixer
from tests.gpu_setting import Setting

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}  # of the norm of all differences to that of all values


@dataclass(frozen=True)
class Shape:
    """How many queries and own keys a block has; EAGLE-3's chains have one query and a key a step."""

    name: str
    num_slots: int
    num_keys: int
    window: int | None = None


SHAPES = (
    Shape("anchor_first", 7, 7),
    Shape("in_place with a window", 8, 8, window=24),
    Shape("eagle3 step 0", 1, 1),
    Shape("eagle3 step 6", 1, 7),
)


@dataclass(frozen=True)
class AttentionInputs:
    anchors: Tensor  # [1, A] in host memory, the last one unused
    document_ids: Tensor  # [1, S] in host memory
    leaves: tuple[Tensor, ...]  # queries, keys and values of blocks, keys and values of the row, as `Mixer` takes them
    upstream: Tensor  # gradient of the output, zero at the unused anchor


def attention_inputs(setting: Setting, shape: Shape, dtype: torch.dtype) -> AttentionInputs:
    """Random, of packed documents; each number is one of `dtype`."""
    generator, spec = torch.Generator().manual_seed(0), setting.spec
    lengths = torch.tensor(setting.lengths)
    starts = [0, *lengths.cumsum(0).tolist()]
    share = [min(setting.num_anchors, length) for length in setting.lengths]
    places = [
        start + torch.randperm(length, generator=generator)[:count].sort().values
        for start, length, count in zip(starts, setting.lengths, share, strict=False)
    ]
    anchors = torch.cat([*places, torch.tensor([-1])])[None]
    num_blocks, size = anchors.shape[1], spec.head_dim

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(setting.device, dtype)

    leaves = (
        random(1, num_blocks, shape.num_slots, spec.num_heads, size),
        *(random(1, num_blocks, shape.num_keys, spec.num_kv_heads, size) for _ in range(2)),
        *(random(1, spec.num_kv_heads, int(lengths.sum()), size) for _ in range(2)),
    )
    upstream = torch.randn(leaves[0].shape, generator=generator).to(setting.device, dtype)
    upstream[:, -1] = 0
    document_ids = torch.arange(len(lengths)).repeat_interleave(lengths)[None]
    return AttentionInputs(anchors, document_ids, leaves, upstream)


def attend(
    inputs: AttentionInputs, shape: Shape, dtype: torch.dtype, *, flex: bool, with_grad: bool
) -> tuple[list[Tensor], Callable[[], None]]:
    """Output and gradients of all leaves, float32 and without the unused anchor; and the same work to be timed."""
    device = inputs.leaves[0].device
    leaves = [leaf.detach().to(dtype).requires_grad_(with_grad) for leaf in inputs.leaves]
    mix = training_mixer(
        inputs.anchors, inputs.document_ids, device, num_slots=shape.num_slots, window=shape.window, flex=flex
    )

    def work() -> Tensor:
        with torch.set_grad_enabled(with_grad):
            mixed = mix(leaves[0], (leaves[1], leaves[2]), (leaves[3], leaves[4]))
            if with_grad:
                mixed.backward(inputs.upstream.to(dtype))
        return mixed

    found = [work().detach()[:, :-1]]
    for index, leaf in enumerate(leaves if with_grad else []):
        assert leaf.grad is not None
        found.append(leaf.grad[:, :-1] if index < 3 else leaf.grad)
    return [x.float().clone() for x in found], lambda: (work(), None)[1]


def relative_error(ours: Tensor, theirs: Tensor) -> float:
    """NaN where anything is; equal nothing counts as equal."""
    return float((ours - theirs).norm() / theirs.norm().clamp(min=1e-30))


def check_attention(setting: Setting, shape: Shape, dtype: torch.dtype) -> tuple[bool, str, dict[str, Any]]:
    """FlexAttention in `dtype` against dense products in float32 of the same numbers, with all gradients where there
    are some. Dense attention in `dtype` is measured beside it."""
    with_grad, inputs = setting.is_cuda, attention_inputs(setting, shape, dtype)
    reference, _ = attend(inputs, shape, torch.float32, flex=False, with_grad=with_grad)
    found: dict[str, Any] = {}
    for name, flex in (("flex", True), ("dense", False)):
        values, work = attend(inputs, shape, dtype, flex=flex, with_grad=with_grad)
        errors = [relative_error(a, b) for a, b in zip(values, reference, strict=True)]
        setting.wait()
        began = time.perf_counter()
        for _ in range(setting.num_steps):
            work()
        setting.wait()
        milliseconds = 1e3 * (time.perf_counter() - began) / setting.num_steps
        found[name] = {"forward": errors[0], "backward": max(errors[1:], default=None), "milliseconds": milliseconds}
    flex = found["flex"]
    errors = [flex["forward"]] + ([flex["backward"]] if with_grad else [])
    backward = f"backward {flex['backward']:.1e}" if with_grad else "no backward on a CPU"
    text = (
        f"relative errors: forward {flex['forward']:.1e}, {backward} (at most {TOLERANCE[dtype]:.0e}); "
        f"{flex['milliseconds']:.1f} ms, dense {found['dense']['milliseconds']:.1f} ms"
    )
    return all(error <= TOLERANCE[dtype] for error in errors), text, found
