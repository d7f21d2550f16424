"""Verification: which draft tokens the target accepts, and the token that follows them."""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from models.base import Proposal
from models.sampling import Purpose, Sampler
from models.trees import depths


class Rule(StrEnum):
    """ratio: exact rejection sampling (Leviathan et al. 2023). match: accept where the target's own sample agrees.
    lossy_threshold: as ratio, and whatever the target gives a probability of the threshold or more."""

    ratio = "ratio"
    match = "match"
    lossy_threshold = "lossy_threshold"

    @property
    def is_lossless(self) -> bool:
        return self is not Rule.lossy_threshold


@dataclass(frozen=True)
class Verdict:
    """The outcome of one verification; the kept tokens are the first `num_accepted` drafts, then `next_token`."""

    num_accepted: Tensor  # [B] int64
    next_token: Tensor  # [B] int64: correction after a rejection, bonus token after none
    path: Tensor | None = None  # [B, P] int64 of a tree: its accepted nodes, the first num_accepted of each row


def verify(
    rule: Rule,
    proposal: Proposal,
    target_probs: Tensor,
    positions: Tensor,
    sampler: Sampler,
    *,
    threshold: float = 1.0,
) -> Verdict:
    """target_probs [B, K+1, V] of the slots [newest token, d_1 .. d_K]; positions [B] of d_1. `threshold` is that of
    lossy_threshold.

    Drafts beyond `proposal.lengths` are not proposed and never accepted.
    """
    if proposal.parents is not None:
        return _verify_tree(proposal, proposal.parents, target_probs, positions, sampler)
    slots = torch.arange(proposal.tokens.shape[1], device=positions.device)
    places = positions[:, None] + slots  # [B, K]
    proposed = slots < proposal.lengths[:, None]
    if rule is Rule.match:
        return _verify_match(proposal, target_probs, positions, proposed, sampler)
    target_of_drafts = target_probs[:, :-1].gather(2, proposal.tokens[..., None]).squeeze(2)
    draft_of_drafts = prob_of(proposal)
    # Cross-multiplied u < target / draft: no division, and what the target excludes is not accepted even at u = 0.
    accepted = sampler.uniform(places, Purpose.accept) * draft_of_drafts < target_of_drafts
    if rule is Rule.lossy_threshold:
        accepted = accepted | (target_of_drafts >= threshold)
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


def _verify_tree(
    proposal: Proposal, parents: Tensor, target_probs: Tensor, positions: Tensor, sampler: Sampler
) -> Verdict:
    """Sample the target behind every node with the noise of its position, and follow the children that were sampled.

    Both rules in one: children are chosen, not drawn, so each is a point mass, for which rejecting one after the other
    and drawing the rest from what is left is drawing once from the target.
    """
    depth = torch.cat((torch.zeros_like(positions)[:, None], depths(parents)), dim=1)  # [B, N+1], 0 = newest token
    samples = sampler.draw(target_probs, positions[:, None] + depth, Purpose.target)
    nodes = torch.arange(parents.shape[1], device=parents.device)
    proposed = nodes < proposal.lengths[:, None]
    at = torch.full_like(positions, -1)
    path, num_accepted, walking = [], torch.zeros_like(positions), torch.ones_like(positions, dtype=torch.bool)
    for _ in range(int(depth.max())):
        wanted = samples.gather(1, at[:, None] + 1)
        follows = (parents == at[:, None]) & (proposal.tokens == wanted) & proposed & walking[:, None]
        walking = follows.any(1)
        at = torch.where(walking, follows.long().argmax(1), at)
        path.append(at)
        num_accepted = num_accepted + walking
    accepted = torch.stack(path, dim=1).clamp(min=0) if path else parents[:, :0]
    return Verdict(num_accepted, samples.gather(1, at[:, None] + 1).squeeze(1), accepted)


def altered_of(proposal: Proposal, target_probs: Tensor, threshold: float) -> Tensor:
    """Total variation distance [B, K] between what `lossy_threshold` gives at each slot of a chain and the target's own
    distribution there."""
    target, drafts = target_probs[:, :-1], proposal.probs
    if proposal.candidate_ids is not None:
        drafts = torch.zeros_like(target).scatter_add_(2, proposal.candidate_ids, drafts)
    kept = torch.where(target >= threshold, drafts, torch.minimum(drafts, target))
    rest = residual(target, drafts)
    rest = rest / rest.sum(-1, keepdim=True)
    given = kept + (1 - kept.sum(-1, keepdim=True)) * rest
    return (given - target).abs().sum(-1) / 2


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
