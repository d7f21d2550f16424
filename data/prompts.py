"""Prompts: the project's own, filled from templates with a seed, and any JSONL of prompts or chats."""

import random
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any, Literal, get_args

from omegaconf import OmegaConf

from data.messages import Message, chat_field, chat_of
from data.records import open_records

Split = Literal["train", "heldout"]

TEMPLATES = Path(__file__).with_name("prompt_templates.yaml")


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

    Formats are those of `chat_of`, but of `turns` all but the first are dropped if `first_turn_only`. A line's own
    `id`, `domain` and `split` win over the defaults, which are `<file stem>-<line number>`, `domain` (or the file stem)
    and `split`. Raises ValueError naming file and line for anything else.
    """
    prompts, where_of_id = [], {}
    records = open_records(str(path))
    for index, record in enumerate(records):
        where = records.where(index)
        if first_turn_only and chat_field(record) == "turns" and isinstance(record["turns"], list):
            record = {**record, "turns": record["turns"][:1]}
        messages = chat_of(record, where).messages
        if all(message["role"] != "user" for message in messages):
            raise ValueError(f"{where}: the chat has no user turn, so there is nothing to answer")
        prompt = Prompt(
            id=_text_field(record, "id", where) or f"{path.stem}-{where.rpartition(':')[2]}",
            domain=_text_field(record, "domain", where) or domain or path.stem,
            split=_split_field(record, where) or split,
            messages=messages,
        )
        if prompt.id in where_of_id:
            raise ValueError(f"{where}: id {prompt.id!r} is already used at {where_of_id[prompt.id]}; make it unique")
        where_of_id[prompt.id] = where
        prompts.append(prompt)
    return prompts


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
