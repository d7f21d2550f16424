"""Prompts: the project's own, filled from templates with a seed, and any source of prompts or chats."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from string import Formatter
from typing import Any, Literal, get_args

from omegaconf import OmegaConf

from data.messages import Message, chat_field, chat_of
from data.records import Records, open_records, source_stem

Split = Literal["train", "heldout"]

TEMPLATES = Path(__file__).with_name("prompt_templates.yaml")


@dataclass(frozen=True)
class Prompt:
    id: str
    domain: str
    split: Split
    messages: list[Message]
    tools: list[dict[str, Any]] | None = None


@dataclass(frozen=True)
class SourcePrompt:
    """A prompt with what its record says about its place among others."""

    prompt: Prompt
    where: str
    own_split: Split | None
    group: str | None  # prompts of one group are variants of one template
    is_turns: bool  # user texts without the answers between them, as benchmarks have them

    @property
    def first_turn(self) -> Prompt:
        """The prompt, of `turns` only the first one: what can be asked without an answer of the target."""
        if not self.is_turns:
            return self.prompt
        messages = self.prompt.messages
        first = next(index for index, message in enumerate(messages) if message["role"] == "user")
        return replace(self.prompt, messages=messages[: first + 1])


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
    """The prompts or chats of a file (see `read_source`), of `turns` only the first one if `first_turn_only`."""
    found = read_source(str(path), domain, split=split)
    check_ids([found])
    return [source.first_turn if first_turn_only else source.prompt for source in found]


def read_source(source: str, domain: str | None = None, *, split: Split = "train") -> list[SourcePrompt]:
    """The prompts or chats of any source of `open_records`, in any format of `chat_of`.

    A record's own `id`, `domain` and `split` win over the defaults, which are `<stem>-<line or index>`, `domain` (or
    the stem) and `split`; its group is its `group` or `template`. Raises ValueError naming file and line for a record
    that cannot be read or has no user turn.
    """
    return prompts_of(open_records(source), domain or source_stem(source), split=split)


def prompts_of(
    records: Records,
    domain: str,
    *,
    split: Split = "train",
    turns_of: Callable[[dict[str, Any], str], list[str]] | None = None,
) -> list[SourcePrompt]:
    """As `read_source`, of records that are open. `turns_of` makes the user turns of records in no known format."""
    found = []
    for index, raw in enumerate(records):
        where = records.where(index)
        record = raw if turns_of is None else {"id": raw.get("id", ""), "turns": turns_of(raw, where)}
        chat = chat_of(record, where)
        if all(message["role"] != "user" for message in chat.messages):
            raise ValueError(f"{where}: the chat has no user turn, so there is nothing to answer")
        own_split = _split_field(record, where)
        prompt = Prompt(
            id=records.id_of(index, record),
            domain=_text_field(record, "domain", where) or domain,
            split=own_split or split,
            messages=chat.messages,
            tools=chat.tools,
        )
        group = _text_field(record, "group", where) or _text_field(record, "template", where)
        found.append(SourcePrompt(prompt, where, own_split, group, chat_field(record) == "turns"))
    return found


def check_ids(sources: Sequence[Sequence[SourcePrompt]]) -> None:
    """Raises ValueError that names both places of an id that two prompts have."""
    where_of_id: dict[str, str] = {}
    for source in sources:
        for found in source:
            first = where_of_id.setdefault(found.prompt.id, found.where)
            if first is not found.where:
                raise ValueError(f"{found.where}: id {found.prompt.id!r} is already used at {first}; make it unique")


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
