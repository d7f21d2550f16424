"""Prompts to measure on: the project's own held-out ones, a benchmark by name, or any JSONL."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from data.chat import render_prompt
from data.generate import BuiltinPrompts, load_prompts
from data.messages import prompt_part
from data.prompts import Prompt, read_prompts

HELDOUT = "heldout"


def load_tasks(
    names: Sequence[str], builtin: BuiltinPrompts, *, prompts_dir: str | None, num_prompts: int | None
) -> list[Prompt]:
    """`heldout` is the built-in set (other templates than the training prompts). Any other name is a JSONL file, or
    `<prompts_dir>/<name>.jsonl`, whose domain is its name; its first turns are asked. At most `num_prompts` a task.
    """
    prompts: list[Prompt] = []
    for name in names:
        if name == HELDOUT:
            found = load_prompts(None, builtin, "heldout")
        else:
            path = task_file(name, prompts_dir)
            found = read_prompts(path, domain=path.stem)
        prompts += found if num_prompts is None else found[:num_prompts]
    if not prompts:
        raise ValueError(f"tasks={list(names)} name no prompt")
    return prompts


def render_prompts(
    tokenizer: PreTrainedTokenizerBase, prompts: Sequence[Prompt], thinking: bool | None
) -> list[list[int]]:
    """Token ids of each prompt without its answer."""
    return [
        render_prompt(tokenizer, prompt_part(prompt.messages), tools=prompt.tools, thinking=thinking)
        for prompt in prompts
    ]


def task_file(name: str, prompts_dir: str | None) -> Path:
    """Raises ValueError that says where the task was looked for."""
    path = Path(name) if name.endswith(".jsonl") else Path(prompts_dir or ".") / f"{name}.jsonl"
    if not path.is_file():
        raise ValueError(
            f"tasks: {name} is neither '{HELDOUT}' nor a file (looked for {path}); set prompts_dir= or give FILE.jsonl"
        )
    return path
