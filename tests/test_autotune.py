"""The choice of a length from given costs, and that real costs are measured for every length."""

import pytest

import eval.autotune as autotune_module
import eval.costs as costs_module
from eval.autotune import LengthChoice, choose_num_draft_tokens, round_seconds
from eval.decode import DecodeConfig, decode
from eval.schedule import Schedule, ScheduleName
from eval.stats import acceptance_stats
from eval.verify import Rule
from models.dspark import DSpark
from models.ngram import NgramDrafter
from models.sampling import SamplingConfig
from models.target import Target

K = 4
CONFIG = DecodeConfig(16, 12, 0, Rule.ratio, Schedule(ScheduleName.fixed, 0.0), SamplingConfig(0.0, 0, 1.0, 0.0, 0))


@pytest.fixture
def choose(monkeypatch: pytest.MonkeyPatch, tiny_target: Target, tiny_dspark: DSpark, tiny_prompts: list[list[int]]):
    """Choose with given (draft, verify) seconds for 0 .. K draft tokens and the drafter's real acceptance."""

    def run(costs: list[tuple[float, float]]) -> LengthChoice:
        monkeypatch.setattr(autotune_module, "round_seconds", lambda *_: costs)
        return choose_num_draft_tokens(tiny_target, tiny_dspark, tiny_prompts, CONFIG)

    return run


def test_free_drafts_are_taken_in_full_and_dear_ones_not_at_all(choose) -> None:
    assert choose([(0.0, 1.0)] * (K + 1)).num_draft_tokens >= 3  # the last slot may never be accepted
    assert choose([(10.0 * length, 1.0) for length in range(K + 1)]).num_draft_tokens == 0


@pytest.mark.parametrize("cliff", range(1, K))
def test_a_cost_cliff_moves_the_choice_below_it(choose, cliff: int) -> None:
    """Verifying more than `cliff` tokens costs a hundred times as much."""
    costs = [(0.001 * bool(length), 1.0 if length <= cliff else 100.0) for length in range(K + 1)]
    assert choose(costs).num_draft_tokens == cliff


def test_the_best_expected_rate_is_chosen(
    choose, tiny_target: Target, tiny_dspark: DSpark, tiny_prompts: list[list[int]]
) -> None:
    costs = [(0.0, 1.0), (0.25, 1.1), (0.3, 1.2), (0.35, 1.6), (0.4, 2.2)]
    full = DecodeConfig(16, 12, K, CONFIG.rule, CONFIG.schedule, CONFIG.sampling)
    survival = acceptance_stats(decode(tiny_target, tiny_dspark, tiny_prompts, full).generations).survival
    rates = [
        len(tiny_prompts) * (1 + sum(survival[:length])) / (draft + verify)
        for length, (draft, verify) in enumerate(costs)
    ]
    choice = choose(costs)
    assert [row["expected_tokens_per_second"] for row in choice.table] == pytest.approx(rates)
    assert choice.num_draft_tokens == rates.index(max(rates))
    assert choice.batch_size == len(tiny_prompts)


def test_costs_are_measured_for_every_length_without_moving_the_state(
    monkeypatch: pytest.MonkeyPatch, tiny_target: Target, tiny_dspark: DSpark, tiny_prompts: list[list[int]]
) -> None:
    monkeypatch.setattr(costs_module, "REPEATS", 1)
    for drafter in (tiny_dspark, NgramDrafter(K)):
        costs = round_seconds(tiny_target, drafter, tiny_prompts)
        assert len(costs) == K + 1
        assert all(verify > 0 for _, verify in costs)
        assert all(draft > 0 for draft, _ in costs[1:])
