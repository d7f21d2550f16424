"""Exported drafters in vLLM's CPU build: the same tokens, and as many drafts and accepted tokens, prompt by prompt.

How vLLM (0.32) counts, and how its counts follow from our rounds:
- A draft is counted when it is verified, in full: of the last one neither the drafted nor the accepted tokens are cut
  at the limit. Nor are they in our rounds.
- The first token comes from the prompt's own forward and belongs to no round, in both.
A mean over prompts hides faults that these counts show: a drafter that reads the wrong layers loses a few per cent.
"""

import json
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch

from data.store import FeatureStore
from eval.rounds import Generation
from models.base import Drafter
from models.block import BlockDrafter
from models.dspark import DSpark
from models.export import export_drafter
from models.target import Target, TargetConfig
from tests.conftest import build_dspark, train_briefly
from tests.test_engines import NUM_DRAFT_TOKENS, NUM_TOKENS, endless, runtime  # noqa: F401 (a fixture)
from tests.test_golden import CASES, GOLDEN, expected, load_case
from tests.vllm_engine import PYTHON, Served, serve
from tests.wider_heads import widen_heads

METHODS = {"Qwen3DSparkModel": "dspark", "DFlashDraftModel": "dflash"}  # by architecture; of all others eagle3

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not PYTHON.exists(), reason=f"no {PYTHON}: `make test-vllm` builds its environment"),
]


def exported(drafter: Drafter, folder: Path) -> Path:
    export_drafter(drafter, folder, engine="deepspec", dtype=torch.float32, card="")
    return folder


def vllm(target: str | Path, draft: Path, prompts: list[list[int]]) -> list[Served]:
    architecture = json.loads((draft / "config.json").read_text())["architectures"][0]
    method = METHODS.get(architecture, "eagle3")
    options: dict[str, Any] = {"num_draft_tokens": NUM_DRAFT_TOKENS, "num_tokens": NUM_TOKENS}
    return serve(Path(target), draft, prompts, method=method, **options)


def as_vllm_counts(generation: Generation) -> Served:
    drafts, accepted = len(generation.rounds), sum(round_.accepted for round_ in generation.rounds)
    return Served(generation.tokens, drafts, drafts * NUM_DRAFT_TOKENS, accepted)


def recorded_counts(sample: dict[str, Any]) -> Served:
    """Of a golden case. Its reference may run one round more, where exactly the limit is out."""
    ends = list(accumulate(sample["acceptance_lengths"]))
    drafts = 1 + sum(end < NUM_TOKENS - 1 for end in ends)
    return Served(sample["output"], drafts, drafts * NUM_DRAFT_TOKENS, ends[drafts - 1] - drafts)


def dspark(target: Target, config: TargetConfig, store: FeatureStore) -> DSpark:
    return train_briefly(build_dspark(target, config, num_layers=2), store)


@pytest.mark.parametrize("make", [dspark])
def test_vllm_drafts_and_accepts_what_the_runtime_does(
    make: Callable[..., BlockDrafter],
    endless: Target,
    tiny_target_config: TargetConfig,
    tiny_store: FeatureStore,
    tiny_prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    drafter = make(endless, tiny_target_config, tiny_store)
    expected = [as_vllm_counts(generation) for generation in runtime(endless, drafter, tiny_prompts, 0.0)]
    assert all(len(answer.tokens) == NUM_TOKENS for answer in expected)
    assert len({answer.accepted for answer in expected}) > 3  # it would notice a mix-up of prompts
    assert vllm(tiny_target_config.path, exported(drafter, tmp_path), tiny_prompts) == expected


@pytest.mark.skipif(not CASES, reason=f"no golden cases under {GOLDEN}; name their folder with GOLDEN")
@pytest.mark.parametrize("case", ["dspark_vanilla"])
def test_vllm_drafts_and_accepts_what_the_reference_does(case: str, tmp_path: Path) -> None:
    target = widen_heads(GOLDEN / "target", tmp_path / "target")
    drafter = widen_heads(exported(load_case(case), tmp_path / "exported"), tmp_path / "drafter")
    recorded = expected(case)["decode"]
    assert recorded["max_new_tokens"] == NUM_TOKENS
    prompts = [sample["prompt"] for sample in recorded["samples"]]
    assert vllm(target, drafter, prompts) == [recorded_counts(sample) for sample in recorded["samples"]]


def test_wrong_layers_do_not_pass(
    endless: Target,
    tiny_target_config: TargetConfig,
    tiny_dspark: DSpark,
    tiny_prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    """vLLM serves them without a word, and the text is right: only the counts tell."""
    config = json.loads((exported(tiny_dspark, tmp_path) / "config.json").read_text())
    wrong = [layer_id + 1 for layer_id in config["target_layer_ids"]]
    (tmp_path / "config.json").write_text(json.dumps(config | {"target_layer_ids": wrong}))
    prompts = tiny_prompts[:4]
    served = vllm(tiny_target_config.path, tmp_path, prompts)
    expected = [as_vllm_counts(generation) for generation in runtime(endless, tiny_dspark, prompts, 0.0)]
    assert [answer.tokens for answer in served] == [answer.tokens for answer in expected]
    assert served != expected
