"""The reduced vocabulary that a drafter may draft from: the most frequent supervised tokens of a store."""

from collections.abc import Sequence

from torch import Tensor


def choose_draft_vocabulary(counts: Tensor, size: int, stop_token_ids: Sequence[int]) -> Tensor:
    """The `size` most frequent tokens of counts [V], ascending; stop tokens are always among them.

    Without them a drafter could never propose an end. Ties, and places that no supervised token claims, go to the
    lower id, so equal stores give equal vocabularies (EAGLE-3 section 3).
    """
    assert len(stop_token_ids) < size <= len(counts), (size, len(counts))
    first = counts.clone()
    first[list(stop_token_ids)] = counts.max() + 1
    return first.argsort(descending=True, stable=True)[:size].sort().values
