"""Attention of draft blocks, each over the part of its row's context that it may see and over its own keys.

Cost is linear in the number of blocks and in the tokens of a row of fixed-length documents: no mask of all queries
against all keys is ever built. Dense matrix products document by document, or FlexAttention over named tiles (CUDA).
"""

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

from models.masks import Span, context_spans, flex_block_mask

KeysValues = tuple[Tensor, Tensor]
# queries [B, A, Q, H, d], keys and values of the blocks [B, A, M, H_kv, d], of the rows [B, H_kv, S, d]
# -> [B, A, Q, H, d]
Mixer = Callable[[Tensor, KeysValues, KeysValues], Tensor]


def training_mixer(
    anchors: Tensor,  # [B, A] int64 in host memory, ascending in each row, then -1 = unused
    document_ids: Tensor,  # [B, S] int64 in host memory
    device: torch.device,
    *,
    num_slots: int,
    window: int | None = None,
    flex: bool = False,
) -> Mixer:
    """How the blocks of packed rows attend in training; what unused anchors give has no meaning."""
    if flex and anchors.shape[1]:  # without a block there is no tile to name
        return _flex_mixer(anchors.to(device), document_ids.to(device), num_slots, window)
    spans = context_spans(anchors, document_ids, num_slots=num_slots, window=window)
    spans = [Span(s.row, s.blocks, s.context, s.mask.to(device, non_blocking=True)) for s in spans]
    num_used, num_blocks = (anchors >= 0).sum(1).tolist(), anchors.shape[1]
    # Also where there are none: every weight has to have a gradient, or processes would wait for each other for ever.
    unused = [
        Span(row, slice(used, num_blocks), slice(0, 0), torch.ones(1, num_blocks - used, 1, 0, device=device).bool())
        for row, used in enumerate(num_used)
        if used < num_blocks or used == 0
    ]

    def mix(queries: Tensor, block: KeysValues, context: KeysValues) -> Tensor:
        parts: list[list[Tensor]] = [[] for _ in range(len(queries))]
        for span in [*spans, *unused]:
            row = slice(span.row, span.row + 1)
            own, keys, values = (x[row, span.blocks] for x in (queries, *block))
            seen = context[0][row, :, span.context], context[1][row, :, span.context]
            parts[span.row].append(attend_blocks(own, (keys, values), seen, span.mask))
        return torch.cat([torch.cat(found, dim=1) for found in parts])

    return mix


def cache_mixer(mask: Tensor) -> Mixer:
    """For decoding, where every row is one document: mask [B, A, 1 or Q, S] bool."""
    return lambda queries, block, context: attend_blocks(queries, block, context, mask)


def attend_blocks(
    queries: Tensor,  # [B, A, Q, H, d]
    block: KeysValues,  # keys and values of the block itself, each [B, A, M, H_kv, d], all visible
    context: KeysValues,  # keys and values of the row, each [B, H_kv, S, d]
    context_mask: Tensor,  # [B, A, 1 or Q, S] bool
) -> Tensor:
    """Softmax attention of each block over (its visible context, its own keys) -> [B, A, Q, H, d].

    The context product is one matmul a row and the block product Q x M per block, so cost is linear in the number of
    blocks: no [A*Q, S + A*M] mask is ever built. Grouped heads share keys without copies.
    """
    batch, num_blocks, num_slots, num_heads, size = queries.shape
    num_kv_heads, length = context[0].shape[1:3]
    group, num_keys = num_heads // num_kv_heads, block[0].shape[2]
    scaled = (queries * size**-0.5).view(batch, num_blocks, num_slots, num_kv_heads, group, size)
    scaled = scaled.permute(0, 3, 1, 4, 2, 5)  # [B, H_kv, A, G, Q, d]
    by_row = scaled.reshape(batch, num_kv_heads, -1, size)  # [B, H_kv, A*G*Q, d]
    by_block = scaled.reshape(batch, num_kv_heads, num_blocks, group * num_slots, size)
    block_keys, block_values = (x.permute(0, 3, 1, 2, 4) for x in block)  # [B, H_kv, A, M, d]
    context_scores = (by_row @ context[0].transpose(-1, -2)).view(
        batch, num_kv_heads, num_blocks, group, num_slots, length
    )
    context_scores = context_scores.masked_fill(~context_mask[:, None, :, None], -torch.inf).flatten(3, 4)
    scores = torch.cat((context_scores, by_block @ block_keys.transpose(-1, -2)), dim=-1)
    weights = torch.softmax(scores.float(), dim=-1).to(queries.dtype)
    from_context, from_block = weights.split((length, num_keys), dim=-1)
    mixed = (from_context.reshape(*by_row.shape[:-1], length) @ context[1]).view(by_block.shape)
    mixed = mixed + from_block @ block_values
    mixed = mixed.view(batch, num_kv_heads, num_blocks, group, num_slots, size)
    return mixed.permute(0, 2, 4, 1, 3, 5).reshape(queries.shape)


def _flex_mixer(anchors: Tensor, document_ids: Tensor, num_slots: int, window: int | None) -> Mixer:
    masks = {}

    def mix(queries: Tensor, block: KeysValues, context: KeysValues) -> Tensor:
        num_keys = block[0].shape[2]
        if num_keys not in masks:  # one for all layers; chains grow by a key a step
            masks[num_keys] = flex_block_mask(
                anchors, document_ids, num_slots=num_slots, num_keys=num_keys, window=window
            )
        keys, values = (
            torch.cat((seen, own.flatten(1, 2).transpose(1, 2)), dim=2)
            for seen, own in zip(context, block, strict=True)
        )
        queries, keys = queries.to(values.dtype), keys.to(values.dtype)  # under autocast norms leave them in float32
        run = _compiled_flex() if queries.is_cuda else flex_attention
        mixed = run(queries.flatten(1, 2).transpose(1, 2), keys, values, block_mask=masks[num_keys], enable_gqa=True)
        assert isinstance(mixed, Tensor)
        return mixed.transpose(1, 2).reshape(queries.shape)

    return mix


@cache
def _compiled_flex() -> Callable[..., Tensor]:
    """Once a process: uncompiled it would hold every score."""
    return torch.compile(flex_attention, dynamic=True)  # type: ignore[return-value]
