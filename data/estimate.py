"""What an extraction will take, from a sample of its chats and one timed batch."""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path

from data.capture import CapturedFeatures
from data.codecs import bytes_per_vector, find_codec
from data.responses import RenderedRecord, Responses, batches_by_length
from data.store import StoreHeader
from models.target import Target, pad_rows

SAMPLE_SIZE = 256


@dataclass(frozen=True)
class Estimate:
    num_chats: float
    num_tokens: float
    supervised_share: float
    bytes: float
    hours: float

    def __str__(self) -> str:
        return (
            f"about {self.num_chats:.0f} chats, {self.num_tokens:.3g} tokens ({100 * self.supervised_share:.0f} % "
            f"supervised), {show_bytes(self.bytes)}, {show_hours(self.hours)}"
        )

    def scaled(self, share: float, *, num_processes: int) -> "Estimate":
        """For a share of the work, done by processes as fast as this one."""
        return Estimate(
            num_chats=share * self.num_chats,
            num_tokens=share * self.num_tokens,
            supervised_share=self.supervised_share,
            bytes=share * self.bytes,
            hours=share * self.hours / num_processes,
        )


def estimate(
    responses: Responses, header: StoreHeader, target: Target, captured: CapturedFeatures, tokens_per_batch: int
) -> Estimate:
    """For all responses and one process; captured chats take no time.

    Raises ValueError where the sample is all there is and nothing in it can be trained on.
    """
    num_looked_at, chats = responses.sample(SAMPLE_SIZE)
    if not chats and num_looked_at == len(responses.records):
        raise ValueError(
            f"responses={responses.source}: no chat has {responses.options.min_supervised_tokens} supervised tokens"
        )
    scale = len(responses.records) / num_looked_at
    tokens = sum(len(record.chat.input_ids) for record in chats)
    supervised = sum(sum(record.chat.loss_mask) for record in chats)
    computed = [chat for chat in chats if not captured.holds(chat.id, chat.chat.input_ids)]
    seconds = sum(len(chat.chat.input_ids) for chat in computed) / tokens_per_second(target, computed, tokens_per_batch)
    return Estimate(
        num_chats=scale * len(chats),
        num_tokens=scale * tokens,
        supervised_share=supervised / max(1, tokens),
        bytes=scale * stored_bytes(header, tokens, supervised),
        hours=scale * seconds / 3600,
    )


def stored_bytes(header: StoreHeader, num_tokens: float, num_supervised_tokens: float) -> float:
    """Features, last hidden states, ids and masks; some hundred bytes a shard come on top."""
    feature = bytes_per_vector(find_codec(header.feature_dtype, "feature_dtype"), header.hidden_size)
    last_hidden = bytes_per_vector(find_codec(header.last_hidden_dtype, "last_hidden_dtype"), header.hidden_size)
    return num_tokens * (len(header.layer_ids) * feature + 5) + num_supervised_tokens * last_hidden


def tokens_per_second(target: Target, chats: list[RenderedRecord], tokens_per_batch: int) -> float:
    """Of one middling batch after one that warms up, padding not counted."""
    if not chats:
        return float("inf")
    batches = list(batches_by_length([len(chat.chat.input_ids) for chat in chats], tokens_per_batch))
    members = batches[len(batches) // 2]
    tokens, counts = pad_rows([chats[index].chat.input_ids for index in members], target.device)
    target.forward_whole(tokens[:1])
    began = time.perf_counter()
    target.forward_whole(tokens).hidden.sum().item()  # waits for the device
    return int(counts.sum()) / (time.perf_counter() - began)


def check_disk(folder: Path, expected: Estimate) -> None:
    """Raises ValueError when the store would not fit."""
    parent = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(parent).free
    if expected.bytes > free:
        raise ValueError(
            f"store={folder} needs {show_bytes(expected.bytes)} more, its disk has {show_bytes(free)} free: choose "
            "another store=, feature_dtype=fp8 or nf4, last_hidden_dtype=fp8, or fewer target.layer_ids"
        )


def show_bytes(count: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6)):
        if count >= size:
            return f"{count / size:.2f} {unit}"
    return f"{count / 1e3:.1f} kB"


def show_hours(hours: float) -> str:
    return f"{hours:.1f} hours" if hours >= 1 else f"{60 * hours:.1f} minutes"
