"""Which positions a block of draft slots may see, as one rule from which every form of the mask is made."""

from collections.abc import Callable

import torch
from torch import Tensor


def sees_context(position: Tensor, anchor: Tensor, position_document: Tensor, anchor_document: Tensor) -> Tensor:
    """The rule (DFlash section 3): target features strictly before the anchor, of the anchor's own document.

    The anchor token itself enters through slot 0, and its target feature does not exist yet at decoding.
    """
    return (position < anchor) & (position_document == anchor_document)


def context_mask(anchors: Tensor, document_ids: Tensor) -> Tensor:
    """anchors [B, A] (-1 = unused, sees nothing), document_ids [B, S] -> [B, A, S] bool."""
    positions = torch.arange(document_ids.shape[1], device=anchors.device)
    anchor_documents = document_ids.gather(1, anchors.clamp(min=0))
    return sees_context(positions, anchors[..., None], document_ids[:, None], anchor_documents[..., None])


def block_mask_mod(anchors: Tensor, document_ids: Tensor, num_slots: int) -> Callable[..., Tensor]:
    """FlexAttention mask_mod over keys [S context ; A*Q slots] for queries [A*Q slots], from the same rule."""
    length = document_ids.shape[1]
    anchor_documents = document_ids.gather(1, anchors.clamp(min=0))

    def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        block = query // num_slots
        position = key.clamp(max=length - 1)
        in_context = sees_context(
            position, anchors[row, block], document_ids[row, position], anchor_documents[row, block]
        )
        in_block = (key >= length) & ((key - length) // num_slots == block) & (anchors[row, block] >= 0)
        return ((key < length) & in_context) | in_block

    return mask_mod
