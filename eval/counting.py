"""How engines count drafts, and what each would have counted of our rounds: equal drafters then give equal counts.

In every engine, as here, the first token comes from the prompt's own forward and belongs to no round. Our rounds stop
counting at an accepted stop token; only `Round.behind` knows what was proposed and accepted past it. Engines differ:

- vLLM (v1/core/sched/scheduler.py, update_from_output) counts before it looks for stop tokens and limits: every round
  in full, as many drafts accepted as tokens came out less one. A step without drafts is no round.
- SGLang (batch_result_processor.py, _resolve_spec_v2_tokens) counts every verification in full as well; what it calls
  spec_accept_length is tokens / verifications, the first token included, and is not used here.
- llama.cpp (build 11549; tests/test_engines.py holds it against the real one) drafts at most r - 1 tokens with r to
  go, so that nothing overshoots: both counts of a round are capped there. Sampling stops at an accepted end token,
  which then counts as that round's bonus token, while all that was drafted behind it counts as proposed. It tells no
  number of rounds, but nothing overshoots and every round has a bonus token, so tokens = 1 + rounds + accepted. Where
  one token is to go there is a round without drafts.

Not covered, and refused by eval/serving.py: stop strings, which engines find at different times.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

from eval.rounds import Generation, Round


@dataclass(frozen=True)
class Counts:
    """Of one answer or of many."""

    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    # rounds with more than k drafts accepted, where the engine tells
    by_position: tuple[int, ...] = field(default=(), compare=False)

    @property
    def acceptance_length(self) -> float | None:
        """Pooled; accepted drafts and the bonus token of every round. None without rounds."""
        return 1 + self.accepted / self.rounds if self.rounds else None

    @property
    def survival(self) -> list[float] | None:
        """[k]: share of rounds with more than k drafts accepted; None where that is not told."""
        return [count / self.rounds for count in self.by_position] if self.rounds and self.by_position else None

    def __add__(self, other: "Counts") -> "Counts":
        return self._joined(other, 1)

    def __sub__(self, other: "Counts") -> "Counts":
        return self._joined(other, -1)

    def _joined(self, other: "Counts", sign: int) -> "Counts":
        pairs = zip_longest(self.by_position, other.by_position, fillvalue=0)
        return Counts(
            self.rounds + sign * other.rounds,
            self.proposed + sign * other.proposed,
            self.accepted + sign * other.accepted,
            tuple(ours + sign * theirs for ours, theirs in pairs),
        )


def pooled(counts: Iterable[Counts]) -> Counts:
    return sum(counts, Counts())


def as_vllm(generation: Generation, max_new_tokens: int) -> Counts:
    """Whole rounds, of those with drafts."""
    verified = [one for one in whole_rounds(generation, max_new_tokens) if one[0]]
    longest = max((proposed for proposed, _ in verified), default=0)
    by_position = tuple(sum(accepted > k for _, accepted in verified) for k in range(longest))
    return Counts(len(verified), sum(p for p, _ in verified), sum(a for _, a in verified), by_position)


def as_sglang(generation: Generation, max_new_tokens: int) -> Counts:
    """Whole rounds."""
    verified = list(whole_rounds(generation, max_new_tokens))
    return Counts(len(verified), sum(p for p, _ in verified), sum(a for _, a in verified))


def as_llama_cpp(generation: Generation, max_new_tokens: int) -> Counts:
    """Rounds that are capped where the output ends."""
    rounds = proposed = accepted = 0
    for round_, to_go in counted_rounds(generation, max_new_tokens):
        ended = not round_.bonus
        rounds += 1
        proposed += min(round_.proposed + behind(round_)[0], to_go - 1)
        accepted += min(round_.accepted - ended, to_go - 1)
    return Counts(rounds, proposed, accepted)


def whole_rounds(generation: Generation, max_new_tokens: int) -> Iterator[tuple[int, int]]:
    """(proposed, accepted) of each, as it was verified."""
    for round_, _ in counted_rounds(generation, max_new_tokens):
        proposed, accepted = behind(round_)
        yield round_.proposed + proposed, round_.accepted + accepted


def counted_rounds(generation: Generation, max_new_tokens: int) -> Iterator[tuple[Round, int]]:
    """Each with the tokens that were to go before it; one that `protocol=deepspec` adds at the limit is none."""
    to_go = max_new_tokens - 1
    for round_ in generation.rounds:
        if to_go <= 0:
            return
        yield round_, to_go
        to_go -= round_.accepted + round_.bonus


def behind(round_: Round) -> tuple[int, int]:
    """Drafts proposed and accepted behind an accepted stop token. Raises ValueError on a pass that was kept before this
    was recorded."""
    if round_.bonus:
        return 0, 0
    if not round_.behind:
        raise ValueError(
            "eval/passes in the run's folder holds rounds of an earlier version, which do not say what was drafted "
            "behind a stop token: delete that folder and run the same command again"
        )
    proposed, accepted = round_.behind
    return proposed, accepted
