"""What a bar for drafts would buy: of confidences by replaying rounds (DSpark paper, figure 5), of the lossy rule by
decoding at each threshold."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from eval.calibrate import recorded
from eval.rounds import Generation
from eval.schedule import Scaling, calibrated
from eval.stats import Pass

THRESHOLDS = tuple(k / 20 for k in range(20))


def confidence_sweep(measured: Pass, scaling: Scaling | None) -> list[dict[str, Any]]:
    """Of all prompts and of every task: at each threshold what `schedule=confidence` would have verified of the
    recorded rounds and what would have been accepted of it. Rounds are taken as they were, though a shorter one would
    have moved those behind it."""
    tasks = sorted(set(measured.domains))
    parts = {None: measured.generations} | {
        task: [g for g, own in zip(measured.generations, measured.domains, strict=True) if own == task]
        for task in (tasks if len(tasks) > 1 else ())
    }
    found = []
    for task, generations in parts.items():
        if any(r.confidence for g in generations for r in g.rounds):
            found.append({"task": task, "thresholds": _replayed(generations, scaling)})
    return found


def _replayed(generations: Sequence[Generation], scaling: Scaling | None) -> list[dict[str, Any]]:
    rounds = recorded(generations)
    sure = calibrated(torch.from_numpy(rounds.confidence), scaling).numpy()
    found = []
    for threshold in THRESHOLDS:
        verified = (sure >= threshold).cumprod(axis=1).astype(bool) & rounds.known
        accepted = float((rounds.survived * verified).sum())
        drafts, count = int(verified.sum()), len(sure)
        found.append(
            {
                "threshold": threshold,
                "drafts_per_round": drafts / count,
                "acceptance_rate": accepted / drafts if drafts else None,
                "acceptance_length": 1 + accepted / count,
            }
        )
    return found


def altered_share(generations: Sequence[Generation]) -> float:
    """Of the tokens that came out of rounds, the share that a lossy rule is expected to have made others than the
    target would have drawn: the sum of `Round.altered` over the slots that were decided."""
    rounds = [r for g in generations for r in g.rounds]
    altered = sum(sum(r.altered[: r.accepted + 1]) for r in rounds)
    return altered / max(sum(r.accepted + r.bonus for r in rounds), 1)


def lossy_sweep(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Report rows of one drafter at one temperature, the lossless one first, then by threshold: acceptance bought and
    divergence paid."""
    lossy = [row for row in rows if not row["lossless"]]
    if not lossy:
        return []
    asked = ("drafter", "temperature", "num_draft_tokens", "task_set", "schedule")
    first = lossy[0]
    same = [row for row in rows if all(row[key] == first[key] for key in asked)]
    kept = ("lossy_threshold", "lossless", "acceptance_length", "acceptance_length_interval", "tokens_per_second")
    ordered = sorted(same, key=lambda row: -np.inf if row["lossless"] else -row["lossy_threshold"])
    return [{key: row[key] for key in (*kept, "altered_share", "drafter", "temperature")} for row in ordered]
