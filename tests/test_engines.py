"""Exported drafters in llama.cpp: the same tokens, and the same drafts proposed and accepted, prompt by prompt.

How its counts follow from our rounds stands in eval/counting.py. A mean over prompts hides faults that these pairs
show: a drafter that reads the wrong layers loses a few per cent only.
"""

import copy
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from data.store import FeatureStore
from eval.counting import as_llama_cpp
from eval.decode import DecodeConfig, decode
from eval.rounds import Generation
from eval.schedule import Schedule, ScheduleName
from eval.verify import Rule
from models.base import Drafter, Engine, Serving, SlotLayout
from models.checkpoint import save_drafter
from models.dflash import DFlash
from models.dspark import DSpark
from models.eagle3 import Eagle3
from models.export import export_drafter
from models.files import read_json
from models.gguf import speculative_type
from models.sampling import SamplingConfig
from models.target import Target, TargetConfig, TargetIdentity
from tests.conftest import build_drafter, build_dspark, dflash_config, eagle3_config, train_briefly
from tests.gguf_target import write_target
from tests.llama_cpp import Served, need_llama_cpp, running, serve
from tests.test_golden import CASES, GOLDEN, expected, load_case, target_of
from tests.test_scripts import Script, fails, prompts_file, script  # noqa: F401 (fixtures)

NUM_TOKENS, NUM_DRAFT_TOKENS = 48, 4
UNSEEN = 0  # <pad>, which the tiny target never says: as end token it lets every answer run to NUM_TOKENS
GREEDY = SamplingConfig(0.0, 0, 1.0, 0.0, 0)
GOLDEN_CASES = ("dspark_vanilla", "dflash_anchor_first", "dflash_in_place")  # llama.cpp has no such EAGLE-3
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}

pytestmark = pytest.mark.engine


@pytest.fixture(autouse=True)
def installed() -> None:
    need_llama_cpp()


@pytest.fixture(scope="module")
def endless(tiny_target: Target) -> Target:
    """The tiny target, whose end token ends nothing."""
    target = copy.copy(tiny_target)
    target.spec = replace(target.spec, eos_token_ids=(UNSEEN,))
    return target


def runtime(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    threshold: float,
    num_draft_tokens: int = NUM_DRAFT_TOKENS,
) -> list[Generation]:
    schedule = Schedule(ScheduleName.confidence if threshold else ScheduleName.fixed, threshold)
    config = DecodeConfig(NUM_TOKENS, len(prompts), num_draft_tokens, Rule.ratio, schedule, GREEDY)
    return decode(target, drafter, prompts, config).generations


def as_llama_cpp_counts(generation: Generation) -> Served:
    counts = as_llama_cpp(generation, NUM_TOKENS)
    assert counts.rounds == len(generation.tokens) - 1 - counts.accepted, "which is how its rounds are counted"
    return Served(generation.tokens, counts.proposed, counts.accepted)


def llama_cpp(
    target: Target,
    drafter: Drafter,
    prompts: list[list[int]],
    folder: Path,
    *,
    threshold: float = 0.0,
    dtype: torch.dtype = torch.float32,
    num_draft_tokens: int = NUM_DRAFT_TOKENS,
) -> list[Served]:
    """Export with our own function and serve."""
    write_target(target, folder / "target.gguf", end_token_id=target.spec.eos_token_ids[0])
    export_drafter(drafter, folder, engine=Engine.gguf, dtype=dtype, card="")
    kind = speculative_type(drafter.serving(Engine.gguf).config)
    if kind != "draft-eagle3":
        kind = None  # llama.cpp must find it out by itself
    options: dict[str, Any] = {"num_draft_tokens": num_draft_tokens, "num_tokens": NUM_TOKENS, "threshold": threshold}
    options["kind"] = kind
    return serve(folder / "target.gguf", folder / f"{type(drafter).__name__.lower()}.gguf", prompts, **options)


def dspark(target: Target, config: TargetConfig, store: FeatureStore) -> DSpark:
    return train_briefly(build_dspark(target, config, num_layers=2), store)


def dflash(target: Target, config: TargetConfig, store: FeatureStore) -> DFlash:
    return train_briefly(build_drafter(dflash_config(), target, config), store, num_steps=150)


def dflash_in_place(target: Target, config: TargetConfig, store: FeatureStore) -> DFlash:
    model = dflash_config(slot_layout=SlotLayout.in_place)
    return train_briefly(build_drafter(model, target, config), store, num_steps=150)


def scaled_rotary(target: Target, config: TargetConfig, store: FeatureStore) -> DSpark:
    """As for a Llama 3.1 target; only the drafter's own positions are scaled here."""
    rope = {**LLAMA3, "rope_theta": 10000.0, "original_max_position_embeddings": 16}
    scaled = copy.copy(target)
    scaled.spec = replace(target.spec, rope_parameters=rope)
    return train_briefly(build_dspark(scaled, config), store)


def eagle3(target: Target, config: TargetConfig, store: FeatureStore, **options: Any) -> Eagle3:
    model = eagle3_config(**options)
    return train_briefly(build_drafter(model, target, config), store, num_steps=150)


def eagle3_own_head(target: Target, config: TargetConfig, store: FeatureStore) -> Eagle3:
    return eagle3(target, config, store, own_head=True, norm_before_residual=True)


def eagle3_reduced(target: Target, config: TargetConfig, store: FeatureStore) -> Eagle3:
    return eagle3(target, config, store, draft_vocab_size=40, norm_before_fc=True)


@pytest.mark.parametrize(
    "make", [dspark, dflash, dflash_in_place, scaled_rotary, eagle3, eagle3_own_head, eagle3_reduced]
)
def test_llama_cpp_proposes_and_accepts_what_the_runtime_does(
    make: Callable[..., Drafter],
    endless: Target,
    tiny_target_config: TargetConfig,
    tiny_store: FeatureStore,
    tiny_prompts: list[list[int]],
    tmp_path: Path,
) -> None:
    drafter = make(endless, tiny_target_config, tiny_store)
    expected = [as_llama_cpp_counts(g) for g in runtime(endless, drafter, tiny_prompts, 0.0)]
    assert all(len(answer.tokens) == NUM_TOKENS for answer in expected)
    assert len({answer.accepted for answer in expected}) > 3  # it would notice a mix-up of prompts
    assert llama_cpp(endless, drafter, tiny_prompts, tmp_path) == expected


@pytest.mark.parametrize("threshold", [0.0, 0.6])
@pytest.mark.parametrize("case", GOLDEN_CASES)
def test_llama_cpp_proposes_and_accepts_what_was_recorded_of_the_reference(
    case: str, threshold: float, tmp_path: Path
) -> None:
    """Golden drafters, read from their own files; the rounds are the recorded ones (tests/test_golden.py)."""
    if case not in CASES:
        pytest.skip(f"no golden case {case} under {GOLDEN}; name their folder with GOLDEN")
    drafter, recorded = load_case(case), expected(case)["decode"]
    if threshold and f"confidence_threshold_{threshold:g}" not in recorded:
        pytest.skip(f"{case} has no confidence head")
    target, prompts = target_of(drafter.target_layer_ids), [sample["prompt"] for sample in recorded["samples"]]
    options = {"num_draft_tokens": drafter.num_draft_tokens, "threshold": threshold}
    ours = [as_llama_cpp_counts(g) for g in runtime(target, drafter, prompts, **options)]
    assert [answer.tokens for answer in ours] == [sample["output"] for sample in recorded["samples"]]
    assert len({answer.accepted for answer in ours}) > 3
    assert llama_cpp(target, drafter, prompts, tmp_path, **options) == ours


@pytest.mark.parametrize("threshold", [0.5, 0.65])
def test_the_confidence_threshold_is_llama_cpps_p_min(
    threshold: float, endless: Target, tiny_dspark: DSpark, tiny_prompts: list[list[int]], tmp_path: Path
) -> None:
    generations = runtime(endless, tiny_dspark, tiny_prompts, threshold)
    lengths = {round_.proposed for generation in generations for round_ in generation.rounds}
    assert lengths == set(range(NUM_DRAFT_TOKENS + 1))
    served = llama_cpp(endless, tiny_dspark, tiny_prompts, tmp_path, threshold=threshold)
    assert served == [as_llama_cpp_counts(generation) for generation in generations]


def test_an_accepted_end_token_is_llama_cpps_bonus_token(
    tiny_target: Target, tiny_dspark: DSpark, tiny_prompts: list[list[int]], tmp_path: Path
) -> None:
    generations = runtime(tiny_target, tiny_dspark, tiny_prompts, 0.0)
    assert {generation.rounds[-1].bonus for generation in generations} == {True, False}
    served = llama_cpp(tiny_target, tiny_dspark, tiny_prompts, tmp_path)
    assert served == [as_llama_cpp_counts(generation) for generation in generations]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_narrow_weights_leave_the_text_as_it_is(
    dtype: torch.dtype, endless: Target, tiny_dspark: DSpark, tiny_prompts: list[list[int]], tmp_path: Path
) -> None:
    generations = runtime(endless, tiny_dspark, tiny_prompts, 0.0)
    served = llama_cpp(endless, tiny_dspark, tiny_prompts, tmp_path, dtype=dtype)
    assert [answer.tokens for answer in served] == [generation.tokens for generation in generations]
    assert sum(answer.accepted for answer in served) > 0


@pytest.mark.parametrize(
    "fault",
    [{"dflash.target_layers": [0, 1, 2]}, {"dflash.sample_from_anchor": False}, {"dflash.attention.causal": True}],
    ids=lambda fault: next(iter(fault)),
)
def test_a_wrong_export_does_not_pass(
    fault: dict[str, Any],
    endless: Target,
    tiny_dspark: DSpark,
    tiny_prompts: list[list[int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """llama.cpp serves these without a word, and the text is right: only the counts tell."""
    right = tiny_dspark.serving(Engine.gguf)
    assert set(fault) <= set(right.config)
    wrong = Serving(right.config | fault, right.tensors)
    monkeypatch.setattr(tiny_dspark, "serving", lambda engine: wrong)
    served = llama_cpp(endless, tiny_dspark, tiny_prompts, tmp_path)
    expected = [as_llama_cpp_counts(g) for g in runtime(endless, tiny_dspark, tiny_prompts, 0.0)]
    assert [answer.tokens for answer in served] == [answer.tokens for answer in expected]
    assert served != expected


def test_eval_measures_a_running_llama_cpp(
    script: Script,
    fails: Callable[..., str],
    prompts_file: Path,
    tiny_target: Target,
    tiny_dspark: DSpark,
    tiny_identity: TargetIdentity,
    tmp_path: Path,
) -> None:
    """Equal counts prompt by prompt, stop tokens and all; and one error where it drafts another number of tokens."""
    save_drafter(tiny_dspark, tmp_path / "drafter", target=asdict(tiny_identity))
    write_target(tiny_target, tmp_path / "target.gguf", end_token_id=tiny_target.spec.eos_token_ids[0])
    export_drafter(tiny_dspark, tmp_path, engine=Engine.gguf, dtype=torch.float32, card="")
    asked = [f"draft={tmp_path / 'drafter'}", f"output_dir={tmp_path}", f"tasks=[{prompts_file}]", "num_prompts=12"]
    asked += [
        f"max_new_tokens={NUM_TOKENS}",
        "baselines=[]",
        "replay=null",
        "check_transformers=0",
        "temperature=[0,1]",
    ]
    served = tmp_path / "target.gguf", tmp_path / "dspark.gguf"
    with running(*served, num_draft_tokens=NUM_DRAFT_TOKENS) as url:
        script("eval", *asked, "batch_size=1", f"server={url}")
        found = read_json(tmp_path / "eval" / "report.json")["server"]
        greedy, sampled = found["rows"]
        assert (found["engine"], found["vocab_size"], found["context"]) == ("llama.cpp", 55, 512)
        assert greedy["equal_counts"] == greedy["equal_outputs"] == greedy["num_prompts"] == 12
        assert greedy["counts"] == greedy["offline_counts"] and greedy["counts"]["accepted"] > 12
        assert "the same counts on every prompt" in (tmp_path / "summary.md").read_text()
        assert sampled["interval"] is not None and sampled["acceptance_length"] > 1
        assert "here num_draft_tokens=3: set that to the server's" in fails(
            "eval", *asked, f"server={url}", "num_draft_tokens=3"
        )
    assert f"server {url} does not answer" in fails("eval", *asked, f"server={url}")
