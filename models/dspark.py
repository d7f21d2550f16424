"""DSpark (DeepSpec, 2026): the DFlash backbone with a Markov head and a confidence head.

Unusual: the backbone predicts all slots in parallel, then the Markov head adds a low-rank bias that depends on the
token before each slot, so drafting is one parallel pass and a cheap left-to-right walk. The confidence head predicts,
before a slot is sampled, the probability that exact verification will accept it.
"""

from dataclasses import dataclass
from enum import StrEnum

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from models.base import DraftBatch, DraftLoss, Engine, Proposal, Serving, SlotLayout, stacked
from models.block import BlockConfig, BlockDrafter, BlockState, SupervisedSlots
from models.engines import block_serving
from models.gguf import dflash_file
from models.losses import sum_of
from models.packed import Linear
from models.sampling import Purpose, Sampler
from models.spec import TargetSpec


class MarkovHeadType(StrEnum):
    """How the bias of a slot is computed from the token before it (deepspec section 2.5)."""

    vanilla = "vanilla"
    gated = "gated"
    rnn = "rnn"


@dataclass(frozen=True)
class DSparkConfig(BlockConfig):
    """Options of DSpark; conf/model/dspark.yaml lists every value with a remark."""

    markov_rank: int
    markov_head: MarkovHeadType
    confidence: bool
    confidence_with_markov: bool
    confidence_weight: float

    def build(self, spec: TargetSpec, *, target_layer_ids: tuple[int, ...], mask_token_id: int | None) -> "DSpark":
        return DSpark(self, spec, target_layer_ids=target_layer_ids, mask_token_id=mask_token_id)


class DSpark(BlockDrafter):
    """Block drafter with a sequential low-rank correction and calibrated-to-be confidences."""

    config_type = DSparkConfig
    training_options = BlockDrafter.training_options | {"confidence_weight"}
    config: DSparkConfig

    def __init__(
        self, config: DSparkConfig, spec: TargetSpec, *, target_layer_ids: tuple[int, ...], mask_token_id: int | None
    ) -> None:
        check_heads(config)
        super().__init__(config, spec, target_layer_ids=target_layer_ids, mask_token_id=mask_token_id)
        self.markov_head = MarkovHead(config.markov_head, config.markov_rank, spec) if config.markov_rank else None
        confidence_size = spec.hidden_size + (config.markov_rank if config.confidence_with_markov else 0)
        self.confidence_head = ConfidenceHead(confidence_size) if config.confidence else None
        for head in (self.markov_head, self.confidence_head):
            if head is not None:
                head.apply(self.init_weights)

    def forward(self, batch: DraftBatch) -> DraftLoss:
        states = self.block_states(batch)
        slots = self.supervised_slots(batch)
        hidden = slots.of(states)
        embedded, latent = self._teacher_forced_markov(states, slots)
        bias_head = None if self.markov_head is None else self.markov_head.markov_w2.weight
        loss = self.token_loss(batch, hidden, slots, bias_input=latent, bias_head=bias_head)
        numerators = {"tokens": loss.total}
        metrics = self.slot_metrics(loss, slots)
        if self.confidence_head is not None:
            logits = self.confidence_head(hidden, embedded if self.config.confidence_with_markov else None)
            bce = F.binary_cross_entropy_with_logits(logits, loss.accept_rate, weight=slots.weights, reduction="sum")
            numerators["confidence"] = self.config.confidence_weight * bce
            metrics["confidence_bce"] = (bce.detach().double(), slots.weights.double().sum())
            error = torch.sigmoid(logits) - loss.accept_rate
            metrics["confidence_error"] = sum_of(error.abs(), slots.weights)
            metrics["confidence_bias"] = sum_of(error, slots.weights)
        return DraftLoss(numerators, metrics)

    def denominators(self, batch: DraftBatch) -> dict[str, Tensor]:
        weight = self.slot_weight(batch)
        return {"tokens": weight} | ({"confidence": weight} if self.confidence_head is not None else {})

    @property
    def bias_size(self) -> int:
        return self.config.markov_rank

    def training_flops(self, batch: DraftBatch) -> float:
        """Gates of the Markov head run over every slot; that of the confidence head is a dot product a row."""
        gates = [
            m for m in (self.markov_head or nn.Module()).children() if isinstance(m, nn.Linear) and m.bias is not None
        ]
        num_slots = self.num_draft_tokens * int((batch.host.anchors >= 0).sum())
        return super().training_flops(batch) + 6.0 * num_slots * sum(gate.weight.numel() for gate in gates)

    def _teacher_forced_markov(self, states: Tensor, slots: SupervisedSlots) -> tuple[Tensor | None, Tensor | None]:
        """W1 embedding of the true previous token and the bias latent, both [R, r], of the supervised slots."""
        if self.markov_head is None:
            return None, None
        embedded = self.markov_head.markov_w1(slots.previous)
        if self.config.markov_head is MarkovHeadType.vanilla:
            return embedded, embedded
        previous = torch.zeros_like(slots.mask, dtype=torch.int64).flatten()
        previous = previous.index_copy(0, slots.ids, slots.previous).view(slots.mask.shape)
        latents, memory = [], self.markov_head.memory(states[:, :, 0])
        for slot in range(self.num_draft_tokens):
            step = self.markov_head.markov_w1(previous[:, :, slot])
            latent, memory = self.markov_head.latent(step, states[:, :, slot], memory)
            latents.append(latent)
        return embedded, slots.of(torch.stack(latents, dim=2))

    def propose(self, state: BlockState, last: Tensor, sampler: Sampler, num_draft_tokens: int) -> Proposal:
        states = self.propose_states(state, last, num_draft_tokens)
        base = self.logits(states)
        positions = state.lengths + 1
        previous, memory = last, None if self.markov_head is None else self.markov_head.memory(states[:, 0])
        tokens, probs, confidences, ranked = [], [], [], []
        for slot in range(num_draft_tokens):
            logits, embedded = base[:, slot], None
            if self.markov_head is not None:
                embedded = self.markov_head.markov_w1(previous)
                latent, memory = self.markov_head.latent(embedded, states[:, slot], memory)
                logits = logits + self.markov_head.markov_w2(latent).float()
            if self.confidence_head is not None:
                features = embedded if self.config.confidence_with_markov else None
                confidences.append(torch.sigmoid(self.confidence_head(states[:, slot], features)))
            ranked.append(sampler.ranked(logits))
            probs.append(sampler.probs(logits, torch.stack(tokens, dim=1) if tokens else None))
            previous = sampler.draw(probs[-1], positions + slot, Purpose.draft)
            tokens.append(previous)
        return Proposal(
            tokens=torch.stack(tokens, dim=1),
            probs=torch.stack(probs, dim=1),
            lengths=torch.full_like(last, num_draft_tokens),
            confidence=stacked(confidences),
            ranked=stacked(ranked),
        )

    def serving(self, engine: Engine) -> Serving:
        if engine is Engine.gguf:
            return self._gguf()
        heads = {
            "markov_rank": self.config.markov_rank,
            "markov_head_type": str(self.config.markov_head),
            "enable_confidence_head": self.config.confidence,
            "confidence_head_with_markov": self.config.confidence_with_markov,
        }
        return block_serving(self, engine, heads)

    def _gguf(self) -> Serving:
        """llama.cpp's architecture `dflash`: anchor_first is its draft-dspark, in_place without a Markov head its
        draft-dflash. Raises ValueError on heads that llama.cpp cannot serve or would serve wrongly."""
        config, in_place = self.config, self.slot_layout is SlotLayout.in_place
        if config.markov_rank and config.markov_head is not MarkovHeadType.vanilla:
            raise ValueError(
                f"model.markov_head={config.markov_head} cannot be served by llama.cpp, only vanilla; "
                "train with model.markov_head=vanilla"
            )
        if config.markov_rank and in_place:
            raise ValueError(
                f"model.slot_layout=in_place cannot be served by llama.cpp with model.markov_rank="
                f"{config.markov_rank}; train with model.slot_layout=anchor_first or model.markov_rank=0"
            )
        if config.confidence and not config.confidence_with_markov:
            raise ValueError(
                "model.confidence_with_markov=false cannot be served by llama.cpp, whose confidence head reads the "
                "Markov embedding; train with model.confidence_with_markov=true or model.confidence=false"
            )
        heads = {
            "markov_head.markov_w1": "markov_w1",
            "markov_head.markov_w2": "markov_w2",
            "confidence_head.proj": "conf_proj",
        }
        return dflash_file(self, heads, {"has_confidence_head": config.confidence})


class MarkovHead(nn.Module):
    """Low-rank bias W2 . f(W1[previous token]) over the vocabulary (DSpark paper, eq. 6 and its variants)."""

    def __init__(self, head_type: MarkovHeadType, rank: int, spec: TargetSpec) -> None:
        super().__init__()
        self.head_type, self.rank = head_type, rank
        self.markov_w1 = nn.Embedding(spec.vocab_size, rank)
        self.markov_w2 = Linear(rank, spec.vocab_size, bias=False)
        if head_type is MarkovHeadType.gated:
            self.gate_proj = Linear(spec.hidden_size + rank, rank)
        elif head_type is MarkovHeadType.rnn:
            self.joint_proj = Linear(spec.hidden_size + 2 * rank, 3 * rank)

    def memory(self, state: Tensor) -> Tensor | None:
        """What the head carries from slot to slot: zeros [..., r] for the RNN, nothing else."""
        return state.new_zeros(*state.shape[:-1], self.rank) if self.head_type is MarkovHeadType.rnn else None

    def latent(self, embedded: Tensor, state: Tensor, memory: Tensor | None) -> tuple[Tensor, Tensor | None]:
        """embedded [..., r] = W1[previous], state [..., D] -> (input of W2 [..., r], next memory)."""
        if self.head_type is MarkovHeadType.vanilla:
            return embedded, None
        if self.head_type is MarkovHeadType.gated:
            return torch.sigmoid(self.gate_proj(torch.cat((state, embedded), dim=-1))) * embedded, None
        assert memory is not None
        gate, candidate, output = self.joint_proj(torch.cat((memory, embedded, state), dim=-1)).chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        return torch.tanh(output), gate * memory + (1 - gate) * torch.tanh(candidate)


class ConfidenceHead(nn.Module):
    """One linear unit on [state ; W1[previous]]: the logit of the acceptance probability, float32."""

    def __init__(self, input_size: int) -> None:
        super().__init__()
        self.proj = Linear(input_size, 1)

    def forward(self, state: Tensor, embedded: Tensor | None) -> Tensor:
        features = state if embedded is None else torch.cat((state, embedded), dim=-1)
        return self.proj(features).squeeze(-1).float()


def check_heads(config: DSparkConfig) -> None:
    """Raises ValueError on head options that contradict each other."""
    if config.markov_rank < 0:
        raise ValueError(f"model.markov_rank must be at least 0 (0 = no Markov head), got {config.markov_rank}")
    if config.confidence_with_markov and config.markov_rank == 0:
        raise ValueError("model.confidence_with_markov=true needs model.markov_rank > 0, got 0")
    if not isinstance(config.markov_head, MarkovHeadType):
        raise ValueError(f"model.markov_head must be one of {', '.join(MarkovHeadType)}, got {config.markov_head!r}")
