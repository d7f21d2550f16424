"""Answered chats as tokens and loss masks, shard by shard: a shard is a group of consecutive response records."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.chat import FINISH_REASONS, RenderedChat, Supervise, render_chats
from data.messages import Message, chat_of
from data.records import Records, open_records
from data.shards import check_unique


@dataclass
class ChatOptions:
    """What of a chat is trained on; conf/chats/default.yaml lists every value with a remark."""

    supervise: Supervise
    max_length: int
    min_supervised_tokens: int


@dataclass(frozen=True)
class RenderedRecord:
    id: str
    chat: RenderedChat
    is_cut: bool = False


@dataclass(frozen=True)
class RenderedShard:
    records: list[RenderedRecord]
    num_left_out: int  # response records of which too little is supervised
    num_cut: int  # chats cut at max_length


class Responses:
    """Response records cut into shards, rendered when a shard is asked for.

    Opening reads every record once: equal ids and records that hold no chat are named before anything is computed.
    """

    def __init__(
        self,
        source: str,
        tokenizer: PreTrainedTokenizerBase,
        options: ChatOptions,
        *,
        thinking: bool | None,
        context: int,
        records_per_shard: int,
    ) -> None:
        if options.max_length < 2 or options.min_supervised_tokens < 1 or records_per_shard < 1:
            raise ValueError(
                "chats.max_length must be at least 2, chats.min_supervised_tokens and records_per_shard at least 1, "
                f"got {options.max_length}, {options.min_supervised_tokens} and {records_per_shard}"
            )
        self.source, self.tokenizer, self.options, self.thinking = source, tokenizer, options, thinking
        self.max_length, self.records_per_shard = min(options.max_length, context), records_per_shard
        self.records = open_responses(source)
        self._check()
        self._inputs: dict[int, str] = {}

    @property
    def num_shards(self) -> int:
        return -(-len(self.records) // self.records_per_shard)

    def describe(self) -> dict[str, Any]:
        """For the store: what decides the tokens and masks besides the records and the chat template."""
        options = {**asdict(self.options), "supervise": str(self.options.supervise), "max_length": self.max_length}
        return {**options, "thinking": self.thinking}

    def shard(self, index: int) -> RenderedShard:
        """The usable chats of a shard. Raises ValueError that names a record which the template refuses."""
        rendered = [self.render(record) for record in self._members(index)]
        chats = [chat for chats in rendered for chat in chats]
        num_cut = sum(chat.is_cut for chat in chats)
        return RenderedShard(chats, num_left_out=sum(not chats for chats in rendered), num_cut=num_cut)

    def inputs_sha256(self, index: int) -> str:
        """Names the records of a shard, so that a resumed run makes shards of other records again."""
        if index not in self._inputs:
            records = [self.records[record] for record in self._members(index)]
            self._inputs[index] = hashlib.sha256(json.dumps(records, sort_keys=True).encode()).hexdigest()
        return self._inputs[index]

    def render(self, index: int) -> list[RenderedRecord]:
        """Record `index` as one chat or more (see `render_chats`), trimmed; none where too little is supervised."""
        record, where = self.records[index], self.records.where(index)
        chat = chat_of(record, where)
        if record.get("finish_reason") == "length" and not says_anything(chat.messages):
            return []  # cut before its first token
        try:
            chats = render_chats(
                self.tokenizer,
                chat,
                finish_reason=record.get("finish_reason"),
                thinking=self.thinking,
                supervise=self.options.supervise,
            )
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        id, rendered = self.records.id_of(index, record), []
        for place, chat in enumerate(chats):
            trimmed = trim(chat, self.max_length)
            if sum(trimmed.loss_mask) >= self.options.min_supervised_tokens:
                is_cut = len(chat.input_ids) > self.max_length
                rendered.append(RenderedRecord(f"{id}/{place}" if place else id, trimmed, is_cut))
        return rendered

    def sample(self, size: int) -> tuple[int, list[RenderedRecord]]:
        """How many records were looked at, spread evenly, and the usable chats among them."""
        step = max(1, len(self.records) // size)
        looked_at = range(0, len(self.records), step)
        return len(looked_at), [rendered for index in looked_at for rendered in self.render(index)]

    def _members(self, shard: int) -> range:
        first = shard * self.records_per_shard
        return range(first, min(first + self.records_per_shard, len(self.records)))

    def _check(self) -> None:
        ids = []
        for index, record in enumerate(self.records):
            where = self.records.where(index)
            messages = chat_of(record, where).messages
            if not any(message["role"] == "assistant" for message in messages):
                roles = [message["role"] for message in messages]
                raise ValueError(f"{where}: nothing to learn without an assistant turn, got roles {roles}")
            if (reason := record.get("finish_reason")) not in FINISH_REASONS:
                raise ValueError(f"{where}: finish_reason must be one of {FINISH_REASONS}, got {reason!r}")
            ids.append(self.records.id_of(index, record))
        check_unique(ids, f"responses={self.source}")
        known = set(ids)
        for id in ids:  # as `render` names further records of a chat
            stem, slash, place = id.rpartition("/")
            if slash and place.isdecimal() and stem in known:
                raise ValueError(f"responses={self.source}: ids {stem!r} and {id!r} may clash; name them otherwise")


def open_responses(source: str) -> Records:
    """Raises ValueError that says what to run first where there is no such file."""
    try:
        return open_records(source)
    except ValueError as error:
        missing = Path(source).suffix == ".jsonl" and not Path(source).is_file()
        reason = "no such file; run generate.py first" if missing else error
        raise ValueError(f"responses={source}: {reason}") from error


def says_anything(messages: list[Message]) -> bool:
    """Whether the last answer has a text, reasoning or tool calls."""
    answer = next(message for message in reversed(messages) if message["role"] == "assistant")
    return any(answer.get(part) for part in ("content", "reasoning_content", "tool_calls"))


def trim(chat: RenderedChat, max_length: int) -> RenderedChat:
    """Cut at max_length, and after the last supervised token: nothing looks at what follows it."""
    loss_mask = chat.loss_mask[:max_length]
    while loss_mask and not loss_mask[-1]:
        loss_mask.pop()
    return RenderedChat(chat.input_ids[: len(loss_mask)], loss_mask)


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
