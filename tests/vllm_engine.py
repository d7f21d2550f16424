"""vLLM's CPU build and the speculators package in child processes: they live in an environment of their own.

Tests import this file; the interpreter of .venv-vllm (`make test-vllm`) runs it, without this project's packages.
"""

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

PYTHON = Path(__file__).parents[1] / ".venv-vllm" / "bin" / "python"
TIMEOUT_S = 1200  # interpreted kernels take 70 s on idle cores, and ten minutes on busy ones
COUNTERS = {"num_drafts": "drafts", "num_draft_tokens": "proposed", "num_accepted_tokens": "accepted"}
SETTINGS = {
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # counters and patches are of one process
    "VLLM_NO_USAGE_STATS": "1",
}
# Only vLLM's second model runner has DSpark and DFlash 2. Its kernels are Triton's: interpreted, they need no GPU.
SECOND_RUNNER = {"TRITON_INTERPRET": "1", "VLLM_USE_V2_MODEL_RUNNER": "1"}


@dataclass(frozen=True)
class Served:
    """One greedy answer: its tokens, and how many drafts of how many tokens were verified and accepted on the way."""

    tokens: list[int]
    drafts: int
    proposed: int
    accepted: int


@dataclass(frozen=True)
class Understood:
    """What a speculators folder says to its readers."""

    speculators: dict[str, Any]  # the package's own config
    misfits: list[str]  # tensors that its model has and the file has not, the other way round, or with other values
    vllm: dict[str, Any]  # the config that vLLM makes of it
    vllm_method: dict[str, Any]  # what vLLM would speculate with


def serve(
    target: Path, prompts: Sequence[list[int]], *, speculation: Mapping[str, Any], num_tokens: int
) -> list[Served]:
    """Answer token-id prompts one after the other, in float32. End tokens end nothing."""
    request = {"target": str(target), "prompts": prompts, "speculation": speculation, "num_tokens": num_tokens}
    architectures = json.loads((Path(speculation["model"]) / "config.json").read_text())["architectures"]
    needs_second = speculation["method"] == "dspark" or architectures == ["DFlash2DraftModel"]
    answers = _in_child("serve", request, SECOND_RUNNER if needs_second else {})
    return [Served(**answer) for answer in answers]


def understand(folders: Sequence[Path]) -> list[Understood]:
    """Load folders in the speculators format with both of its readers."""
    answers = _in_child("understand", {"folders": [str(folder) for folder in folders]}, {})
    return [Understood(**answer) for answer in answers]


def _in_child(task: str, request: Mapping[str, Any], settings: Mapping[str, str]) -> Any:
    command = ["nice", str(PYTHON), __file__, task]
    environment = os.environ | SETTINGS | settings
    done = subprocess.run(
        command, input=json.dumps(request), capture_output=True, text=True, timeout=TIMEOUT_S, env=environment
    )
    log = (done.stdout + done.stderr)[-3000:]
    assert done.returncode == 0, f"{task} ended with {done.returncode}:\n{log}"
    return json.loads(done.stdout.splitlines()[-1])


# ---- in the child


def main() -> None:
    request = json.load(sys.stdin)
    answer = {"serve": _serve, "understand": _understand}[sys.argv[1]](request)
    sys.stdout.write("\n" + json.dumps(answer, default=str) + "\n")


def _serve(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    if os.environ.keys() >= SECOND_RUNNER.keys():
        _let_triton_be_interpreted()
    from vllm import LLM, SamplingParams

    _norm_each_layers_keys()
    _name_gemma4_layers_apart()
    llm = LLM(
        model=request["target"],
        skip_tokenizer_init=True,
        dtype="float32",
        enforce_eager=True,
        max_model_len=256,
        kv_cache_memory_bytes=2**28,
        max_num_seqs=4,
        disable_log_stats=False,  # without them there are no counters
        speculative_config=request["speculation"],
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=request["num_tokens"], ignore_eos=True, detokenize=False)
    answers, before = [], _counters(llm)
    for prompt in request["prompts"]:
        tokens = list(llm.generate({"prompt_token_ids": prompt}, sampling, use_tqdm=False)[0].outputs[0].token_ids)
        after = _counters(llm)
        answers.append({"tokens": tokens, **{name: after[name] - before[name] for name in after}})
        before = after
    return answers


def _let_triton_be_interpreted() -> None:
    """vLLM's CPU build takes Triton for usable only where it has a backend named "cpu", which no release has.
    Interpreted kernels use none, so a stand-in will do. Must come before the first import of vllm."""
    from triton.backends import backends

    backends["cpu"] = SimpleNamespace(driver=None, compiler=None)  # type: ignore[assignment]


def _norm_each_layers_keys() -> None:
    """Block drafters normalise the context's keys of all layers in one call, with weights [layers, head_dim]; vLLM
    0.32's CPU kernel takes the first layer's for every layer. Greedy answers stay right, drafts get worse."""
    import torch
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normalize(self: Any, keys: torch.Tensor) -> torch.Tensor:  # [layers, tokens, heads, head_dim]
        scale = torch.rsqrt(keys.pow(2).mean(-1, keepdim=True) + self._rms_norm_eps)
        return keys * scale * self._k_norm_weights[:, None, None, :]

    DFlashQwen3Model._normalize_context_k = normalize


def _name_gemma4_layers_apart() -> None:
    """vLLM 0.32 gives a drafter's Gemma 4 layers the names of a text-only target's, and refuses to start beside one. A
    Gemma 4 that takes pictures has others."""
    from vllm.model_executor.models.gemma4_dspark import Gemma4DSparkForCausalLM

    original = Gemma4DSparkForCausalLM.__init__

    def init(self: Any, *, vllm_config: Any, prefix: str = "") -> None:
        original(self, vllm_config=vllm_config, prefix=prefix or "draft")

    Gemma4DSparkForCausalLM.__init__ = init


def _counters(llm: Any) -> dict[str, int]:
    found = {metric.name.removeprefix("vllm:spec_decode_"): metric for metric in llm.get_metrics()}
    return {ours: int(found[theirs].value) for theirs, ours in COUNTERS.items()}


def _understand(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [_understand_folder(folder) for folder in request["folders"]]


def _understand_folder(folder: str) -> dict[str, Any]:
    import torch
    from safetensors.torch import load_file
    from speculators import SpeculatorModel
    from vllm.transformers_utils.config import get_config
    from vllm.transformers_utils.configs.speculators import SpeculatorsConfig

    model = SpeculatorModel.from_pretrained(folder)
    written, loaded = load_file(f"{folder}/model.safetensors"), model.state_dict()
    loaded = {name: tensor for name, tensor in loaded.items() if not name.startswith("verifier_")}  # of the target
    both = written.keys() & loaded.keys()
    misfits = [*(written.keys() ^ loaded.keys()), *(n for n in both if not torch.equal(written[n], loaded[n]))]
    config, _ = SpeculatorsConfig.get_config_dict(folder)
    return {
        "speculators": model.config.to_dict(),
        "misfits": sorted(misfits),
        "vllm": get_config(folder, trust_remote_code=False).to_dict(),
        "vllm_method": SpeculatorsConfig.extract_vllm_speculative_config(config),
    }


if __name__ == "__main__":
    main()
