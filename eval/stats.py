"""Acceptance statistics of finished requests, and the record of one pass over a set of prompts."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, TypeVar

from eval.rounds import DecodeResult, Generation, Round

T = TypeVar("T")


@dataclass(frozen=True)
class AcceptanceStats:
    """Counts are pooled over rounds; the bonus token counts in acceptance lengths, except where a round ended with an
    accepted stop token. The first token of a request belongs to no round."""

    rounds: int
    proposed: int
    accepted: int
    acceptance_length: float | None  # pooled: tokens / rounds
    acceptance_length_per_request: float | None  # mean over requests of their own tokens / rounds
    acceptance_rate: float | None  # accepted / proposed
    survival: list[float]  # [k] share of all rounds with more than k accepted
    conditional_acceptance: list[float | None]  # [k] P(accepted > k | accepted >= k and proposed > k)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def acceptance_stats(generations: Sequence[Generation]) -> AcceptanceStats:
    """None where nothing was counted (a ratio over zero rounds or zero proposals)."""
    rounds = [r for generation in generations for r in generation.rounds]
    proposed, accepted = sum(r.proposed for r in rounds), sum(r.accepted for r in rounds)
    per_request = [_mean_length(generation.rounds) for generation in generations if generation.rounds]
    longest = max((r.proposed for r in rounds), default=0)
    survival, conditional = [], []
    for k in range(longest):
        more = sum(r.accepted > k for r in rounds)
        reached = sum(r.accepted >= k and r.proposed > k for r in rounds)
        survival.append(more / len(rounds))
        conditional.append(more / reached if reached else None)
    return AcceptanceStats(
        rounds=len(rounds),
        proposed=proposed,
        accepted=accepted,
        acceptance_length=_mean_length(rounds) if rounds else None,
        acceptance_length_per_request=sum(per_request) / len(per_request) if per_request else None,
        acceptance_rate=accepted / proposed if proposed else None,
        survival=survival,
        conditional_acceptance=conditional,
    )


def _mean_length(rounds: Sequence[Round]) -> float:
    return sum(r.accepted + r.bonus for r in rounds) / len(rounds)


@dataclass(frozen=True, kw_only=True)
class Pass(DecodeResult):
    """One drafter at one setting over one set of prompts."""

    about: dict[str, Any]
    domains: list[str]
    prompts: list[list[int]]
    parts: list["Pass"] = field(default_factory=list, compare=False, repr=False)  # of one that was joined

    def of_domain(self, domain: str) -> "Pass | None":
        """With the times of its own, where no part has prompts of other domains besides."""
        parts = [part for part in self.parts if domain in part.domains]
        return joined(parts) if parts and all(set(part.domains) == {domain} for part in parts) else None

    def head(self, count: int) -> "Pass":
        """The first `count` prompts only; times stay those of the whole pass."""
        lists = {name: getattr(self, name)[:count] for name in ("domains", "prompts", "generations")}
        return replace(self, **lists, parts=[])

    def to_dict(self) -> dict[str, Any]:
        """JSON values; a round is a list of its fields."""
        generations = []
        for g in self.generations:
            own = {name: value for name, value in vars(g).items() if name not in ("began", "ranked")}
            generations.append({**own, "rounds": [list(vars(r).values()) for r in g.rounds]})
        return {name: value for name, value in vars(self).items() if name != "parts"} | {"generations": generations}

    @staticmethod
    def from_dict(values: Mapping[str, Any]) -> "Pass":
        generations = [
            Generation(**{**g, "rounds": [Round(*r[:3], *map(tuple, r[3:])) for r in g["rounds"]]})
            for g in values["generations"]
        ]
        return Pass(**{**values, "generations": generations})


def joined(parts: Sequence[Pass]) -> Pass:
    """Parts of one pass as a whole; their times are added up."""
    values: dict[str, Any] = {"about": parts[0].about, "parts": list(parts)}
    for name in {f.name for f in fields(Pass)} - values.keys():
        of_parts = [getattr(part, name) for part in parts]
        values[name] = [x for part in of_parts for x in part] if isinstance(of_parts[0], list) else sum(of_parts)
    return Pass(**values)


def first_of_each(items: Iterable[T], key: Callable[[T], Any]) -> list[T]:
    """The first item of every key, in order."""
    found: dict[Any, T] = {}
    for item in items:
        found.setdefault(key(item), item)
    return list(found.values())
