"""transformers' attention over a `KVCache`: its cache calls handed on, its grouped heads not copied."""

from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.cache_utils import CacheLayerMixin
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface

from models.cache import KVCache


class CacheLayer(CacheLayerMixin):
    """Hands transformers' cache calls of one layer to the shared `KVCache`."""

    def __init__(self, cache: KVCache, index: int) -> None:
        super().__init__()
        self.cache, self.index = cache, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Buffers are allocated by the KVCache at its first write."""

    def update(self, key_states: Tensor, value_states: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        return self.cache.write(self.index, key_states, value_states)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return int(self.cache.lengths.max()) + query_length, 0

    def get_seq_length(self) -> int:
        return int(self.cache.lengths.max())

    def get_max_length(self) -> int:
        return self.cache.capacity


def grouped_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """SDPA that folds grouped query heads into the query axis instead of copying keys for each of them.

    Decoding over long caches spends its time on that copy. Masks are [B, 1, Q, N] bool; without one (whole
    sequences) transformers' own function is used. Where rows have different lengths, queries come as one row [1, H, T,
    d] of those that see anything.
    """
    for name, what in (("softcap", "capped attention scores"), ("s_aux", "attention sinks")):
        if kwargs.get(name) is not None:
            raise ValueError(f"target has {what} ({name}), which SDPA leaves out; not supported")
    if attention_mask is None or attention_mask.shape[1] != 1:
        return sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
    tokens = None
    if len(query) != len(key):
        tokens = attention_mask[:, 0].any(-1)
        query = spread(query[0].transpose(0, 1), tokens).transpose(1, 2)
    batch, num_heads, num_queries, size = query.shape
    num_kv_heads = key.shape[1]
    group = num_heads // num_kv_heads
    folded = query.reshape(batch, num_kv_heads, group * num_queries, size)
    mask = attention_mask[:, :, None].expand(-1, -1, group, -1, -1).flatten(2, 3)
    output = nn.functional.scaled_dot_product_attention(folded, key, value, attn_mask=mask, scale=kwargs.get("scaling"))
    output = output.view(batch, num_heads, num_queries, -1).transpose(1, 2)
    return output if tokens is None else output[tokens][None], None


ATTENTION = "draftsmith_grouped"
AttentionInterface.register(ATTENTION, grouped_attention)
AttentionMaskInterface.register(ATTENTION, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])


def spread(rows: Tensor, places: Tensor) -> Tensor:
    """rows [T, ...] to where places [B, Q] is true, zeros elsewhere -> [B, Q, ...]."""
    whole = rows.new_zeros(*places.shape, *rows.shape[1:])
    whole[places] = rows
    return whole
