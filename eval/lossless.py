"""Does speculation keep the target's outputs? By task: greedy ones token by token, sampled ones by their distribution.

Greedy outputs are compared with plain decoding of the same prompts. Of sampled outputs two things are: the first token
that came out of a verification (the token before it is the same in both, being drawn from the prompt's forward with the
same noise), and how long the outputs are.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import stats

from eval.identity import is_near_tie
from eval.rounds import Generation
from eval.stats import Pass

FEWEST = 5  # expected counts of a class, or it is pooled with others


def greedy_agreement(measured: Pass, divergences: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A row a task: prompts, how many outputs are equal to plain decoding's, and of the others the `divergences`."""
    found = []
    for task in dict.fromkeys(measured.domains):
        own = [one for one in divergences if measured.domains[one["prompt"]] == task]
        count = measured.domains.count(task)
        near_ties = sum(map(is_near_tie, own))
        row = {"task": task, "num_prompts": count, "equal": count - len(own), "near_ties": near_ties}
        found.append(row | {"divergences": own})
    return found


def sampled_agreement(measured: Pass, vanilla: Pass) -> list[dict[str, Any]]:
    """A row a task: p-values of the hypothesis that tokens and lengths come from one distribution. None: too few."""
    found = []
    for task in dict.fromkeys(measured.domains):
        pairs = [
            (ours, theirs)
            for ours, theirs, own in zip(measured.generations, vanilla.generations, measured.domains, strict=True)
            if own == task
        ]
        ours, theirs = ([pair[side] for pair in pairs] for side in (0, 1))
        found.append(
            {
                "task": task,
                "num_prompts": len(pairs),
                "first_verified_token_p": token_p_value(ours, theirs),
                "length_p": length_p_value(ours, theirs),
            }
        )
    return found


def token_p_value(ours: Sequence[Generation], theirs: Sequence[Generation]) -> float | None:
    """Chi-square of homogeneity of the second output token; rare ones are one class."""
    counts = [Counter(g.tokens[1] for g in side if len(g.tokens) > 1) for side in (ours, theirs)]
    totals = [sum(count.values()) for count in counts]
    if min(totals) < FEWEST:
        return None
    share = min(totals) / sum(totals)
    common = [t for t, n in (counts[0] + counts[1]).items() if n * share >= FEWEST]
    rows = [[count[t] for t in common] for count in counts]
    table = np.array([[*row, total - sum(row)] for row, total in zip(rows, totals, strict=True)])
    table = table[:, table.sum(0) > 0]
    if table.shape[1] < 2:
        return None
    result: Any = stats.chi2_contingency(table)
    return float(result.pvalue)


def length_p_value(ours: Sequence[Generation], theirs: Sequence[Generation]) -> float | None:
    """Kolmogorov-Smirnov of two samples."""
    lengths = [[len(g.tokens) for g in side] for side in (ours, theirs)]
    if len(ours) < FEWEST:
        return None
    result: Any = stats.ks_2samp(lengths[0], lengths[1])
    return float(result.pvalue)
