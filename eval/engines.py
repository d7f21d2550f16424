"""Running engines that speculate: which one answers at a URL, how it is asked, and where its counts are.

An engine says which it is in GET /v1/models (`owned_by`). Prompts go to it as token ids, with every sampling option
named, as a server may have defaults of its own.
"""

import re
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from data.access import open_client, server_urls, without_credentials
from data.server import served_models
from eval.connection import Connection
from eval.counting import Counts, as_llama_cpp, as_sglang, as_vllm, pooled
from eval.rounds import Generation
from models.sampling import SamplingConfig

SETTLE_SECONDS, SETTLE_POLLS = 0.1, 30  # counters may come later than the answer that they count


@dataclass(frozen=True)
class Settings:
    """What all requests ask for."""

    max_new_tokens: int
    num_draft_tokens: int  # engines are started with it; none takes it from a request
    sampling: SamplingConfig
    stop_token_ids: tuple[int, ...]


@dataclass(frozen=True)
class Answer:
    tokens: list[int]
    counts: Counts | None  # None: counted with others only


@dataclass(frozen=True)
class Answered:
    """Answers in the order of the prompts, and what was counted of all of them together."""

    answers: list[Answer]
    counts: Counts
    seconds: float

    @property
    def num_tokens(self) -> int:
        return sum(len(answer.tokens) for answer in self.answers)


@dataclass(frozen=True)
class Facts:
    """What an engine tells of itself; None where it does not."""

    model: str
    version: str | None
    context: int | None = None  # tokens of one request
    vocab_size: int | None = None
    dtype: str | None = None
    device: str | None = None


class RunningEngine(ABC):
    """One that runs, and how it counts."""

    name: ClassVar[str]
    known: ClassVar[str]  # the version whose field names these are
    switch: ClassVar[str]  # how it is started with a drafter
    counted: ClassVar[str]  # where its counts come from
    drafting: ClassVar[str]  # where that differs from here at a temperature
    caps_drafts: ClassVar[bool] = False  # near the limit it drafts fewer

    def __init__(self, connection: Connection, facts: Facts) -> None:
        self.connection, self.facts = connection, facts

    @property
    def title(self) -> str:
        return f"{self.name} {self.facts.version or ''}".rstrip()

    @abstractmethod
    def ask(self, prompt: Sequence[int], seed: int, *, settings: Settings) -> Answer: ...

    @abstractmethod
    def counts_of(self, generation: Generation, max_new_tokens: int) -> Counts:
        """What it would have counted of our rounds."""

    def answer_all(
        self, prompts: Sequence[list[int]], settings: Settings, seeds: Sequence[int], *, concurrency: int
    ) -> Answered:
        """`concurrency`: requests at a time."""
        answers, seconds = self._answers(prompts, settings, seeds, concurrency)
        return Answered(answers, pooled(answer.counts for answer in answers if answer.counts is not None), seconds)

    def _answers(
        self, prompts: Sequence[list[int]], settings: Settings, seeds: Sequence[int], concurrency: int
    ) -> tuple[list[Answer], float]:
        """With the seconds that all of them took."""
        ask, began = partial(self.ask, settings=settings), time.perf_counter()
        if concurrency == 1:
            answers = list(map(ask, prompts, seeds))
        else:
            with ThreadPoolExecutor(concurrency) as pool:
                answers = list(pool.map(ask, prompts, seeds))
        return answers, time.perf_counter() - began

    @contextmanager
    def _reading(self, path: str) -> Iterator[None]:
        """The body reads an answer; what is not there is named."""
        try:
            yield
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise ValueError(
                f"server={self.connection.url} ({self.title}): the answer of {path} lacks what is read of it, {error}: "
                f"update it to {self.name} {self.known} or newer"
            ) from error


class Vllm(RunningEngine):
    """Counts all requests together, in counters of GET /metrics."""

    name, known = "vLLM", "0.32"
    switch = """--speculative-config '{"method": ..., "model": DRAFTER, "num_speculative_tokens": K}'"""
    counted = (
        "differences of the counters vllm:spec_decode_* of /metrics; every round in full, also where a stop token or "
        "the limit cut its output"
    )
    drafting = (
        "unless it was started with draft_sample_method=probabilistic it drafts the likeliest tokens, while here "
        "drafts are drawn"
    )

    def ask(self, prompt: Sequence[int], seed: int, *, settings: Settings) -> Answer:
        sampling = settings.sampling
        body = {
            "model": self.facts.model,
            "prompt": list(prompt),
            "max_tokens": settings.max_new_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": seed,
            "stop_token_ids": list(settings.stop_token_ids),
            "return_token_ids": True,
            # A prompt that was cached as a whole starts with a round of placeholders, which is counted.
            "cache_salt": uuid.uuid4().hex,
        }
        found = self.connection.post("/v1/completions", body)
        with self._reading("/v1/completions"):
            return Answer(list(found["choices"][0]["token_ids"]), None)

    def counts_of(self, generation: Generation, max_new_tokens: int) -> Counts:
        return as_vllm(generation, max_new_tokens)

    def answer_all(
        self, prompts: Sequence[list[int]], settings: Settings, seeds: Sequence[int], *, concurrency: int
    ) -> Answered:
        """Prompt by prompt where they go one at a time."""
        if concurrency > 1:
            return self._counted_together(prompts, settings, seeds, concurrency)
        parts = [
            self._counted_together([prompt], settings, [seed], 1) for prompt, seed in zip(prompts, seeds, strict=True)
        ]
        answers = [replace(part.answers[0], counts=part.counts) for part in parts]
        return Answered(answers, pooled(part.counts for part in parts), sum(part.seconds for part in parts))

    def _counted_together(
        self, prompts: Sequence[list[int]], settings: Settings, seeds: Sequence[int], concurrency: int
    ) -> Answered:
        before = self.counters()
        answers, seconds = self._answers(prompts, settings, seeds, concurrency)
        return Answered(answers, self._counts_since(before, answers), seconds)

    def _counts_since(self, before: Counts, answers: Sequence[Answer]) -> Counts:
        """Raises ValueError where they are not those of these answers: each round gives its accepted drafts and one
        more token, and only the last one of an answer may give too many."""
        told = sum(len(answer.tokens) - 1 for answer in answers)
        counts = self.counters() - before
        for _ in range(SETTLE_POLLS):
            if counts.rounds + counts.accepted >= told:
                break
            time.sleep(SETTLE_SECONDS)
            counts = self.counters() - before
        given, most = counts.rounds + counts.accepted, told + len(counts.by_position) * len(answers)
        if counts.rounds and not told <= given <= most:
            raise ValueError(
                f"server={self.connection.url}: its counters moved by {given} tokens where its answers have {told} "
                f"behind their first (at most {most} in whole rounds): others ask it at the same time, or it drafts in "
                "some rounds only; measure when nobody else does, with one number of draft tokens in all rounds"
            )
        return counts

    def counters(self) -> Counts:
        """Since it was started, of all its engines."""
        response = self.connection.checked("GET", "/metrics", self.connection.get("/metrics"))
        found = spec_decode_counters(response.text)
        if found is not None:
            return found
        if re.search(r"^vllm:", response.text, flags=re.MULTILINE) is None:
            raise ValueError(
                f"server={self.connection.url}: GET /metrics has none of vLLM's counters: start it without "
                "--disable-log-stats"
            )
        raise ValueError(
            f"server={self.connection.url}: GET /metrics has no vllm:spec_decode_num_drafts_total, so it does not "
            f"speculate: start it with {self.switch}"
        )


class Sglang(RunningEngine):
    """Counts in the meta_info of every answer."""

    name, known = "SGLang", "0.5.23"
    switch = (
        "--speculative-algorithm ALGORITHM --speculative-draft-model-path DRAFTER, with K + 1 as "
        "--speculative-num-draft-tokens"
    )
    counted = (
        "spec_verify_ct and spec_num_correct_drafts of every answer's meta_info; every round in full, also where "
        "a stop token or the limit cut its output (its own spec_accept_length counts an answer's first token as well)"
    )
    drafting = "it may draft the likeliest tokens, while here drafts are drawn"

    def ask(self, prompt: Sequence[int], seed: int, *, settings: Settings) -> Answer:
        sampling = settings.sampling
        options = {
            "max_new_tokens": settings.max_new_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "sampling_seed": seed,
            "stop_token_ids": list(settings.stop_token_ids),
        }
        found = self.connection.post("/generate", {"input_ids": list(prompt), "sampling_params": options})
        with self._reading("/generate"):
            told, tokens = found["meta_info"], list(found["output_ids"])
            if "spec_verify_ct" not in told:  # it verified nothing
                return Answer(tokens, Counts())
            proposed, accepted = told["spec_num_proposed_drafts"], told["spec_num_correct_drafts"]
            return Answer(tokens, Counts(int(told["spec_verify_ct"]), int(proposed), int(accepted)))

    def counts_of(self, generation: Generation, max_new_tokens: int) -> Counts:
        return as_sglang(generation, max_new_tokens)


class LlamaCpp(RunningEngine):
    """Counts in the timings of every answer."""

    name, known = "llama.cpp", "b11549"
    switch = "--spec-draft-model DRAFTER.gguf --spec-draft-n-max K --spec-draft-p-min 0"
    counted = (
        "draft_n and draft_n_accepted of every answer's timings; rounds are its tokens less the first and the accepted "
        "drafts. Drafts are capped so that no round overshoots the limit, and an accepted stop token counts as a bonus "
        "token"
    )
    drafting = "it drafts the likeliest tokens and keeps those that its own sample equals, while here drafts are drawn"
    caps_drafts = True

    def ask(self, prompt: Sequence[int], seed: int, *, settings: Settings) -> Answer:
        sampling = settings.sampling
        body = {
            "prompt": list(prompt),
            "n_predict": settings.max_new_tokens,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "samplers": ["temperature", "top_k", "top_p", "min_p"],  # in this order here; its own has temperature last
            "seed": seed,
            "return_tokens": True,
            "cache_prompt": False,
        }
        found = self.connection.post("/completion", body)
        with self._reading("/completion"):
            timings, tokens = found["timings"], list(found["tokens"])
            if not tokens:
                raise KeyError("tokens")  # a server that does not know return_tokens
            # without a single draft it has neither
            proposed, accepted = int(timings.get("draft_n", 0)), int(timings.get("draft_n_accepted", 0))
            return Answer(tokens, Counts(len(tokens) - 1 - accepted, proposed, accepted))

    def counts_of(self, generation: Generation, max_new_tokens: int) -> Counts:
        return as_llama_cpp(generation, max_new_tokens)


def find_engine(server: str, *, api_key_file: str | None, timeout: float, concurrency: int) -> RunningEngine:
    """Asks the server which engine it is. Raises ValueError where it cannot be reached or is none that is known."""
    urls = server_urls(server)
    if len(urls) != 1:
        raise ValueError(f"server= must be one URL, got {len(urls)}: eval.py measures one engine at a time")
    if not timeout > 0:
        raise ValueError(f"request_timeout must be more than 0, got {timeout}")
    url, auth = without_credentials(urls[0])
    connection = Connection(open_client(api_key_file, timeout=timeout, num_connections=concurrency), url, auth, timeout)
    models = served_models(connection.client, url, auth)
    if not models:
        raise ValueError(f"server={url} serves no model: GET /v1/models lists none; start it with the target")
    name, model = next(iter(models.items()))
    owner = model.get("owned_by")
    if owner == "vllm":
        version = connection.told("/version").get("version")
        return Vllm(connection, Facts(name, version, model.get("max_model_len")))
    if owner == "sglang":
        told = connection.told("/server_info")
        context, dtype, device = model.get("max_model_len"), told.get("dtype"), told.get("device")
        return Sglang(connection, Facts(name, told.get("version"), context, None, dtype, device))
    if owner == "llamacpp":
        told, meta = connection.told("/props"), model.get("meta") or {}
        context = (told.get("default_generation_settings") or {}).get("n_ctx")
        build, dtype = told.get("build_info"), meta.get("ftype")
        return LlamaCpp(connection, Facts(name, build, context, meta.get("n_vocab"), dtype))
    raise ValueError(
        f"server={url} says that it is {owner!r} (owned_by of GET /v1/models): eval.py knows the counters of vLLM, "
        "SGLang and llama.cpp only; give the engine's own address, not that of a gateway before it"
    )


COUNTER = re.compile(
    r"^vllm:spec_decode_(num_drafts|num_draft_tokens|num_accepted_tokens|num_accepted_tokens_per_pos)_total"
    r"(?:\{(.*)\})? (\S+)",
    flags=re.MULTILINE,
)


def spec_decode_counters(text: str) -> Counts | None:
    """Of the Prometheus text format, all engines and models added up; None where none of them is there."""
    totals: dict[str, int] = {}
    by_position: dict[int, int] = {}
    for name, labels, value in COUNTER.findall(text):
        if name == "num_accepted_tokens_per_pos":
            place = re.search(r'position="(\d+)"', labels)
            assert place is not None, labels
            by_position[int(place[1])] = by_position.get(int(place[1]), 0) + int(float(value))
        else:
            totals[name] = totals.get(name, 0) + int(float(value))
    if len(totals) < 3:
        return None
    positions = tuple(by_position[place] for place in sorted(by_position))
    return Counts(totals["num_drafts"], totals["num_draft_tokens"], totals["num_accepted_tokens"], positions)
