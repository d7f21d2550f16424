"""Tests of models/cache.py: ragged keys and values against plain lists, one a row."""

import random

import pytest
import torch
from torch import Tensor

from models.cache import KVCache
from tests.conftest import planted_fault

NUM_LAYERS, NUM_HEADS, HEAD_SIZE, CAPACITY = 2, 3, 4, 40
CPU = torch.device("cpu")


class ListCache:
    """The reference: per layer and row, a list of committed (key, value) pairs."""

    def __init__(self, batch_size: int) -> None:
        self.rows: list[list[list[tuple[Tensor, Tensor]]]] = [
            [[] for _ in range(NUM_LAYERS)] for _ in range(batch_size)
        ]

    def commit(self, layer: int, keys: Tensor, values: Tensor, counts: list[int]) -> None:
        for row, count in enumerate(counts):
            self.rows[row][layer] += [(keys[row, :, i], values[row, :, i]) for i in range(count)]

    def select(self, rows: list[int]) -> None:
        self.rows = [[list(layer) for layer in self.rows[row]] for row in rows]

    def lengths(self) -> list[int]:
        return [len(row[0]) for row in self.rows]


def random_step(batch_size: int, num_new: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    shape = (2, batch_size, NUM_HEADS, num_new, HEAD_SIZE)
    keys, values = torch.randn(shape, generator=generator)
    return keys, values


def check_equal(cache: KVCache, reference: ListCache) -> None:
    assert cache.lengths.tolist() == reference.lengths()
    for layer in range(NUM_LAYERS):
        keys, values = cache.read(layer)
        assert keys.shape[2] == values.shape[2] == max(reference.lengths())
        for row, length in enumerate(reference.lengths()):
            for slot in range(length):
                key, value = reference.rows[row][layer][slot]
                assert torch.equal(keys[row, :, slot], key)
                assert torch.equal(values[row, :, slot], value)


def run_random_steps(seed: int) -> None:
    rng, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    batch_size = rng.randrange(1, 5)
    cache, reference = KVCache(NUM_LAYERS, batch_size, CAPACITY, CPU), ListCache(batch_size)
    for _ in range(8):
        num_new = rng.randrange(1, 5)
        expected = [[length + i for i in range(num_new)] for length in reference.lengths()]
        assert cache.begin(num_new).tolist() == expected
        counts = [rng.randrange(0, num_new + 1) for _ in range(batch_size)]
        if rng.random() < 0.3:
            counts = [num_new] * batch_size  # equal lengths take the path without index writes
        for layer in range(NUM_LAYERS):
            keys, values = random_step(batch_size, num_new, generator)
            cache.write(layer, keys, values)
            reference.commit(layer, keys, values, counts)
        cache.advance(torch.tensor(counts))
        check_equal(cache, reference)
        if rng.random() < 0.4:
            rows = [rng.randrange(batch_size) for _ in range(rng.randrange(1, batch_size + 1))]
            cache.select(torch.tensor(rows))
            reference.select(rows)
            batch_size = len(rows)
            check_equal(cache, reference)


@pytest.mark.parametrize("seed", range(12))
def test_ragged_steps_rollbacks_and_selections_equal_lists(seed: int) -> None:
    run_random_steps(seed)


def test_write_returns_the_committed_slots_and_the_new_ones() -> None:
    generator = torch.Generator().manual_seed(0)
    cache = KVCache(NUM_LAYERS, 2, CAPACITY, CPU)
    first, _ = random_step(2, 3, generator)
    cache.begin(3)
    cache.write(0, first, first)
    cache.advance(torch.tensor([3, 1]))
    second, _ = random_step(2, 2, generator)
    cache.begin(2)
    keys, values = cache.write(0, second, -second)
    assert keys.shape == (2, NUM_HEADS, 5, HEAD_SIZE)
    assert torch.equal(keys[0], torch.cat((first[0], second[0]), dim=1))
    assert torch.equal(keys[1, :, :3], torch.cat((first[1, :, :1], second[1]), dim=1))
    assert torch.equal(values[1, :, 1:3], -second[1])


def test_a_query_sees_its_own_row_up_to_itself() -> None:
    cache = KVCache(1, 3, CAPACITY, CPU)
    cache.lengths = torch.tensor([4, 0, 2])
    cache.begin(3)
    visible = cache.visible()
    assert visible.shape == (3, 1, 3, 7)
    for row, length in enumerate([4, 0, 2]):
        for query in range(3):
            assert visible[row, 0, query].tolist() == [slot <= length + query for slot in range(7)]


def test_what_a_row_sees_never_holds_leftovers() -> None:
    """A rejected draft's keys stay in the buffer until they are written over; the mask hides what is not."""
    cache = KVCache(1, 2, CAPACITY, CPU)
    rejected = torch.full((2, NUM_HEADS, 4, HEAD_SIZE), 7.0)
    cache.begin(4)
    cache.write(0, rejected, rejected)
    cache.advance(torch.tensor([0, 2]))
    fresh = torch.ones(2, NUM_HEADS, 1, HEAD_SIZE)
    cache.begin(1)
    keys, _ = cache.write(0, fresh, fresh)
    seen = cache.visible()[:, 0, 0]
    assert keys[0, 0, seen[0], 0].tolist() == [1.0]
    assert keys[1, 0, seen[1], 0].tolist() == [7.0, 7.0, 1.0]


def test_a_full_cache_is_an_error_that_names_the_sizes() -> None:
    cache = KVCache(1, 2, 4, CPU)
    cache.begin(4)
    cache.advance(torch.tensor([4, 1]))
    with pytest.raises(AssertionError, match=r"cache of 4 slots cannot take 4 \+ 1"):
        cache.begin(1)


def test_reading_before_the_first_write_is_an_error() -> None:
    with pytest.raises(AssertionError, match="read before the first write"):
        KVCache(1, 2, 4, CPU).read(0)


def test_a_write_that_takes_all_rows_for_equal_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    right = KVCache.begin

    def begin(self: KVCache, num_new: int) -> Tensor:
        slots = right(self, num_new)
        self._start = int(self.lengths.max())
        return slots

    with planted_fault(monkeypatch, KVCache, "begin", begin):
        run_random_steps(1)
