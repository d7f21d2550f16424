"""Answers of the target to the prompts, in batches, resumable record by record."""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from data.chat import render_prompt
from data.prompts import Prompt, builtin_prompts, prompt_part, read_prompts
from data.run import append_lines, read_lines
from models.sampling import Purpose, Sampler, SamplingConfig
from models.target import Target

log = logging.getLogger(__name__)


@dataclass
class BuiltinPrompts:
    """How many of the project's own prompts, over all domains."""

    seed: int
    num_train: int
    num_heldout: int


@dataclass
class GenerateConfig:
    """Options of generate.py; conf/generate.yaml lists every value with a remark."""

    name: str
    output_dir: str
    responses: str
    target: Any
    prompts: str | None
    builtin: BuiltinPrompts
    sampling: SamplingConfig
    max_new_tokens: int
    batch_size: int


@dataclass(frozen=True)
class Answer:
    """Token ids of one answer, its stop token included where there was one."""

    index: int
    tokens: list[int]
    finish_reason: str  # stop or length


def load_prompts(file: str | None, builtin: BuiltinPrompts, split: str) -> list[Prompt]:
    """Prompts of a JSONL, or the project's own where `file` is null. Raises ValueError when the split is empty."""
    if file is None:
        prompts = builtin_prompts(builtin.seed, num_train=builtin.num_train, num_heldout=builtin.num_heldout)
    else:
        prompts = read_prompts(Path(file))
    prompts = [prompt for prompt in prompts if prompt.split == split]
    if not prompts:
        raise ValueError(f"prompts={file} has no prompt with split={split}")
    return prompts


def generate(config: GenerateConfig, target: Target, tokenizer: PreTrainedTokenizerBase) -> None:
    """Answer every training prompt that `responses` does not hold yet."""
    path = Path(config.responses)
    prompts = load_prompts(config.prompts, config.builtin, "train")
    sampling = {**asdict(config.sampling), "max_new_tokens": config.max_new_tokens}
    done = check_responses(read_lines(path, repair=True), sampling, path)
    todo = [i for i, prompt in enumerate(prompts) if prompt.id not in done]
    log.info("generate: %d prompts, %d already answered", len(prompts), len(prompts) - len(todo))
    rendered = {i: render_prompt(tokenizer, prompt_part(prompts[i].messages)) for i in todo}
    # Longest first: the slowest batches and the largest buffers come at once, and the ETA only improves.
    todo.sort(key=lambda i: (-len(rendered[i]), i))
    num_tokens, began = 0, time.perf_counter()
    with tqdm(total=len(todo), unit="prompt", desc="generate", disable=not todo) as progress:
        for start in range(0, len(todo), config.batch_size):
            members = todo[start : start + config.batch_size]
            answers = answer_batch(target, [rendered[i] for i in members], members, config)
            lines = []
            for answer in answers:
                prompt, num_tokens = prompts[answer.index], num_tokens + len(answer.tokens)
                lines.append(response_line(prompt, answer, tokenizer, sampling))
            append_lines(path, lines)
            progress.update(len(members))
            progress.set_postfix_str(f"{num_tokens / (time.perf_counter() - began):.0f} tokens/s")


def check_responses(lines: Sequence[dict[str, Any]], sampling: dict[str, Any], path: Path) -> set[str]:
    """Ids already answered. Raises ValueError when they were sampled with other options."""
    for line in lines:
        if line["sampling"] != sampling:
            raise ValueError(
                f"responses={path} holds answers with sampling {line['sampling']}, asked for is {sampling}: "
                "choose another responses= file or remove this one"
            )
    return {line["id"] for line in lines}


def response_line(
    prompt: Prompt, answer: Answer, tokenizer: PreTrainedTokenizerBase, sampling: dict[str, Any]
) -> dict[str, Any]:
    content = answer.tokens[:-1] if answer.finish_reason == "stop" else answer.tokens
    text = tokenizer.decode(content, skip_special_tokens=False)
    messages = [*prompt_part(prompt.messages), {"role": "assistant", "content": text}]
    return {
        "id": prompt.id,
        "domain": prompt.domain,
        "split": prompt.split,
        "messages": messages,
        "finish_reason": answer.finish_reason,
        "sampling": sampling,
    }


@torch.inference_mode()
def answer_batch(
    target: Target, prompts: Sequence[list[int]], request_ids: Sequence[int], config: GenerateConfig
) -> list[Answer]:
    """Plain decoding of one ragged batch with preallocated caches; finished rows are compacted away."""
    device = target.device
    counts = torch.tensor([len(prompt) for prompt in prompts], device=device)
    width = int(counts.max())
    tokens = torch.tensor([prompt + [0] * (width - len(prompt)) for prompt in prompts], device=device)
    cache = target.new_cache(len(prompts), width + config.max_new_tokens)
    sampler = Sampler(config.sampling, torch.tensor(list(request_ids), device=device))
    hidden = target.forward(tokens, cache, with_features=False).hidden
    cache.advance(counts)
    hidden = hidden[torch.arange(len(prompts), device=device), counts - 1]
    answers = [Answer(index, [], "length") for index in request_ids]
    running = list(range(len(prompts)))
    for step in range(config.max_new_tokens):
        probs = sampler.probs(target.logits(hidden))
        last = sampler.draw(probs, cache.lengths, Purpose.target)
        kept = list(_append(last.tolist(), running, answers, target.spec.eos_token_ids))
        if not kept or step + 1 == config.max_new_tokens:
            break
        if len(kept) < len(running):
            rows = torch.tensor(kept, device=device)
            running = [running[row] for row in kept]
            last, sampler = last[rows], sampler.select(rows)
            cache.select(rows)
        hidden = target.forward(last[:, None], cache, with_features=False).hidden[:, 0]
        cache.advance(torch.ones_like(last))
    return answers


def _append(tokens: list[int], running: list[int], answers: list[Answer], stops: tuple[int, ...]) -> Iterator[int]:
    """Add one token to each running answer; yields the rows that go on."""
    for row, token in enumerate(tokens):
        answer = answers[running[row]]
        answer.tokens.append(token)
        if token in stops:
            answers[running[row]] = Answer(answer.index, answer.tokens, "stop")
        else:
            yield row
