"""Sequential temperature scaling on rounds of known miscalibration, and its measures by hand."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from eval.calibrate import (
    CALIBRATION,
    Recorded,
    area_under_curve,
    assess,
    calibration_error,
    fit_temperatures,
    load_temperatures,
    recorded,
    scaled,
)
from eval.decode import Generation, Round
from models.files import write_json

TRUE = [1.6, 0.7, 2.2]  # the temperatures that were left out of the confidences


def rounds_of(num_rounds: int, seed: int, temperatures: list[float] = TRUE) -> Recorded:
    """Drafts that are accepted with the confidences that the temperatures would give."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.0, 2.0, size=(num_rounds, len(temperatures)))
    chances = 1 / (1 + np.exp(-logits / np.array(temperatures)))
    survived = np.cumprod(rng.random(chances.shape) < chances, axis=1).astype(np.float64)
    return Recorded(1 / (1 + np.exp(-logits)), survived, np.ones_like(survived, dtype=bool))


def test_the_temperatures_that_were_left_out_are_found_and_calibrate_other_rounds() -> None:
    fitted, held_out = fit_temperatures(rounds_of(40_000, 0)), rounds_of(40_000, 1)
    assert fitted == pytest.approx(TRUE, rel=0.15)
    before, after = assess(held_out), assess(held_out, fitted)
    assert max(after.ece) < 0.012 < min(before.ece[0], before.ece[2])
    assert after.to_dict()["mean_ece"] < 0.3 * before.to_dict()["mean_ece"]
    assert sum(after.brier) < sum(before.brier)
    assert after.auc == pytest.approx(before.auc, abs=0.02)  # the order within a slot hardly changes


def test_slots_are_fitted_left_to_right() -> None:
    """The error of a slot's product is least given the slots before it."""
    rounds = rounds_of(20_000, 2)
    fitted = fit_temperatures(rounds)
    for slot, other in itertools.product(range(3), (0.8, 1.25)):
        changed = [*fitted[:slot], fitted[slot] * other, *fitted[slot + 1 :]]
        assert assess(rounds, fitted).ece[slot] <= assess(rounds, changed).ece[slot] + 1e-9
    # a fault in an early slot is made good by the later ones, not by itself
    early = Recorded(np.where(np.arange(3) == 0, 0.999, rounds.confidence), rounds.survived, rounds.known)
    assert fit_temperatures(early)[0] > 2 and fit_temperatures(early)[1] != pytest.approx(fitted[1], rel=0.05)


def test_a_slot_with_one_outcome_only_keeps_its_confidence() -> None:
    rounds = rounds_of(500, 3)
    always = Recorded(rounds.confidence, np.ones_like(rounds.survived), rounds.known)
    assert fit_temperatures(always) == [1.0] * 3
    unknown = Recorded(rounds.confidence, rounds.survived, np.zeros_like(rounds.known))
    assert fit_temperatures(unknown) == [1.0] * 3


def test_calibration_error_by_hand() -> None:
    predicted, outcomes = np.array([0.02, 0.04, 0.52, 0.98, 1.0]), np.array([0.0, 1.0, 1.0, 1.0, 0.0])
    # bins of 0.05: {.02, .04}, {.52}, {.98, 1}
    expected = (2 * abs(0.03 - 0.5) + abs(0.52 - 1) + 2 * abs(0.99 - 0.5)) / 5
    assert calibration_error(predicted, outcomes) == pytest.approx(expected)


def test_area_under_curve_is_the_share_of_pairs_in_order() -> None:
    rng = np.random.default_rng(0)
    predicted, outcomes = rng.integers(0, 6, 60) / 6, (rng.random(60) < 0.4).astype(np.float64)
    positive, negative = predicted[outcomes > 0], predicted[outcomes == 0]
    pairs = [(p > n) + 0.5 * (p == n) for p in positive for n in negative]
    assert area_under_curve(predicted, outcomes) == pytest.approx(np.mean(pairs))
    assert area_under_curve(predicted, np.ones(60)) is None


def test_measures_are_of_the_rounds_that_proposed_a_slot() -> None:
    rounds = [
        Round(2, 1, True, (0.9, 0.4)),
        Round(1, 1, False, (0.5, 0.3)),
        Round(2, 2, True, (0.6, 0.8)),
        Round(2, 0, True),
    ]
    found = recorded([Generation(0, rounds=rounds)])
    assert found.confidence.tolist() == [[0.9, 0.4], [0.5, 0.3], [0.6, 0.8]]  # one without confidences is none
    assert found.survived.tolist() == [[1, 0], [1, 0], [1, 1]]
    assert found.known.tolist() == [[True, True], [True, False], [True, True]]
    measured = assess(found)
    assert measured.rounds == [3, 2] and measured.mean_survived == [1.0, 0.5]
    assert measured.brier[1] == pytest.approx(((0.36 - 0) ** 2 + (0.48 - 1) ** 2) / 2)
    assert measured.bins[1] == {
        "predicted": [pytest.approx(0.36), pytest.approx(0.48)],
        "survived": [0.0, 1.0],
        "share": [0.5, 0.5],
    }
    with pytest.raises(ValueError, match="needs a drafter with a confidence head"):
        recorded([Generation(0, rounds=[Round(2, 0, True)])])


def test_temperatures_divide_logits_and_pass_certainties() -> None:
    assert scaled(np.array([[0.9, 0.5, 1.0]]), [2.0, 3.0, 1.0])[0] == pytest.approx([0.75, 0.5, 1.0], abs=1e-6)


@pytest.mark.parametrize("found", [[1.0, 2.0], [1.0, 2.0, 0.0], "1", None])
def test_temperatures_of_another_drafter_are_refused(tmp_path: Path, found: object) -> None:
    assert load_temperatures(tmp_path, 3) is None
    write_json(tmp_path / CALIBRATION, {"temperatures": found})
    with pytest.raises(ValueError, match=r"calibration\.json: temperatures=.* must be 3 positive numbers"):
        load_temperatures(tmp_path, 3)


def test_temperatures_are_read_where_they_were_written(tmp_path: Path) -> None:
    write_json(tmp_path / CALIBRATION, {"temperatures": [1, 2.5]})
    assert load_temperatures(tmp_path, 2) == (1.0, 2.5)
