"""Which positions a block or chain of draft slots may see, as one rule from which every form of the mask is made."""

from collections.abc import Callable

import torch
from torch import Tensor


def sees_context(position: Tensor, anchor: Tensor, slot: Tensor, window: int | None) -> Tensor:
    """The rule (DFlash section 3): target features strictly before the anchor, and no older than a window allows.

    The anchor token itself enters through slot 0, and its target feature does not exist yet at decoding. A window of W
    counts the slot's own position, as Hugging Face does: slot j of a block at a sees positions above a + j - W.
    """
    before = position < anchor
    return before if window is None else before & (position > anchor + slot - window)


def context_mask(anchors: Tensor, document_ids: Tensor, *, num_slots: int = 1, window: int | None = None) -> Tensor:
    """anchors [B, A] (-1 = unused, sees nothing), document_ids [B, S] -> [B, A, num_slots, S] bool, or one slot for all
    where there is no window."""
    positions = torch.arange(document_ids.shape[1], device=anchors.device)
    anchor_documents = document_ids.gather(1, anchors.clamp(min=0))
    same_document = document_ids[:, None] == anchor_documents[..., None]
    return same_document[:, :, None] & _by_slot(positions, anchors, num_slots, window)


def cache_mask(lengths: Tensor, width: int, *, num_slots: int = 1, window: int | None = None) -> Tensor:
    """For decoding: lengths [B] of the context, whose cache slot n holds position n -> [B, 1, 1 or Q, width] bool."""
    return _by_slot(torch.arange(width, device=lengths.device), lengths[:, None], num_slots, window)


def _by_slot(positions: Tensor, anchors: Tensor, num_slots: int, window: int | None) -> Tensor:
    slots = torch.arange(1 if window is None else num_slots, device=anchors.device)
    return sees_context(positions, anchors[..., None, None], slots[:, None], window)


def block_mask_mod(
    anchors: Tensor, document_ids: Tensor, num_slots: int, window: int | None = None
) -> Callable[..., Tensor]:
    """FlexAttention mask_mod over keys [S context ; A*Q slots] for queries [A*Q slots], from the same rule."""
    length = document_ids.shape[1]
    anchor_documents = document_ids.gather(1, anchors.clamp(min=0))

    def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        block, slot = query // num_slots, query % num_slots
        position = key.clamp(max=length - 1)
        in_context = sees_context(position, anchors[row, block], slot, window) & (
            document_ids[row, position] == anchor_documents[row, block]
        )
        in_block = (key >= length) & ((key - length) // num_slots == block) & (anchors[row, block] >= 0)
        return ((key < length) & in_context) | in_block

    return mask_mod
