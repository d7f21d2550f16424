"""The work on a store by one process: claimed shards, rendered one ahead, computed, and written behind."""

import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from data.capture import CapturedFeatures
from data.claims import MANIFEST_CLAIM, Claims
from data.responses import RenderedRecord, RenderedShard, Responses, batches_by_length
from data.run import StopRequest
from data.shards import (
    EncodedRecord,
    encode_record,
    finished_shards,
    publish,
    read_finished,
    remove_leftovers,
    remove_working_files,
    write_shard,
)
from data.store import MANIFEST, StoreHeader, StoreRecord, supervised_rows
from data.tensor_parallel import STOP, TargetGroup
from models.target import Target, pad_rows

POLL_SECONDS = 0.5
"""How often a process without work looks whether the others have finished theirs."""
WRITES_BEHIND = 1


@dataclass
class Work:
    """What this process did."""

    num_chats: int = 0
    num_captured: int = 0
    num_cut: int = 0
    num_left_out: int = 0
    num_tokens: int = 0
    num_padded_tokens: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        if not self.num_chats and not self.num_left_out:
            return "no shard was left for this process"
        parts = [f"{self.num_chats} chats"]
        parts += [f"{self.num_captured} of them from captured features"] * bool(self.num_captured)
        parts += [f"{self.num_cut} of them cut at chats.max_length"] * bool(self.num_cut)
        parts += [f"{self.num_left_out} records left out (too little supervised)"] * bool(self.num_left_out)
        if self.num_padded_tokens:
            padding = 100 * (1 - self.num_tokens / self.num_padded_tokens)
            parts.append(f"{self.num_tokens} tokens at {self.num_tokens / self.seconds:.0f} tokens/s")
            parts.append(f"{padding:.1f} % of the computed tokens padding")
        return ", ".join(parts)


@dataclass
class Extraction:
    """One process's share of the work on a store."""

    folder: Path
    header: StoreHeader
    responses: Responses
    target: Target
    captured: CapturedFeatures
    tokens_per_batch: int
    group: TargetGroup
    work: Work = field(default_factory=Work)
    _finished: set[int] = field(default_factory=set)

    def unfinished(self) -> list[int]:
        return [index for index in range(self.responses.num_shards) if not self.is_finished(index)]

    def is_finished(self, index: int) -> bool:
        """Looked up until it is: no process of the job undoes a shard."""
        if index not in self._finished:
            info = read_finished(self.folder, self.header, index)
            if info is not None and info.inputs_sha256 == self.responses.inputs_sha256(index):
                self._finished.add(index)
        return index in self._finished

    def run(self, claims: Claims, stop: StopRequest, *, show: bool) -> bool:
        """Make shards until none is left; False where `stop` came first. Each group begins elsewhere."""
        self._finished.clear()  # looked up before this process had joined the job
        todo = self.unfinished()
        begin = len(todo) * self.group.index // self.group.num_groups
        todo = todo[begin:] + todo[:begin]
        try:
            with tqdm(total=len(todo), desc="extract", unit="shard", disable=not show or not todo) as progress:
                while todo and not stop.received:
                    began = time.perf_counter()
                    num_made = self._make_claimable(todo, claims, stop, progress)
                    self.work.seconds += time.perf_counter() - began
                    if num_made == 0:
                        time.sleep(POLL_SECONDS)  # other processes hold what is left
                    todo = [] if self.is_published() else self.unfinished()
        finally:
            self.group.agree(STOP)
        return not todo

    def follow(self) -> None:
        """Compute what the leader of the group computes, which alone writes."""
        for index in self.group.follow():
            self.compute(self.responses.shard(index))

    def publish(self, claims: Claims) -> None:
        """Write the manifest, unless another process does."""
        while not self.is_published():
            if claims.take(MANIFEST_CLAIM):
                if not self.is_published():
                    remove_leftovers(self.folder, self.responses.num_shards)
                    infos = [info for _, info in sorted(finished_shards(self.folder, self.header).items())]
                    publish(self.folder, self.header, infos, self.responses.records.fingerprint())
            else:
                time.sleep(POLL_SECONDS)
        if claims.is_current():  # opened after another process had published and removed its own
            remove_working_files(self.folder)

    def is_published(self) -> bool:
        return (self.folder / MANIFEST).is_file()

    def _make_claimable(self, todo: Sequence[int], claims: Claims, stop: StopRequest, progress: tqdm) -> int:
        """Make those shards of `todo` that nobody else holds; returns how many."""
        num_made = 0
        writes: deque[Future[None]] = deque()
        with ThreadPoolExecutor(1, "render") as renderer, ThreadPoolExecutor(1, "write") as writer:
            for index, rendering in self._rendered_ahead(todo, claims, renderer):
                shard = rendering.result()
                self.group.agree(index)
                writes.append(writer.submit(self._write, claims, index, self.compute(shard)))
                while len(writes) > WRITES_BEHIND:
                    writes.popleft().result()
                num_made += 1
                progress.update()
                if stop.received:
                    break
            for write in writes:
                write.result()
        return num_made

    def _rendered_ahead(
        self, todo: Sequence[int], claims: Claims, renderer: ThreadPoolExecutor
    ) -> Iterator[tuple[int, "Future[RenderedShard]"]]:
        """Claimed shards, while the one after is rendered."""
        ahead: tuple[int, Future[RenderedShard]] | None = None
        for index in todo:
            if self._claim(claims, index):
                following = index, renderer.submit(self.responses.shard, index)
                if ahead is not None:
                    yield ahead
                ahead = following
        if ahead is not None:
            yield ahead

    def _claim(self, claims: Claims, index: int) -> bool:
        if not claims.take(index):
            return False
        # Another process may have finished it since, and the store.
        if self.is_published() or self.is_finished(index):
            claims.release(index)
            return False
        return True

    def _write(self, claims: Claims, index: int, records: list[EncodedRecord]) -> None:
        inputs = self.responses.inputs_sha256(index)
        write_shard(self.folder, self.header, index=index, records=records, inputs_sha256=inputs)
        claims.release(index)

    def compute(self, shard: RenderedShard) -> list[EncodedRecord]:
        """The target's outputs over a shard, in its own order."""
        encoded: dict[int, EncodedRecord] = {}
        outputs = extract_records(self.target, shard.records, self.tokens_per_batch, self.captured, self.work)
        for index, record in outputs:
            encoded[index] = encode_record(record, self.header)
        self.work.num_chats += len(shard.records)
        self.work.num_cut += shard.num_cut
        self.work.num_left_out += shard.num_left_out
        return [encoded[index] for index in range(len(shard.records))]


def extract_records(
    target: Target,
    records: Sequence[RenderedRecord],
    tokens_per_batch: int,
    captured: CapturedFeatures | None = None,
    work: Work | None = None,
) -> Iterator[tuple[int, StoreRecord]]:
    """Every record with its index, in the order of batches of equal lengths, on the target's device.

    Records whose exact tokens were captured while they were generated are not run again. `work` counts the others.
    """
    todo = []
    for index, record in enumerate(records):
        kept = None if captured is None else captured.find(record.id, record.chat.input_ids)
        if kept is None:
            todo.append(index)
        else:
            if work is not None:
                work.num_captured += 1
            yield index, store_record(record, kept.features, kept.hidden)
    lengths = [len(records[index].chat.input_ids) for index in todo]
    for members in batches_by_length(lengths, tokens_per_batch):
        batch = [todo[member] for member in members]
        tokens, _ = pad_rows([records[index].chat.input_ids for index in batch], target.device)
        output = target.forward_whole(tokens)
        if work is not None:
            work.num_padded_tokens += tokens.numel()
            work.num_tokens += sum(lengths[member] for member in members)
        for row, index in enumerate(batch):
            length = len(records[index].chat.input_ids)
            yield index, store_record(records[index], output.features[row, :length], output.hidden[row, :length])


def store_record(record: RenderedRecord, features: Tensor, hidden: Tensor) -> StoreRecord:
    """features [S, L*D], hidden [S, D], of which only the rows that predict supervised tokens are kept."""
    mask = torch.tensor(record.chat.loss_mask)
    return StoreRecord(
        id=record.id,
        input_ids=torch.tensor(record.chat.input_ids, dtype=torch.int32),
        loss_mask=mask,
        features=features,
        last_hidden=hidden[supervised_rows(mask).to(hidden.device)],
    )
