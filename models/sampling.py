"""Logits to probabilities, and draws whose random numbers are keyed by what they decide, never by batch order."""

import time
from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor


@dataclass
class SamplingConfig:
    """How logits become probabilities; temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off, as are the
    penalties, a repetition of 1 (over prompt and output, as in transformers) and a presence of 0 (over the output)."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0

    @property
    def is_greedy(self) -> bool:
        """Temperatures under 1e-5 put all mass on the first maximum."""
        return self.temperature < 1e-5

    def __post_init__(self) -> None:
        limits = {
            "temperature": (self.temperature >= 0, ">= 0"),
            "top_k": (self.top_k >= 0, ">= 0 (0 = off)"),
            "top_p": (0 < self.top_p <= 1, "in (0, 1] (1 = off)"),
            "min_p": (0 <= self.min_p < 1, "in [0, 1) (0 = off)"),
            "repetition_penalty": (self.repetition_penalty > 0, "> 0 (1 = off)"),
            "presence_penalty": (-2 <= self.presence_penalty <= 2, "in [-2, 2] (0 = off)"),
        }
        for name, (holds, limit) in limits.items():
            if not holds:
                raise ValueError(f"sampling.{name} must be {limit}, got {getattr(self, name)}")

    @property
    def has_penalties(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0


GREEDY = SamplingConfig(temperature=0.0, top_k=0, top_p=1.0, min_p=0.0, seed=0)


class Purpose(IntEnum):
    """What a random number decides. One position may need one of each; they must not share a number."""

    draft = 1
    accept = 2
    target = 3


def probs_from_logits(logits: Tensor, config: SamplingConfig) -> Tensor:
    """Float32 probabilities [..., V]: temperature, then top-k, top-p and min-p, in the order of transformers.

    Greedy is all mass on the first maximum.
    """
    logits = logits.float()
    if config.is_greedy:
        return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
    logits = logits / config.temperature
    if config.top_k:
        kth = logits.topk(min(config.top_k, logits.shape[-1]), dim=-1).values[..., -1:]
        logits = logits.masked_fill(logits < kth, -torch.inf)
    probs = torch.softmax(logits, dim=-1)
    if config.top_p < 1:
        probs = _nucleus(probs, config.top_p)
    if config.min_p:
        probs = probs.masked_fill(probs < config.min_p * probs.amax(-1, keepdim=True), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def _nucleus(probs: Tensor, top_p: float) -> Tensor:
    """The smallest set of most likely tokens whose mass reaches top_p, renormalised."""
    ordered, ids = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1, dtype=torch.float64) - ordered
    ordered = ordered.masked_fill(before >= top_p, 0.0)
    kept = torch.zeros_like(probs).scatter_(-1, ids, ordered)
    return kept / kept.sum(-1, keepdim=True)


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse-CDF sample: probs [..., V] (need not sum to 1), uniforms [...] float64 in [0, 1) -> ids [...].

    The cumulative sum is float64, so a vocabulary of 150,000 adds no bias; zero-probability ids are never drawn.
    """
    cumulative = probs.cumsum(-1, dtype=torch.float64)
    total = cumulative[..., -1]
    below_total = torch.nextafter(total, torch.zeros_like(total))  # u * total may round up to total
    threshold = torch.minimum(uniforms * total, below_total)[..., None]
    return torch.searchsorted(cumulative, threshold, right=True).squeeze(-1)


@dataclass
class SeenTokens:
    """What penalties look at, request by request."""

    anywhere: Tensor  # [B, V] bool, in prompt or output
    output: Tensor  # [B, V] bool

    @classmethod
    def of_prompts(cls, tokens: Tensor, counts: Tensor, vocab_size: int) -> "SeenTokens":
        """tokens [B, S], of which counts [B] are valid."""
        nothing = torch.zeros(len(tokens), vocab_size, dtype=torch.bool, device=tokens.device)
        return cls(_marked(nothing, tokens, counts), nothing)

    def add(self, tokens: Tensor, counts: Tensor) -> None:
        """Output tokens [B, Q], of which counts [B] were committed."""
        self.anywhere, self.output = (_marked(found, tokens, counts) for found in (self.anywhere, self.output))

    def penalise(self, logits: Tensor, drafted: Tensor, behind: Tensor, config: SamplingConfig) -> Tensor:
        """Logits [B, Q, V] of slots that stand behind some of drafted [B, T], behind [Q, T] or [B, Q, T] bool."""
        behind = behind.expand(*logits.shape[:2], drafted.shape[1])
        anywhere, output = (found[:, None].expand_as(logits).clone() for found in (self.anywhere, self.output))
        for place in range(drafted.shape[1]):
            ids = drafted[:, place, None, None].expand(-1, logits.shape[1], 1)
            for found in (anywhere, output):
                found.scatter_(2, ids, found.gather(2, ids) | behind[..., place, None])
        repeated = torch.where(logits > 0, logits / config.repetition_penalty, logits * config.repetition_penalty)
        return torch.where(anywhere, repeated, logits) - config.presence_penalty * output

    def select(self, rows: Tensor) -> "SeenTokens":
        return SeenTokens(self.anywhere[rows], self.output[rows])


def _marked(found: Tensor, tokens: Tensor, counts: Tensor) -> Tensor:
    """A copy of found [B, V] with the first counts [B] of tokens [B, S] set."""
    counted = torch.zeros(found.shape, dtype=torch.int64, device=found.device)
    valid = torch.arange(tokens.shape[1], device=tokens.device) < counts[:, None]
    return found | (counted.scatter_add_(1, tokens, valid.long()) > 0)


@dataclass
class Ranking:
    """How many of the likeliest tokens are asked for, and how long looking for them took: it is no part of drafting."""

    count: int
    seconds: float = 0.0


@dataclass(frozen=True)
class Sampler:
    """Sampling of B running requests; requests keep their random numbers wherever they sit in the batch."""

    config: SamplingConfig
    request_ids: Tensor  # [B] int64
    seen: SeenTokens | None = None  # with penalties
    ranking: Ranking | None = None  # drafters name the likeliest tokens of every slot beside what they draw

    def probs(
        self,
        logits: Tensor,
        drafted: Tensor | None = None,
        *,
        behind: Tensor | None = None,
        columns: Tensor | None = None,
    ) -> Tensor:
        """Probabilities of logits [B, V] behind drafted [B, T], tokens that are not committed; or of all slots at once
        of logits [B, Q, V], where slot q stands behind the first q tokens of drafted [B, Q - 1], or behind those that
        `behind` [B, Q, T] says. `columns` [V] or [B, V]: token of each column where they are not the whole vocabulary.
        """
        if self.seen is not None:
            slots = logits.float() if logits.dim() == 3 else logits.float()[:, None]
            if drafted is None:
                drafted = self.request_ids.new_zeros(len(slots), 0)
            if behind is None:
                order = torch.ones(slots.shape[1], drafted.shape[1], dtype=torch.bool, device=logits.device)
                behind = order.tril(-1) if logits.dim() == 3 else order
            whole = slots
            if columns is not None:  # a token outside of them has no logit to be penalised
                columns = (columns if columns.dim() == 1 else columns[:, None]).expand_as(slots)
                whole = slots.new_zeros(*slots.shape[:2], self.seen.output.shape[1]).scatter_(2, columns, slots)
            whole = self.seen.penalise(whole, drafted, behind, self.config)
            logits = (whole if columns is None else whole.gather(2, columns)).view_as(logits)
        return probs_from_logits(logits, self.config)

    def draw(self, probs: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
        """probs [B, ..., V] at token positions [B, ...] -> ids [B, ...]. Greedy probabilities are one-hot: no draw."""
        if self.config.is_greedy:
            return probs.argmax(-1)
        return draw(probs, self.uniform(positions, purpose))

    def draw_block(self, logits: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """Drafts [B, K] and their probabilities [B, K, V] of slots that do not know each other; only penalties on what
        was drafted before them do."""
        if self.seen is None:
            probs = self.probs(logits)
            return self.draw(probs, positions, Purpose.draft), probs
        tokens, probs = positions[:, :0], []
        for slot in range(logits.shape[1]):
            probs.append(self.probs(logits[:, slot], tokens))
            drawn = self.draw(probs[-1], positions[:, slot], Purpose.draft)
            tokens = torch.cat((tokens, drawn[:, None]), dim=1)
        return tokens, torch.stack(probs, dim=1)

    def ranked(self, logits: Tensor, ids: Tensor | None = None) -> Tensor | None:
        """The likeliest tokens of a drafter's logits [..., V or W], most likely first, before filters: target ids
        [..., count], `ids` [W] or [..., W] those of its columns; None where nobody asks."""
        if self.ranking is None:
            return None
        began = time.perf_counter()
        columns = logits.topk(min(self.ranking.count, logits.shape[-1]), dim=-1).indices
        found = columns if ids is None else ids.expand_as(logits).gather(-1, columns)
        self.ranking.seconds += time.perf_counter() - began
        return found

    def uniform(self, positions: Tensor, purpose: Purpose) -> Tensor:
        """Float64 in [0, 1) for each position [B, ...], keyed by (seed, request, position, purpose)."""
        requests = self.request_ids.view(-1, *[1] * (positions.dim() - 1)).expand_as(positions)
        return keyed_uniform(self.config.seed, requests, positions, purpose)

    def select(self, rows: Tensor) -> "Sampler":
        seen = None if self.seen is None else self.seen.select(rows)
        return replace(self, request_ids=self.request_ids[rows], seen=seen)

    def put(self, rows: Tensor, other: "Sampler") -> "Sampler":
        """With these rows replaced by all rows of another one."""
        seen = None
        if self.seen is not None and other.seen is not None:
            pairs = (self.seen.anywhere, other.seen.anywhere), (self.seen.output, other.seen.output)
            seen = SeenTokens(*(ours.index_copy(0, rows, theirs) for ours, theirs in pairs))
        return replace(self, request_ids=self.request_ids.index_copy(0, rows, other.request_ids), seen=seen)


def keyed_uniform(seed: int, requests: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
    """Counter-based random numbers (splitmix64 finaliser, Steele et al. 2014), one per element, float64 in [0, 1)."""
    state = torch.full_like(positions, _to_signed(seed * 0x9E3779B97F4A7C15))
    for key in (requests, positions, torch.full_like(positions, int(purpose))):
        state = _mix(state ^ (key * _GOLDEN))
    return _shift_right(state, 11).to(torch.float64) * 2.0**-53


def _mix(x: Tensor) -> Tensor:
    x = x + _GOLDEN
    x = (x ^ _shift_right(x, 30)) * _to_signed(0xBF58476D1CE4E5B9)
    x = (x ^ _shift_right(x, 27)) * _to_signed(0x94D049BB133111EB)
    return x ^ _shift_right(x, 31)


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """Logical shift of int64 (torch's own is arithmetic)."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def _to_signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


_GOLDEN = _to_signed(0x9E3779B97F4A7C15)
