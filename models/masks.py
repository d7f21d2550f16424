"""Which positions a block or chain of draft slots may see, as one rule from which every form of the mask is made."""

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask

TILE = 128  # queries and keys of a FlexAttention tile
# Scores a head of one span at most: later blocks of a long document see more of it than earlier ones, so cutting its
# blocks into several spans leaves out about half of the scores.
SPAN_SCORES = 2**18


def sees_context(position: Tensor, anchor: Tensor, slot: Tensor, window: int | None) -> Tensor:
    """The rule (DFlash section 3): target features strictly before the anchor, and no older than a window allows.

    The anchor token itself enters through slot 0, and its target feature does not exist yet at decoding. A window of W
    counts the slot's own position, as Hugging Face does: slot j of a block at a sees positions above a + j - W.
    """
    before = position < anchor
    return before if window is None else before & (position > anchor + slot - window)


def cache_mask(lengths: Tensor, width: int, *, num_slots: int = 1, window: int | None = None) -> Tensor:
    """For decoding: lengths [B] of the context, whose cache slot n holds position n -> [B, 1, 1 or Q, width] bool."""
    return _by_slot(torch.arange(width, device=lengths.device), lengths[:, None], num_slots, window)


@dataclass(frozen=True)
class Span:
    """Some blocks of one document and what of their row they may see at most."""

    row: int
    blocks: slice  # of the row's anchors
    context: slice  # of the row's positions, all of one document
    mask: Tensor  # [1, blocks, 1 or Q, context] bool


def context_spans(
    anchors: Tensor, document_ids: Tensor, *, num_slots: int = 1, window: int | None = None
) -> list[Span]:
    """anchors [B, A] ascending in each row, then -1 = unused, and document_ids [B, S], both in host memory.

    Unused anchors are in no span, and no span crosses a document.
    """
    spans = []
    for row, (places, documents) in enumerate(zip(anchors, document_ids, strict=True)):
        used = places[: int((places >= 0).sum())]
        lengths = documents.unique_consecutive(return_counts=True)[1]
        edges = [0, *lengths.cumsum(0).tolist()]
        places_of_edges = torch.searchsorted(used, torch.tensor(edges)).tolist()
        for (start, stop), (first, last) in zip(pairwise(edges), pairwise(places_of_edges), strict=True):
            size = max(1, SPAN_SCORES // (num_slots * (stop - start)))
            for low in range(first, last, size):
                blocks = slice(low, min(low + size, last))
                mask = _by_slot(torch.arange(start, stop), used[None, blocks], num_slots, window)
                seen = mask.flatten(0, 2).any(0).nonzero().flatten().tolist() or [0, -1]  # none, at a document's start
                mask = mask[..., seen[0] : seen[-1] + 1]
                spans.append(Span(row, blocks, slice(start + seen[0], start + seen[-1] + 1), mask))
    return spans


def _by_slot(positions: Tensor, anchors: Tensor, num_slots: int, window: int | None) -> Tensor:
    slots = torch.arange(1 if window is None else num_slots, device=anchors.device)
    return sees_context(positions, anchors[..., None, None], slots[:, None], window)


def block_mask_mod(
    anchors: Tensor, document_ids: Tensor, num_slots: int, num_keys: int, window: int | None = None
) -> Callable[..., Tensor]:
    """FlexAttention mask_mod over keys [S context ; A*num_keys of the blocks] for queries [A*num_slots]."""
    length = document_ids.shape[1]
    anchor_documents = document_ids.gather(1, anchors.clamp(min=0))
    last_block = anchors.shape[1] - 1

    def mask_mod(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        block, slot = (query // num_slots).clamp(max=last_block), query % num_slots
        position = key.clamp(max=length - 1)
        in_context = sees_context(position, anchors[row, block], slot, window) & (
            document_ids[row, position] == anchor_documents[row, block]
        )
        in_block = (key >= length) & ((key - length) // num_keys == block) & (anchors[row, block] >= 0)
        return ((key < length) & in_context) | in_block

    return mask_mod


def flex_block_mask(
    anchors: Tensor, document_ids: Tensor, *, num_slots: int, num_keys: int, window: int | None = None
) -> BlockMask:
    """`block_mask_mod` with the tiles that can hold anything named beforehand, so that no [queries, keys] mask is ever
    built: a tile of queries sees one run of context, from its first document's start to its last anchor, and one run of
    block keys. A few tiles more than needed may be named, never one less. Waits for no device."""
    (batch, num_blocks), length = anchors.shape, document_ids.shape[1]
    num_queries, width = num_blocks * num_slots, length + num_blocks * num_keys
    positions = torch.arange(length, device=anchors.device).expand(batch, -1)
    is_first = torch.ones_like(document_ids, dtype=torch.bool)
    is_first[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
    starts = torch.where(is_first, positions, 0).cummax(1).values  # [B, S] first position of each one's document
    lows = starts.gather(1, anchors.clamp(min=0)).masked_fill(anchors < 0, length)
    if window is not None:
        lows = lows.maximum(anchors - window + 1)
    tiles = torch.arange(-(-num_queries // TILE), device=anchors.device)
    first = tiles * TILE // num_slots
    last = ((tiles * TILE + TILE - 1) // num_slots).clamp(max=num_blocks - 1)
    blocks = torch.arange(num_blocks, device=anchors.device)
    in_tile = (blocks >= first[:, None]) & (blocks <= last[:, None])  # [tiles, A]
    low = torch.where(in_tile, lows[:, None], length).amin(-1)  # [B, tiles]
    high = torch.where(in_tile, anchors[:, None], 0).amax(-1)
    edges = torch.arange(-(-width // TILE), device=anchors.device) * TILE

    def touched(low: Tensor, high: Tensor) -> Tensor:
        return (edges < high[..., None]) & (edges + TILE > low[..., None]) & (low < high)[..., None]

    needed = touched(low, high) | touched(length + first * num_keys, length + (last + 1) * num_keys)
    counts = needed.sum(-1, dtype=torch.int32)[:, None]
    indices = (~needed).long().argsort(dim=-1, stable=True).to(torch.int32)[:, None]
    return BlockMask.from_kv_blocks(
        counts,
        indices.contiguous(),
        BLOCK_SIZE=TILE,
        mask_mod=block_mask_mod(anchors, document_ids, num_slots, num_keys, window),
        seq_lengths=(num_queries, width),
    )
