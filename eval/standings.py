"""Who leads a race of drafters, by how much, and whether that is real: tables and a picture from the cells' files."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from eval.intervals import Interval, percentiles, resampled_over_seeds
from eval.markdown import aligned, between, number
from eval.plots import Bar, interval_chart
from models.files import read_json, write_text

STANDINGS, PICTURE = "standings.md", "standings.svg"


@dataclass(frozen=True)
class Length:
    """Mean over seeds of the acceptance length (bonus counted, pooled over prompts), with what makes its interval."""

    value: float
    by_seed: list[float]
    resamples: NDArray[np.float64] | None  # None: too few prompts to say how sure it is
    longest: int  # a round with all drafts accepted

    @property
    def interval(self) -> Interval | None:
        """Within what a length can be: of two seeds Student's t reaches far."""
        if self.resamples is None:
            return None
        low, high = percentiles(self.resamples)
        return Interval(max(low, 1.0), min(high, float(self.longest)))


class Entrant:
    """All finished cells of one drafter, by seed; `stream` numbers it."""

    def __init__(self, name: str, cells: Sequence[Mapping[str, Any]], stream: int) -> None:
        self.name, self.stream = name, stream
        self._lengths: dict[tuple[float, str | None], Length] = {}
        self.cells = sorted(cells, key=lambda cell: cell["cell"]["seed"] or 0)

    def length(self, temperature: float, domain: str | None = None) -> Length:
        """Of all domains, or of one; resampled once."""
        if (temperature, domain) not in self._lengths:
            self._lengths[temperature, domain] = self._length(temperature, domain)
        return self._lengths[temperature, domain]

    def _length(self, temperature: float, domain: str | None) -> Length:
        seeds = []
        for cell in self.cells:
            domains = row_at(cell, temperature)["requests"]
            chosen = [domains[domain]] if domain is not None else list(domains.values())
            seeds.append(np.array([request for part in chosen for request in part], dtype=float))
        pooled = [float(requests[:, 0].sum() / requests[:, 1].sum()) for requests in seeds]
        longest = self.cells[0]["plan"]["num_draft_tokens"] + 1
        return Length(mean(pooled), pooled, resampled_over_seeds(seeds, self.stream), longest)

    @property
    def seeds(self) -> list[int]:
        """Of its finished trainings; none of an untrained one."""
        return [cell["cell"]["seed"] for cell in self.cells if cell["cell"]["seed"] is not None]

    @property
    def draft_seconds(self) -> float:
        return median(cell["alone"]["draft_seconds"] for cell in self.cells)

    @property
    def training_seconds(self) -> float | None:
        found = [cell["training"]["seconds"] for cell in self.cells if cell["training"] is not None]
        return median(found) if found else None


class Costs(NamedTuple):
    """Seconds for one request that do not depend on the drafter: medians of all cells."""

    verify: float  # of all drafts and the token before them
    vanilla: float  # of one token

    @staticmethod
    def of(cells: Sequence[Mapping[str, Any]]) -> "Costs":
        return Costs(*(median(cell["alone"][f"{name}_seconds"] for cell in cells) for name in Costs._fields))

    def speed(self, entrant: Entrant) -> float:
        """Of one greedy request, as a multiple of decoding without drafts: tokens a round over what a round costs."""
        return entrant.length(0.0).value * self.vanilla / (entrant.draft_seconds + self.verify)


def row_at(cell: Mapping[str, Any], temperature: float) -> Mapping[str, Any]:
    return next(row for row in cell["measured"] if row["temperature"] == temperature)


def read_cells(folder: Path) -> list[dict[str, Any]]:
    return [read_json(path) for path in sorted(folder.glob("*.json"))]


def cell_text(record: Mapping[str, Any]) -> str:
    """JSON with a line for every part of a record."""
    lines = [f"{json.dumps(name)}: {json.dumps(record[name], sort_keys=True)}" for name in sorted(record)]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def show_standings(folder: Path) -> str:
    """Writes STANDINGS and PICTURE of all cells in `folder`; returns the former."""
    entrants = ranked(read_cells(folder))
    text = standings(entrants)
    write_text(folder / STANDINGS, text)
    write_text(folder / PICTURE, standings_picture(entrants))
    return text


def ranked(cells: Sequence[Mapping[str, Any]]) -> list[Entrant]:
    """By greedy acceptance length, the longest first."""
    names = sorted({cell["cell"]["drafter"] for cell in cells})
    entrants = [
        Entrant(name, [cell for cell in cells if cell["cell"]["drafter"] == name], stream)
        for stream, name in enumerate(names)
    ]
    return sorted(entrants, key=lambda entrant: -entrant.length(0.0).value)


def standings(entrants: Sequence[Entrant]) -> str:
    """Markdown: under which conditions, the ranking, every domain, and which are really apart."""
    cells = [cell for entrant in entrants for cell in entrant.cells]
    costs = Costs.of(cells)
    parts = [conditions(cells), unequal_seeds(entrants), table(*ranking(entrants, costs)), reading(cells, costs)]
    for temperature in (0.0, 1.0):
        parts.append(f"Acceptance length by domain at temperature {temperature:g}, with 95 % intervals:")
        parts.append(table(*by_domain(entrants, temperature)))
    parts.append("\n".join(f"- {line}" for line in gaps(entrants)))
    return "\n\n".join(part for part in parts if part) + "\n"


def conditions(cells: Sequence[Mapping[str, Any]]) -> str:
    plan, row = cells[0]["plan"], row_at(cells[0], 0.0)
    dates = sorted({cell["date"] for cell in cells})
    seeds = sorted({cell["cell"]["seed"] for cell in cells if cell["cell"]["seed"] is not None})
    near_ties = sum(row_at(cell, 0.0)["near_tie_divergences"] or 0 for cell in cells)
    identical = all(row_at(cell, 0.0)["outputs_identical_to_vanilla"] for cell in cells)
    options = [f"{stage}.py {' '.join(own)}" for stage, own in plan["options"].items() if own]
    vanilla = f"{'' if identical else 'NOT '}identical to vanilla decoding in every cell"
    more = f"With {', '.join(options)}. " if options else ""
    return (
        f"Target {row['target']}, {row['dtype']} on {row['device']}; trained drafters: {plan['num_steps']} steps on "
        f"{plan['num_answers']} answers, seeds {', '.join(map(str, seeds)) or '-'}; {plan['num_draft_tokens']} draft "
        f"tokens, a chain, lossless rules; {row['num_prompts']} held-out prompts in batches of "
        f"{min(row['batch_size'], row['num_prompts'])}, at most {row['max_new_tokens']} new tokens; "
        f"{' to '.join(dict.fromkeys((dates[0], dates[-1])))}. {more}Acceptance lengths are pooled over "
        "rounds, the bonus token counted, and averaged over seeds; intervals (95 %) are a bootstrap over prompts and, "
        "of trained drafters, seeds (widened by Student's t, as they are few). "
        f"Greedy outputs are {vanilla} ({near_ties} near ties)."
    )


def unequal_seeds(entrants: Sequence[Entrant]) -> str:
    """Says which trained drafters have not run all seeds that others have; empty where all have."""
    everything = sorted({seed for entrant in entrants for seed in entrant.seeds})
    fewer = [entrant for entrant in entrants if entrant.seeds and entrant.seeds != everything]
    if not fewer:
        return ""
    named = "; ".join(f"{name_of(entrant)} {', '.join(map(str, entrant.seeds))}" for entrant in fewer)
    return f"NOT all of these seeds have run for every drafter yet. Only some for: {named}."


def reading(cells: Sequence[Mapping[str, Any]], costs: Costs) -> str:
    drafts, threads = cells[0]["plan"]["num_draft_tokens"], sorted({cell["made_with"]["threads"] for cell in cells})
    return (
        "`draft k`: how often that draft token was accepted where those before it were. Training: all steps at the "
        f"median speed, without start-up, answers and features. Drafting: {drafts} tokens for one request. Estimated "
        "speed: of one greedy request against decoding without drafts, from the acceptance length and the costs of a "
        f"round ({1e3 * costs.verify:.0f} ms for verifying {drafts + 1} tokens, {1e3 * costs.vanilla:.0f} ms for one "
        f"token; {' or '.join(map(str, threads))} threads, medians of all cells; more tokens never cost less, what was "
        "timed otherwise is levelled). It has no interval, and other work on the machine shows in it."
    )


def ranking(entrants: Sequence[Entrant], costs: Costs) -> tuple[list[str], list[list[str]]]:
    length = max(len(row_at(cell, 0.0)["conditional_acceptance"]) for entrant in entrants for cell in entrant.cells)
    head = ["drafter", "acceptance length, greedy", "seed by seed", *(f"draft {slot + 1}" for slot in range(length))]
    head += ["trained parameters", "training", "drafting", "estimated speed"]
    rows = []
    for entrant in entrants:
        found, seconds = entrant.length(0.0), entrant.training_seconds
        parameters = entrant.cells[0]["trained_parameters"]
        rows.append(
            [
                name_of(entrant),
                f"{found.value:.2f}{between(found.interval)}",
                " ".join(f"{value:.2f}" for value in found.by_seed) if seconds is not None else "",
                *(number(value) for value in conditional(entrant, length)),
                f"{parameters / 1e6:.1f} M" if parameters else "",
                "" if seconds is None else f"{seconds / 60:.1f} min",
                f"{1e3 * entrant.draft_seconds:.0f} ms",
                f"{costs.speed(entrant):.2f}x",
            ]
        )
    return head, rows


def conditional(entrant: Entrant, length: int) -> list[float | None]:
    """Of each draft token, mean over seeds: how often it was accepted where those before it were."""
    found = []
    for slot in range(length):
        values = [row_at(cell, 0.0)["conditional_acceptance"][slot : slot + 1] for cell in entrant.cells]
        known = [value for part in values for value in part if value is not None]
        found.append(mean(known) if known else None)
    return found


def by_domain(entrants: Sequence[Entrant], temperature: float) -> tuple[list[str], list[list[str]]]:
    domains = list(row_at(entrants[0].cells[0], temperature)["requests"])
    rows = []
    for entrant in entrants:
        lengths = [entrant.length(temperature, domain) for domain in (None, *domains)]
        rows.append([name_of(entrant), *(f"{x.value:.2f}{between(x.interval)}" for x in lengths)])
    return ["drafter", "all", *domains], rows


def gaps(entrants: Sequence[Entrant]) -> list[str]:
    """Of every drafter how far it is ahead of the next in the ranking and, where that may be chance, of the first one
    below that it is really ahead of."""
    lines = []
    for place, ours in enumerate(entrants):
        pairs = [(theirs, difference(ours, theirs)) for theirs in entrants[place + 1 :]]
        behind = [(theirs, found) for theirs, found in pairs if found is not None]
        first_real = next((index for index, (_, found) in enumerate(behind) if found.low > 0), 0)
        shown = behind[:1] + (behind[first_real : first_real + 1] if first_real else [])
        if shown:
            lines.append(f"{name_of(ours)} against {'; against '.join(_gap(ours, *one) for one in shown)}.")
    return lines


def difference(ours: Entrant, theirs: Entrant) -> Interval | None:
    """Of greedy acceptance lengths, paired by prompts; None where there are too few of them."""
    mine, others = ours.length(0.0).resamples, theirs.length(0.0).resamples
    return None if mine is None or others is None else percentiles(mine - others)


def _gap(ours: Entrant, theirs: Entrant, interval: Interval) -> str:
    verdict = "a real difference" if interval.low > 0 else "which may be chance"
    if interval.low > 0 and any(x.training_seconds is not None and len(x.cells) == 1 for x in (ours, theirs)):
        verdict = "real on these prompts, but of one seed"
    ahead = ours.length(0.0).value - theirs.length(0.0).value
    between_ends = f"{interval.low:+.2f} to {interval.high:+.2f}"
    return f"{name_of(theirs)}: {ahead:+.2f} ({between_ends}) tokens a round, {verdict}"


def name_of(entrant: Entrant) -> str:
    """As people write it, with the slot layout of a block drafter."""
    layout = row_at(entrant.cells[0], 0.0)["slot_layout"]
    return entrant.name.replace("_", " ") + ("" if layout is None else f" ({layout})")


def standings_picture(entrants: Sequence[Entrant]) -> str:
    """Every drafter's acceptance length with its interval, on a ground of its own: pages may be dark."""
    bars = []
    for entrant in entrants:
        found = entrant.length(0.0)
        bars.append(Bar(name_of(entrant), found.value, found.interval, int(entrant.training_seconds is None)))
    svg = interval_chart("race", "tokens a round, greedy", bars)
    return re.sub(r"(<svg[^>]*>)", r'\1<rect width="100%" height="100%" fill="#ffffff"/>', svg, count=1) + "\n"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    return "\n".join(aligned([head, ["---"] * len(head), *rows]))
