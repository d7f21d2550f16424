"""Answers of the target to the prompts, here in batches or by servers, resumable record by record."""

import logging
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from tqdm import tqdm
from transformers import PreTrainedTokenizerBase

from data.capture import (
    FEATURE_DTYPES,
    BatchCapture,
    CapturedAnswer,
    CaptureHeader,
    capture_header,
    write_captured,
)
from data.conversation import Conversation, Failures, Rendering, check_responses, questions, response_line
from data.mixing import MixOptions, mix, write_heldout
from data.prompts import Prompt, SourcePrompt, builtin_prompts, read_source
from data.run import StopRequest, append_lines, iter_lines
from data.server import ServerOptions, Servers, answer_all, request_body
from models.sampling import Purpose, Sampler, SamplingConfig
from models.spec import TargetSpec
from models.target import Target, TargetIdentity, pad_rows

log = logging.getLogger(__name__)

STOPPED = "generate: asked to stop after %d of %d; the same command goes on from there"


@dataclass
class BuiltinPrompts:
    """How many of the project's own prompts, over all domains."""

    seed: int
    num_train: int
    num_heldout: int


@dataclass
class GenerateConfig(MixOptions, ServerOptions):
    """Options of generate.py; conf/generate.yaml lists every value with a remark."""

    name: str
    output_dir: str
    responses: str
    target: Any
    prompts: Any
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


def load_prompts(sources: str | list[str] | None, builtin: BuiltinPrompts, split: str) -> list[Prompt]:
    """Prompts of one or several sources, or the project's own where there is none.

    Raises ValueError when the split is empty.
    """
    found = [prompt.first_turn for source in read_sources(sources, builtin) for prompt in source]
    prompts = [prompt for prompt in found if prompt.split == split]
    if not prompts:
        raise ValueError(f"prompts={sources} has no prompt with split={split}")
    return prompts


def read_sources(sources: str | list[str] | None, builtin: BuiltinPrompts) -> list[list[SourcePrompt]]:
    if sources is None:
        prompts = builtin_prompts(builtin.seed, num_train=builtin.num_train, num_heldout=builtin.num_heldout)
        return [[SourcePrompt(prompt, "builtin", prompt.split, None, is_turns=False) for prompt in prompts]]
    return [read_source(name) for name in source_names(sources)]


def source_names(sources: str | list[str] | None) -> list[str]:
    """The sources as a list, for null the one that is built in. Raises ValueError for anything else."""
    names = ["builtin"] if sources is None else [sources] if isinstance(sources, str) else sources
    if not isinstance(names, list) or not names or not all(isinstance(name, str) for name in names):
        raise ValueError(f"prompts={sources} must be null, one source or a list of sources")
    return names


def generate(
    config: GenerateConfig,
    target: Target,
    tokenizer: PreTrainedTokenizerBase,
    identity: TargetIdentity,
    *,
    thinking: bool | None,
) -> None:
    """Answer every training prompt that `responses` does not hold yet."""
    path = Path(config.responses)
    sampling = sampling_of(config, thinking, server_model=None)
    rendering = Rendering(tokenizer, thinking, target.spec.max_position_embeddings - config.max_new_tokens)
    chats = open_chats(config, rendering, sampling)
    header = None if config.capture is None else capture_header(target, identity, config.capture)
    stop, num_tokens, began = StopRequest(), 0, time.perf_counter()
    with tqdm(total=len(chats), unit="prompt", desc="generate", disable=not chats) as progress:
        for start in range(0, len(chats), config.batch_size):
            if stop.received:
                log.info(STOPPED, start, len(chats))
                break
            batch = chats[start : start + config.batch_size]
            captured = answer_chats(target, batch, config, rendering, header)
            if header is not None:
                write_captured(Path(config.captured), header, [chat.prompt.id for chat in batch], captured)
            append_lines(path, [response_line(chat, sampling) for chat in batch])
            num_tokens += sum(chat.num_new_tokens for chat in batch)
            progress.update(len(batch))
            progress.set_postfix_str(f"{num_tokens / (time.perf_counter() - began):.0f} tokens/s")
    log_shortened(sum(chat.lacks_room for chat in chats))


def generate_by_servers(
    config: GenerateConfig, spec: TargetSpec, tokenizer: PreTrainedTokenizerBase, *, thinking: bool | None
) -> None:
    """Like `generate`, by the servers of `server=`; prompts without an answer are listed in `<responses>.failed.jsonl`.

    Raises ValueError when servers cannot be used or are all gone, and when no prompt could be answered; what was
    answered stays.
    """
    if config.capture is not None:
        raise ValueError(
            f"capture={config.capture} keeps features of a target that runs here: set it null with server="
        )
    path, num_answered, num_shortened = Path(config.responses), 0, 0
    rendering = Rendering(tokenizer, thinking, spec.max_position_embeddings - config.max_new_tokens)
    with Servers(config) as servers:
        sampling = sampling_of(config, thinking, server_model=servers.model)
        chats = open_chats(config, rendering, sampling)
        failures, stop, num_chats = Failures(path, chats), StopRequest(), len(chats)
        try:
            with tqdm(total=num_chats, unit="prompt", desc="generate", disable=not chats) as progress:
                answer = partial(ask_servers, servers=servers, config=config, rendering=rendering)
                for outcomes in answer_all(servers, given_away(chats), answer, stop):
                    finished = [chat for chat, error in outcomes if error is None]
                    append_lines(path, [response_line(chat, sampling) for chat in finished])
                    num_answered += len(finished)
                    num_shortened += sum(chat.lacks_room for chat in finished)
                    for chat, error in outcomes:
                        failures.update(chat.prompt.id, error)
                    progress.update(len(outcomes))
        finally:
            failures.write()
    if stop.received:
        log.info(STOPPED, num_answered, num_chats)
    else:
        failures.check(num_answered)
    log_shortened(num_shortened)


def given_away(chats: list[Conversation]) -> Iterator[Conversation]:
    """The chats in order, each out of the list: answers that were written need no memory any more."""
    chats.reverse()
    while chats:
        yield chats.pop()


def ask_servers(chat: Conversation, *, servers: Servers, config: GenerateConfig, rendering: Rendering) -> None:
    """Have all turns of one chat answered; raises what `Servers.ask` raises."""
    is_open = True
    while is_open:
        body = request_body(
            chat.messages,
            chat.prompt.tools,
            config.sampling,
            max_new_tokens=config.max_new_tokens,
            thinking=rendering.thinking,
            record_id=chat.prompt.id,
        )
        reply = servers.ask(body)
        is_open = chat.add(reply.message, reply.finish_reason, rendering)


def sampling_of(config: GenerateConfig, thinking: bool | None, server_model: str | None) -> dict[str, Any]:
    """All that answers depend on besides their prompts; `server_model` null means answered here."""
    return {
        **asdict(config.sampling),
        "max_new_tokens": config.max_new_tokens,
        "thinking": thinking,
        "regenerate": str(config.regenerate),
        "server_model": server_model,
    }


def open_chats(config: GenerateConfig, rendering: Rendering, sampling: dict[str, Any]) -> list[Conversation]:
    """A chat for every training prompt without an answer, the longest first; held-out prompts are written aside."""
    path = Path(config.responses)
    sources = read_sources(config.prompts, config.builtin)
    mixture = mix(
        sources,
        config,
        lambda prompt, regenerate: len(rendering.ids(prompt, questions(prompt, regenerate)[0])),
        names=source_names(config.prompts),
    )
    done = check_responses(iter_lines(path, repair=True), sampling, path)
    if both := done & {prompt.id for prompt in mixture.heldout}:
        raise ValueError(
            f"responses={path} holds answers to {len(both)} prompts that are held out now, {min(both)} among them: "
            "choose another responses= file or the heldout= of that run"
        )
    if config.prompts is not None:
        write_heldout(Path(config.output_dir) / "heldout.jsonl", mixture.heldout)
    prompts = [(index, prompt) for index, prompt in enumerate(mixture.train) if prompt.id not in done]
    log.info("generate: %d prompts, %d already answered", len(mixture.train), len(mixture.train) - len(prompts))
    chats = [Conversation(index, prompt, config.regenerate) for index, prompt in prompts]
    lengths = {chat.index: check_chat(chat, rendering, config.max_new_tokens) for chat in chats}
    # Longest first: the slowest batches and the largest buffers come at once, and the ETA only improves.
    return sorted(chats, key=lambda chat: (-lengths[chat.index], chat.index))


def check_chat(chat: Conversation, rendering: Rendering, max_new_tokens: int) -> int:
    """Tokens of the first prompt. Raises ValueError where it leaves no room for its answer in the target's context, and
    where the chat template refuses a later turn, which would otherwise show hours later."""
    num_tokens = len(rendering.ids(chat.prompt, chat.messages))
    if num_tokens > rendering.max_tokens:
        raise ValueError(
            f"prompt {chat.prompt.id} of {num_tokens} tokens + max_new_tokens={max_new_tokens} exceed the target's "
            f"context of {rendering.max_tokens + max_new_tokens}: shorten it, lower max_new_tokens or set "
            f"max_prompt_tokens={max(rendering.max_tokens, 1)}"
        )
    if chat.later:
        rendering.ids(chat.prompt, chat.outline())
    return num_tokens


def log_shortened(count: int) -> None:
    if count:
        log.info("generate: %d chats end before a user turn that would leave no room for its answer", count)


def answer_chats(
    target: Target,
    chats: Sequence[Conversation],
    config: GenerateConfig,
    rendering: Rendering,
    header: CaptureHeader | None,
) -> list[CapturedAnswer]:
    """Answer a batch of chats round by round until all are over; returns the capture of each chat's last answer."""
    captured: dict[int, CapturedAnswer] = {}
    running = list(chats)
    while running:
        capture = None if header is None else BatchCapture(FEATURE_DTYPES[header.feature_dtype], len(running))
        asked = [rendering.ids(chat.prompt, chat.messages) for chat in running]
        answers = answer_batch(target, asked, [chat.index for chat in running], config, capture)
        if capture is not None:
            fed = [prompt + answer.tokens for prompt, answer in zip(asked, answers, strict=True)]
            captured |= zip([chat.index for chat in running], capture.finish(fed), strict=True)
        running = [chat for chat, answer in zip(running, answers, strict=True) if add_answer(chat, answer, rendering)]
    return [captured[chat.index] for chat in chats] if header is not None else []


def add_answer(chat: Conversation, answer: Answer, rendering: Rendering) -> bool:
    content = answer.tokens[:-1] if answer.finish_reason == "stop" else answer.tokens
    text = rendering.tokenizer.decode(content, skip_special_tokens=False)
    chat.num_new_tokens += len(answer.tokens)
    return chat.add({"role": "assistant", "content": text}, answer.finish_reason, rendering)


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
