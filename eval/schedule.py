"""How many of the drafted tokens are sent to verification. Decisions look only at what precedes the cut."""

from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor

from models.base import Proposal


class ScheduleName(StrEnum):
    """fixed: every drafted token. confidence: up to the first slot whose confidence is under the threshold."""

    fixed = "fixed"
    confidence = "confidence"


@dataclass(frozen=True)
class Schedule:
    """Proposal lengths per row. `confidence` needs a drafter with a confidence head."""

    name: ScheduleName
    threshold: float

    def lengths(self, proposal: Proposal) -> Tensor:
        """[B] int64. A slot's confidence depends only on tokens before it, so cutting there keeps the output exact."""
        if self.name is ScheduleName.fixed:
            return proposal.lengths
        if proposal.confidence is None:
            raise ValueError("schedule=confidence needs a drafter with a confidence head; use schedule=fixed")
        confident = (proposal.confidence >= self.threshold).long().cumprod(1).sum(1)
        return torch.minimum(confident, proposal.lengths)
