"""Answers of the target to the prompts, in batches, resumable record by record."""

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from data.capture import BatchCapture, capture_header, write_captured
from data.chat import render_prompt
from data.messages import prompt_part
from data.prompts import Prompt, builtin_prompts, read_prompts
from data.run import append_lines, read_lines
from data.store import FEATURE_DTYPES
from models.sampling import Purpose, Sampler, SamplingConfig
from models.target import Target, TargetIdentity, pad_rows

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
    capture: str | None
    captured: str


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


def generate(
    config: GenerateConfig, target: Target, tokenizer: PreTrainedTokenizerBase, identity: TargetIdentity
) -> None:
    """Answer every training prompt that `responses` does not hold yet."""
    path = Path(config.responses)
    prompts = load_prompts(config.prompts, config.builtin, "train")
    sampling = {**asdict(config.sampling), "max_new_tokens": config.max_new_tokens}
    done = check_responses(read_lines(path, repair=True), sampling, path)
    todo = [i for i, prompt in enumerate(prompts) if prompt.id not in done]
    log.info("generate: %d prompts, %d already answered", len(prompts), len(prompts) - len(todo))
    header = None if config.capture is None else capture_header(target, identity, config.capture)
    rendered = {i: render_prompt(tokenizer, prompt_part(prompts[i].messages)) for i in todo}
    # Longest first: the slowest batches and the largest buffers come at once, and the ETA only improves.
    todo.sort(key=lambda i: (-len(rendered[i]), i))
    check_context(rendered, prompts, config.max_new_tokens, target.spec.max_position_embeddings)
    num_tokens, began = 0, time.perf_counter()
    with tqdm(total=len(todo), unit="prompt", desc="generate", disable=not todo) as progress:
        for start in range(0, len(todo), config.batch_size):
            members = todo[start : start + config.batch_size]
            asked = [rendered[i] for i in members]
            capture = None if header is None else BatchCapture(FEATURE_DTYPES[header.feature_dtype], len(members))
            answers = answer_batch(target, asked, members, config, capture)
            if header is not None and capture is not None:
                fed = [prompt + answer.tokens for prompt, answer in zip(asked, answers, strict=True)]
                ids = [prompts[i].id for i in members]
                write_captured(Path(config.captured), header, ids, capture.finish(fed))
            lines = [response_line(prompts[answer.index], answer, tokenizer, sampling) for answer in answers]
            append_lines(path, lines)
            num_tokens += sum(len(answer.tokens) for answer in answers)
            progress.update(len(members))
            progress.set_postfix_str(f"{num_tokens / (time.perf_counter() - began):.0f} tokens/s")


def check_context(
    rendered: Mapping[int, list[int]], prompts: Sequence[Prompt], max_new_tokens: int, limit: int
) -> None:
    """Raises ValueError on a prompt that leaves no room for its answer in the target's context."""
    for index, tokens in rendered.items():
        if len(tokens) + max_new_tokens > limit:
            raise ValueError(
                f"prompt {prompts[index].id} of {len(tokens)} tokens + max_new_tokens={max_new_tokens} exceed the "
                f"target's context of {limit}: shorten it or lower max_new_tokens"
            )


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
    target: Target,
    prompts: Sequence[list[int]],
    request_ids: Sequence[int],
    config: GenerateConfig,
    capture: BatchCapture | None = None,
) -> list[Answer]:
    """Plain decoding of one ragged batch with preallocated caches; finished rows are compacted away."""
    batch = _Batch(target, prompts, request_ids, config, capture)
    for step in range(config.max_new_tokens):
        last = batch.draw()
        kept = list(_append(last.tolist(), batch.running, batch.answers, target.spec.eos_token_ids))
        is_over = not kept or step + 1 == config.max_new_tokens
        # A finished row is fed its last token only where features are captured.
        if capture is None:
            if is_over:
                break
            last = last[batch.keep(kept)]
        batch.feed(last[:, None], torch.ones_like(last))
        if is_over:
            break
        if capture is not None:
            batch.keep(kept)
    return batch.answers


class _Batch:
    """Rows that still run, their caches and the hidden state that predicts each row's next token."""

    def __init__(
        self,
        target: Target,
        prompts: Sequence[list[int]],
        request_ids: Sequence[int],
        config: GenerateConfig,
        capture: BatchCapture | None,
    ) -> None:
        self.target, self.capture = target, capture
        device = target.device
        tokens, counts = pad_rows(prompts, device)
        self.cache = target.new_cache(len(prompts), tokens.shape[1] + config.max_new_tokens)
        self.sampler = Sampler(config.sampling, torch.tensor(list(request_ids), device=device))
        self.answers = [Answer(index, [], "length") for index in request_ids]
        self.running = list(range(len(prompts)))
        self.feed(tokens, counts)

    def feed(self, tokens: Tensor, counts: Tensor) -> None:
        """tokens [B, Q], of which counts [B] are kept."""
        output = self.target.forward(tokens, self.cache, with_features=self.capture is not None)
        self.cache.advance(counts)
        if self.capture is not None:
            self.capture.add(self.running, output, counts.tolist())
        self.hidden = output.hidden[torch.arange(len(counts), device=counts.device), counts - 1]

    def draw(self) -> Tensor:
        probs = self.sampler.probs(self.target.logits(self.hidden))
        return self.sampler.draw(probs, self.cache.lengths, Purpose.target)

    def keep(self, rows: list[int]) -> Tensor:
        """Drop all other rows; returns the index of the kept ones."""
        index = torch.tensor(rows, device=self.hidden.device)
        if len(rows) < len(self.running):
            self.running = [self.running[row] for row in rows]
            self.hidden, self.sampler = self.hidden[index], self.sampler.select(index)
            self.cache.select(index)
        return index


def _append(tokens: list[int], running: list[int], answers: list[Answer], stops: tuple[int, ...]) -> Iterator[int]:
    """Add one token to each running answer; yields the rows that go on."""
    for row, token in enumerate(tokens):
        answer = answers[running[row]]
        answer.tokens.append(token)
        if token in stops:
            answers[running[row]] = Answer(answer.index, answer.tokens, "stop")
        else:
            yield row
