"""Products with frozen weights on a CPU, which are laid out once instead of at every product.

oneDNN and MKL bring a weight into blocks before they multiply. With few rows that takes as long as the product, so that
checking five tokens costs more than twice what decoding one does. With the blocks kept, a handful of rows costs about
what one does, which is what speculative decoding lives on. (torch.compile's freezing does the same by the same
operator.) A weight that is used so is held twice, as it is and in blocks.
"""

import platform
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

MOST_ROWS = 512  # of a product; with more of them, laying out is a small part
FEWEST_ELEMENTS = 2**15  # of a weight; a small one is multiplied before its blocks are looked up
_EXPECTED_ROWS = 8  # the blocks are chosen for about so many, and serve any number


class Blocks(NamedTuple):
    """A weight in blocks, and what it was when it was laid out: a weight that changed is laid out anew."""

    version: int | None
    address: int
    tensor: Tensor

    @classmethod
    def of(cls, weight: Tensor, known: "Blocks | None") -> "Blocks":
        """`known`, where they still are the weight's."""
        version, address = None if weight.is_inference() else weight._version, weight.data_ptr()
        if known is not None and known.version == version and known.address == address:
            return known
        return cls(version, address, torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _EXPECTED_ROWS))

    def multiply(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.tensor, bias, "none", [], "")


_shared = WeakIdKeyDictionary()  # weight -> Blocks, of weights that belong to no layer


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """x [..., I], weight [O, I] -> [..., O], as torch's own. Gradients go the ordinary way."""
    if not _is_worth_it(x, weight):
        return F.linear(x, weight)
    blocks = _shared[weight] = Blocks.of(weight, _shared.get(weight))
    return blocks.multiply(x, None)


def _is_worth_it(x: Tensor, weight: Tensor) -> bool:
    return (
        not (torch.is_grad_enabled() or torch.is_autocast_enabled("cpu"))
        and 0 < x.numel() <= MOST_ROWS * x.shape[-1]
        and x.device.type == "cpu"
        and weight.numel() >= FEWEST_ELEMENTS
        and x.dtype is weight.dtype
        and weight.dtype in _dtypes()
        and type(weight) in (Tensor, nn.Parameter)  # not a part of one that processes share
        and torch.backends.mkldnn.enabled  # type: ignore[attr-defined]
    )


@cache
def _dtypes() -> frozenset[torch.dtype]:
    """For which this processor has such products."""
    if not torch.backends.mkldnn.is_available() or platform.machine() not in ("x86_64", "AMD64"):
        return frozenset()
    has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return frozenset({torch.float32, torch.bfloat16} if has_bf16 else {torch.float32})


class Linear(nn.Linear):
    """torch's, with its weight in blocks where that pays."""

    blocks: Blocks | None = None

    def forward(self, input: Tensor) -> Tensor:
        if not _is_worth_it(input, self.weight):
            return F.linear(input, self.weight, self.bias)
        self.blocks = Blocks.of(self.weight, self.blocks)
        return self.blocks.multiply(input, self.bias)

    def __getstate__(self) -> dict[str, Any]:
        """For copies, which lay out their own."""
        return {name: value for name, value in self.__dict__.items() if name != "blocks"}


def keep_blocks(module: nn.Module) -> None:
    """Let all linear layers of a module, of torch's own class and no other, be `Linear`s."""
    for child in module.modules():
        if type(child) is nn.Linear:
            child.__class__ = Linear
