"""DFlash (arXiv 2602.06036): a block of masked slots filled in one parallel pass, no head but the target's.

Unusual: slots are drawn independently of each other given the context, so the probability of a later slot does not know
which token an earlier slot took. Exists in two slot layouts: DeepSpec's `anchor_first` (its files call the class
Qwen3DSparkModel, both heads off) and z-lab's `in_place` (DFlashDraftModel). Backbone weights have the same names and
shapes in both, so nothing but the layout tells them apart, and the wrong one drafts nonsense.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.base import DraftBatch, DraftLoss, Engine, Proposal, Serving
from models.block import BlockConfig, BlockDrafter, BlockState
from models.engines import block_serving
from models.gguf import dflash_file
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

    def serving(self, engine: Engine) -> Serving:
        """DeepSpec and engines know DFlash in anchor_first as a DSpark without heads."""
        return dflash_file(self, {}, {}) if engine is Engine.gguf else block_serving(self, engine, None)
