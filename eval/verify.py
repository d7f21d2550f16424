"""Lossless verification: which draft tokens the target accepts, and the token that follows them."""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from models.base import Proposal
from models.sampling import Purpose, Sampler


class Rule(StrEnum):
    """ratio: exact rejection sampling (Leviathan et al. 2023). match: accept where the target's own sample agrees."""

    ratio = "ratio"
    match = "match"


@dataclass(frozen=True)
class Verdict:
    """The outcome of one verification; the kept tokens are the first `num_accepted` drafts, then `next_token`."""

    num_accepted: Tensor  # [B] int64
    next_token: Tensor  # [B] int64: correction after a rejection, bonus token after none


def verify(rule: Rule, proposal: Proposal, target_probs: Tensor, positions: Tensor, sampler: Sampler) -> Verdict:
    """target_probs [B, K+1, V] of the slots [newest token, d_1 .. d_K]; positions [B] of d_1.

    Drafts beyond `proposal.lengths` are not proposed and never accepted.
    """
    slots = torch.arange(proposal.tokens.shape[1], device=positions.device)
    places = positions[:, None] + slots  # [B, K]
    proposed = slots < proposal.lengths[:, None]
    if rule is Rule.match:
        return _verify_match(proposal, target_probs, positions, proposed, sampler)
    target_of_drafts = target_probs[:, :-1].gather(2, proposal.tokens[..., None]).squeeze(2)
    draft_of_drafts = prob_of(proposal)
    # Cross-multiplied u < target / draft: no division, and what the target excludes is not accepted even at u = 0.
    accepted = sampler.uniform(places, Purpose.accept) * draft_of_drafts < target_of_drafts
    num_accepted = (accepted & proposed).long().cumprod(1).sum(1)
    rows = torch.arange(positions.shape[0], device=positions.device)
    next_probs = target_probs[rows, num_accepted]
    rejected = num_accepted < proposal.lengths
    if proposal.tokens.shape[1]:
        draft_probs = scatter_probs(proposal, num_accepted.clamp(max=proposal.tokens.shape[1] - 1), next_probs.shape[1])
        next_probs = torch.where(rejected[:, None], residual(next_probs, draft_probs), next_probs)
    return Verdict(num_accepted, sampler.draw(next_probs, positions + num_accepted, Purpose.target))


def _verify_match(
    proposal: Proposal, target_probs: Tensor, positions: Tensor, proposed: Tensor, sampler: Sampler
) -> Verdict:
    """Sample the target at every slot with the noise of its position, whatever was drafted, and keep what agrees."""
    places = positions[:, None] + torch.arange(target_probs.shape[1], device=positions.device)
    samples = sampler.draw(target_probs, places, Purpose.target)  # [B, K+1]
    agrees = (samples[:, :-1] == proposal.tokens) & proposed
    num_accepted = agrees.long().cumprod(1).sum(1)
    return Verdict(num_accepted, samples.gather(1, num_accepted[:, None]).squeeze(1))


def residual(target_probs: Tensor, draft_probs: Tensor) -> Tensor:
    """max(target - draft, 0) [B, V], unnormalised; the target itself where rounding left no mass."""
    rest = (target_probs - draft_probs).clamp(min=0)
    return torch.where(rest.sum(-1, keepdim=True) > 0, rest, target_probs)


def prob_of(proposal: Proposal) -> Tensor:
    """Draft probability [B, K] of each draft token, as sampled."""
    if proposal.candidate_ids is None:
        return proposal.probs.gather(2, proposal.tokens[..., None]).squeeze(2)
    is_token = proposal.candidate_ids == proposal.tokens[..., None]
    return (proposal.probs * is_token).sum(-1)


def scatter_probs(proposal: Proposal, slots: Tensor, vocab_size: int) -> Tensor:
    """Draft distribution [B, V] at one slot per row."""
    rows = torch.arange(slots.shape[0], device=slots.device)
    probs = proposal.probs[rows, slots]
    if proposal.candidate_ids is None:
        return probs
    full = probs.new_zeros(slots.shape[0], vocab_size)
    return full.scatter_add_(1, proposal.candidate_ids[rows, slots], probs)
