"""Features of the target over every answered chat, written shard by shard; any process can resume any other's work."""

import hashlib
import json
import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from data.capture import CapturedFeatures, CaptureHeader
from data.chat import RenderedChat, render_chat
from data.messages import normalise_messages
from data.run import read_lines
from data.store import (
    FeatureStore,
    ShardInfo,
    StoreHeader,
    StoreRecord,
    finished_shards,
    publish,
    remove_sidecars,
    supervised_rows,
    write_shard,
)
from models.files import sha256_text
from models.target import Target, TargetIdentity, pad_rows

log = logging.getLogger(__name__)


@dataclass
class ExtractConfig:
    """Options of extract.py; conf/extract.yaml lists every value with a remark."""

    name: str
    output_dir: str
    responses: str
    captured: str
    store: str
    target: Any
    feature_dtype: str
    max_length: int
    min_supervised_tokens: int
    records_per_shard: int
    tokens_per_batch: int
    verify: bool


@dataclass(frozen=True)
class RenderedRecord:
    id: str
    chat: RenderedChat


def extract(
    config: ExtractConfig,
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    identity: TargetIdentity,
    accelerator: Accelerator,
) -> None:
    """Fill the store that `config.store` names; returns at once when it is finished and from the same target."""
    folder = Path(config.store)
    header = StoreHeader(
        target=identity,
        layer_ids=target.layer_ids,
        hidden_size=target.spec.hidden_size,
        feature_dtype=config.feature_dtype,
        chat_template_sha256=sha256_text(str(tokenizer.chat_template)),
    )
    if (folder / "manifest.json").is_file():
        check_finished(folder, header)
        if accelerator.is_main_process:
            remove_sidecars(folder)  # of a run that was killed right after its manifest
        return
    records = render_responses(config, tokenizer)
    longest, limit = max(len(record.chat.input_ids) for record in records), target.spec.max_position_embeddings
    if longest > limit:
        raise ValueError(f"a chat of {longest} tokens exceeds the target's context of {limit}: set max_length={limit}")
    shards = [records[i : i + config.records_per_shard] for i in range(0, len(records), config.records_per_shard)]
    finished = finished_shards(folder, header) if folder.is_dir() else {}
    accelerator.wait_for_everyone()
    todo = [i for i, shard in enumerate(shards) if i not in finished or finished[i].inputs_sha256 != inputs_hash(shard)]
    log.info("extract: %d chats in %d shards, %d already done", len(records), len(shards), len(shards) - len(todo))
    captured = CapturedFeatures(Path(config.captured), CaptureHeader(identity, target.layer_ids, config.feature_dtype))
    for index in tqdm(
        todo[accelerator.process_index :: accelerator.num_processes],
        desc="extract",
        unit="shard",
        disable=not accelerator.is_main_process or not todo,
    ):
        extracted = extract_shard(target, shards[index], config.tokens_per_batch, captured)
        write_shard(folder, header, shard_index=index, records=extracted, inputs_sha256=inputs_hash(shards[index]))
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        remove_leftovers(folder, len(shards))
        infos: list[ShardInfo] = [info for _, info in sorted(finished_shards(folder, header).items())]
        publish(folder, header, infos)
    accelerator.wait_for_everyone()


def check_finished(folder: Path, header: StoreHeader) -> None:
    """Raises ValueError when the finished store at `folder` is not the one that was asked for."""
    existing = FeatureStore(folder).manifest.header
    if existing != header:
        differing = [key for key, value in asdict(header).items() if asdict(existing)[key] != value]
        raise ValueError(f"store={folder} exists with another {', '.join(differing)}: remove it or choose another name")
    log.info("extract: %s is finished", folder)


def remove_leftovers(folder: Path, num_shards: int) -> None:
    """Remove what interrupted runs left: unfinished files, and shards of responses that are no longer there."""
    for path in folder.glob(".*.tmp"):
        path.unlink()
    for path in folder.glob("shard-*.safetensors"):
        if int(path.stem.removeprefix("shard-")) >= num_shards:
            path.with_suffix(".json").unlink(missing_ok=True)
            path.unlink()


def verify_store(folder: Path) -> None:
    """Re-read every checksum of a finished store; ValueError names each damaged shard."""
    store = FeatureStore(folder)
    store.verify()
    log.info("extract: %s is whole: %d chats in %d shards", folder, len(store), len(store.manifest.shards))


def render_responses(config: ExtractConfig, tokenizer: PreTrainedTokenizerBase) -> list[RenderedRecord]:
    """Token ids and loss masks of every usable response, trimmed.

    Chats with fewer than `min_supervised_tokens` supervised tokens are left out and counted in the log. Raises
    ValueError on a missing or empty file, or when no chat is left.
    """
    path = Path(config.responses)
    if not path.is_file():
        raise ValueError(f"responses={path}: no such file; run generate.py first")
    lines = read_lines(path, repair=False)
    if not lines:
        raise ValueError(f"responses={path} holds no records")
    records = []
    for number, line in enumerate(lines, start=1):
        if missing := {"id", "messages"} - set(line):
            raise ValueError(f"{path}:{number}: no {' and no '.join(sorted(missing))}; generate.py writes both")
        messages = normalise_messages(line["messages"], f"{path}:{number}")
        try:
            chat = render_chat(tokenizer, messages, finish_reason=line.get("finish_reason"))
        except ValueError as error:
            raise ValueError(f"{path}:{number}: {error}") from error
        chat = trim(chat, config.max_length)
        if sum(chat.loss_mask) >= config.min_supervised_tokens:
            records.append(RenderedRecord(line["id"], chat))
    if len(records) < len(lines):
        log.info("extract: left out %d chats with too few supervised tokens", len(lines) - len(records))
    if not records:
        raise ValueError(f"responses={path}: no chat has {config.min_supervised_tokens} supervised tokens")
    return records


def trim(chat: RenderedChat, max_length: int) -> RenderedChat:
    """Cut at max_length, and after the last supervised token: nothing looks at what follows it."""
    loss_mask = chat.loss_mask[:max_length]
    while loss_mask and not loss_mask[-1]:
        loss_mask.pop()
    return RenderedChat(chat.input_ids[: len(loss_mask)], loss_mask)


def inputs_hash(shard: Sequence[RenderedRecord]) -> str:
    """Names what a shard is made from, so that a resumed run redoes shards of other inputs."""
    digest = hashlib.sha256()
    for record in shard:
        digest.update(json.dumps([record.id, record.chat.input_ids, record.chat.loss_mask]).encode())
    return digest.hexdigest()


def extract_shard(
    target: Target,
    records: Sequence[RenderedRecord],
    tokens_per_batch: int,
    captured: CapturedFeatures | None = None,
) -> list[StoreRecord]:
    """Run the target over a shard in length-sorted batches; results are in the shard's own order.

    Records whose exact tokens were captured while they were generated are not run again.
    """
    done: dict[int, StoreRecord] = {}
    for index, record in enumerate(records):
        kept = None if captured is None else captured.find(record.id, record.chat.input_ids)
        if kept is not None:
            done[index] = store_record(record, kept.features, kept.hidden)
    todo = [index for index in range(len(records)) if index not in done]
    for members in batches_by_length([len(records[i].chat.input_ids) for i in todo], tokens_per_batch):
        batch = [todo[member] for member in members]
        tokens, _ = pad_rows([records[i].chat.input_ids for i in batch], target.device)
        output = target.forward_whole(tokens)
        for row, index in enumerate(batch):
            length = len(records[index].chat.input_ids)
            done[index] = store_record(records[index], output.features[row, :length], output.hidden[row, :length])
    return [done[index] for index in range(len(records))]


def store_record(record: RenderedRecord, features: Tensor, hidden: Tensor) -> StoreRecord:
    """features [S, L*D], hidden [S, D], of which only the rows that predict supervised tokens are kept."""
    mask = torch.tensor(record.chat.loss_mask)
    return StoreRecord(
        id=record.id,
        input_ids=torch.tensor(record.chat.input_ids, dtype=torch.int32),
        loss_mask=mask,
        features=features.cpu(),
        last_hidden=hidden[supervised_rows(mask)].cpu(),
    )


def batches_by_length(lengths: Sequence[int], tokens_per_batch: int) -> Iterator[list[int]]:
    """Indices grouped by length, each padded batch at most `tokens_per_batch` tokens (one record may exceed it)."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if batch and lengths[index] * (len(batch) + 1) > tokens_per_batch:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
