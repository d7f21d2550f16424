"""Prompts: the project's own, filled from templates with a seed, and any JSONL of prompts or chats."""

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any, Literal, get_args

from omegaconf import OmegaConf

Split = Literal["train", "heldout"]
Message = dict[str, str]

TEMPLATES = Path(__file__).with_name("prompt_templates.yaml")

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bing": "assistant",
    "bard": "assistant",
}
"""Roles of OpenAI and ShareGPT chats, as the chat templates name them."""

CHAT_FIELDS = ("messages", "conversations", "turns", "prompt")
"""In order of preference: a line that has several is read by the first, which says the most."""


@dataclass(frozen=True)
class Prompt:
    id: str
    domain: str
    split: Split
    messages: list[Message]


def builtin_prompts(seed: int, *, num_train: int, num_heldout: int) -> list[Prompt]:
    """Distinct prompts on math, code and chat: first the training split, then the held-out one, domains in turn.

    Counts are totals over the domains, so each prefix of a split is balanced to within one prompt. The splits share
    neither templates nor slot values. A smaller count gives a prefix of what a larger one gives.
    Raises ValueError when the templates cannot fill a count without repeating a text.
    """
    sections: Any = OmegaConf.to_container(OmegaConf.load(TEMPLATES))
    totals: dict[Split, int] = {"train": num_train, "heldout": num_heldout}
    prompts = []
    for split, total in totals.items():
        if total < 0:
            raise ValueError(f"num_{split} must be 0 or more, got {total}")
        by_domain = {}
        for index, domain in enumerate(sections):
            num_prompts = len(range(index, total, len(sections)))
            rng = random.Random(f"{seed}/{domain}/{split}")
            where = f"num_{split}={total}: {domain}"
            by_domain[domain] = _filled_texts(sections[domain][split], rng, num_texts=num_prompts, where=where)
        for index in range(total):
            domain = list(sections)[index % len(sections)]
            number = index // len(sections)
            message = {"role": "user", "content": by_domain[domain][number]}
            prompts.append(Prompt(f"{domain}-{split}-{number:05d}", domain, split, [message]))
    num_texts = len({prompt.messages[0]["content"] for prompt in prompts})
    assert num_texts == len(prompts), f"{len(prompts) - num_texts} prompts repeat another's text"
    return prompts


def read_prompts(
    path: Path, domain: str | None = None, *, split: Split = "train", first_turn_only: bool = True
) -> list[Prompt]:
    """The prompts or chats of a JSONL file, one a line; blank lines are passed over.

    A line holds OpenAI `messages`, ShareGPT `conversations`, `turns` (user texts, all but the first dropped if
    `first_turn_only`) or a `prompt` text. Its own `id`, `domain` and `split` win over the defaults, which are
    `<file stem>-<line number>`, `domain` (or the file stem) and `split`.
    Raises ValueError naming file and line for anything else.
    """
    prompts, line_of_id = [], {}
    for line_number, record in _read_records(path):
        where = f"{path}, line {line_number}"
        messages = _messages_of(record, where, first_turn_only=first_turn_only)
        prompt = Prompt(
            id=_text_field(record, "id", where) or f"{path.stem}-{line_number}",
            domain=_text_field(record, "domain", where) or domain or path.stem,
            split=_split_field(record, where) or split,
            messages=messages,
        )
        if prompt.id in line_of_id:
            raise ValueError(
                f"{where}: id {prompt.id!r} is already used on line {line_of_id[prompt.id]}; make it unique"
            )
        line_of_id[prompt.id] = line_number
        prompts.append(prompt)
    if not prompts:
        raise ValueError(f"{path} is empty: expected one JSON object a line with one of {', '.join(CHAT_FIELDS)}")
    return prompts


def normalise_messages(raw: object, where: str) -> list[Message]:
    """Messages with the keys `role` and `content` only, roles system, user and assistant, from OpenAI or ShareGPT ones.

    `where` (a file and line, say) opens the ValueError that an unknown role or a content other than text raises.
    """
    if not isinstance(raw, list) or not raw:
        raise ValueError(f"{where}: expected a non-empty list of messages, got {raw!r}")
    messages = []
    for index, item in enumerate(raw):
        if not isinstance(item, dict):
            raise ValueError(f"{where}: message {index} must be an object with role and content, got {item!r}")
        role = item["role"] if "role" in item else item.get("from")
        content = item["content"] if "content" in item else item.get("value")
        if not isinstance(role, str) or role not in ROLES:
            raise ValueError(f"{where}: message {index} has unknown role {role!r}; use one of {', '.join(ROLES)}")
        if not isinstance(content, str):
            raise ValueError(f"{where}: message {index} ({role}) must have a text as content, got {content!r}")
        messages.append({"role": ROLES[role], "content": content})
    return messages


def prompt_part(messages: list[Message]) -> list[Message]:
    """The messages up to and including the last user turn: what the target is asked to answer."""
    user_turns = [index for index, message in enumerate(messages) if message["role"] == "user"]
    if not user_turns:
        raise ValueError(f"a prompt needs a user turn, got roles {[message['role'] for message in messages]}")
    return messages[: user_turns[-1] + 1]


def _filled_texts(section: dict[str, Any], rng: random.Random, *, num_texts: int, where: str) -> list[str]:
    """`num_texts` distinct texts, every template used once before any is used again (each round in a new order)."""
    texts: dict[str, None] = {}
    templates = list(section["templates"])
    num_misses, most_misses = 0, 100 * len(templates)
    while len(texts) < num_texts:
        rng.shuffle(templates)
        for template in templates:
            text = _fill(template, section["slots"], rng)
            num_misses = num_misses + 1 if text in texts else 0
            texts[text] = None
        if num_misses > most_misses:
            raise ValueError(
                f"{where} would need {num_texts} distinct prompts and its templates gave {len(texts)};"
                f" ask for fewer or add templates to {TEMPLATES.name}"
            )
    return list(texts)[:num_texts]


def _fill(template: str | dict[str, Any], slots: dict[str, list[str]], rng: random.Random) -> str:
    text = template if isinstance(template, str) else template["text"]
    ranges = {} if isinstance(template, str) else {key: limits for key, limits in template.items() if key != "text"}
    numbers = {name: rng.randint(low, high) for name, (low, high) in ranges.items()}
    if "a" in numbers and "b" in numbers:
        numbers["a_times_b"] = numbers["a"] * numbers["b"]
    names = dict.fromkeys(name for _, name, _, _ in Formatter().parse(text) if name is not None)
    words = {name: rng.choice(slots[name]) for name in names if name not in numbers}
    return text.format(**numbers, **words)


def _read_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Line numbers from 1 with the JSON object of each line that is not blank."""
    if not path.is_file():
        raise ValueError(f"no such file of prompts: {path}")
    with path.open("rb") as file:
        for line_number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line)
            except (json.JSONDecodeError, UnicodeDecodeError) as error:
                raise ValueError(f"{path}, line {line_number}: broken JSON ({error})") from error
            if not isinstance(record, dict):
                raise ValueError(f"{path}, line {line_number}: expected a JSON object, got {record!r}")
            yield line_number, record


def _messages_of(record: dict[str, Any], where: str, *, first_turn_only: bool) -> list[Message]:
    # Tables exported to JSONL write null for the columns that a row lacks.
    field = next((field for field in CHAT_FIELDS if record.get(field) is not None), None)
    if field is None:
        raise ValueError(f"{where}: none of {', '.join(CHAT_FIELDS)} among the fields {sorted(record)}")
    if field in ("messages", "conversations"):
        messages = normalise_messages(record[field], f"{where}, {field}")
    else:
        texts = [record["prompt"]] if field == "prompt" else record["turns"]
        if not isinstance(texts, list):
            raise ValueError(f"{where}: turns must be a list of user texts, got {texts!r}")
        texts = texts[:1] if first_turn_only else texts
        messages = normalise_messages([{"role": "user", "content": text} for text in texts], f"{where}, {field}")
    if all(message["role"] != "user" for message in messages):
        raise ValueError(f"{where}: {field} has no user turn, so there is nothing to answer")
    return messages


def _text_field(record: dict[str, Any], key: str, where: str) -> str | None:
    value = record.get(key)
    if value is not None and not isinstance(value, str | int):
        raise ValueError(f"{where}: {key} must be a text or a number, got {value!r}")
    return None if value is None else str(value)


def _split_field(record: dict[str, Any], where: str) -> Split | None:
    value = record.get("split")
    for split in get_args(Split):
        if value == split:
            return split
    if value is not None:
        raise ValueError(f"{where}: split must be one of {', '.join(get_args(Split))}, got {value!r}")
    return None
