"""Passes over prompts in units of a few batches: each is decoded as a whole and kept, so that what was interrupted goes
on, and that any number of processes gives what one does.

A unit is decoded by one process and without the others' requests, so its batches, and with them every rounding, are the
same however the work is shared and wherever it was interrupted. What is kept is named by all that decides on it.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from data.prompts import Prompt, SourcePrompt
from eval.rounds import DecodeResult, Generation
from eval.stats import Pass, joined
from eval.tasks import render_prompts, turn_prompt
from models.files import read_json, sha256_text, write_json

UNIT_BATCHES = 2

# prompts as token ids, their request ids, a call for every finished request
Decoding = Callable[[Sequence[list[int]], Sequence[int], Callable[[Generation], object]], DecodeResult]


@dataclass(frozen=True)
class Passes:
    """A folder of kept passes, and the processes that fill it."""

    folder: Path
    accelerator: Accelerator
    tokenizer: PreTrainedTokenizerBase
    thinking: bool | None
    all_turns: bool

    def render(self, prompts: Sequence[Prompt]) -> list[list[int]]:
        return render_prompts(self.tokenizer, prompts, self.thinking)

    def once(self, path: Path, make: Callable[[], Any]) -> Any:
        """JSON values that the main process makes where they are not kept yet."""
        if self.accelerator.is_main_process and not path.is_file():
            write_json(path, make())
        self.accelerator.wait_for_everyone()
        return read_json(path)

    def run(
        self, about: Mapping[str, Any], options: Any, sources: Sequence[SourcePrompt], decode: Decoding, label: str
    ) -> Pass:
        """`options`: JSON values that beside `about` and the prompts decide on what comes out."""
        asked = [[source.prompt.id, source.prompt.messages] for source in sources]
        key = sha256_text(json.dumps([about, options, asked, self.thinking, self.all_turns], sort_keys=True))
        folder = self.folder / f"{about['drafter']}_{about['task_set']}_{key[:16]}".replace(" ", "-")
        units = units_of(sources, UNIT_BATCHES * int(about["batch_size"]))
        files = [folder / f"unit_{index:05d}.json" for index in range(len(units))]
        own = slice(self.accelerator.process_index, None, self.accelerator.num_processes)
        todo = [(unit, file) for unit, file in zip(units[own], files[own], strict=True) if not file.is_file()]
        total = sum(len(unit) for unit, _ in todo)
        with tqdm(total=total, desc=label, unit="prompt", disable=not self.accelerator.is_main_process) as progress:
            for unit, file in todo:
                write_json(file, self._unit(about, unit, sources, decode, progress).to_dict())
        self.accelerator.wait_for_everyone()
        return joined([Pass.from_dict(read_json(file)) for file in files])

    def _unit(
        self, about: Mapping[str, Any], unit: range, sources: Sequence[SourcePrompt], decode: Decoding, progress: tqdm
    ) -> Pass:
        """Turn by turn: each is asked behind the answers to those before."""
        parts, running = [], {index: [] for index in unit}
        for turn in range(max(len(sources[index].prompt.messages) for index in unit) if self.all_turns else 1):
            found = {index: turn_prompt(sources[index], answers) for index, answers in running.items()}
            prompts = {index: prompt for index, prompt in found.items() if prompt is not None}
            if not prompts:
                break
            rendered = self.render(list(prompts.values()))
            ids = [index + turn * len(sources) for index in prompts]
            result = decode(rendered, ids, lambda _: progress.update(0 if turn else 1))  # noqa: B023 (called at once)
            domains = [prompt.domain for prompt in prompts.values()]
            parts.append(Pass(**vars(result), about=dict(about), domains=domains, prompts=rendered))
            running = {
                index: [*running[index], self.tokenizer.decode(generation.tokens, skip_special_tokens=True)]
                for index, generation in zip(prompts, result.generations, strict=True)
            }
        return joined(parts)


def units_of(sources: Sequence[SourcePrompt], size: int) -> list[range]:
    """At most `size` prompts each, and of one domain where the prompts of every domain stand together, so that what
    each of them took is known."""
    domains = [source.prompt.domain for source in sources]
    counts = [len(list(members)) for _, members in groupby(domains)]
    if len(counts) > len(set(domains)):
        counts = [len(domains)]
    starts = [sum(counts[:index]) for index in range(len(counts))]
    return [
        range(first, min(first + size, start + count))
        for start, count in zip(starts, counts, strict=True)
        for first in range(start, start + count, size)
    ]
