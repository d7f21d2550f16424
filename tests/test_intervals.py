"""Bootstrap intervals against their definition, and that they hold what they promise."""

import numpy as np
import pytest

from eval.intervals import difference_interval, length_interval, resampled_lengths
from eval.rounds import Generation, Round


def requests(rng: np.random.Generator, count: int, *, mean: float, spread: float = 1.0) -> list[Generation]:
    """Requests of 5 to 20 rounds, each with an own mean of accepted drafts of 8."""
    found = []
    for index in range(count):
        chance = np.clip(rng.normal(mean, spread) / 8, 0, 1)
        rounds = [Round(8, int(rng.binomial(8, chance)), bonus=True) for _ in range(rng.integers(5, 21))]
        found.append(Generation(index, rounds=rounds))
    return found


def test_a_resample_is_the_pooled_length_of_requests_drawn_with_replacement() -> None:
    generations = requests(np.random.default_rng(0), 4, mean=3)
    pooled = {
        round(sum(r.accepted + 1 for g in drawn for r in g.rounds) / sum(len(g.rounds) for g in drawn), 9)
        for drawn in ([generations[i] for i in ids] for ids in np.ndindex(4, 4, 4, 4))
    }
    assert {round(float(x), 9) for x in resampled_lengths(generations)} == pooled


def test_nineteen_of_twenty_intervals_hold_the_true_length() -> None:
    rng = np.random.default_rng(1)
    held = 0
    for _ in range(200):
        interval = length_interval(requests(rng, 60, mean=3))
        assert interval is not None
        held += interval.low <= 4 <= interval.high
    assert 175 <= held <= 199


def test_pairs_are_told_apart_where_single_intervals_overlap() -> None:
    rng = np.random.default_rng(2)
    theirs = requests(rng, 40, mean=3, spread=2.0)
    better = [
        Generation(
            g.request_id,
            rounds=[Round(8, min(8, r.accepted + (i % 3 == 0)), bonus=True) for i, r in enumerate(g.rounds)],
        )
        for g in theirs
    ]
    ours_alone, theirs_alone = length_interval(better), length_interval(theirs)
    assert ours_alone is not None and theirs_alone is not None and ours_alone.low < theirs_alone.high
    difference = difference_interval(better, theirs)
    assert difference is not None and 0.1 < difference.low < difference.high < 0.5
    same = difference_interval(theirs, theirs)
    assert same == (0.0, 0.0)


def test_too_little_to_say_anything_of_says_nothing() -> None:
    one = [Generation(0, rounds=[Round(2, 1, bonus=True)]), Generation(1)]
    assert length_interval(one) is None and difference_interval(one, one) is None
    with pytest.raises(ValueError, match="the same prompts, got 2 and 1"):
        difference_interval(one, one[:1])
