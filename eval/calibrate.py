"""Sequential temperature scaling of confidences (DSpark paper, section 3.3), and how well they are calibrated.

A confidence head says P(draft k is accepted | those before it were). What schedules use is the product up to k, the
chance that a block survives beyond k, and that is calibrated, left to right: with the scaling of earlier slots fixed,
the logit of slot k is divided by the value of GRID at which the products have the least calibration error.

Temperatures cannot make good a head that is sure of too much everywhere, as one is on other texts than it has learnt,
nor that a draft it is not at all sure of is right every fifth time. So there is a second form, with a bias and a floor:
at each temperature and floor of a grid the bias with which as many blocks are predicted to survive as do, and of all
those the likeliest (a proper score: the least calibration error of a form this free is that of a constant).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import root_scalar
from scipy.stats import rankdata
from torch import Tensor

from eval.rounds import Generation
from eval.schedule import Scaling, calibrated, scaled
from models.drafter_files import CALIBRATION
from models.files import read_json

NUM_BINS = 20  # of equal width, as in the reference's evaluator
MOST_BIAS = 20.0  # of a logit
FLOORS = tuple(k / 20 for k in range(10))
GRID = np.exp(np.linspace(np.log(0.2), np.log(5.0), 161))  # 2 % a step, 1 in its middle

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


def bins_of(predicted: Floats) -> NDArray[np.int64]:
    return np.minimum((predicted * NUM_BINS).astype(np.int64), NUM_BINS - 1)


class Form(StrEnum):
    """temperatures: those alone, by calibration error (the paper's). full: temperatures, biases and floors."""

    temperatures = "temperatures"
    full = "full"


def fit_scaling(rounds: Recorded, form: Form) -> Scaling:
    """A slot without both outcomes keeps its confidence."""
    fitted: list[tuple[float, float, float]] = []
    of_all = torch.logit(torch.from_numpy(rounds.confidence))
    before = torch.ones(len(of_all), dtype=torch.float64)
    for slot in range(of_all.shape[1]):
        known = rounds.known[:, slot]
        best, outcomes = (1.0, 0.0, 0.0), rounds.survived[known, slot]
        if 0 < outcomes.sum() < len(outcomes):
            rows = torch.from_numpy(known)
            logits, reached = of_all[rows, slot], before[rows]
            candidates = [(float(t), 0.0, 0.0) for t in GRID]
            if form is Form.full:
                candidates = [
                    (float(t), _matching_bias(logits / float(t), reached, floor, outcomes.mean()), floor)
                    for t in GRID[:: len(GRID) // 20]
                    for floor in FLOORS
                ]
            score = calibration_error if form is Form.temperatures else surprise
            scores = [score((reached * scaled(logits, *candidate)).numpy(), outcomes) for candidate in candidates]
            best = candidates[int(np.argmin(scores))]
        fitted.append(best)
        before = before * scaled(of_all[:, slot], *best)
    temperatures, biases, floors = zip(*fitted, strict=True)
    return Scaling(temperatures, biases, floors)


def _matching_bias(logits: Tensor, reached: Tensor, floor: float, survived: float) -> float:
    """With which the mean of what survives is `survived`, or the nearest of the range."""

    def excess(bias: float) -> float:
        return float((reached * scaled(logits, 1.0, bias, floor)).mean() - survived)

    if excess(MOST_BIAS) <= 0:
        return MOST_BIAS
    if excess(-MOST_BIAS) >= 0:
        return -MOST_BIAS
    return float(root_scalar(excess, bracket=(-MOST_BIAS, MOST_BIAS), method="brentq", xtol=1e-4).root)


def surprise(predicted: Floats, outcomes: Floats) -> float:
    """Mean negative log-likelihood."""
    chances = np.clip(np.where(outcomes > 0, predicted, 1 - predicted), 1e-12, None)
    return float(-np.log(chances).mean())


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


def assess(rounds: Recorded, scaling: Scaling | None = None) -> Calibration:
    survival = calibrated(torch.from_numpy(rounds.confidence), scaling).cumprod(1).numpy()
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


def calibration_file(rounds: Recorded, form: Form, *, dataset: str) -> dict[str, Any]:
    """What is kept beside the weights. `scaling` is what schedules here use; the other fields are those of the file
    that SGLang reads, which knows temperatures only: the best without anything else, and their errors."""
    alone = fit_scaling(rounds, Form.temperatures)
    scaling = alone if form is Form.temperatures else fit_scaling(rounds, form)
    return {
        "temperatures": list(alone.temperatures),
        "dataset": dataset,
        "num_samples": len(rounds.confidence),
        "ece_before": assess(rounds).ece,
        "ece_after": assess(rounds, alone).ece,
        "scaling": {name: list(values) for name, values in vars(scaling).items()},
    }


def read_calibration(folder: Path, num_draft_tokens: int) -> dict[str, Any] | None:
    """A drafter's `calibration_file`, None where it is not calibrated. Raises ValueError on one that does not fit."""
    path = folder / CALIBRATION
    if not path.is_file():
        return None
    calibration = read_json(path)
    lowest = {"temperatures": float(np.nextafter(0, 1)), "biases": -MOST_BIAS, "floors": 0.0}
    for name, found in (("temperatures", calibration.get("temperatures")), *(calibration.get("scaling") or {}).items()):
        fits = name in lowest and isinstance(found, list) and len(found) == num_draft_tokens
        if not fits or not all(isinstance(x, int | float) and x >= lowest[name] for x in found):
            raise ValueError(
                f"{path}: {name}={found} must be {num_draft_tokens} numbers, one a draft token (temperatures more than "
                "0, floors 0 or more); remove the file, or write it anew with eval.py calibrate.enabled=true"
            )
    return calibration


def load_scaling(folder: Path, num_draft_tokens: int) -> Scaling | None:
    """That of `read_calibration`; of a file without, its temperatures."""
    found = read_calibration(folder, num_draft_tokens)
    if found is None:
        return None
    nothing = [0.0] * num_draft_tokens
    chosen = {"temperatures": found["temperatures"], "biases": nothing, "floors": nothing} | (
        found.get("scaling") or {}
    )
    return Scaling(**{name: tuple(values) for name, values in chosen.items()})
