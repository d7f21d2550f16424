"""How sure a measured acceptance length is: bootstrap over prompts, as rounds of one prompt are not independent."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from eval.rounds import Generation

RESAMPLES, LEVEL, SEED = 4000, 0.95, 0


class Interval(NamedTuple):
    """95 %, by percentiles of the resamples."""

    low: float
    high: float


def tokens_and_rounds(generations: Sequence[Generation]) -> NDArray[np.float64]:
    """[N, 2]: what each request adds to the pooled acceptance length."""
    return np.array([[sum(r.accepted + r.bonus for r in g.rounds), len(g.rounds)] for g in generations], dtype=float)


def resampled_lengths(generations: Sequence[Generation]) -> NDArray[np.float64]:
    """Pooled acceptance length of each resample of the requests; equally many requests are drawn equally."""
    rng = np.random.default_rng(SEED)
    drawn = rng.multinomial(len(generations), [1 / len(generations)] * len(generations), size=RESAMPLES)
    tokens, rounds = (drawn @ tokens_and_rounds(generations)).T
    return np.divide(tokens, rounds, out=np.full(RESAMPLES, np.nan), where=rounds > 0)


def length_interval(generations: Sequence[Generation]) -> Interval | None:
    """None where fewer than two requests had rounds."""
    if sum(bool(g.rounds) for g in generations) < 2:
        return None
    return _percentiles(resampled_lengths(generations))


def difference_interval(ours: Sequence[Generation], theirs: Sequence[Generation]) -> Interval | None:
    """Of the difference of acceptance lengths on the same prompts, each resample with the same ones of both."""
    if len(ours) != len(theirs):
        raise ValueError(f"paired intervals need the same prompts, got {len(ours)} and {len(theirs)}")
    if min(sum(bool(g.rounds) for g in one) for one in (ours, theirs)) < 2:
        return None
    return _percentiles(resampled_lengths(ours) - resampled_lengths(theirs))


def _percentiles(values: NDArray[np.float64]) -> Interval:
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.nanpercentile(values, [tail, 100 - tail])
    return Interval(float(low), float(high))
