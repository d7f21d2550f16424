"""llama.cpp (the PyPI package xllamacpp) in a child process: it ends its process on files that it cannot use."""

import json
import os
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 120
READY = "listens at "


@dataclass(frozen=True)
class Served:
    """One greedy answer: its tokens, and how many draft tokens were proposed and accepted on the way."""

    tokens: list[int]
    proposed: int
    accepted: int


def need_llama_cpp() -> None:
    """Skips the test where the package is missing; a failure in continuous integration."""
    if find_spec("xllamacpp") is None:
        missing = "xllamacpp is not installed: `make test-engines` installs it"
        if os.environ.get("CI") == "true":
            pytest.fail(missing)
        pytest.skip(missing)


def serve(
    target: Path,
    draft: Path,
    prompts: Sequence[list[int]],
    *,
    num_draft_tokens: int,
    num_tokens: int,
    threshold: float,
    kind: str | None = None,
) -> list[Served]:
    """Answer token-id prompts one after the other."""
    options = {"num_draft_tokens": num_draft_tokens, "threshold": threshold, "kind": kind}
    with running(target, draft, **options) as url:
        return [complete(url, prompt, num_tokens) for prompt in prompts]


@contextmanager
def running(
    target: Path,
    draft: Path | None = None,
    *,
    num_draft_tokens: int = 0,
    threshold: float = 0.0,
    kind: str | None = None,
) -> Iterator[str]:
    """The URL of a server in float32, until the body ends. `kind` is --spec-type; None: llama.cpp finds it out."""
    request: dict[str, Any] = {"target": str(target), "draft": None if draft is None else str(draft), "kind": kind}
    request |= {"num_draft_tokens": num_draft_tokens, "threshold": threshold}
    command, pipe = [sys.executable, __file__, json.dumps(request)], subprocess.PIPE
    with (
        tempfile.TemporaryFile("w+") as log,
        subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=log, text=True) as child,
    ):
        assert child.stdin is not None and child.stdout is not None
        watch = threading.Timer(TIMEOUT_S, child.kill)
        watch.start()
        try:
            said = []
            for line in child.stdout:
                said.append(line)
                if line.startswith(READY):
                    yield line.removeprefix(READY).strip()
                    break
            else:
                log.seek(0)
                raise AssertionError(f"llama.cpp ended with {child.wait()}:\n{(''.join(said) + log.read())[-3000:]}")
        finally:
            watch.cancel()
            child.stdin.close()  # which ends it


def main() -> None:
    import xllamacpp as engine

    request = json.loads(sys.argv[1])
    params = engine.CommonParams()
    params.model.path = request["target"]
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 512, 1, 1
    params.verbosity = 1  # errors
    params.flash_attn_type = engine.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    draft = params.speculative.draft
    if request["draft"] is not None:
        draft.mparams.path, draft.n_max = request["draft"], request["num_draft_tokens"]
        draft.p_min = request["threshold"]
    if request["kind"] is not None:
        types = {kind.name: kind for kind in engine.common_speculative_type}
        params.speculative.types = [types[f"COMMON_SPECULATIVE_TYPE_{request['kind'].upper().replace('-', '_')}"]]
    for part in (params, draft):  # float16 by default
        part.cache_type_k = part.cache_type_v = engine.ggml_type.GGML_TYPE_F32
    server = engine.Server(params)
    sys.stdout.write(f"\n{READY}{server.listening_address}\n")
    sys.stdout.flush()
    sys.stdin.read()


def complete(address: str, prompt: list[int], num_tokens: int) -> Served:
    body = {"prompt": prompt, "n_predict": num_tokens, "temperature": 0, "return_tokens": True, "cache_prompt": False}
    call = urllib.request.Request(f"{address}/completion", json.dumps(body).encode())
    with urllib.request.urlopen(call, timeout=TIMEOUT_S) as reply:
        answer: dict[str, Any] = json.load(reply)
    timings = answer["timings"]  # without a single draft it has neither count
    return Served(answer["tokens"], timings.get("draft_n", 0), timings.get("draft_n_accepted", 0))


if __name__ == "__main__":
    main()
