"""Which records make up every optimiser step, how they are packed for every process, and the reading of them."""

import hashlib
import heapq
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from data.store import FeatureSource, StoreRecord

T = TypeVar("T")
Visit = tuple[int, int]  # record and epoch; anchors depend on both
UNSUPERVISED = -1  # the epoch of a visit that fills a micro-batch which has no record of its own


class StepPlan:
    """Deterministic order from (seed, epoch), addressable by optimiser step, so a run resumes anywhere.

    Each epoch is a permutation cut into whole batches of `batch_size` records; the remainder waits for another epoch's
    permutation. How a batch is split over processes and micro-batches depends on lengths only. Every process gets the
    same number of micro-batches (sharded weights are gathered by all or none), as few as hold `tokens_per_batch` tokens
    each at most: longest records first, each to the micro-batch that has the fewest tokens. With `packing` tokens are
    counted as they are, without it as rows padded to the longest one.
    """

    def __init__(
        self,
        lengths: Tensor,  # [N] tokens of each record
        batch_size: int,
        tokens_per_batch: int,
        *,
        packing: bool,
        num_processes: int,
        seed: int,
    ) -> None:
        if len(lengths) < batch_size:
            raise ValueError(f"batch_size={batch_size} is larger than the store's {len(lengths)} records")
        if batch_size < num_processes:
            raise ValueError(f"batch_size={batch_size} leaves some of {num_processes} processes without a record")
        if (longest := int(lengths.max())) > tokens_per_batch:
            raise ValueError(
                f"tokens_per_batch={tokens_per_batch} is less than the {longest} tokens of the longest chat: raise it, "
                "or lower chats.max_length of the store"
            )
        self.lengths, self.batch_size, self.tokens_per_batch = lengths, batch_size, tokens_per_batch
        self.packing, self.num_processes, self.seed = packing, num_processes, seed
        # The sampler, a few batches ahead, and the loop both ask; an answer is a sort of all records of the step.
        self.micro_batches = lru_cache(maxsize=64)(self._micro_batches)
        self._order: tuple[int, Tensor] | None = None  # of the newest epoch asked for

    @property
    def steps_per_epoch(self) -> int:
        return len(self.lengths) // self.batch_size

    def members(self, step: int) -> list[int]:
        """Records of optimiser step `step`, counted from 0."""
        # read once: the loop and its prefetch thread share this
        epoch, known = step // self.steps_per_epoch, self._order
        if known is None or known[0] != epoch:
            generator = torch.Generator().manual_seed(stable_seed(self.seed, epoch))
            self._order = known = epoch, torch.randperm(len(self.lengths), generator=generator)
        start = step % self.steps_per_epoch * self.batch_size
        return known[1][start : start + self.batch_size].tolist()

    def _micro_batches(self, step: int) -> list[list[list[Visit]]]:
        """Visits of step `step`, by process and micro-batch."""
        epoch, members = step // self.steps_per_epoch, self.members(step)
        lengths = self.lengths[members].tolist()
        split = _pack if self.packing else _cut
        count = max(1, -(-sum(lengths) // (self.num_processes * self.tokens_per_batch)))
        while (parts := split(lengths, count * self.num_processes, self.tokens_per_batch)) is None:
            count += 1
        shortest = members[min(range(len(members)), key=lengths.__getitem__)]
        visits = [[(members[place], epoch) for place in part] or [(shortest, UNSUPERVISED)] for part in parts]
        return [visits[rank :: self.num_processes] for rank in range(self.num_processes)]


def _pack(lengths: list[int], num_parts: int, most_tokens: int) -> list[list[int]] | None:
    """Places of `lengths` in parts of about equal sums; None where one would exceed `most_tokens`."""
    parts: list[list[int]] = [[] for _ in range(num_parts)]
    loads = [(0, part) for part in range(num_parts)]
    for place in sorted(range(len(lengths)), key=lambda place: (-lengths[place], place)):
        load, part = heapq.heappop(loads)
        if load + lengths[place] > most_tokens:
            return None
        parts[part].append(place)
        heapq.heappush(loads, (load + lengths[place], part))
    return parts


def _cut(lengths: list[int], num_parts: int, most_tokens: int) -> list[list[int]] | None:
    """Places of `lengths`, longest first, cut into parts of equal counts; None where padded rows exceed the tokens."""
    order = sorted(range(len(lengths)), key=lambda place: (-lengths[place], place))
    edges = [len(order) * part // num_parts for part in range(num_parts + 1)]
    parts = [order[start:stop] for start, stop in pairwise(edges)]
    fits = all(len(part) * lengths[part[0]] <= most_tokens for part in parts if part)
    return parts if fits else None


class RankSampler(Sampler[list[Visit]]):
    """Micro-batches of one process, from optimiser step `first_step` to `last_step`."""

    def __init__(self, plan: StepPlan, *, first_step: int, last_step: int, rank: int) -> None:
        self.plan, self.steps, self.rank = plan, range(first_step, last_step), rank

    def __iter__(self) -> Iterator[list[Visit]]:
        for step in self.steps:
            yield from self.plan.micro_batches(step)[self.rank]


def prefetched(items: Iterator[T]) -> Iterator[T]:
    """The same items, each made by a thread while the one before it is used."""
    with ThreadPoolExecutor(1, "prefetch") as executor:
        end = object()
        ahead = executor.submit(next, items, end)
        while (item := ahead.result()) is not end:
            ahead = executor.submit(next, items, end)
            yield item  # type: ignore[misc]


@dataclass(frozen=True)
class TrainingRecord:
    """One chat with the anchors of one visit."""

    record: StoreRecord
    features: Tensor  # [S, L*D] of the drafter's layers
    anchors: Tensor  # [A] int64 ascending


class TrainingData(Dataset[TrainingRecord]):
    """Records with the drafter's layers and freshly drawn anchors, by visit."""

    def __init__(self, store: FeatureSource, *, layer_ids: tuple[int, ...], num_anchors: int, seed: int) -> None:
        if num_anchors < 1:
            raise ValueError(f"num_anchors must be at least 1, got {num_anchors}")
        self.store, self.layer_ids, self.num_anchors, self.seed = store, layer_ids, num_anchors, seed

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, key: Visit) -> TrainingRecord:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[Visit]) -> list[TrainingRecord]:
        """What a DataLoader asks for: a target that runs in this process computes them as one batch."""
        records = self.store.read_many([index for index, _ in keys])
        return [self._visit(record, epoch) for record, (_, epoch) in zip(records, keys, strict=True)]

    def _visit(self, record: StoreRecord, epoch: int) -> TrainingRecord:
        if epoch == UNSUPERVISED:
            record = replace(record, loss_mask=torch.zeros_like(record.loss_mask), last_hidden=record.last_hidden[:0])
        generator = torch.Generator().manual_seed(stable_seed(self.seed, epoch, record.id))
        anchors = sample_anchors(record.loss_mask, self.num_anchors, generator)
        return TrainingRecord(record, self.store.select_layers(record.features, self.layer_ids), anchors)


def sample_anchors(loss_mask: Tensor, num_anchors: int, generator: torch.Generator) -> Tensor:
    """Up to `num_anchors` positions a, ascending, uniform without replacement, where a and a + 1 are supervised.

    So the anchor itself is an answer token, as at decoding, where the first answer token comes from the target.
    """
    candidates = (loss_mask[:-1] & loss_mask[1:]).nonzero().squeeze(-1)
    chosen = torch.randperm(len(candidates), generator=generator)[:num_anchors]
    return candidates[chosen].sort().values


def stable_seed(*key: int | str) -> int:
    """A 63-bit seed from any key, the same in every process and Python run."""
    digest = hashlib.sha256("\x1f".join(str(part) for part in key).encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1
