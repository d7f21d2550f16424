"""Prompts to measure on: the project's own held-out ones, a task of conf/task/, or any JSONL."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from transformers import PreTrainedTokenizerBase

from data.chat import render_prompt
from data.generate import BuiltinPrompts, load_prompts
from data.messages import prompt_part
from data.prompts import Prompt, SourcePrompt, check_ids, prompts_of, read_source
from data.records import open_hub
from models.config import to_dataclass

HELDOUT = "heldout"
TASKS = Path(__file__).parents[1] / "conf" / "task"  # a new task is one yaml there
DEEPSPEC_SEED = 980406


class Protocol(StrEnum):
    """own: tasks as their files have them. deepspec: as that project's evaluator asks them (first turn, no system
    prompt, thinking off, 2,048 new tokens, temperature 1), on the prompts that it draws of every task."""

    own = "own"
    deepspec = "deepspec"


class Turns(StrEnum):
    """Of a conversation: the first user turn, or all, each behind the target's own answers to those before."""

    first = "first"
    all = "all"


@dataclass
class Hub:
    """Arguments of `datasets.load_dataset`."""

    path: str
    name: str | None
    split: str
    data_files: str | None


@dataclass
class Task:
    """One yaml of conf/task/. A record of the hub becomes `prompt`, filled with its fields, or lists its `turns`."""

    file: str
    hub: Hub | None
    prompt: str | None
    optional: dict[str, str]
    turns: str | None
    deepspec_prompts: int

    def turns_of(self, record: Mapping[str, Any], where: str) -> list[str]:
        """Raises ValueError on a record without a field that is named."""
        try:
            if self.turns is not None:
                return list(record[self.turns])
            added = [text for field, text in self.optional.items() if record.get(field)]
            return ["".join([self.prompt or "", *added]).format(**record)]
        except KeyError as error:
            raise ValueError(f"{where} has no field {error}, only {', '.join(sorted(record))}") from error


@dataclass(frozen=True)
class TaskOptions:
    """How tasks are asked."""

    builtin: BuiltinPrompts
    prompts_dir: str | None
    num_prompts: int | None  # at most so many a task
    protocol: Protocol = Protocol.own


def known_tasks() -> list[str]:
    return sorted(path.stem for path in TASKS.glob("*.yaml"))


def load_tasks(names: Sequence[str], options: TaskOptions) -> tuple[list[SourcePrompt], list[str]]:
    """Prompts of all tasks with all their turns, and a line for each task that cannot be found. `heldout` is the
    built-in set (other templates than the training prompts). Raises ValueError where nothing is left."""
    found: list[SourcePrompt] = []
    missing = []
    for name in names:
        try:
            prompts = load_task(name, options)
        except FileNotFoundError as error:
            missing.append(str(error))
            continue
        found += prompts if options.num_prompts is None else prompts[: options.num_prompts]
    if not found:
        raise ValueError("; ".join(missing) or f"tasks={list(names)} name no prompt")
    return found, missing


def load_task(name: str, options: TaskOptions) -> list[SourcePrompt]:
    """Under protocol=deepspec of a known task the prompts that its evaluator draws, in its order. Raises
    FileNotFoundError that says where the prompts were looked for, and ValueError where they are damaged."""
    if name == HELDOUT:
        prompts = load_prompts(None, options.builtin, "heldout")
        return [SourcePrompt(prompt, HELDOUT, prompt.split, None, is_turns=False) for prompt in prompts]
    description = TASKS / f"{name}.yaml"
    if not description.is_file():
        found = own_prompts(name, options.prompts_dir)
        check_ids([found])
        return found
    task = to_dataclass(Task, OmegaConf.load(description), section=f"tasks/{name}")
    found = task_prompts(name, task, options.prompts_dir)
    check_ids([found])
    if options.protocol is Protocol.deepspec:
        random.Random(DEEPSPEC_SEED).shuffle(found)
        found = found[: task.deepspec_prompts]
    return found


def own_prompts(name: str, folder: str | None) -> list[SourcePrompt]:
    """Of a JSONL file, or of one in `folder`."""
    path = Path(name) if name.endswith(".jsonl") else Path(folder or ".") / f"{name}.jsonl"
    if not path.is_file():
        raise FileNotFoundError(
            f"tasks: {name} is none of {', '.join([HELDOUT, *known_tasks()])} and no file (looked for {path}); "
            "set prompts_dir= or give FILE.jsonl"
        )
    return read_source(str(path), path.stem)


def task_prompts(name: str, task: Task, folder: str | None) -> list[SourcePrompt]:
    """From its file in `folder`, or else from the hub."""
    path = None if folder is None else Path(folder) / task.file
    if path is not None and path.is_file():
        return read_source(str(path), name)
    looked = "prompts_dir is not set" if path is None else f"there is no {path}"
    if task.hub is None:
        raise FileNotFoundError(f"tasks: {name}: {looked}, and it is not on the hub as prompts")
    try:
        records = open_hub(task.hub.path, task.hub.split, name=task.hub.name, data_files=task.hub.data_files)
    except ValueError as error:
        raise FileNotFoundError(f"tasks: {name}: {looked}, and {error}") from error
    return prompts_of(records, name, turns_of=task.turns_of)


def turn_prompt(source: SourcePrompt, answers: Sequence[str]) -> Prompt | None:
    """The chat up to the user turn behind `answers`, the target's to the turns before; None where there is no more."""
    if not source.is_turns:
        return None if answers else source.prompt
    messages, questions = [], 0
    for message in source.prompt.messages:
        if message["role"] == "user":
            if questions > len(answers):
                break
            if questions:
                messages.append({"role": "assistant", "content": answers[questions - 1]})
            questions += 1
        messages.append(message)
    return replace(source.prompt, messages=messages) if questions == len(answers) + 1 else None


def render_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], thinking: bool | None
) -> list[list[int]]:
    """Token ids of each prompt without its answer."""
    return [
        render_prompt(tokenizer, prompt_part(prompt.messages), tools=prompt.tools, thinking=thinking)
        for prompt in prompts
    ]
