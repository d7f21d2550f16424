"""How sure a measured acceptance length is: bootstrap over prompts, as rounds of one prompt are not independent."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from eval.rounds import Generation

RESAMPLES, LEVEL, SEED = 4000, 0.95, 0
FEWEST_REQUESTS = 8  # of fewer a bootstrap's interval is much too narrow


class Interval(NamedTuple):
    """95 %, by percentiles of the resamples."""

    low: float
    high: float


def tokens_and_rounds(generations: Sequence[Generation]) -> NDArray[np.float64]:
    """[N, 2]: what each request adds to the pooled acceptance length."""
    pairs = [(sum(r.accepted + r.bonus for r in g.rounds), len(g.rounds)) for g in generations]
    return np.array(pairs, dtype=float).reshape(-1, 2)


def resampled_lengths(generations: Sequence[Generation]) -> NDArray[np.float64]:
    """Pooled acceptance length of each resample of the requests; equally many requests are drawn equally."""
    return _resampled(tokens_and_rounds(generations))


def _resampled(requests: NDArray[np.float64]) -> NDArray[np.float64]:
    rng = np.random.default_rng(SEED)
    drawn = rng.multinomial(len(requests), [1 / len(requests)] * len(requests), size=RESAMPLES)
    tokens, rounds = (drawn @ requests).T
    return np.divide(tokens, rounds, out=np.full(RESAMPLES, np.nan), where=rounds > 0)


def length_interval(generations: Sequence[Generation]) -> Interval | None:
    """None where fewer than FEWEST_REQUESTS had rounds."""
    if sum(bool(g.rounds) for g in generations) < FEWEST_REQUESTS:
        return None
    return percentiles(resampled_lengths(generations))


def difference_interval(ours: Sequence[Generation], theirs: Sequence[Generation]) -> Interval | None:
    """Of the difference of acceptance lengths on the same prompts, each resample with the same ones of both."""
    return paired_interval(tokens_and_rounds(ours), tokens_and_rounds(theirs))


def paired_interval(ours: NDArray[np.float64], theirs: NDArray[np.float64]) -> Interval | None:
    """`difference_interval` of requests [N, 2] as `tokens_and_rounds` has them."""
    if len(ours) != len(theirs):
        raise ValueError(f"paired intervals need the same prompts, got {len(ours)} and {len(theirs)}")
    if min(np.count_nonzero(one[:, 1]) for one in (ours, theirs)) < FEWEST_REQUESTS:
        return None
    return percentiles(_resampled(ours) - _resampled(theirs))


def resampled_over_seeds(seeds: Sequence[NDArray[np.float64]], stream: int) -> NDArray[np.float64] | None:
    """[RESAMPLES] of the mean over training seeds of the pooled acceptance length; `seeds` hold requests [N, 2] of the
    same N prompts each. None where fewer than FEWEST_REQUESTS had rounds.

    Prompts are resampled, with the same ones for equally many prompts whatever the drafter, and so are seeds, by a
    `stream` of random numbers for each drafter. Resamples of S seeds vary too little, by sqrt((S - 1) / S) and by what
    Student's t adds to an interval of few; both are made up for. One seed: only prompts vary.
    """
    if min(np.count_nonzero(requests[:, 1]) for requests in seeds) < FEWEST_REQUESTS:
        return None
    lengths = np.stack([_resampled(requests) for requests in seeds])
    mean, count = lengths.mean(axis=0), len(lengths)
    if count == 1:
        return mean
    drawn = np.random.default_rng([SEED, 1 + stream]).integers(count, size=(count, RESAMPLES))
    picked = np.take_along_axis(lengths, drawn, axis=0).mean(axis=0)
    return mean + (picked - mean) * np.sqrt(count / (count - 1)) * few_seeds(count)


def few_seeds(count: int) -> float:
    """How much wider Student's t makes an interval of so many values than a normal distribution does."""
    tail = (1 + LEVEL) / 2
    return float(stats.t.ppf(tail, count - 1) / stats.norm.ppf(tail))


def percentiles(values: NDArray[np.float64]) -> Interval:
    tail = 100 * (1 - LEVEL) / 2
    low, high = np.nanpercentile(values, [tail, 100 - tail])
    return Interval(float(low), float(high))
