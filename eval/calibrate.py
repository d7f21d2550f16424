"""Sequential temperature scaling of confidences (DSpark paper, section 3.3), and how well they are calibrated.

A confidence head says P(draft k is accepted | those before it were). What schedules use is the product up to k, the
chance that a block survives beyond k, and that is calibrated, left to right: with the temperatures of earlier slots
fixed, the one of slot k divides its logit by the value of GRID at which the products have the least calibration error.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import rankdata

from eval.decode import Generation
from eval.schedule import calibrated
from models.files import read_json

NUM_BINS = 20  # of equal width, as in the reference's evaluator
GRID = np.exp(np.linspace(np.log(0.2), np.log(5.0), 161))  # 2 % a step, 1 in its middle
CALIBRATION = "calibration.json"  # beside a drafter's weights

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Recorded:
    """Rounds that sent all their drafts to verification."""

    confidence: Floats  # [N, K]
    survived: Floats  # [N, K] 1 where draft k and all before it were accepted
    known: NDArray[np.bool_]  # [N, K] False behind the end of an output, where nothing was proposed


def recorded(generations: Sequence[Generation]) -> Recorded:
    """Raises ValueError where no round has confidences."""
    rounds = [r for generation in generations for r in generation.rounds if r.confidence]
    if not rounds:
        raise ValueError("calibration needs a drafter with a confidence head, and rounds that it drafted in")
    slots = np.arange(len(rounds[0].confidence))
    accepted, proposed = (np.array([getattr(r, name) for r in rounds])[:, None] for name in ("accepted", "proposed"))
    confidence = np.array([r.confidence for r in rounds], dtype=np.float64)
    return Recorded(confidence, (slots < accepted).astype(np.float64), slots < proposed)


def scaled(confidence: Floats, temperatures: Sequence[float]) -> Floats:
    """`calibrated` of arrays [N, K]."""
    return calibrated(torch.from_numpy(confidence), temperatures).numpy()


def bins_of(predicted: Floats) -> NDArray[np.int64]:
    return np.minimum((predicted * NUM_BINS).astype(np.int64), NUM_BINS - 1)


def fit_temperatures(rounds: Recorded) -> list[float]:
    """One for each slot. A slot without both outcomes keeps 1."""
    temperatures: list[float] = []
    before = np.ones(len(rounds.confidence))
    for slot in range(rounds.confidence.shape[1]):
        known, column = rounds.known[:, slot], rounds.confidence[:, slot : slot + 1]
        outcomes = rounds.survived[known, slot]
        best = 1.0
        if 0 < outcomes.sum() < len(outcomes):
            errors = [calibration_error(before[known] * scaled(column[known], [t])[:, 0], outcomes) for t in GRID]
            best = float(GRID[int(np.argmin(errors))])
        temperatures.append(best)
        before = before * scaled(column, [best])[:, 0]
    return temperatures


def calibration_error(predicted: Floats, outcomes: Floats) -> float:
    """ECE: sum over bins of their share times |mean prediction - mean outcome|."""
    bins = bins_of(predicted)
    gaps = np.abs(np.bincount(bins, predicted - outcomes, NUM_BINS))
    return float(gaps.sum() / len(predicted))


def area_under_curve(predicted: Floats, outcomes: Floats) -> float | None:
    """ROC-AUC, ties counted half; None with one kind of outcome."""
    positive = int(outcomes.sum())
    negative = len(outcomes) - positive
    if not positive or not negative:
        return None
    ranks = rankdata(predicted)[outcomes > 0].sum()
    return float((ranks - positive * (positive + 1) / 2) / (positive * negative))


@dataclass(frozen=True)
class Calibration:
    """Of the survival at each slot, over the rounds that proposed it."""

    rounds: list[int]
    ece: list[float]
    auc: list[float | None]
    brier: list[float]
    mean_predicted: list[float]
    mean_survived: list[float]
    bins: list[dict[str, list[float]]]  # of a slot: mean prediction, share survived, share of rounds, where any

    def to_dict(self) -> dict[str, Any]:
        """JSON values, with the error over all slots, weighted by rounds."""
        return {**asdict(self), "mean_ece": float(np.average(self.ece, weights=self.rounds))}


def assess(rounds: Recorded, temperatures: Sequence[float] | None = None) -> Calibration:
    confidence = rounds.confidence if temperatures is None else scaled(rounds.confidence, temperatures)
    survival = np.cumprod(confidence, axis=1)
    columns: dict[str, list[Any]] = {name: [] for name in Calibration.__dataclass_fields__}
    for slot in range(survival.shape[1]):
        known = rounds.known[:, slot]
        if not known.any():
            continue
        predicted, outcomes = np.asarray(survival[known, slot], dtype=np.float64), rounds.survived[known, slot]
        bins = bins_of(predicted)
        counts = np.bincount(bins, minlength=NUM_BINS)
        held = counts > 0
        columns["rounds"].append(len(predicted))
        columns["ece"].append(calibration_error(predicted, outcomes))
        columns["auc"].append(area_under_curve(predicted, outcomes))
        columns["brier"].append(float(((predicted - outcomes) ** 2).mean()))
        columns["mean_predicted"].append(float(predicted.mean()))
        columns["mean_survived"].append(float(outcomes.mean()))
        of_bins = {
            "predicted": np.bincount(bins, predicted, NUM_BINS)[held] / counts[held],
            "survived": np.bincount(bins, outcomes, NUM_BINS)[held] / counts[held],
            "share": counts[held] / len(predicted),
        }
        columns["bins"].append({name: values.tolist() for name, values in of_bins.items()})
    return Calibration(**columns)


def load_temperatures(folder: Path, num_draft_tokens: int) -> tuple[float, ...] | None:
    """None where a drafter is not calibrated. Raises ValueError on a file that does not fit it."""
    path = folder / CALIBRATION
    if not path.is_file():
        return None
    found = read_json(path).get("temperatures")
    if not isinstance(found, list) or len(found) != num_draft_tokens or not all(t > 0 for t in found):
        raise ValueError(
            f"{path}: temperatures={found} must be {num_draft_tokens} positive numbers, one a draft token; "
            "remove the file, or write it anew with eval.py calibrate.enabled=true"
        )
    return tuple(float(t) for t in found)
