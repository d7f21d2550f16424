"""The backbone of block drafters (DFlash, arXiv 2602.06036): one parallel pass over a block of masked slots.

The target's features enter every layer as keys and values (K/V injection): they are fused once, projected by each
layer's own k_proj and v_proj, and never updated. Training sees many blocks a row, decoding one.
"""

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.base import DraftBatch, Drafter, SlotLayout
from models.cache import KVCache
from models.layers import BlockLayer, RMSNorm, Rotary
from models.losses import position_decay
from models.masks import context_mask
from models.spec import TargetSpec


@dataclass
class BlockState:
    """Keys and values of the verified context; slots of a block are never kept."""

    cache: KVCache

    @property
    def lengths(self) -> Tensor:
        return self.cache.lengths

    def select(self, rows: Tensor) -> None:
        self.cache.select(rows)


@dataclass(frozen=True)
class SupervisedSlots:
    """The slots of a batch that carry supervision, flattened: unsupervised slots never reach a projection."""

    mask: Tensor  # [B, A, K] bool
    labels: Tensor  # [R] int64
    previous: Tensor  # [R] int64, the true token before the label
    teacher: Tensor  # [R, D]
    weights: Tensor  # [R]
    slot_ids: Tensor  # [R] int64 in 0..K-1


class BlockDrafter(Drafter):
    """Shared by every block drafter; a subclass adds heads, loss and proposal."""

    def __init__(
        self,
        spec: TargetSpec,
        *,
        num_layers: int,
        num_draft_tokens: int,
        slot_layout: SlotLayout,
        target_layer_ids: tuple[int, ...],
        mask_token_id: int,
        decay: float | None,
    ) -> None:
        super().__init__()
        check_block_options(spec, num_layers, num_draft_tokens, target_layer_ids, mask_token_id)
        self.spec, self.num_draft_tokens, self.slot_layout = spec, num_draft_tokens, slot_layout
        self.target_layer_ids, self.mask_token_id, self.decay = target_layer_ids, mask_token_id, decay
        self.fc = nn.Linear(len(target_layer_ids) * spec.hidden_size, spec.hidden_size, bias=False)
        self.hidden_norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(BlockLayer(spec) for _ in range(num_layers))
        self.norm = RMSNorm(spec.hidden_size, spec.rms_norm_eps)
        self.rotary = Rotary(spec)
        self.apply(self._init_weights)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=self.spec.initializer_range)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def warm_start_layers(self) -> nn.ModuleList:
        return self.layers

    def block_layers(self) -> list[BlockLayer]:
        return cast("list[BlockLayer]", list(self.layers))

    def embed(self, token_ids: Tensor) -> Tensor:
        """Frozen target embedding [..., D], scaled as the target scales it."""
        return F.embedding(token_ids, self.embedding) * self.spec.embedding_scale

    # ---- training

    def block_states(self, batch: DraftBatch) -> Tensor:
        """Final-normed states of the predicting slots of every anchor: [B, A, K, D]."""
        fused = self.hidden_norm(self.fc(batch.features.to(self.fc.weight.dtype)))
        rotary = self.rotary(batch.position_ids)
        mask = context_mask(batch.anchors, batch.document_ids)
        anchor_ids = batch.anchors.clamp(min=0)
        first = batch.input_ids.gather(1, anchor_ids)
        positions = batch.position_ids.gather(1, anchor_ids)
        contexts = []
        for layer in self.block_layers():
            keys, values = layer.self_attn.keys_values(fused, *rotary)
            contexts.append((keys.transpose(1, 2), values.transpose(1, 2)))
        return self._run_blocks(first, positions, contexts, mask, self.num_draft_tokens)

    def _run_blocks(
        self,
        first: Tensor,  # [B, A] int64 known token of each block
        positions: Tensor,  # [B, A] int64 its position
        contexts: list[tuple[Tensor, Tensor]],  # per layer, keys and values [B, H_kv, S, d]
        mask: Tensor,  # [B, A, S] bool
        num_draft_tokens: int,
    ) -> Tensor:
        num_slots = num_draft_tokens + (self.slot_layout is SlotLayout.in_place)
        slots = torch.arange(num_slots, device=first.device)
        tokens = torch.where(slots == 0, first[..., None], self.mask_token_id)  # [B, A, Q]
        rotary = self.rotary((positions[..., None] + slots).flatten(1))
        x = self.embed(tokens.flatten(1)).to(self.norm.weight.dtype)
        for layer, context in zip(self.layers, contexts, strict=True):
            x = layer(x, rotary, context, mask)
        x = self.norm(x).view(*tokens.shape, -1)
        return x[:, :, num_slots - num_draft_tokens :]

    def supervised_slots(self, batch: DraftBatch) -> SupervisedSlots:
        """Slot k of a block anchored at a is labelled with token a + 1 + k, in both layouts.

        Supervision of a block stops at its first unsupervised token, document border or row end.
        """
        num_slots, length = self.num_draft_tokens, batch.input_ids.shape[1]
        slots = torch.arange(num_slots, device=batch.anchors.device)
        label_ids = batch.anchors[..., None] + 1 + slots  # [B, A, K]
        inside = (label_ids < length) & (batch.anchors >= 0)[..., None]
        label_ids = label_ids.clamp(min=1, max=length - 1).flatten(1)

        def take(values: Tensor, ids: Tensor) -> Tensor:
            return values.gather(1, ids).view(inside.shape)

        anchor_documents = batch.document_ids.gather(1, batch.anchors.clamp(min=0))[..., None]
        same_document = take(batch.document_ids, label_ids) == anchor_documents
        mask = inside & same_document & take(batch.loss_mask, label_ids)
        mask = mask.long().cumprod(-1).bool()
        teacher_rows = take(batch.last_hidden_ids, label_ids - 1)[mask]
        assert bool((teacher_rows >= 0).all()), "a supervised token has no stored last hidden state"
        return SupervisedSlots(
            mask=mask,
            labels=take(batch.input_ids, label_ids)[mask],
            previous=take(batch.input_ids, label_ids - 1)[mask],
            teacher=batch.last_hidden[teacher_rows],
            weights=position_decay(num_slots, self.decay, mask.device).expand(mask.shape)[mask],
            slot_ids=slots.expand(mask.shape)[mask],
        )

    def slot_weight(self, batch: DraftBatch) -> Tensor:
        """Sum of the static position weights over supervised slots (float64), the denominator of slot losses."""
        return self.supervised_slots(batch).weights.double().sum()

    # ---- decoding

    def start(self, tokens: Tensor, features: Tensor, counts: Tensor, capacity: int) -> BlockState:
        cache = KVCache(len(self.layers), tokens.shape[0], capacity, tokens.device)
        state = BlockState(cache)
        self.advance(state, tokens, features, counts)
        return state

    def advance(self, state: BlockState, tokens: Tensor, features: Tensor, counts: Tensor) -> None:
        rotary = self.rotary(state.cache.begin(tokens.shape[1]))
        fused = self.hidden_norm(self.fc(features.to(self.fc.weight.dtype)))
        for index, layer in enumerate(self.block_layers()):
            keys, values = layer.self_attn.keys_values(fused, *rotary)
            state.cache.write(index, keys.transpose(1, 2), values.transpose(1, 2))
        state.cache.advance(counts)

    def propose_states(self, state: BlockState, last: Tensor, num_draft_tokens: int) -> Tensor:
        """Final-normed states [B, K, D] of one block after the newest committed token."""
        contexts = [state.cache.read(index) for index in range(len(self.layers))]
        slots = torch.arange(contexts[0][0].shape[2], device=last.device)
        mask = (slots < state.lengths[:, None])[:, None]
        return self._run_blocks(last[:, None], state.lengths[:, None], contexts, mask, num_draft_tokens)[:, 0]


def check_block_options(
    spec: TargetSpec, num_layers: int, num_draft_tokens: int, target_layer_ids: tuple[int, ...], mask_token_id: int
) -> None:
    """Raises ValueError naming the option, its value and its limits."""
    for key, value in (("num_layers", num_layers), ("num_draft_tokens", num_draft_tokens)):
        if value < 1:
            raise ValueError(f"model.{key} must be at least 1, got {value}")
    if not 0 <= mask_token_id < spec.vocab_size:
        raise ValueError(f"mask_token_id must be in 0..{spec.vocab_size - 1} (the vocabulary), got {mask_token_id}")
    ids = list(target_layer_ids)
    if not ids or ids != sorted(set(ids)) or ids[0] < 0 or ids[-1] >= spec.num_layers:
        raise ValueError(
            f"target_layer_ids must be ascending, unique and in 0..{spec.num_layers - 1} (the target's layers), "
            f"got {ids}"
        )
