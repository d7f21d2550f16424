"""The backbone of block drafters (DFlash, arXiv 2602.06036): one parallel pass over a block of masked slots.

The target's features enter every layer as keys and values (K/V injection): they are fused once, projected by each
layer's own k_proj and v_proj, and never updated. Training sees many blocks a row, decoding one.
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self, cast

import torch
from torch import Tensor, nn

from models.attention import cache_mixer, training_mixer
from models.base import DraftBatch, Drafter, SlotLayout, check_layer_ids
from models.cache import CacheState, KVCache
from models.config import to_dataclass
from models.flops import attention_flops, loss_columns, num_tokens, vocabulary_flops
from models.layer_styles import LayerStyle
from models.layers import BlockLayer, Rotary
from models.losses import (
    LossWeights,
    check_sampled_vocabulary,
    check_terms,
    dynamic_weights,
    position_decay,
    published_decay,
    sum_of,
)
from models.masks import cache_mask
from models.packed import Linear, linear
from models.spec import TargetSpec
from models.vocab_loss import VocabLoss, vocab_loss


@dataclass(frozen=True)
class BlockConfig:
    """Options of every block drafter; conf/model/*.yaml list every value with a remark."""

    num_layers: int
    layer_style: LayerStyle
    num_draft_tokens: int
    slot_layout: SlotLayout
    sliding_window: int | None
    decay: float | None
    dpace_smoothing: float | None
    loss: LossWeights
    sampled_vocabulary: int | None


class BlockState(CacheState):
    """Keys and values of the verified context; slots of a block are never kept."""


@dataclass(frozen=True)
class SupervisedSlots:
    """The slots of a batch that carry supervision, flattened: unsupervised slots never reach a projection."""

    mask: Tensor  # [B, A, K] bool
    ids: Tensor  # [R] int64 of the true entries of the flattened mask, ascending
    labels: Tensor  # [R] int64
    previous: Tensor  # [R] int64, the true token before the label
    teacher_rows: Tensor  # [R] int64 row of the batch's last_hidden that predicts the label
    weights: Tensor  # [R]
    slot_ids: Tensor  # [R] int64 in 0..K-1

    def of(self, values: Tensor) -> Tensor:
        """values [B, A, K, ...] -> [R, ...], without waiting for the device."""
        return values.flatten(0, 2)[self.ids]


class BlockDrafter(Drafter):
    """Shared by every block drafter; a subclass adds heads, loss and proposal."""

    config_type: ClassVar[type[BlockConfig]]
    training_options = frozenset({"decay", "dpace_smoothing", "loss", "sampled_vocabulary"})

    def __init__(
        self, config: BlockConfig, spec: TargetSpec, *, target_layer_ids: tuple[int, ...], mask_token_id: int | None
    ) -> None:
        super().__init__()
        self.mask_token_id = check_block_options(config, spec, mask_token_id)
        check_layer_ids(target_layer_ids, spec)
        spec, style = config.layer_style.spec_of_layers(spec), config.layer_style.classes
        self.config, self.spec, self.target_layer_ids = config, spec, target_layer_ids
        self.num_draft_tokens, self.slot_layout = config.num_draft_tokens, config.slot_layout
        self.sampled_vocabulary = config.sampled_vocabulary
        self.decay = published_decay(config.num_draft_tokens) if config.decay is None else config.decay
        self.fc = Linear(len(target_layer_ids) * spec.hidden_size, spec.hidden_size, bias=False)
        self.hidden_norm = style.norm(spec.hidden_size, spec.rms_norm_eps)
        self.layers = nn.ModuleList(self.build_layer() for _ in range(config.num_layers))
        self.norm = style.norm(spec.hidden_size, spec.rms_norm_eps)
        self.rotary = Rotary(spec)
        self.apply(self.init_weights)

    def build_layer(self) -> BlockLayer:
        return self.config.layer_style.classes.block(self.spec)

    @property
    def num_slots(self) -> int:
        """Q: an in_place block has a slot for the known token beside those that predict."""
        return self.num_draft_tokens + (self.slot_layout is SlotLayout.in_place)

    def warm_start_layers(self) -> nn.ModuleList:
        return self.layers

    def block_layers(self) -> list[BlockLayer]:
        return cast("list[BlockLayer]", list(self.layers))

    def native_config(self) -> dict[str, Any]:
        return {
            **asdict(self.config),
            "target_layer_ids": list(self.target_layer_ids),
            "mask_token_id": self.mask_token_id,
        }

    @classmethod
    def from_native(cls, config: Mapping[str, Any], spec: TargetSpec) -> Self:
        own = dict(config)
        layer_ids, mask_token_id = tuple(own.pop("target_layer_ids")), own.pop("mask_token_id")
        typed = to_dataclass(cls.config_type, own, section="of the checkpoint")
        return cls(typed, spec, target_layer_ids=layer_ids, mask_token_id=mask_token_id)

    # ---- training

    def block_states(self, batch: DraftBatch) -> Tensor:
        """Final-normed states of the predicting slots of every anchor: [B, A, K, D]."""
        fused = self.hidden_norm(self.fc(batch.features.to(self.fc.weight.dtype)))
        fused_rotary = self.rotary(batch.position_ids)
        mix = training_mixer(
            batch.host.anchors,
            batch.host.document_ids,
            fused.device,
            num_slots=self.num_slots,
            window=self.config.sliding_window,
            flex=self.flex_attention,
        )
        anchor_ids, num_blocks = batch.anchors.clamp(min=0), batch.anchors.shape[1]
        first = batch.input_ids.gather(1, anchor_ids)
        positions = batch.position_ids.gather(1, anchor_ids)
        return self._run_blocks(
            first,
            positions,
            lambda index, x, rotary: self.layers[index](x, rotary, fused, fused_rotary, mix, num_blocks),
        )

    def _run_blocks(
        self,
        first: Tensor,  # [B, A] int64 known token of each block
        positions: Tensor,  # [B, A] int64 its position
        run_layer: Callable[[int, Tensor, tuple[Tensor, Tensor]], Tensor],  # index, x [B, A*Q, D], rotary of the slots
    ) -> Tensor:
        slots = torch.arange(self.num_slots, device=first.device)
        tokens = torch.where(slots == 0, first[..., None], self.mask_token_id)  # [B, A, Q]
        rotary = self.rotary((positions[..., None] + slots).flatten(1))
        x = self.embed(tokens.flatten(1)).to(self.fc.weight.dtype)
        for index in range(len(self.layers)):
            x = run_layer(index, x, rotary)
        x = self.norm(x).view(*tokens.shape, -1)
        return x[:, :, self.num_slots - self.num_draft_tokens :]

    def supervised_slots(self, batch: DraftBatch) -> SupervisedSlots:
        """Slot k of a block anchored at a is labelled with token a + 1 + k, in both layouts.

        Supervision of a block stops at its first unsupervised token, document border or row end.
        """
        host, device = batch.host, batch.input_ids.device
        num_slots, length = self.num_draft_tokens, host.input_ids.shape[1]
        slots = torch.arange(num_slots)
        label_ids = host.anchors[..., None] + 1 + slots  # [B, A, K]
        inside = (label_ids < length) & (host.anchors >= 0)[..., None]
        label_ids = label_ids.clamp(min=1, max=length - 1).flatten(1)

        def take(values: Tensor, ids: Tensor) -> Tensor:
            return values.gather(1, ids).view(inside.shape)

        anchor_documents = host.document_ids.gather(1, host.anchors.clamp(min=0))[..., None]
        same_document = take(host.document_ids, label_ids) == anchor_documents
        mask = inside & same_document & take(host.loss_mask, label_ids)
        mask = mask.long().cumprod(-1).bool()
        teacher_rows = take(host.last_hidden_ids, label_ids - 1)[mask]
        assert bool((teacher_rows >= 0).all()), "a supervised token has no stored last hidden state"
        chosen = SupervisedSlots(
            mask=mask,
            ids=mask.flatten().nonzero().squeeze(1),
            labels=take(host.input_ids, label_ids)[mask],
            previous=take(host.input_ids, label_ids - 1)[mask],
            teacher_rows=teacher_rows,
            weights=position_decay(num_slots, self.decay, mask.device).expand(mask.shape)[mask],
            slot_ids=slots.expand(mask.shape)[mask],
        )
        return SupervisedSlots(**{name: value.to(device, non_blocking=True) for name, value in vars(chosen).items()})

    def slot_weight(self, batch: DraftBatch) -> Tensor:
        """Sum of the static position weights over supervised slots (float64), the denominator of slot losses."""
        return self.supervised_slots(batch).weights.double().sum()

    def denominators(self, batch: DraftBatch) -> dict[str, Tensor]:
        return {"tokens": self.slot_weight(batch)}

    def training_flops(self, batch: DraftBatch) -> float:
        spec, host, slots = self.spec, batch.host, self.supervised_slots(batch.host)
        num_rows = len(slots.labels)
        of_layer = sum(p.numel() for p in self.layers[0].parameters() if p.dim() == 2)
        size = spec.num_heads * spec.head_dim
        context = 6.0 * num_tokens(host) * self.block_layers()[0].self_attn.context_size
        context += attention_flops(
            host,
            host.anchors,
            size=size,
            num_queries=self.num_slots,
            num_keys=self.num_slots,
            window=self.config.sliding_window,
        )
        columns, num_teachers = loss_columns(batch, spec.vocab_size), len(slots.teacher_rows.unique())
        flops = 4.0 * num_tokens(host) * self.fc.weight.numel()  # features need no gradient
        flops += len(self.layers) * context + 6.0 * self.layer_rows(batch) * of_layer
        flops += 6.0 * num_rows * columns * self.bias_size
        return flops + vocabulary_flops(num_rows, num_teachers, size=spec.hidden_size, columns=columns)

    def layer_rows(self, batch: DraftBatch) -> int:
        return len(self.layers) * self.num_slots * int((batch.host.anchors >= 0).sum())

    @property
    def bias_size(self) -> int:
        """Inputs of a trained bias over the vocabulary."""
        return 0

    @property
    def sharded_layers(self) -> nn.ModuleList:
        return self.layers

    def token_loss(
        self,
        batch: DraftBatch,
        hidden: Tensor,  # [R, D] states of the supervised slots
        slots: SupervisedSlots,
        *,
        bias_input: Tensor | None = None,  # [R, r], with bias_head [V, r]
        bias_head: Tensor | None = None,
    ) -> VocabLoss:
        """Weighted terms of the supervised slots, over all of the vocabulary or the step's sample."""
        head, labels, log_weights = self.head, slots.labels, None
        if (drawn := batch.vocabulary) is not None:
            head, labels, log_weights = head[drawn.ids], drawn.places(labels), drawn.log_weights
            bias_head = None if bias_head is None else bias_head[drawn.ids]

        def loss(weights: Tensor) -> VocabLoss:
            return vocab_loss(
                hidden,
                batch.last_hidden,
                head=head,
                weights=weights,
                terms=self.config.loss,
                labels=labels,
                teacher_ids=slots.teacher_rows,
                bias_input=bias_input,
                bias_head=bias_head,
                softcap=self.spec.logit_softcap,
                log_weights=log_weights,
                compiled=self.compiled,
            )

        if self.config.dpace_smoothing is None:
            return loss(slots.weights)
        with torch.no_grad():  # the weights need every slot of a block, so they take a pass of their own
            confidence = loss(slots.weights).cross_entropy
        return loss(dynamic_weights(confidence, slots.mask, self.config.dpace_smoothing))

    def slot_metrics(self, loss: VocabLoss, slots: SupervisedSlots) -> dict[str, tuple[Tensor, Tensor]]:
        """Weighted cross-entropy and L1; accept rate and top-1 agreement per slot, [K] each."""
        return {
            **loss.metrics(slots.slot_ids, self.num_draft_tokens),
            "cross_entropy": sum_of(loss.cross_entropy, slots.weights),
            "l1": sum_of(loss.l1, slots.weights),
        }

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
            state.cache.write(index, *layer.self_attn.context(fused, *rotary))
        state.cache.advance(counts)

    def propose_states(self, state: BlockState, last: Tensor, num_draft_tokens: int) -> Tensor:
        """Final-normed states [B, num_draft_tokens, D] of the block after the newest committed token.

        The whole trained block is always run, since attention inside it is bidirectional: a shorter proposal is a
        prefix of the full one. Raises ValueError on a longer one.
        """
        if num_draft_tokens > self.num_draft_tokens:
            raise ValueError(
                f"num_draft_tokens={num_draft_tokens} is more than the {self.num_draft_tokens} that this drafter "
                "was trained for"
            )
        layers, contexts = self.block_layers(), [state.cache.read(index) for index in range(len(self.layers))]
        mask = cache_mask(
            state.lengths, contexts[0][0].shape[2], num_slots=self.num_slots, window=self.config.sliding_window
        )
        mix = cache_mixer(mask)
        states = self._run_blocks(
            last[:, None],
            state.lengths[:, None],
            lambda index, x, rotary: layers[index].draft(x, rotary, contexts[index], mix, num_blocks=1),
        )[:, 0]
        return states[:, :num_draft_tokens].contiguous()

    def logits(self, states: Tensor) -> Tensor:
        """Base logits float32 [..., V] of final-normed states, soft-capped as the target's."""
        return self.capped(linear(states, self.head))


def check_block_options(config: BlockConfig, spec: TargetSpec, mask_token_id: int | None) -> int:
    """The mask token; raises ValueError naming the option, its value and its limits."""
    for key, value in (("num_layers", config.num_layers), ("num_draft_tokens", config.num_draft_tokens)):
        if value < 1:
            raise ValueError(f"model.{key} must be at least 1, got {value}")
    if config.decay is not None and config.decay < 0:
        raise ValueError(
            f"model.decay must be positive, 0 (no decay) or null (as published for the block), got {config.decay}"
        )
    check_terms(config.loss)
    if config.dpace_smoothing is not None and not 0 < config.dpace_smoothing <= 1:
        raise ValueError(
            f"model.dpace_smoothing must be in (0, 1] or null (static decay), got {config.dpace_smoothing}"
        )
    check_sampled_vocabulary(config.sampled_vocabulary)
    num_slots = config.num_draft_tokens + (config.slot_layout is SlotLayout.in_place)
    if config.sliding_window is not None and config.sliding_window <= num_slots:
        raise ValueError(
            f"model.sliding_window must be null or more than the {num_slots} slots of a block, "
            f"got {config.sliding_window}"
        )
    if mask_token_id is None:
        raise ValueError(
            "target.mask_token_id=null and every embedding row of the target is in use: "
            "name the id of a reserved token that chats never hold"
        )
    if not 0 <= mask_token_id < spec.vocab_size:
        raise ValueError(f"mask_token_id must be in 0..{spec.vocab_size - 1} (the vocabulary), got {mask_token_id}")
    return mask_token_id
