"""Which records make up every optimiser step, and the reading of them: the same for any number of processes."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.data import Dataset, Sampler

from data.store import FeatureSource, StoreRecord


@dataclass(frozen=True)
class StepPlan:
    """Deterministic order from (seed, epoch), addressable by optimiser step, so a run resumes anywhere.

    Each epoch is a permutation cut into whole batches of `batch_size` records; the remainder waits for another epoch's
    permutation. A batch is sorted by length before it is cut into micro-batches, which saves padding.
    """

    lengths: Tensor  # [N] tokens of each record
    batch_size: int
    micro_batch_size: int
    seed: int

    def __post_init__(self) -> None:
        if self.batch_size % self.micro_batch_size:
            raise ValueError(f"batch_size={self.batch_size} must be a multiple of {self.micro_batch_size=}")
        if len(self.lengths) < self.batch_size:
            raise ValueError(f"batch_size={self.batch_size} is larger than the store's {len(self.lengths)} records")

    @property
    def steps_per_epoch(self) -> int:
        return len(self.lengths) // self.batch_size

    def epoch(self, step: int) -> int:
        return step // self.steps_per_epoch

    def micro_batches(self, step: int) -> list[list[int]]:
        """Record indices of optimiser step `step`, counted from 0."""
        generator = torch.Generator().manual_seed(stable_seed(self.seed, self.epoch(step)))
        order = torch.randperm(len(self.lengths), generator=generator)
        start = step % self.steps_per_epoch * self.batch_size
        members = order[start : start + self.batch_size]
        members = members[self.lengths[members].argsort(stable=True)].tolist()
        return [members[i : i + self.micro_batch_size] for i in range(0, self.batch_size, self.micro_batch_size)]


class RankSampler(Sampler[list[tuple[int, int]]]):
    """Micro-batches of one process, as lists of (record, epoch), from `first_step` to `last_step`."""

    def __init__(self, plan: StepPlan, *, first_step: int, last_step: int, rank: int, world_size: int) -> None:
        per_step = plan.batch_size // plan.micro_batch_size
        if per_step % world_size:
            raise ValueError(
                f"batch_size={plan.batch_size} / micro_batch_size={plan.micro_batch_size} = {per_step} micro-batches "
                f"cannot be shared by {world_size} processes: make it a multiple of them"
            )
        self.plan, self.steps = plan, range(first_step, last_step)
        self.rank, self.world_size = rank, world_size

    def __len__(self) -> int:
        return len(self.steps) * self.plan.batch_size // self.plan.micro_batch_size // self.world_size

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for step in self.steps:
            epoch = self.plan.epoch(step)
            for members in self.plan.micro_batches(step)[self.rank :: self.world_size]:
                yield [(record, epoch) for record in members]


@dataclass(frozen=True)
class TrainingRecord:
    """One chat with the anchors of one visit."""

    record: StoreRecord
    features: Tensor  # [S, L*D] of the drafter's layers
    anchors: Tensor  # [A] int64 ascending


class TrainingData(Dataset[TrainingRecord]):
    """Records with the drafter's layers and freshly drawn anchors; the key is (record, epoch)."""

    def __init__(self, store: FeatureSource, *, layer_ids: tuple[int, ...], num_anchors: int, seed: int) -> None:
        if num_anchors < 1:
            raise ValueError(f"num_anchors must be at least 1, got {num_anchors}")
        self.store, self.layer_ids, self.num_anchors, self.seed = store, layer_ids, num_anchors, seed

    def __len__(self) -> int:
        return len(self.store)

    def __getitem__(self, key: tuple[int, int]) -> TrainingRecord:
        return self.__getitems__([key])[0]

    def __getitems__(self, keys: Sequence[tuple[int, int]]) -> list[TrainingRecord]:
        """What a DataLoader asks for: a target that runs in this process computes them as one batch."""
        records = self.store.read_many([index for index, _ in keys])
        return [self._visit(record, epoch) for record, (_, epoch) in zip(records, keys, strict=True)]

    def _visit(self, record: StoreRecord, epoch: int) -> TrainingRecord:
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
