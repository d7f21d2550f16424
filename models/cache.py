"""Preallocated keys and values of ragged rows: write in place, roll back by length, compact by index."""

from collections.abc import Hashable
from dataclasses import dataclass

import torch
from torch import Tensor

from models.graphs import Replay


@dataclass
class CacheState:
    """A `DraftState` that is a cache of all positions it has seen."""

    cache: "KVCache"

    @property
    def lengths(self) -> Tensor:
        return self.cache.lengths

    def select(self, rows: Tensor) -> None:
        self.cache.select(rows)

    def put(self, rows: Tensor, other: "CacheState") -> None:
        self.cache.put(rows, other.cache)


class KVCache:
    """Slot n of a row holds position n, so a row's length is both its next slot and its next position.

    Slots at or beyond a row's length hold leftovers that masks must hide; the next write replaces them.
    Buffers are [B, H, N, head size] per layer, allocated at the first write (layers may differ in shape).
    """

    def __init__(
        self, num_layers: int, batch_size: int, capacity: int, device: torch.device, *, is_static: bool = False
    ) -> None:
        """`is_static`: steps show all slots, used or not, so that their shapes stay the same and no step waits for the
        device. Nothing then checks that a step still fits in."""
        self.capacity, self.is_static = capacity, is_static
        self.lengths = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.replays: dict[Hashable, Replay] = {}  # steps recorded over these buffers
        self._keys: list[Tensor | None] = [None] * num_layers
        self._values: list[Tensor | None] = [None] * num_layers
        self._slots = torch.empty(0, dtype=torch.int64, device=device)  # [B, Q] of the step in progress
        self._tokens: Tensor | None = None  # [B, Q] bool, where the rows of the step have different lengths
        self._width = capacity  # slots that the step in progress may look at
        self._start = -1  # first slot of the step if all rows share it, else -1

    def begin(self, num_new: int, tokens: Tensor | None = None) -> Tensor:
        """Open a step that writes `num_new` slots a row; returns their positions [B, Q]. With `tokens` [B, Q] bool only
        where it is true, and keys come as one row without what is between: [1, H, T, d]."""
        slots = self.lengths[:, None] + torch.arange(num_new, device=self.lengths.device)
        self.open(slots, tokens)
        if not self.is_static:
            shortest, longest = (int(x) for x in torch.aminmax(self.lengths))
            width = longest + num_new
            assert width <= self.capacity, f"cache of {self.capacity} slots cannot take {longest} + {num_new}"
            self._width = width
            self._start = longest if shortest == longest and tokens is None else -1
        return slots

    def open(self, slots: Tensor, tokens: Tensor | None = None) -> None:
        """A step that writes at slots [B, Q], and looks at all."""
        self._slots, self._tokens, self._width, self._start = slots, tokens, self.capacity, -1

    def write(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Store [B, H, Q, d] at the open step's slots; returns views of the first `width` slots."""
        if self._keys[layer] is None:
            batch, heads, size = len(self.lengths), keys.shape[1], keys.shape[3]
            self._keys[layer] = keys.new_zeros(batch, heads, self.capacity, size)
            self._values[layer] = values.new_zeros(batch, values.shape[1], self.capacity, values.shape[3])
        return self._store(self._keys[layer], keys), self._store(self._values[layer], values)

    def _store(self, buffer: Tensor | None, new: Tensor) -> Tensor:
        assert buffer is not None
        if self._start >= 0:
            buffer[:, :, self._start : self._width] = new
        elif self._tokens is not None:
            rows = self._tokens.nonzero(as_tuple=True)[0]
            buffer[rows, :, self._slots[self._tokens]] = new[0].transpose(0, 1)
        else:
            rows = torch.arange(buffer.shape[0], device=buffer.device)[:, None]
            buffer[rows, :, self._slots] = new.transpose(1, 2)
        return buffer[:, :, : self._width]

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [B, H, longest, d] of the committed slots (shorter rows end in leftovers)."""
        keys, values = self._keys[layer], self._values[layer]
        assert keys is not None and values is not None, "read before the first write"
        longest = int(self.lengths.max())
        return keys[:, :, :longest], values[:, :, :longest]

    def visible(self, reach: Tensor | None = None) -> Tensor:
        """Mask [B, 1, Q, width] of the open step: a query sees its row's committed slots and, of the step's own, those
        up to itself or those that reach [B, Q, Q] bool says. What is no token sees nothing."""
        slots = torch.arange(self._width, device=self._slots.device)
        if reach is None:
            seen = slots <= self._slots[..., None]
            return (seen if self._tokens is None else seen & self._tokens[..., None])[:, None]
        committed = (slots < self.lengths[:, None])[:, None].expand(-1, reach.shape[1], -1)
        return committed.scatter(2, self._slots[:, None].expand_as(reach), reach)[:, None]

    def advance(self, counts: Tensor) -> None:
        """Commit the first `counts` [B] slots of the open step; the rest is forgotten."""
        self.lengths = self.lengths + counts

    def keep_path(self, path: Tensor, counts: Tensor) -> None:
        """Commit, of the open step, slots path [B, P] (ascending places in the step) of which counts [B] are valid:
        they are moved to stand one after another."""
        rows = torch.arange(len(path), device=path.device)[:, None]
        sources = self.lengths[:, None] + path
        targets = self.lengths[:, None] + torch.arange(path.shape[1], device=path.device)
        for buffer in (*self._keys, *self._values):
            if buffer is not None:
                buffer[rows, :, targets] = buffer[rows, :, sources]
        self.advance(counts)

    def put(self, rows: Tensor, other: "KVCache") -> None:
        """Replace these rows by all rows of another cache that is no longer than this one can hold."""
        width = int(other.lengths.max())
        assert width <= self.capacity, f"cache of {self.capacity} slots cannot take a row of {width}"
        self.lengths = self.lengths.index_copy(0, rows, other.lengths)
        for ours, theirs in ((self._keys, other._keys), (self._values, other._values)):
            for buffer, new in zip(ours, theirs, strict=True):
                if buffer is not None and new is not None:
                    buffer[rows, :, :width] = new[:, :, :width]

    def select(self, rows: Tensor) -> None:
        """Keep only these rows, in this order."""
        self.lengths = self.lengths[rows]
        self.replays.clear()
        self._keys = [None if buffer is None else buffer[rows] for buffer in self._keys]
        self._values = [None if buffer is None else buffer[rows] for buffer in self._values]
