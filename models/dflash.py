"""DFlash (arXiv 2602.06036): a block of masked slots filled in one parallel pass, no head but the target's.

Unusual: slots are drawn independently of each other given the context, so the probability of a later slot does not know
which token an earlier slot took. Exists in two slot layouts: DeepSpec's `anchor_first` (its files call the class
Qwen3DSparkModel, both heads off) and z-lab's `in_place` (DFlashDraftModel). Backbone weights have the same names and
shapes in both, so nothing but the layout tells them apart, and the wrong one drafts nonsense.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.base import DraftBatch, DraftLoss, Proposal, Serving, SlotLayout
from models.block import BlockConfig, BlockDrafter, BlockState
from models.gguf import dflash_backbone
from models.sampling import Sampler
from models.spec import TargetSpec


@dataclass(frozen=True)
class DFlashConfig(BlockConfig):
    """Options of DFlash; conf/model/dflash.yaml lists every value with a remark."""

    def build(self, spec: TargetSpec, *, target_layer_ids: tuple[int, ...], mask_token_id: int | None) -> "DFlash":
        return DFlash(self, spec, target_layer_ids=target_layer_ids, mask_token_id=mask_token_id)


class DFlash(BlockDrafter):
    """Block drafter whose slots are predicted and drawn independently."""

    config_type = DFlashConfig

    def forward(self, batch: DraftBatch) -> DraftLoss:
        states = self.block_states(batch)
        slots = self.supervised_slots(batch)
        loss = self.token_loss(batch, slots.of(states), slots)
        return DraftLoss({"tokens": loss.total}, self.slot_metrics(loss, slots))

    def propose(self, state: BlockState, last: Tensor, sampler: Sampler, num_draft_tokens: int) -> Proposal:
        logits = self.logits(self.propose_states(state, last, num_draft_tokens))
        positions = state.lengths[:, None] + 1 + torch.arange(num_draft_tokens, device=last.device)
        tokens, probs = sampler.draw_block(logits, positions)
        lengths = torch.full_like(last, num_draft_tokens)
        return Proposal(tokens=tokens, probs=probs, lengths=lengths, ranked=sampler.ranked(logits))

    def serving(self, engine: str) -> Serving:
        """DeepSpec's layout (its class of DSpark with both heads off), or GGUF."""
        if engine == "gguf":
            backbone = dflash_backbone(self)
            metadata = backbone.config | {"dflash.has_confidence_head": False}  # absent would mean true
            return Serving(config=metadata, renames=backbone.renames, with_embedding=False)
        if engine != "deepspec":
            raise ValueError(f"engine={engine} cannot be written for DFlash; choose engine=deepspec or engine=gguf")
        return deepspec_serving(self, markov_rank=0, enable_confidence_head=False)


def deepspec_serving(drafter: BlockDrafter, **heads: bool | int | str) -> Serving:
    """config.json of the reference's Qwen3DSparkModel; `heads` are its flat fields of both heads.

    Raises ValueError on a layout or window that the format cannot say.
    """
    if drafter.slot_layout is not SlotLayout.anchor_first:
        raise ValueError("the deepspec format has no slot_layout=in_place; train with model.slot_layout=anchor_first")
    if drafter.config.sliding_window is not None:
        raise ValueError(
            f"the deepspec format has no sliding window (got {drafter.config.sliding_window}); "
            "train with model.sliding_window=null"
        )
    config = {
        "architectures": ["Qwen3DSparkModel"],
        "block_size": drafter.num_draft_tokens,
        "layer_types": ["full_attention"] * drafter.config.num_layers,
        "mask_token_id": drafter.mask_token_id,
        "num_anchors": 512,  # a training option that the reference requires at load; not used in decoding
        "num_hidden_layers": drafter.config.num_layers,
        "sample_from_anchor": True,  # explicit: engines disagree on what its absence means
        "target_layer_ids": list(drafter.target_layer_ids),
        **heads,
    }
    return Serving(config=config, renames={}, with_embedding=True)
