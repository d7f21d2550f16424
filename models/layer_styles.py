"""Which decoder layers a drafter is made of: Qwen3's for any target, or those of the target's own family."""

from dataclasses import dataclass, replace
from enum import StrEnum

from models.gemma4 import Gemma4BlockLayer, Gemma4PairLayer, WideNorm
from models.layers import BlockLayer, PairLayer, RMSNorm
from models.spec import TargetSpec


class LayerStyle(StrEnum):
    """qwen3 fits every target; gemma4 is what engines serve beside a Gemma 4."""

    qwen3 = "qwen3"
    gemma4 = "gemma4"

    def spec_of_layers(self, target: TargetSpec) -> TargetSpec:
        """The target's sizes, with those of the attention that such layers copy in front."""
        if not STYLES[self].is_global:
            return target
        return replace(target, head_dim=target.global_head_dim, num_kv_heads=target.num_global_kv_heads)

    @property
    def classes(self) -> "Classes":
        return STYLES[self]


@dataclass(frozen=True)
class Classes:
    """What a style is made of."""

    norm: type[RMSNorm]
    block: type[BlockLayer]
    pair: type[PairLayer]
    is_global: bool  # copies the sizes of the target's global attention


STYLES = {
    LayerStyle.qwen3: Classes(RMSNorm, BlockLayer, PairLayer, is_global=False),
    LayerStyle.gemma4: Classes(WideNorm, Gemma4BlockLayer, Gemma4PairLayer, is_global=True),
}
