"""The reduced vocabulary that a drafter may draft from: the most frequent supervised tokens of a store."""

from collections.abc import Sequence

import torch
from safetensors import safe_open
from torch import Tensor

from data.store import FeatureStore


def count_supervised_tokens(store: FeatureStore, vocab_size: int) -> Tensor:
    """How often each token is supervised, [V] int64. Reads tokens and masks, not features."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for shard in store.manifest.shards:
        with safe_open(store.folder / shard.file, framework="pt") as file:
            tokens = file.get_tensor("input_ids")[file.get_tensor("loss_mask")]
        counts += torch.bincount(tokens.long(), minlength=vocab_size)
    return counts


def choose_draft_vocabulary(counts: Tensor, size: int, stop_token_ids: Sequence[int]) -> Tensor:
    """The `size` most frequent tokens of counts [V], ascending; stop tokens are always among them.

    Without them a drafter could never propose an end. Ties, and places that no supervised token claims, go to the
    lower id, so equal stores give equal vocabularies (EAGLE-3 section 3).
    """
    assert len(stop_token_ids) < size <= len(counts), (size, len(counts))
    first = counts.clone()
    first[list(stop_token_ids)] = counts.max() + 1
    return first.argsort(descending=True, stable=True)[:size].sort().values
