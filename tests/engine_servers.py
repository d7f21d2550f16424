"""Small servers that speak as vLLM, SGLang and llama.cpp do, decode with the runtime, and count as those engines do:
round by round, from rounds that no stop token or limit cut."""

import copy
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from eval.decode import DecodeConfig, decode
from eval.schedule import FIXED
from eval.verify import Rule
from models.base import Proposer
from models.dspark import DSpark
from models.sampling import SamplingConfig
from models.target import Target

K = 4  # drafts a round, where nothing else is said
UNSEEN = 0  # <pad>, which the tiny target never says
Reply = tuple[int, Any]  # status, and JSON values or text


@dataclass(frozen=True)
class Step:
    """A verification in full."""

    proposed: int
    accepted: int
    tokens: list[int]  # the accepted drafts and the bonus token


class FakeEngine:
    """Decodes greedily or with its own seed; `bodies` are what it was asked. `shift` makes it another model."""

    def __init__(self, target: Target, drafter: Proposer, num_draft_tokens: int, *, shift: int = 0) -> None:
        self.target, self.drafter, self.num_draft_tokens, self.shift = (
            copy.copy(target),
            drafter,
            num_draft_tokens,
            shift,
        )
        self.ends = target.spec.eos_token_ids
        self.target.spec = replace(target.spec, eos_token_ids=(UNSEEN,))
        self.bodies: list[dict[str, Any]] = []
        self.lock = threading.Lock()
        self.gets: dict[str, Reply] = {"/v1/models": (200, {"data": [self.model()]})}

    def model(self) -> dict[str, Any]:
        raise NotImplementedError

    def post(self, path: str, body: dict[str, Any]) -> Reply:
        raise NotImplementedError

    def get(self, path: str) -> Reply:
        return self.gets.get(path, (404, {"detail": "Not Found"}))

    def steps(self, prompt: list[int], limit: int, temperature: float) -> tuple[int, Iterator[Step]]:
        """The first token, and what the verifications behind it give, whatever the limit and stop tokens say."""
        sampling = SamplingConfig(temperature, 0, 1.0, 0.0, seed=99)
        length = self.num_draft_tokens
        config = DecodeConfig(limit + 2 * length, 1, length, Rule.ratio, FIXED, sampling)
        with self.lock:
            (found,) = decode(self.target, self.drafter, [prompt], config).generations
        tokens = [(token + self.shift) % self.target.spec.vocab_size for token in found.tokens]

        def rounds() -> Iterator[Step]:
            place = 1
            for round_ in found.rounds:
                kept = tokens[place : place + round_.accepted + 1]
                yield Step(round_.proposed, round_.accepted, kept)
                place += len(kept)

        return tokens[0], rounds()

    def cut(self, tokens: list[int], limit: int) -> list[int]:
        end = next((i + 1 for i, token in enumerate(tokens) if token in self.ends), len(tokens))
        return tokens[: min(end, limit)]

    def whole(self, prompt: list[int], limit: int, temperature: float) -> tuple[list[int], list[Step]]:
        """As vLLM and SGLang do: stop tokens and the limit are looked for when a round is counted already."""
        first, rounds = self.steps(prompt, limit, temperature)
        tokens, counted = [first], []
        while self.cut(tokens, limit) == tokens and len(tokens) < limit and tokens[-1] not in self.ends:
            step = next(rounds)
            counted.append(step)
            tokens += step.tokens
        return self.cut(tokens, limit), counted


class FakeVllm(FakeEngine):
    speculates = True

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.totals = {"num_drafts": 7, "num_draft_tokens": 28, "num_accepted_tokens": 5}  # others asked before
        self.positions = [3] + [1] * (self.num_draft_tokens - 1)
        self.gets["/version"] = (200, {"version": "0.32.0"})

    def model(self) -> dict[str, Any]:
        return {"id": "tiny", "object": "model", "owned_by": "vllm", "root": "tiny", "max_model_len": 512}

    def get(self, path: str) -> Reply:
        if path != "/metrics" or path in self.gets:
            return super().get(path)
        lines = ["# HELP vllm:num_requests_running Number of requests", 'vllm:num_requests_running{engine="0"} 0.0']
        if self.speculates:
            labels = 'engine="0",model_name="tiny {a}"'
            lines += [f"vllm:spec_decode_{name}_total{{{labels}}} {value:.1f}" for name, value in self.totals.items()]
            lines += [f"vllm:spec_decode_{name}_created{{{labels}}} 1.7e+09" for name in self.totals]
            lines += [
                f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{place}"}} {value:.1f}'
                for place, value in enumerate(self.positions)
            ]
        return 200, "\n".join(lines) + "\n"

    def post(self, path: str, body: dict[str, Any]) -> Reply:
        assert path == "/v1/completions" and body["model"] == "tiny" and body["return_token_ids"]
        tokens, steps = self.whole(body["prompt"], body["max_tokens"], body["temperature"])
        with self.lock:
            self.count(steps)
        return 200, {"choices": [{"index": 0, "text": "", "token_ids": tokens}]}

    def count(self, steps: list[Step]) -> None:
        self.totals["num_drafts"] += len(steps)
        self.totals["num_draft_tokens"] += sum(step.proposed for step in steps)
        self.totals["num_accepted_tokens"] += sum(step.accepted for step in steps)
        for place in range(self.num_draft_tokens):
            self.positions[place] += sum(step.accepted > place for step in steps)


class FakeSglang(FakeEngine):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gets["/server_info"] = (200, {"version": "0.5.23", "dtype": "float32", "device": "cpu"})

    def model(self) -> dict[str, Any]:
        return {"id": "tiny", "object": "model", "owned_by": "sglang", "root": "tiny", "max_model_len": 512}

    def post(self, path: str, body: dict[str, Any]) -> Reply:
        assert path == "/generate"
        asked = body["sampling_params"]
        tokens, steps = self.whole(body["input_ids"], asked["max_new_tokens"], asked["temperature"])
        about: dict[str, Any] = {"completion_tokens": len(tokens), "finish_reason": {"type": "length"}}
        return 200, {"text": "", "output_ids": tokens, "meta_info": about | self.told(len(tokens), steps)}

    def told(self, num_tokens: int, steps: list[Step]) -> dict[str, Any]:
        if not steps:
            return {}
        proposed, correct = len(steps) * self.num_draft_tokens, sum(step.accepted for step in steps)
        return {
            "spec_accept_rate": correct / proposed,
            "spec_accept_length": num_tokens / len(steps),
            "spec_num_correct_drafts": correct,
            "spec_num_proposed_drafts": proposed,
            "spec_verify_ct": len(steps),
        }


class FakeLlamaCpp(FakeEngine):
    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.gets["/props"] = (200, {"build_info": "b11549-abc", "default_generation_settings": {"n_ctx": 512}})

    def model(self) -> dict[str, Any]:
        meta = {"n_vocab": self.target.spec.vocab_size, "ftype": "all F32"}
        return {"id": "tiny.gguf", "owned_by": "llamacpp", "meta": meta}

    def post(self, path: str, body: dict[str, Any]) -> Reply:
        assert path == "/completion" and body["return_tokens"] and not body["cache_prompt"]
        limit, proposed, accepted = body["n_predict"], 0, 0
        first, steps = self.steps(body["prompt"], limit, body["temperature"])
        tokens = [first]
        while len(tokens) < limit and tokens[-1] not in self.ends:
            step = next(steps)
            drafts = min(step.proposed, limit - len(tokens) - 1)
            kept = step.tokens[: min(step.accepted, drafts) + 1]
            kept = self.cut(kept, limit)
            proposed, accepted = proposed + drafts, accepted + len(kept) - 1
            tokens += kept
        timings = {"predicted_n": len(tokens), "predicted_ms": 1.0}
        if proposed:
            timings |= {"draft_n": proposed, "draft_n_accepted": accepted}
        return 200, {"content": "", "tokens": tokens, "timings": timings, "stop": True}


@contextmanager
def running(engine: FakeEngine) -> Iterator[str]:
    """Its URL."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def do_GET(self) -> None:
            self._send(engine.get(self.path))

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            engine.bodies.append(body)
            self._send(engine.post(self.path, body))

        def _send(self, reply: Reply) -> None:
            status, value = reply
            content = value.encode() if isinstance(value, str) else json.dumps(value).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


FAKES = {"vLLM": FakeVllm, "SGLang": FakeSglang, "llama.cpp": FakeLlamaCpp}


@pytest.fixture
def fake(tiny_target: Target, tiny_dspark: DSpark) -> Callable[..., FakeEngine]:
    """An engine by name that serves the tiny drafter, on features of its own `layer_ids` where they are given."""

    def make(name: str, *, layer_ids: tuple[int, ...] | None = None, **options: Any) -> FakeEngine:
        target = tiny_target.capturing(layer_ids or tiny_dspark.target_layer_ids)
        return FAKES[name](target, tiny_dspark, options.pop("num_draft_tokens", K), **options)

    return make
