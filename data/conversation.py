"""Chats that the target answers, turn by turn, and the lines that say what came of them."""

import json
import logging
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from data.chat import render_prompt
from data.messages import Message, prompt_part
from data.prompts import Prompt
from data.run import read_lines
from data.server import RequestError
from models.files import write_text

log = logging.getLogger(__name__)


class Regenerate(StrEnum):
    """Which user turns of a recorded chat are answered."""

    last = "last"
    all = "all"


def questions(prompt: Prompt, regenerate: Regenerate) -> list[list[Message]]:
    """What is put to the target before each of its answers, in order; at least one, each ends with a user turn.

    `last` is the recorded chat up to its last user turn. `all` is every user turn with the system turns before it,
    without recorded answers; it ends before the first tool turn, whose content only fits the recorded call.
    Raises ValueError where there is no user turn, or with `all` none before the first tool turn.
    """
    if regenerate is Regenerate.last:
        return [prompt_part(prompt.messages)]
    parts: list[list[Message]] = [[]]
    for message in prompt.messages:
        if message["role"] == "tool":
            break
        if message["role"] != "assistant":
            parts[-1].append(message)
        if message["role"] == "user":
            parts.append([])
    if len(parts) == 1:
        roles = [message["role"] for message in prompt.messages]
        raise ValueError(
            f"prompt {prompt.id}: regenerate=all needs a user turn before the first tool turn, got roles {roles}"
        )
    return parts[:-1]


@dataclass(frozen=True)
class Rendering:
    """Token ids of what the target is asked. Threads may share one: tokenizers are not made for that."""

    tokenizer: PreTrainedTokenizerBase
    thinking: bool | None
    max_tokens: int  # of a prompt that leaves room for its answer
    lock: Any = field(default_factory=threading.Lock)

    def ids(self, prompt: Prompt, messages: list[Message]) -> list[int]:
        """`messages` of a chat that began with `prompt`. Raises ValueError that names the prompt."""
        try:
            with self.lock:
                return render_prompt(self.tokenizer, messages, tools=prompt.tools, thinking=self.thinking)
        except ValueError as error:
            raise ValueError(f"prompt {prompt.id}: {error}") from error


class Conversation:
    """A chat that is being answered: what was asked and answered so far, and the user turns still to come."""

    def __init__(self, index: int, prompt: Prompt, regenerate: Regenerate) -> None:
        self.index, self.prompt = index, prompt
        self.messages, *self.later = questions(prompt, regenerate)
        self.finish_reason: str | None = None
        self.num_new_tokens = 0
        self.lacks_room = False  # for the answer to the next user turn

    def add(self, answer: Message, finish_reason: str, rendering: Rendering) -> bool:
        """Append an answer, and the next user turn where it is to be answered too; returns whether it is.

        Only a finished answer is history: one that was cut or that calls a tool ends the chat, and so does a user turn
        that leaves no room for its answer.
        """
        self.messages = [*self.messages, answer]
        self.finish_reason = finish_reason
        if finish_reason != "stop" or not self.later:
            return False
        longer = [*self.messages, *self.later[0]]
        self.lacks_room = len(rendering.ids(self.prompt, longer)) > rendering.max_tokens
        if self.lacks_room:
            return False
        self.messages, self.later = longer, self.later[1:]
        return True

    def outline(self) -> list[Message]:
        """All that will be asked, with a word in place of each answer."""
        messages = list(self.messages)
        for question in self.later:
            messages += [{"role": "assistant", "content": "Yes."}, *question]
        return messages


def response_line(chat: Conversation, sampling: Mapping[str, Any]) -> dict[str, Any]:
    prompt = chat.prompt
    line = {"id": prompt.id, "domain": prompt.domain, "split": prompt.split, "messages": chat.messages}
    if prompt.tools is not None:
        line["tools"] = prompt.tools
    return {**line, "finish_reason": chat.finish_reason, "sampling": sampling}


def check_responses(lines: Iterable[tuple[int, dict[str, Any]]], sampling: Mapping[str, Any], path: Path) -> set[str]:
    """Ids already answered, of numbered lines. Raises ValueError when they were sampled with other options, and for
    lines that are no answers of generate.py."""
    ids: set[str] = set()
    for number, line in lines:
        if not isinstance(line, dict) or not isinstance(line.get("id"), str) or "sampling" not in line:
            raise ValueError(
                f"{path}:{number} has no `id` and `sampling` as answers of generate.py have, so none can be added to "
                "this file: choose another responses= file (extract.py takes this one as it is)"
            )
        if line["sampling"] != sampling:
            raise ValueError(
                f"responses={path} holds answers with sampling {line['sampling']}, asked for is {sampling}: "
                "choose another responses= file or remove this one"
            )
        ids.add(line["id"])
    return ids


class Failures:
    """`<responses stem>.failed.jsonl`: the prompts that have no answer because the last attempt at them failed."""

    def __init__(self, responses: Path, chats: Iterable[Conversation]) -> None:
        self.path = responses.with_name(f"{responses.stem}.failed.jsonl")
        self.responses = responses
        asked = {chat.prompt.id for chat in chats}
        # A run that is stopped early has not asked all of them again.
        self.lines = {line["id"]: line for line in read_lines(self.path, repair=False) if line["id"] in asked}
        self.known = frozenset(self.lines)

    def update(self, record_id: str, error: RequestError | None) -> None:
        """What came of the newest attempt: its error, or none."""
        self.lines.pop(record_id, None)
        if error is not None:
            self.lines[record_id] = {"id": record_id, "error": str(error), "attempts": error.num_attempts}

    def write(self) -> None:
        """No failures, no file; else one warning that says how many and where."""
        if not self.lines:
            self.path.unlink(missing_ok=True)
            return
        write_text(self.path, "".join(json.dumps(line) + "\n" for line in self.lines.values()))
        log.warning(
            "generate: %d prompts have no answer, %s says why; the same command tries them again",
            len(self.lines),
            self.path,
        )

    def check(self, num_answered: int) -> None:
        """Raises ValueError when this run asked in vain: nothing was answered and something failed.

        What failed before beside answers may fail for ever, so to find just that again is no error.
        """
        is_news = not self.responses.is_file() or not self.known.issuperset(self.lines)
        if self.lines and num_answered == 0 and is_news:
            first = next(iter(self.lines.values()))
            raise ValueError(
                f"none of {len(self.lines)} prompts could be answered, {self.path} says why; the first, {first['id']}: "
                f"{first['error']}"
            )
