"""The load simulator: its sums by hand, and that calibrated schedules lose to no fixed length."""

import numpy as np
import pytest

from eval.costs import CostTable
from eval.rounds import Generation, Round
from eval.schedule import Schedule, ScheduleName
from eval.simulate import Load, compare, simulate

FIXED = Schedule(ScheduleName.fixed, 0.0)
K = 4


def recorded_runs(seed: int, num_requests: int = 60) -> list[Generation]:
    """Requests with easy and hard passages, whose confidences are the true chances."""
    rng, generations = np.random.default_rng(seed), []
    for request in range(num_requests):
        level, rounds = rng.uniform(0.1, 0.95), []
        for _ in range(int(rng.integers(10, 60))):
            level = float(np.clip(level + rng.normal(0, 0.1), 0.05, 0.97))
            chances = np.clip(level + rng.normal(0, 0.1, K), 0.02, 0.98)
            accepted = int(np.cumprod(rng.random(K) < chances).sum())
            rounds.append(Round(K, accepted, bonus=True, confidence=tuple(chances)))
        generations.append(Generation(request, rounds=rounds))
    return generations


def costs_of(fixed: float, each: float, draft: float) -> CostTable:
    """Verifying costs `fixed` and `each` a token, drafting `draft` and a tenth of a token's cost a request."""
    loads = [1, 8, 64]
    verify = [[fixed + each * load * (k + 1) for k in range(K + 1)] for load in loads]
    return CostTable(loads, [[0.0] + [draft + 0.1 * each * load] * K for load in loads], verify)


def test_plain_decoding_takes_the_time_of_its_verifications() -> None:
    found = simulate(recorded_runs(0), FIXED, costs_of(1.0, 0.1, 0.2), 4, num_draft_tokens=0, num_rounds=50)
    assert found == Load(4, pytest.approx(4 / (1.0 + 0.4)), 0.0, 1.0)


def test_a_fixed_length_gains_what_was_accepted_of_it() -> None:
    rounds = [Round(K, accepted, bonus=True, confidence=(0.5,) * K) for accepted in (0, 1, 2, 3, 4, 4)]
    runs = [Generation(0, rounds=rounds)]
    for length in range(1, K + 1):
        found = simulate(runs, FIXED, costs_of(1.0, 0.1, 0.2), 1, num_draft_tokens=length, num_rounds=6 * 50)
        gained = 1 + np.mean([min(r.accepted, length) for r in rounds])
        assert found.tokens_per_round == pytest.approx(gained)
        assert found.drafts_per_request == length
        assert found.tokens_per_second == pytest.approx(gained / (0.2 + 0.01 + 1.0 + 0.1 * (1 + length)))


@pytest.mark.parametrize("costs", [(1.0, 0.02, 0.1), (0.2, 0.2, 0.1), (1.0, 0.05, 2.5)], ids=["flat", "steep", "dear"])
def test_schedules_lose_to_no_fixed_length_and_with_the_gate_not_to_plain_decoding(
    costs: tuple[float, float, float],
) -> None:
    loads = [1, 8, 64]
    found = compare(recorded_runs(1), costs_of(*costs), loads, scaling=None, threshold=0.5, num_rounds=120)
    rates = {name: [load.tokens_per_second for load in rows] for name, rows in found.items()}
    for place in range(len(loads)):
        best_fixed = max(rates[f"fixed {k}"][place] for k in range(1, K + 1))
        for name in ("algorithm1", "async"):
            assert rates[name][place] > 0.97 * best_fixed, (name, loads[place])
            assert rates[f"{name}, gate"][place] > 0.97 * rates["vanilla"][place], (name, loads[place])
    if costs == (1.0, 0.02, 0.1):
        assert any(
            rates["async"][p] > 1.03 * max(rates["vanilla"][p], *(rates[f"fixed {k}"][p] for k in range(1, K + 1)))
            for p in range(len(loads))
        )


def test_the_budget_falls_with_the_load() -> None:
    found = compare(
        recorded_runs(2), costs_of(1.0, 0.05, 0.1), [1, 16, 64], scaling=None, threshold=0.5, num_rounds=100
    )
    for name in ("algorithm1", "async"):
        budgets = [load.drafts_per_request for load in found[name]]
        assert budgets[0] > budgets[1] > budgets[2]


def test_a_simulation_repeats_itself() -> None:
    runs, costs = recorded_runs(3), costs_of(1.0, 0.1, 0.1)
    first, again = (simulate(runs, FIXED, costs, 3, num_draft_tokens=2, num_rounds=30) for _ in range(2))
    assert first == again
    assert first != simulate(runs, FIXED, costs, 3, num_draft_tokens=2, num_rounds=30, seed=1)


def test_rounds_without_confidences_cannot_be_simulated() -> None:
    runs = [Generation(0, rounds=[Round(4, 2, bonus=True)])]
    with pytest.raises(ValueError, match="needs recorded rounds with confidences"):
        simulate(runs, FIXED, costs_of(1.0, 0.1, 0.1), 1, num_draft_tokens=2, num_rounds=3)
