"""Near ties and real divergences are told apart, and counted."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

import eval.identity as identity_module
from eval.identity import NEAR_TIE, first_difference, identity_of, top2_gap
from eval.rounds import Generation
from eval.stats import Pass
from models.target import Target, TargetConfig


def pass_of(tokens: list[list[int]]) -> Pass:
    generations = [Generation(index, row) for index, row in enumerate(tokens)]
    count = len(tokens)
    return Pass(generations, 1.0, 0.0, 1.0, about={}, domains=["d"] * count, prompts=[[9]] * count)


@pytest.mark.parametrize(
    ("ours", "theirs", "place"),
    [
        ([], [], None),
        ([1, 2], [1, 2], None),
        ([1, 2], [1, 3], 1),
        ([1, 2, 3], [9, 2, 3], 0),
        ([1], [1, 2], 1),
        ([1, 2], [1], 1),
        ([], [1], 0),
    ],
)
def test_first_difference(ours: list[int], theirs: list[int], place: int | None) -> None:
    assert first_difference(ours, theirs) == place


def test_equal_outputs_are_identical_without_asking_the_target(tiny_target: Target) -> None:
    same = [[1, 2, 3], [4]]
    assert identity_of(tiny_target, pass_of(same), pass_of(same)) == {
        "num_prompts": 2,
        "outputs_identical_to_vanilla": True,
        "near_tie_divergences": 0,
        "divergences": [],
    }


def gaps(monkeypatch: pytest.MonkeyPatch, *values: float) -> list[list[int]]:
    """Let the target prefer its first token by these gaps, one a question; returns the contexts asked for."""
    asked: list[list[int]] = []
    remaining = list(values)

    def fake(_target: Target, tokens: list[int]) -> float:
        asked.append(tokens)
        return remaining.pop(0)

    monkeypatch.setattr(identity_module, "top2_gap", fake)
    return asked


def test_a_near_tie_is_counted_and_the_outputs_stay_identical(
    monkeypatch: pytest.MonkeyPatch, tiny_target: Target
) -> None:
    asked = gaps(monkeypatch, NEAR_TIE / 2)
    found = identity_of(tiny_target, pass_of([[1, 2, 3], [4]]), pass_of([[1, 2, 5], [4]]))
    assert asked == [[9, 1, 2]], "the context is the prompt and the common tokens"
    assert found["outputs_identical_to_vanilla"] and found["near_tie_divergences"] == 1
    assert found["divergences"] == []


def test_a_real_divergence_is_reported_where_it_is(monkeypatch: pytest.MonkeyPatch, tiny_target: Target) -> None:
    gaps(monkeypatch, NEAR_TIE)  # the limit itself is a preference
    found = identity_of(tiny_target, pass_of([[4], [1, 2, 3]]), pass_of([[4], [1, 7, 3]]))
    assert not found["outputs_identical_to_vanilla"] and found["near_tie_divergences"] == 0
    assert found["divergences"] == [{"prompt": 1, "position": 1, "top2_gap": NEAR_TIE}]


@pytest.mark.parametrize(("num_prompts", "ties", "identical"), [(200, 1, True), (200, 2, False), (201, 2, True)])
def test_more_than_one_near_tie_per_200_prompts_is_not_identical(
    monkeypatch: pytest.MonkeyPatch, tiny_target: Target, num_prompts: int, ties: int, identical: bool
) -> None:
    gaps(monkeypatch, *[0.0] * ties)
    ours, theirs = [[1]] * num_prompts, [[2]] * ties + [[1]] * (num_prompts - ties)
    found = identity_of(tiny_target, pass_of(ours), pass_of(theirs))
    assert (found["near_tie_divergences"], found["outputs_identical_to_vanilla"]) == (ties, identical)


def test_the_gap_is_that_of_the_targets_own_float64_logits(
    tiny_target: Target, tiny_target_config: TargetConfig, tiny_prompts: list[list[int]]
) -> None:
    model = AutoModelForCausalLM.from_pretrained(Path(tiny_target_config.path), dtype=torch.float64).eval()
    for prompt in tiny_prompts[:3]:
        with torch.no_grad():
            first, second = model(torch.tensor([prompt])).logits[0, -1].topk(2).values.tolist()
        # Rotary tables stay in float32 in both.
        assert top2_gap(tiny_target, prompt) == pytest.approx(first - second, abs=1e-5)
    assert tiny_target.head.dtype == torch.float32, "the target itself is left as it was"
