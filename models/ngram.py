"""Prompt lookup (Saxena 2023): draft what followed the last occurrence of the newest n-gram. Needs no training.

The baseline that any trained drafter has to beat; its proposal is a point mass, so `ratio` accepts with the target's
own probability of each token.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from models.base import Proposal
from models.sampling import Sampler


@dataclass
class NgramState:
    """Tokens seen so far, row by row; the newest committed token is not among them until it is verified."""

    histories: list[list[int]]
    device: torch.device

    @property
    def lengths(self) -> Tensor:
        return torch.tensor([len(history) for history in self.histories], device=self.device)

    def select(self, rows: Tensor) -> None:
        self.histories = [self.histories[row] for row in rows.tolist()]

    def put(self, rows: Tensor, other: "NgramState") -> None:
        for row, history in zip(rows.tolist(), other.histories, strict=True):
            self.histories[row] = history


class NgramDrafter:
    """Looks for the longest suffix of at most `max_ngram` tokens that occurred before, most recent occurrence first."""

    needs_features = False

    def __init__(self, num_draft_tokens: int, max_ngram: int = 3) -> None:
        self.num_draft_tokens, self.max_ngram = num_draft_tokens, max_ngram

    def start(self, tokens: Tensor, features: Tensor, counts: Tensor, capacity: int) -> NgramState:  # noqa: ARG002
        rows = [row[:count] for row, count in zip(tokens.tolist(), counts.tolist(), strict=True)]
        return NgramState(rows, tokens.device)

    def propose(self, state: NgramState, last: Tensor, sampler: Sampler, num_draft_tokens: int) -> Proposal:  # noqa: ARG002
        found = [
            lookup([*history, token], self.max_ngram, num_draft_tokens)
            for history, token in zip(state.histories, last.tolist(), strict=True)
        ]
        padded = [tokens + [0] * (num_draft_tokens - len(tokens)) for tokens in found]
        tokens = torch.tensor(padded, dtype=torch.int64, device=last.device).view(len(found), num_draft_tokens)
        return Proposal(
            tokens=tokens,
            probs=torch.ones(*tokens.shape, 1, device=last.device),
            candidate_ids=tokens[..., None],
            lengths=torch.tensor([len(tokens) for tokens in found], device=last.device),
        )

    def advance(self, state: NgramState, tokens: Tensor, features: Tensor, counts: Tensor) -> None:  # noqa: ARG002
        for history, row, count in zip(state.histories, tokens.tolist(), counts.tolist(), strict=True):
            history.extend(row[:count])


def lookup(tokens: list[int], max_ngram: int, num_draft_tokens: int) -> list[int]:
    """What followed the most recent earlier occurrence of the longest matching suffix; [] if there is none."""
    for size in range(min(max_ngram, len(tokens) - 1), 0, -1):
        suffix = tokens[-size:]
        for start in range(len(tokens) - size - 1, -1, -1):
            if tokens[start : start + size] == suffix:
                return tokens[start + size : start + size + num_draft_tokens]
    return []
