"""Logits to probabilities, and draws whose random numbers are keyed by what they decide, never by batch order."""

from dataclasses import dataclass, replace
from enum import IntEnum

import torch
from torch import Tensor


@dataclass
class SamplingConfig:
    """How logits become probabilities; temperature 0 is greedy. top_k 0, top_p 1 and min_p 0 are off."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    seed: int

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
        }
        for name, (holds, limit) in limits.items():
            if not holds:
                raise ValueError(f"sampling.{name} must be {limit}, got {getattr(self, name)}")


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


@dataclass(frozen=True)
class Sampler:
    """Sampling of B running requests; requests keep their random numbers wherever they sit in the batch."""

    config: SamplingConfig
    request_ids: Tensor  # [B] int64

    def probs(self, logits: Tensor) -> Tensor:
        return probs_from_logits(logits, self.config)

    def draw(self, probs: Tensor, positions: Tensor, purpose: Purpose) -> Tensor:
        """probs [B, ..., V] at token positions [B, ...] -> ids [B, ...]. Greedy probabilities are one-hot: no draw."""
        if self.config.is_greedy:
            return probs.argmax(-1)
        return draw(probs, self.uniform(positions, purpose))

    def uniform(self, positions: Tensor, purpose: Purpose) -> Tensor:
        """Float64 in [0, 1) for each position [B, ...], keyed by (seed, request, position, purpose)."""
        requests = self.request_ids.view(-1, *[1] * (positions.dim() - 1)).expand_as(positions)
        return keyed_uniform(self.config.seed, requests, positions, purpose)

    def select(self, rows: Tensor) -> "Sampler":
        return replace(self, request_ids=self.request_ids[rows])


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
