"""Outputs against plain decoding, by task: equal ones, near ties, and distributions that speculation must not move."""

from dataclasses import replace
from typing import Any

import pytest

from eval.decode import decode
from eval.identity import divergences
from eval.lossless import greedy_agreement, length_p_value, sampled_agreement
from eval.rounds import Generation
from eval.stats import Pass
from eval.verify import Rule
from models.dspark import DSpark
from models.target import Target
from tests.test_decode import SAMPLED, config_of


def pass_of(prompts: list[list[int]], generations: list[Generation], tasks: int = 2) -> Pass:
    domains = [f"task {i % tasks}" for i in range(len(prompts))]
    return Pass(generations, 1.0, 0.0, 0.0, about={}, domains=domains, prompts=prompts)


def agreement(target: Target, measured: Pass, vanilla: Pass) -> list[dict[str, Any]]:
    return greedy_agreement(measured, divergences(target, measured, vanilla))


def test_greedy_outputs_are_counted_by_task_and_divergences_placed(
    tiny_target: Target, tiny_dspark: DSpark, tiny_prompts: list[list[int]]
) -> None:
    config = config_of(max_new_tokens=12)
    plain, ours = (decode(tiny_target, d, tiny_prompts, config).generations for d in (None, tiny_dspark))
    changed = [replace(g, tokens=list(g.tokens)) for g in ours]
    changed[3].tokens[2] = (changed[3].tokens[2] + 1) % 40
    vanilla = pass_of(tiny_prompts, plain)
    rows = agreement(tiny_target, pass_of(tiny_prompts, ours), vanilla)
    assert [(row["num_prompts"], row["equal"]) for row in rows] == [(6, 6), (6, 6)]
    even, odd = agreement(tiny_target, pass_of(tiny_prompts, changed), vanilla)
    assert (even["task"], even["equal"], odd["equal"]) == ("task 0", 6, 5)
    (found,) = odd["divergences"]
    assert (found["prompt"], found["position"]) == (3, 2) and found["top2_gap"] > 1e-4 and odd["near_ties"] == 0


def sampled(target: Target, drafter: Any, prompts: list[list[int]], **changes: Any) -> Pass:
    config = config_of(sampling=SAMPLED, max_new_tokens=8, batch_size=400, **changes)
    return pass_of(prompts, decode(target, drafter, prompts, config).generations, tasks=1)


@pytest.mark.parametrize("rule", [Rule.ratio, Rule.match])
def test_lossless_samples_agree_with_plain_ones_and_lossy_ones_do_not(
    tiny_target: Target, tiny_dspark: DSpark, tiny_prompts: list[list[int]], rule: Rule
) -> None:
    """One prompt many times, so that its tokens can be counted."""
    prompts = [tiny_prompts[1]] * 1200
    vanilla = sampled(tiny_target, None, prompts)
    (row,) = sampled_agreement(sampled(tiny_target, tiny_dspark, prompts, rule=rule), vanilla)
    assert row["num_prompts"] == 1200
    assert row["first_verified_token_p"] is not None and min(row["first_verified_token_p"], row["length_p"]) > 1e-4
    lossy = sampled(tiny_target, tiny_dspark, prompts, rule=Rule.lossy_threshold, lossy_threshold=0.02)
    (row,) = sampled_agreement(lossy, vanilla)
    assert row["first_verified_token_p"] < 1e-6


def test_shorter_outputs_are_seen_and_too_few_say_nothing() -> None:
    long, short = ([Generation(i, [1] * (n + i % 7)) for i in range(60)] for n in (20, 14))
    assert length_p_value(long, long) == 1.0
    p_value = length_p_value(long, short)
    assert p_value is not None and p_value < 1e-6
    assert length_p_value(long[:4], short[:4]) is None
    (row,) = sampled_agreement(pass_of([[1]] * 3, long[:3], tasks=1), pass_of([[1]] * 3, short[:3], tasks=1))
    assert row["first_verified_token_p"] is None and row["length_p"] is None
