"""Features of the target over every answered chat, written shard by shard by any number of processes.

Processes need not know of each other: each claims shards on the file system, and whichever finds all of them finished
publishes the store. So any number of processes, of one launcher or several, can resume the work of any other. Shards
are rendered one ahead and written behind, off the thread that computes.
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from data.capture import CapturedFeatures, exact_headers
from data.estimate import check_disk, estimate
from data.responses import ChatOptions, RenderedRecord, RenderedShard, Responses, batches_by_length
from data.run import StopRequest
from data.shards import (
    Claims,
    EncodedRecord,
    encode_record,
    finished_shards,
    publish,
    read_finished,
    remove_leftovers,
    remove_working_files,
    reopen,
    write_shard,
)
from data.store import MANIFEST, FeatureStore, StoreHeader, StoreRecord, read_manifest, supervised_rows
from data.tensor_parallel import STOP, TargetGroup
from models.files import sha256_text
from models.target import (
    Target,
    TargetConfig,
    TargetIdentity,
    feature_layer_ids,
    load_spec,
    load_target,
    load_tokenizer,
    pad_rows,
    target_identity,
)

log = logging.getLogger(__name__)

POLL_SECONDS = 0.5
"""How often a process without work looks whether the others have finished theirs."""
WRITES_BEHIND = 2
MANIFEST_CLAIM = -1


@dataclass
class ExtractConfig:
    """Options of extract.py; conf/extract.yaml lists every value with a remark."""

    name: str
    output_dir: str
    responses: str
    captured: str
    store: str
    target: Any
    chats: ChatOptions
    feature_dtype: str
    last_hidden_dtype: str
    records_per_shard: int
    tokens_per_batch: int
    repair: bool
    verify: bool
    verify_records: int
    stats: bool
    preview: int


@dataclass
class Work:
    """What this process did."""

    num_chats: int = 0
    num_left_out: int = 0
    num_tokens: int = 0
    num_padded_tokens: int = 0
    seconds: float = 0.0

    def __str__(self) -> str:
        rate = self.num_tokens / max(1e-9, self.seconds)
        padding = 100 * (1 - self.num_tokens / max(1, self.num_padded_tokens))
        return (
            f"{self.num_chats} chats ({self.num_left_out} records left out, too little supervised), "
            f"{self.num_tokens} tokens at {rate:.0f} tokens/s, {padding:.1f} % of the computed tokens padding"
        )


def extract(
    config: ExtractConfig,
    target_config: TargetConfig,
    accelerator: Accelerator,
    load: Callable[..., Target] = load_target,
) -> None:
    """Fill the store that `config.store` names; returns at once when it is finished and made of the same.

    A SIGTERM ends it after the shard in progress; the same command goes on, with any number of processes. Raises
    ValueError on responses that cannot be used, on a store made of something else, and when the disk is too small.
    """
    folder = Path(config.store)
    tokenizer, identity = load_tokenizer(target_config), target_identity(target_config)
    responses = open_chats(
        config.responses, config.chats, target_config, tokenizer, records_per_shard=config.records_per_shard
    )
    header = store_header(target_config, tokenizer, identity, responses, config.feature_dtype, config.last_hidden_dtype)
    if config.repair:
        if accelerator.is_main_process:
            repair(folder, header)
        accelerator.wait_for_everyone()
    if (folder / MANIFEST).is_file():
        return check_finished(folder, header, responses.records.fingerprint())
    group = TargetGroup(target_config, accelerator)
    captured = CapturedFeatures(Path(config.captured), exact_headers(identity, header, target_config.dtype))
    target = load(target_config, accelerator.device, mesh=group.mesh)
    job = Extraction(folder, header, responses, target, captured, config.tokens_per_batch, group)
    num_left = group.agree(len(job.unfinished()))
    log.info("extract: %d records in %d shards, %d to do", len(responses.records), responses.num_shards, num_left)
    if num_left:
        expected = estimate(responses, header, target, config.tokens_per_batch)
        expected = expected.scaled(num_left / responses.num_shards, num_processes=group.num_groups)
        log.info("extract: %s to go", expected)
        check_disk(folder, expected)
    stop = StopRequest()
    if not group.is_leader:
        return job.follow()
    with Claims(folder) as claims:
        if not job.run(claims, stop, show=accelerator.is_main_process):
            num_left = len(job.unfinished())
            log.info("extract: asked to stop, %d shards left; the same command goes on from there", num_left)
            return
        job.publish(claims)
    log.info("extract: this process: %s", job.work)
    log.info("extract: %s is finished", folder)


def open_chats(
    source: str,
    options: ChatOptions,
    target: TargetConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    records_per_shard: int,
) -> Responses:
    return Responses(
        source,
        tokenizer,
        options,
        thinking=target.thinking,
        context=load_spec(target).max_position_embeddings,
        records_per_shard=records_per_shard,
    )


def store_header(
    target: TargetConfig,
    tokenizer: PreTrainedTokenizerBase,
    identity: TargetIdentity,
    responses: Responses,
    feature_dtype: str,
    last_hidden_dtype: str,
) -> StoreHeader:
    spec = load_spec(target)
    return StoreHeader(
        target=identity,
        layer_ids=feature_layer_ids(target, spec),
        hidden_size=spec.hidden_size,
        feature_dtype=feature_dtype,
        last_hidden_dtype=last_hidden_dtype,
        chat_template_sha256=sha256_text(str(tokenizer.chat_template)),
        chats=responses.describe(),
    )


def repair(folder: Path, header: StoreHeader) -> None:
    """Reopen a finished store of this header, so that only shards that are damaged or of other records are made."""
    if not (folder / MANIFEST).is_file():
        return
    check_header(folder, read_manifest(folder).header, header)
    found = reopen(folder)
    log.info("extract: %s is open again: %s", folder, "; ".join(found) or "no shard is damaged")


def check_finished(folder: Path, header: StoreHeader, responses_sha256: str) -> None:
    """Raises ValueError when the finished store at `folder` is damaged or not the one that was asked for."""
    manifest = FeatureStore(folder).manifest
    check_header(folder, manifest.header, header)
    if manifest.responses_sha256 != responses_sha256:
        raise ValueError(
            f"store={folder} was made from other responses: `repair=true` makes the shards that differ again;"
            " or choose another name"
        )
    remove_working_files(folder)  # of a run that was killed right after its manifest
    log.info("extract: %s is finished", folder)


def check_header(folder: Path, existing: StoreHeader, asked: StoreHeader) -> None:
    if differing := [key for key, value in asdict(asked).items() if asdict(existing)[key] != value]:
        raise ValueError(f"store={folder} exists with another {', '.join(differing)}: remove it or choose another name")


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

    def unfinished(self) -> list[int]:
        return [index for index in range(self.responses.num_shards) if not self.is_finished(index)]

    def is_finished(self, index: int) -> bool:
        info = read_finished(self.folder, self.header, index)
        return info is not None and info.inputs_sha256 == self.responses.inputs_sha256(index)

    def run(self, claims: Claims, stop: StopRequest, *, show: bool) -> bool:
        """Make shards until none is left; False where `stop` came first. Each group begins elsewhere."""
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
        remove_working_files(self.folder)  # what was opened after another process had removed it

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
