"""llama.cpp (the PyPI package xllamacpp) in a child process: it ends its process on files that it cannot use."""

import json
import subprocess
import sys
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TIMEOUT_S = 120


@dataclass(frozen=True)
class Served:
    """One greedy answer: its tokens, and how many draft tokens were proposed and accepted on the way."""

    tokens: list[int]
    proposed: int
    accepted: int


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
    """Answer token-id prompts one after the other, in float32. `kind` is --spec-type; None: llama.cpp finds it out."""
    request = {"target": str(target), "draft": str(draft), "prompts": list(prompts), "num_tokens": num_tokens}
    request |= {"num_draft_tokens": num_draft_tokens, "threshold": threshold, "kind": kind}
    done = subprocess.run(
        [sys.executable, __file__], input=json.dumps(request), capture_output=True, text=True, timeout=TIMEOUT_S
    )
    log = (done.stdout + done.stderr)[-3000:]
    assert done.returncode == 0, f"llama.cpp ended with {done.returncode}:\n{log}"
    return [Served(**answer) for answer in json.loads(done.stdout.splitlines()[-1])]


def main() -> None:
    import xllamacpp as engine

    request = json.load(sys.stdin)
    params = engine.CommonParams()
    params.model.path = request["target"]
    params.n_ctx, params.n_parallel, params.cpuparams.n_threads = 512, 1, 1
    params.verbosity = 1  # errors
    params.flash_attn_type = engine.llama_flash_attn_type.LLAMA_FLASH_ATTN_TYPE_DISABLED
    draft = params.speculative.draft
    draft.mparams.path, draft.n_max, draft.p_min = request["draft"], request["num_draft_tokens"], request["threshold"]
    if request["kind"] is not None:
        types = {kind.name: kind for kind in engine.common_speculative_type}
        params.speculative.types = [types[f"COMMON_SPECULATIVE_TYPE_{request['kind'].upper().replace('-', '_')}"]]
    for part in (params, draft):  # float16 by default
        part.cache_type_k = part.cache_type_v = engine.ggml_type.GGML_TYPE_F32
    server = engine.Server(params)
    answers = [complete(server.listening_address, prompt, request["num_tokens"]) for prompt in request["prompts"]]
    sys.stdout.write("\n" + json.dumps(answers) + "\n")


def complete(address: str, prompt: list[int], num_tokens: int) -> dict[str, Any]:
    body = {"prompt": prompt, "n_predict": num_tokens, "temperature": 0, "return_tokens": True, "cache_prompt": False}
    call = urllib.request.Request(f"{address}/completion", json.dumps(body).encode())
    with urllib.request.urlopen(call, timeout=TIMEOUT_S) as reply:
        answer = json.load(reply)
    timings = answer["timings"]  # without a single draft it has neither count
    proposed, accepted = timings.get("draft_n", 0), timings.get("draft_n_accepted", 0)
    return {"tokens": answer["tokens"], "proposed": proposed, "accepted": accepted}


if __name__ == "__main__":
    main()
