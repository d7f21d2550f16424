"""Floating-point operations of a training step, 2 a multiply-add: matrix products only, nothing that masks hide."""

import torch
from torch import Tensor

from models.base import DraftBatch


def num_tokens(batch: DraftBatch) -> int:
    return int((batch.host.document_ids >= 0).sum())


def attention_flops(
    batch: DraftBatch, anchors: Tensor, *, size: int, num_queries: int, num_keys: int, window: int | None = None
) -> float:
    """Scores and mixing, forward and backward, of blocks at anchors [B, A] over their own keys and their context;
    `size` is that of all query heads together. A window counts the query's own position and those before it."""
    used = anchors >= 0
    context = batch.host.position_ids.gather(1, anchors.clamp(min=0))[used][:, None].expand(-1, num_queries)
    if window is not None:
        context = context.minimum(window - 1 - torch.arange(num_queries)).clamp(min=0)
    return 12.0 * size * (float(context.sum()) + num_queries * num_keys * int(used.sum()))


def vocabulary_flops(num_rows: int, num_teachers: int, *, size: int, columns: int, trains_head: bool = False) -> float:
    """Logits of draft rows and their gradient, logits of teacher rows."""
    return 2.0 * size * columns * ((3 if trains_head else 2) * num_rows + num_teachers)


def loss_columns(batch: DraftBatch, vocab_size: int) -> int:
    """Columns of the head in a loss over all of the vocabulary, or over the step's sample."""
    return vocab_size if batch.vocabulary is None else len(batch.vocabulary.ids)
