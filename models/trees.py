"""Draft trees: which tokens stand behind which, and the policy of EAGLE-2 that grows one."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from models.base import Proposal


@dataclass(frozen=True)
class TreePolicy:
    """Size of a dynamic draft tree (EAGLE-2, arXiv 2406.16858, section 4): `top_k` nodes of every level are expanded by
    their `top_k` likeliest tokens, `depth` levels deep; the `num_nodes` likeliest of all nodes are verified."""

    top_k: int
    depth: int
    num_nodes: int

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise ValueError(f"tree.{name} must be at least 1, got {value}")
        if self.num_nodes < self.depth:
            raise ValueError(f"tree.num_nodes={self.num_nodes} cannot reach tree.depth={self.depth}: raise it")
        most = self.top_k + (self.depth - 1) * self.top_k**2
        if self.num_nodes > most:
            raise ValueError(
                f"tree.num_nodes={self.num_nodes} is more than the {most} that top_k={self.top_k} and "
                f"depth={self.depth} can grow"
            )


def ancestors(parents: Tensor) -> Tensor:
    """parents [B, N] int64 (-1 = the newest committed token; others stand before their children) -> [B, N, N] bool:
    node q stands behind node t, or is it."""
    num_nodes = parents.shape[1]
    reach = torch.eye(num_nodes, device=parents.device).repeat(len(parents), 1, 1)
    reach.scatter_add_(2, parents.clamp(min=0)[..., None], (parents >= 0).float()[..., None])
    for _ in range(num_nodes.bit_length()):  # each time paths of twice the length
        reach = ((reach @ reach) > 0).float()
    return reach > 0


def depths(parents: Tensor) -> Tensor:
    """Of every node [B, N], counted from 1."""
    return ancestors(parents).sum(-1)


def grow_tree(
    policy: TreePolicy,
    last: Tensor,  # [B] the newest committed token
    logits_behind: Callable[
        [Tensor, Tensor | None], Tensor
    ],  # tokens [B, A], which earlier chain each continues [B, A]
    column_ids: Tensor | None,  # token of each column of those logits, None = its number
) -> Proposal:
    """The likeliest `num_nodes` nodes, parents first. A node is never likelier than its parent and stands behind it, so
    the best ones in a stable order are a tree. Nothing is drawn: the tree depends on the committed tokens alone."""
    batch, device = len(last), last.device
    expanded, behind = last[:, None], None
    score = torch.zeros(batch, 1, device=device)
    number = torch.full((batch, 1), -1, device=device)  # of the nodes that are expanded
    tokens, scores, parents, size = [], [], [], 0
    for _ in range(policy.depth):
        log_probs = logits_behind(expanded, behind).log_softmax(-1)
        best, columns = log_probs.topk(min(policy.top_k, log_probs.shape[-1]), dim=-1)  # [B, A, k]
        children = columns if column_ids is None else column_ids[columns]
        tokens.append(children.flatten(1))
        scores.append((score[..., None] + best).flatten(1))
        parents.append(number[..., None].expand_as(children).flatten(1))
        score, places = scores[-1].topk(min(policy.top_k, scores[-1].shape[1]), dim=-1)
        expanded, behind, number = tokens[-1].gather(1, places), places // columns.shape[-1], size + places
        size += tokens[-1].shape[1]
    of_all = torch.cat(scores, dim=1)
    order = of_all.sort(dim=1, descending=True, stable=True).indices[:, : policy.num_nodes].sort(dim=1).values
    places = torch.arange(order.shape[1], device=device).expand_as(order)
    place_of = torch.full_like(of_all, -1, dtype=torch.int64).scatter_(1, order, places)
    parent = torch.cat(parents, dim=1).gather(1, order)
    drafted = torch.cat(tokens, dim=1).gather(1, order)
    return Proposal(
        tokens=drafted,
        probs=torch.ones(*drafted.shape, 1, device=device),  # chosen for certain
        lengths=torch.full_like(last, drafted.shape[1]),
        candidate_ids=drafted[..., None],
        parents=torch.where(parent < 0, -1, place_of.gather(1, parent.clamp(min=0))),
    )
