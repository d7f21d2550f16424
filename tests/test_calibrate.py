"""Sequential temperature scaling on rounds of known miscalibration, and its measures by hand."""

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from eval.calibrate import (
    Form,
    Recorded,
    area_under_curve,
    assess,
    calibration_error,
    calibration_file,
    fit_scaling,
    load_scaling,
    recorded,
)
from eval.rounds import Generation, Round
from eval.schedule import Scaling, calibrated
from models.drafter_files import CALIBRATION
from models.files import write_json

TRUE = [1.6, 0.7, 2.2]  # the temperatures that were left out of the confidences


NONE = [0.0] * 3
BIASES = [-0.8, 0.3, -0.5]


def rounds_of(num_rounds: int, seed: int, temperatures: list[float] = TRUE, biases: list[float] = NONE) -> Recorded:
    """Drafts that are accepted with the confidences that the scaling would give."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(1.0, 2.0, size=(num_rounds, len(temperatures)))
    chances = 1 / (1 + np.exp(-logits / np.array(temperatures) - np.array(biases)))
    survived = np.cumprod(rng.random(chances.shape) < chances, axis=1).astype(np.float64)
    return Recorded(1 / (1 + np.exp(-logits)), survived, np.ones_like(survived, dtype=bool))


@pytest.mark.parametrize("biases", [None, BIASES])
def test_the_scaling_that_was_left_out_is_found_and_calibrates_other_rounds(biases: list[float] | None) -> None:
    rounds, held_out = (rounds_of(20_000, seed, TRUE, biases or NONE) for seed in (0, 1))
    fitted = fit_scaling(rounds, Form.temperatures if biases is None else Form.full)
    if biases is None:
        assert fitted.temperatures == pytest.approx(TRUE, rel=0.2)
        assert fitted.biases == fitted.floors == (0.0, 0.0, 0.0)
    else:  # a little floor and another bias are nearly the same
        assert fitted.temperatures == pytest.approx(TRUE, rel=0.35) and max(fitted.floors) < 0.2
    before, after = assess(held_out), assess(held_out, fitted)
    assert max(after.ece) < 0.015 < min(before.ece[0], before.ece[2])
    assert after.to_dict()["mean_ece"] < 0.4 * before.to_dict()["mean_ece"]
    assert sum(after.brier) < sum(before.brier)
    assert after.auc == pytest.approx(before.auc, abs=0.02)  # the order within a slot hardly changes


@pytest.mark.parametrize("floor", [0.0, 0.25])
def test_a_head_that_is_sure_of_too_much_needs_more_than_temperatures(floor: float) -> None:
    """And one whose doubts are right every fourth time. The order within a slot is kept, which a constant would not."""
    found = []
    for seed in (2, 3):
        rounds = rounds_of(10_000, seed, [1.0] * 3, [-1.5] * 3)
        lucky = np.random.default_rng(seed).random(rounds.survived.shape) < floor
        own = np.diff(rounds.survived, axis=1, prepend=1.0) == 0  # accepted, or behind a rejection
        survived = np.cumprod((own & (rounds.survived > 0)) | lucky, axis=1).astype(np.float64)
        found.append(Recorded(rounds.confidence, survived, rounds.known))
    alone, full = (assess(found[1], fit_scaling(found[0], form)) for form in (Form.temperatures, Form.full))
    assert full.ece[0] < 0.02 < 0.05 < alone.ece[0]
    assert full.auc[0] == pytest.approx(alone.auc[0], abs=1e-6) and full.brier[0] < alone.brier[0]


def test_slots_are_fitted_left_to_right() -> None:
    """The error of a slot's product is least given the slots before it."""
    rounds = rounds_of(10_000, 2)
    fitted = fit_scaling(rounds, Form.temperatures)
    for slot, factor in itertools.product(range(3), (0.8, 1.25)):
        changed = tuple(t * factor if k == slot else t for k, t in enumerate(fitted.temperatures))
        assert (
            assess(rounds, fitted).ece[slot] <= assess(rounds, replace(fitted, temperatures=changed)).ece[slot] + 1e-9
        )
    # a fault in an early slot is made good by the later ones, not by itself
    early = Recorded(np.where(np.arange(3) == 0, 0.999, rounds.confidence), rounds.survived, rounds.known)
    again = fit_scaling(early, Form.temperatures).temperatures
    assert again[0] > 2 and again[1] != pytest.approx(fitted.temperatures[1], rel=0.05)


@pytest.mark.parametrize("form", Form)
def test_a_slot_with_one_outcome_only_keeps_its_confidence(form: Form) -> None:
    rounds = rounds_of(500, 3)
    for survived, known in (
        (np.ones_like(rounds.survived), rounds.known),
        (rounds.survived, np.zeros_like(rounds.known)),
    ):
        found = fit_scaling(Recorded(rounds.confidence, survived, known), form)
        assert found == Scaling((1.0,) * 3, (0.0,) * 3, (0.0,) * 3)


def test_confidences_of_certainty_stay_within_the_range_of_biases() -> None:
    """No finite bias makes sure drafts fail or impossible ones survive; the nearest is taken."""
    rng = np.random.default_rng(0)
    outcomes = (rng.random((200, 1)) < 0.5).astype(np.float64)
    for confidence in (0.0, 1.0):
        rounds = Recorded(np.full((200, 1), confidence), outcomes, np.ones((200, 1), dtype=bool))
        assert np.isfinite(assess(rounds, fit_scaling(rounds, Form.full)).ece[0])


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
    scaling = Scaling((2.0, 3.0, 1.0), (0.0, 1.0, -1.0), (0.2, 0.0, 0.5))
    expected = [0.2 + 0.8 * 0.75, 1 / (1 + np.exp(-1)), 1.0]
    found = calibrated(torch.tensor([[0.9, 0.5, 1.0]], dtype=torch.float64), scaling)
    assert found[0].tolist() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("found", [[1.0, 2.0], [1.0, 2.0, 0.0], "1", None])
def test_temperatures_of_another_drafter_are_refused(tmp_path: Path, found: object) -> None:
    assert load_scaling(tmp_path, 3) is None
    write_json(tmp_path / CALIBRATION, {"temperatures": found})
    with pytest.raises(ValueError, match=r"calibration\.json: temperatures=.* must be 3 numbers"):
        load_scaling(tmp_path, 3)


@pytest.mark.parametrize("biases", [[1.0, 2.0], [0, "1", 0], None])
def test_biases_of_another_drafter_are_refused(tmp_path: Path, biases: object) -> None:
    scaling = {"temperatures": [1.0] * 3, "biases": biases}
    write_json(tmp_path / CALIBRATION, {"temperatures": [1.0] * 3, "scaling": scaling})
    with pytest.raises(ValueError, match=r"calibration\.json: biases=.* must be 3 numbers"):
        load_scaling(tmp_path, 3)


def test_a_scaling_is_read_where_it_was_written(tmp_path: Path) -> None:
    write_json(tmp_path / CALIBRATION, {"temperatures": [1, 2.5]})  # a file of SGLang's
    assert load_scaling(tmp_path, 2) == Scaling((1.0, 2.5), (0.0, 0.0), (0.0, 0.0))
    rounds = rounds_of(2_000, 4, TRUE, BIASES)
    for form in Form:
        written = calibration_file(rounds, form, dataset="mine")
        write_json(tmp_path / CALIBRATION, written)
        alone = fit_scaling(rounds, Form.temperatures)
        assert load_scaling(tmp_path, 3) == fit_scaling(rounds, form)
        assert written["temperatures"] == list(alone.temperatures)
        assert (written["dataset"], written["num_samples"]) == ("mine", 2_000)
        assert written["ece_before"] == assess(rounds).ece and written["ece_after"] == assess(rounds, alone).ece
