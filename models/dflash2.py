"""DFlash 2 (Inco AI, August 2026; no paper): DFlash with short convolutions inside a block and a path selector.

Unusual: every sublayer is wrapped in two depthwise convolutions over a slot and the one before it, whose kernels are a
learned one per channel plus a correction that is computed from the slot and shared by a group of channels. After one
parallel pass a selector scores, for the likeliest tokens of every slot, how each follows each candidate of the slot
before; walking left to right through the scores is all that is sequential. Drafts are drawn from the candidates alone,
so a proposal has as many probabilities a slot as there are candidates.

A fresh one drafts exactly what a DFlash of the same backbone does: kernels begin as the identity, successors as zero.
Loss and initialisation are not published; these are those of the public re-implementations. Of the metrics of training,
acceptance and agreement are those of the slots' own predictions, before the selector; selector_accuracy is the path's.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from models.attention import Mixer
from models.base import DraftBatch, DraftLoss, Engine, Proposal, Serving, SlotLayout, stacked
from models.block import BlockConfig, BlockDrafter, BlockState
from models.engines import dflash2_serving, refusal
from models.layer_styles import LayerStyle
from models.layers import BlockLayer
from models.losses import by_slot, sum_of
from models.packed import Linear, linear
from models.sampling import Purpose, Sampler
from models.spec import TargetSpec

ROWS_AT_ONCE = 512  # supervised slots whose candidates are scored together


class Codebooks(StrEnum):
    """Where the vectors of predecessors and successors come from."""

    tables = "tables"  # one trained for every token, as in the released files
    projected = "projected"  # linear maps of the frozen embedding and head


class Gold(StrEnum):
    """What the selector learns where the text's token is not among the candidates."""

    inject = "inject"  # it takes the place of the least likely one
    drop = "drop"  # nothing


@dataclass(frozen=True)
class DFlash2Config(BlockConfig):
    """Options of DFlash 2; conf/model/dflash2.yaml lists every value with a remark."""

    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int
    codebooks: Codebooks
    gold: Gold
    selector_weight: float

    def build(self, spec: TargetSpec, *, target_layer_ids: tuple[int, ...], mask_token_id: int | None) -> "DFlash2":
        return DFlash2(self, spec, target_layer_ids=target_layer_ids, mask_token_id=mask_token_id)


class DFlash2(BlockDrafter):
    """Block drafter whose slots know their neighbours, and whose drafts form a path."""

    config_type = DFlash2Config
    training_options = BlockDrafter.training_options | {"gold", "selector_weight"}
    config: DFlash2Config

    def __init__(
        self, config: DFlash2Config, spec: TargetSpec, *, target_layer_ids: tuple[int, ...], mask_token_id: int | None
    ) -> None:
        check_options(config, spec)
        super().__init__(config, spec, target_layer_ids=target_layer_ids, mask_token_id=mask_token_id)
        self.candidate_selector = CandidateSelector(config, spec)
        for module in self.modules():
            if isinstance(module, BlockConv):
                module.reset()

    def build_layer(self) -> BlockLayer:
        return ConvLayer(self.spec, taps=self.config.conv_kernel_size, group_size=self.config.conv_group_size)

    # ---- training

    def forward(self, batch: DraftBatch) -> DraftLoss:
        states = self.block_states(batch)
        slots = self.supervised_slots(batch)
        hidden = slots.of(states)
        loss = self.token_loss(batch, hidden, slots)
        parts = [
            checkpoint(self._selector_loss, *rows, batch, use_reentrant=False)
            for rows in zip(*(x.split(ROWS_AT_ONCE) for x in (hidden, slots.labels, slots.previous)), strict=True)
        ]
        cross_entropy, found, hit = (torch.cat(values) for values in zip(*parts, strict=True))
        weights = slots.weights if self.config.gold is Gold.inject else slots.weights * found
        numerators = {"tokens": loss.total}
        numerators["selector"] = self.config.selector_weight * (cross_entropy * weights).sum()
        metrics = self.slot_metrics(loss, slots) | {"selector": sum_of(cross_entropy, weights)}
        for name, values in (("candidate_recall", found), ("selector_accuracy", hit)):
            metrics[name] = by_slot(values, slots.slot_ids, self.num_draft_tokens)
        return DraftLoss(numerators, metrics)

    def denominators(self, batch: DraftBatch) -> dict[str, Tensor]:
        weight = self.slot_weight(batch)
        return {"tokens": weight, "selector": weight}

    def training_flops(self, batch: DraftBatch) -> float:
        """With the selector: logits of the candidates, gates and transitions of supervised slots. Kernels are applied
        by no matrix product."""
        rows, size = len(self.supervised_slots(batch.host).labels), self.spec.hidden_size
        rank, candidates = self.config.selector_rank, self.config.selector_top_k
        of_row = 4.0 * size * candidates + 6.0 * size * rank + 6.0 * rank * candidates
        if self.config.codebooks is Codebooks.projected:
            of_row += 4.0 * size * rank * (1 + candidates)
        return super().training_flops(batch) + rows * of_row

    @property
    def extra_row_bytes(self) -> int:
        """Four convolutions keep their kernels and the slots that they shift, two the input of their corrections, in
        float32."""
        return 4 * (4 * 2 * self.config.conv_kernel_size + 2) * self.spec.hidden_size

    def _selector_loss(
        self,
        hidden: Tensor,  # [R, D]
        labels: Tensor,  # [R] int64
        previous: Tensor,  # [R] int64
        batch: DraftBatch,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Cross-entropy over the candidates, whether the label was among them, and whether the selector puts it first,
        each [R]. Candidates are the likeliest of all tokens, or of the step's sample."""
        drawn = batch.vocabulary
        with torch.no_grad():
            head = self.head if drawn is None else self.head[drawn.ids]
            ids = self.capped(linear(hidden, head)).topk(self.config.selector_top_k, dim=-1).indices
            ids = ids if drawn is None else drawn.ids[ids]
            found = (ids == labels[:, None]).any(-1)
            ids = torch.where(found[:, None], ids, torch.cat((ids[:, :-1], labels[:, None]), dim=1))
            place = (ids == labels[:, None]).int().argmax(-1)
        unary = self.capped(torch.einsum("rd,rcd->rc", hidden, self.head[ids].to(hidden.dtype)))
        scores = unary + self._transitions(self.candidate_selector.gate(hidden), previous, ids)
        cross_entropy = F.cross_entropy(scores.float(), place, reduction="none")
        hit = (scores.argmax(-1) == place) & found
        return cross_entropy, found.float(), hit.float()

    # ---- shared by training and decoding

    def _transitions(self, gate: Tensor, previous: Tensor, ids: Tensor) -> Tensor:
        """How well candidates ids [R, C] follow previous [R], with gates [R, r] of the slots -> [R, C] float32."""
        context = self._predecessors(previous).to(gate.dtype) * gate
        return torch.einsum("rk,rck->rc", context, self._successors(ids).to(gate.dtype)).float()

    def _predecessors(self, ids: Tensor) -> Tensor:
        return self.candidate_selector.vectors("predecessor", ids, self.embedding)

    def _successors(self, ids: Tensor) -> Tensor:
        return self.candidate_selector.vectors("successor", ids, self.head)

    # ---- decoding

    def propose(self, state: BlockState, last: Tensor, sampler: Sampler, num_draft_tokens: int) -> Proposal:
        states = self.propose_states(state, last, num_draft_tokens)
        logits = self.logits(states)
        # Of equal logits the lower id comes first, as in a DFlash: topk alone promises no order among them.
        unary, ids = logits.topk(self.config.selector_top_k, dim=-1)
        ids, order = ids.sort(dim=-1)
        unary = unary.gather(-1, order)
        gates = self.candidate_selector.gate(states)
        previous, tokens, probs, ranked = last, list[Tensor](), list[Tensor](), list[Tensor | None]()
        for slot in range(num_draft_tokens):
            scores = unary[:, slot] + self._transitions(gates[:, slot], previous, ids[:, slot])
            drafted = torch.stack(tokens, dim=1) if tokens else None
            probs.append(sampler.probs(scores, drafted, columns=ids[:, slot]))
            ranked.append(sampler.ranked(scores, ids[:, slot]))
            column = sampler.draw(probs[-1], state.lengths + 1 + slot, Purpose.draft)
            previous = ids[:, slot].gather(1, column[:, None])[:, 0]
            tokens.append(previous)
        return Proposal(
            tokens=torch.stack(tokens, dim=1),
            probs=torch.stack(probs, dim=1),
            candidate_ids=ids,
            lengths=torch.full_like(last, num_draft_tokens),
            ranked=stacked(ranked),
        )

    def serving(self, engine: Engine) -> Serving:
        if self.slot_layout is not SlotLayout.in_place:
            raise refusal(engine, f"model.slot_layout={self.slot_layout}", "DFlash 2 is served in_place only")
        own = {
            "conv_kernel_size": self.config.conv_kernel_size,
            "conv_group_size": self.config.conv_group_size,
            "selector_rank": self.config.selector_rank,
            "selector_top_k": self.config.selector_top_k,
        }
        return dflash2_serving(self, engine, own, self.engine_tensors())

    def engine_tensors(self) -> dict[str, Tensor]:
        """All weights under published names: codebooks are tables there, whatever they are here."""
        tensors = {name: tensor for name, tensor in self.state_dict().items() if "codebook" not in name}
        ids = torch.arange(self.spec.vocab_size, device=self.embedding.device)
        with torch.no_grad():
            tensors["candidate_selector.predecessor_codebook"] = self._predecessors(ids)
            tensors["candidate_selector.successor_codebook"] = self._successors(ids)
        return tensors


class BlockConv(nn.Module):
    """The convolutions before and after a sublayer; both corrections are computed from what enters the first."""

    def __init__(self, size: int, *, taps: int, group_size: int) -> None:
        super().__init__()
        self.taps, self.group_size = taps, group_size
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, size))
        self.kernel_projection = Linear(size, 2 * taps * (size // group_size), bias=False)

    def reset(self) -> None:
        """To the identity."""
        with torch.no_grad():
            self.base_kernel.zero_()[:, 0] = 1.0
            self.kernel_projection.weight.zero_()

    def before(self, x: Tensor, num_blocks: int) -> tuple[Tensor, Tensor]:
        """x [B, A*Q, D] -> the sublayer's input, and the corrections [B, A*Q, taps, G] of its output."""
        corrections = self.kernel_projection(x).unflatten(-1, (2, self.taps, -1))
        return self._mixed(x, self.base_kernel[0], corrections[:, :, 0], num_blocks), corrections[:, :, 1]

    def after(self, x: Tensor, corrections: Tensor, num_blocks: int) -> Tensor:
        return self._mixed(x, self.base_kernel[1], corrections, num_blocks)

    def _mixed(self, x: Tensor, base: Tensor, corrections: Tensor, num_blocks: int) -> Tensor:
        """Slots behind the first of a block see those before them, never another block's."""
        kernels = base.unflatten(-1, (-1, self.group_size)) + corrections[..., None]  # [B, A*Q, taps, G, g]
        blocks = x.unflatten(1, (num_blocks, -1))
        mixed = torch.zeros_like(x)
        for tap in range(self.taps):
            shifted = F.pad(blocks, (0, 0, tap, 0))[:, :, : blocks.shape[2]].flatten(1, 2)
            mixed = mixed + kernels[:, :, tap].flatten(-2) * shifted
        return mixed


class ConvLayer(BlockLayer):
    """A layer over draft slots with convolutions around attention and MLP."""

    def __init__(self, spec: TargetSpec, *, taps: int, group_size: int) -> None:
        super().__init__(spec)
        self.attention_conv, self.mlp_conv = (
            BlockConv(spec.hidden_size, taps=taps, group_size=group_size) for _ in range(2)
        )

    def draft(
        self,
        x: Tensor,
        rotary: tuple[Tensor, Tensor],
        context: tuple[Tensor, Tensor],
        mix: Mixer,
        num_blocks: int,
    ) -> Tensor:
        mixed, corrections = self.attention_conv.before(self.input_layernorm(x), num_blocks)
        mixed = self.self_attn.o_proj(self.attend(mixed, rotary, context, mix, num_blocks))
        x = x + self.attention_conv.after(mixed, corrections, num_blocks)
        mixed, corrections = self.mlp_conv.before(self.post_attention_layernorm(x), num_blocks)
        return x + self.mlp_conv.after(self.mlp(mixed), corrections, num_blocks)


class CandidateSelector(nn.Module):
    """<A(previous) * H(state), B(candidate)>: vectors of tokens from tables or from the frozen matrices."""

    def __init__(self, config: DFlash2Config, spec: TargetSpec) -> None:
        super().__init__()
        self.codebooks, rank = config.codebooks, config.selector_rank
        rows = spec.vocab_size if config.codebooks is Codebooks.tables else rank
        columns = rank if config.codebooks is Codebooks.tables else spec.hidden_size
        self.predecessor_codebook = nn.Parameter(torch.empty(rows, columns))
        self.successor_codebook = nn.Parameter(torch.zeros(rows, columns))
        self.hidden_projection = Linear(spec.hidden_size, rank, bias=False)
        nn.init.normal_(self.predecessor_codebook, std=spec.initializer_range)
        nn.init.normal_(self.hidden_projection.weight, std=spec.initializer_range)

    def gate(self, states: Tensor) -> Tensor:
        return self.hidden_projection(states)

    def vectors(self, side: str, ids: Tensor, frozen: Tensor) -> Tensor:
        """[..., r] of tokens ids [...]."""
        book = self.predecessor_codebook if side == "predecessor" else self.successor_codebook
        if self.codebooks is Codebooks.tables:
            return F.embedding(ids, book)
        return F.linear(F.embedding(ids, frozen).to(book.dtype), book)


def check_options(config: DFlash2Config, spec: TargetSpec) -> None:
    """Raises ValueError naming the option, its value and its limits."""
    sizes: dict[str, Any] = {"conv_group_size": spec.hidden_size, "selector_top_k": spec.vocab_size}
    for name in ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k"):
        value = vars(config)[name]
        if value < 1 or value > sizes.get(name, value):
            raise ValueError(f"model.{name} must be in 1..{sizes.get(name, '')}, got {value}")
    if spec.hidden_size % config.conv_group_size:
        raise ValueError(
            f"model.conv_group_size={config.conv_group_size} must divide the target's hidden size {spec.hidden_size}"
        )
    if config.layer_style is not LayerStyle.qwen3:
        raise ValueError(f"model.layer_style={config.layer_style} has no DFlash 2; use model.layer_style=qwen3")
