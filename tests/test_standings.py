"""Standings of a race say who leads and whether that is real, from the cells' files alone."""

import re
from pathlib import Path
from statistics import mean
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy import stats

from eval.intervals import percentiles, resampled_over_seeds
from eval.standings import Costs, Entrant, cell_text, ranked, read_cells, show_standings, standings
from models.files import write_text
from tests.test_plots import texts_of

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "race"
DOMAINS = ("chat", "code")


def requests(rng: np.random.Generator, length: float, count: int = 24) -> list[list[int]]:
    """[tokens, rounds] of requests with about `length` tokens a round."""
    rounds = rng.integers(20, 40, size=count)
    return [[round(r * length * x), int(r)] for r, x in zip(rounds, rng.normal(1, 0.1, count), strict=True)]


def cell(name: str, seed: int | None, length: float, **changes: Any) -> dict[str, Any]:
    """What run_cell writes, but for versions. Prompts are the same whatever the drafter: so is their noise."""
    rng = np.random.default_rng(5)
    domains = {domain: requests(rng, length) for domain in DOMAINS}
    row = {
        "target": "tiny",
        "dtype": "float32",
        "device": "cpu",
        "slot_layout": None if name == "ngram" else "in_place",
        "batch_size": 4,
        "max_new_tokens": 16,
        "num_prompts": 48,
        "conditional_acceptance": [0.5, None],
        "outputs_identical_to_vanilla": True,
        "near_tie_divergences": 0,
        "requests": domains,
    }
    return {
        "cell": {"drafter": name, "seed": seed, "options": [], "draft": None},
        "plan": {"num_steps": 5, "num_answers": 9, "num_draft_tokens": 2, "options": {"eval": [], "train": []}},
        "made_with": {"threads": 2},
        "trained_parameters": 0 if seed is None else 1_500_000,
        "training": None if seed is None else {"seconds": 60.0 * seed, "num_steps": 5, "last": {}},
        "measured": [row | {"temperature": 0.0}, row | {"temperature": 1.0, "outputs_identical_to_vanilla": None}],
        "alone": {"draft_seconds": 0.01, "verify_seconds": 0.04, "vanilla_seconds": 0.05},
        "date": "2026-01-02",
    } | changes


def race(lengths: dict[str, list[float]]) -> list[dict[str, Any]]:
    """Cells of drafters by name, with the lengths of their seeds; one alone is untrained."""
    return [
        cell(name, None if len(values) == 1 else seed, value)
        for name, values in lengths.items()
        for seed, value in enumerate(values, start=1)
    ]


def test_the_ranking_is_by_greedy_acceptance_length_over_all_seeds() -> None:
    cells = race({"dflash": [1.5, 1.5, 1.5], "dflash2": [1.9, 2.0, 2.1], "ngram": [1.2]})
    entrants = ranked(cells)
    assert [entrant.name for entrant in entrants] == ["dflash2", "dflash", "ngram"]
    first = entrants[0].length(0.0)
    pooled = []
    for one in cells[3:6]:
        found = [request for domain in DOMAINS for request in one["measured"][0]["requests"][domain]]
        pooled.append(sum(tokens for tokens, _ in found) / sum(rounds for _, rounds in found))
    assert first.by_seed == pooled and first.value == mean(pooled)
    assert Costs.of(cells).speed(entrants[0]) == pytest.approx(first.value * 0.05 / (0.01 + 0.04))


def test_standings_hold_conditions_every_drafter_and_every_domain() -> None:
    text = standings(ranked(race({"dflash": [1.5, 1.5, 1.5], "dflash2": [1.9, 2.0, 2.1], "ngram": [1.2]})))
    for part in ("Target tiny, float32 on cpu", "5 steps on 9 answers, seeds 1, 2, 3", "2 draft tokens", "2026-01-02"):
        assert part in text, part
    assert "identical to vanilla decoding in every cell" in text
    assert len(re.findall(r"^\| dflash2 \(in_place\) ", text, re.MULTILINE)) == 3  # ranking, and each temperature
    line = next(line for line in text.splitlines() if line.startswith("| dflash2"))
    assert "1.5 M" in line and "2.0 min" in line and "| 10 " in line and "| 0.50" in line
    assert "chat" in text and "code" in text


def test_one_output_that_is_not_vanillas_is_said() -> None:
    cells = race({"dflash2": [1.9, 2.0], "ngram": [1.2]})
    cells[1]["measured"][0]["outputs_identical_to_vanilla"] = False
    assert "NOT identical to vanilla decoding in every cell" in standings(ranked(cells))


@pytest.mark.parametrize(
    ("ours", "theirs", "is_real"),
    [
        ([1.80, 1.81, 1.79], [1.50, 1.51, 1.49], True),
        ([1.80, 1.81, 1.79], [1.795, 1.805, 1.785], False),  # smaller than what seeds differ by
        ([2.4, 1.8, 1.5], [1.85, 1.8, 1.75], False),  # one lucky seed
        ([1.80], [1.70], True),  # untrained: prompts alone, and the same ones
    ],
)
def test_a_difference_is_real_where_seeds_and_prompts_agree(
    ours: list[float], theirs: list[float], is_real: bool
) -> None:
    text = standings(ranked(race({"ours": ours, "theirs": theirs})))
    (line,) = [line for line in text.splitlines() if line.startswith("- ours")]
    assert ("a real difference" in line) == is_real and ("may be chance" in line) != is_real, line


def test_seeds_that_differ_widen_an_interval_and_equal_ones_do_not() -> None:
    cells = {spread: race({"dflash2": [1.8 - spread, 1.8, 1.8 + spread]}) for spread in (0.0, 0.2)}
    equal, different = (Entrant("dflash2", found, 0).length(0.0) for found in cells.values())
    alone = Entrant("dflash2", cells[0.0][:1], 0).length(0.0)
    np.testing.assert_allclose(equal.resamples, alone.resamples)
    assert np.ptp(different.interval) > 2 * np.ptp(equal.interval)


def test_resampled_seeds_have_the_error_of_their_mean() -> None:
    """With prompts that do not vary: s / sqrt(S), and what Student's t adds for few."""
    for lengths in ([1.0, 2.0], [1.0, 2.0, 3.0], [2.0, 2.1, 2.2, 1.5, 1.9]):
        seeds = [np.array([[x * 10, 10.0]] * 8) for x in lengths]
        found = resampled_over_seeds(seeds, stream=3)
        assert found is not None
        of_mean = np.std(lengths, ddof=1) / np.sqrt(len(lengths))
        wider = stats.t.ppf(0.975, len(lengths) - 1) / 1.959964  # than a normal distribution's interval
        assert found.std() == pytest.approx(of_mean * wider, rel=0.05)
        assert found.mean() == pytest.approx(mean(lengths), abs=0.1 * wider)


@pytest.mark.parametrize("spread", [0.01, 0.05, 0.2])
def test_nineteen_of_twenty_intervals_of_three_seeds_hold_the_true_length(spread: float) -> None:
    """Prompts and seeds drawn anew, where prompts matter more (their mean deviates by 0.024), alike, or seeds do."""
    rng, held = np.random.default_rng(1), 0
    for stream in range(100):
        rounds = rng.integers(20, 40, size=40)
        of_prompts, of_seeds = rng.normal(2.0, 0.15, 40), rng.normal(0, spread, 3)
        seeds = [np.stack([(of_prompts + own) * rounds, rounds], axis=1) for own in of_seeds]
        resamples = resampled_over_seeds(seeds, stream)
        assert resamples is not None
        low, high = percentiles(resamples)
        held += low <= 2.0 <= high
    assert held >= 89


def test_drafters_that_have_not_run_all_seeds_are_named() -> None:
    cells = race({"dflash": [1.5, 1.5, 1.5], "dflash2": [1.9, 2.0, 2.1], "ngram": [1.2]})
    assert "NOT all" not in standings(ranked(cells))
    text = standings(ranked([one for one in cells if (one["cell"]["drafter"], one["cell"]["seed"]) != ("dflash", 2)]))
    assert "NOT all of these seeds have run for every drafter yet. Only some for: dflash (in_place) 1, 3." in text


def test_no_interval_leaves_what_a_length_can_be() -> None:
    """At least one token a round, and no more than all drafts and the bonus; two seeds say very little."""
    for values in ([1.01, 1.12], [2.8, 2.99]):
        (entrant,) = ranked(race({"dflash2": values}))
        length = entrant.length(0.0)
        assert length.resamples is not None and length.interval is not None
        low, high = percentiles(length.resamples)
        assert low < 1 or high > 3
        assert 1 <= length.interval.low < length.interval.high <= 3


@pytest.mark.parametrize("count", [1, 4, 7])
def test_few_requests_say_nothing_of_how_sure_it_is(count: int) -> None:
    assert resampled_over_seeds([np.array([[9.0, 5.0]] * count + [[0.0, 0.0]] * 9)], 0) is None
    cells = race({"dflash2": [1.9], "ngram": [1.2]})
    for one in cells:
        for row in one["measured"]:
            row["requests"] = {"chat": row["requests"]["chat"][:count]}
    text = standings(ranked(cells))
    assert "a real difference" not in text and " to " not in text.split("\n\n")[1]


def test_a_real_difference_of_one_training_is_said_to_be_of_one_seed() -> None:
    cells = race({"ours": [1.8, 1.8], "theirs": [1.5, 1.5]})
    cells = [one for one in cells if one["cell"]["seed"] == 1]
    assert "real on these prompts, but of one seed" in standings(ranked(cells))


def test_cells_are_read_back_as_written_with_a_line_for_every_part(tmp_path: Path) -> None:
    cells = race({"dflash2": [1.9, 2.0], "ngram": [1.2]})
    for number, one in enumerate(cells):
        write_text(tmp_path / f"{number}.json", cell_text(one))
    assert read_cells(tmp_path) == cells
    assert len((tmp_path / "0.json").read_text().splitlines()) == 2 + len(cells[0])
    assert show_standings(tmp_path) == standings(ranked(cells)) == (tmp_path / "standings.md").read_text()
    texts = texts_of((tmp_path / "standings.svg").read_text())
    assert {"ngram", "dflash2 (in_place)", "tokens a round, greedy"} <= set(texts)


# ---- what the README claims


@pytest.fixture(scope="module")
def committed() -> list[dict[str, Any]]:
    return read_cells(RESULTS)


def test_the_committed_race_is_whole(committed: list[dict[str, Any]]) -> None:
    """Every drafter with three seeds, under one plan, with outputs identical to vanilla decoding."""
    seeds: dict[str, set[int | None]] = {}
    for one in committed:
        seeds.setdefault(one["cell"]["drafter"], set()).add(one["cell"]["seed"])
    trained = {"eagle3", "dflash", "dspark_vanilla", "dspark_gated", "dspark_rnn", "dflash2"}
    assert {name for name, own in seeds.items() if own == {1, 2, 3}} == trained
    assert {name for name, own in seeds.items() if own == {None}} == {"ngram", "first_10_layers", "first_27_layers"}
    assert len({str(one["plan"]) for one in committed}) == 1
    assert all(one["measured"][0]["outputs_identical_to_vanilla"] for one in committed)


def test_the_readmes_tables_and_picture_follow_from_the_committed_cells(committed: list[dict[str, Any]]) -> None:
    readme = (ROOT / "README.md").read_text()
    text = standings(ranked(committed))
    assert (RESULTS / "standings.md").read_text() == text
    tables = [block for block in text.split("\n\n") if block.startswith("|")]
    assert len(tables) == 3 and all(block in readme for block in tables[:2])
    assert all(block in readme for block in text.split("\n\n") if block.startswith(("Target", "`draft k`")))
    assert all(line in readme for line in text.splitlines() if line.startswith("- "))
    assert "results/race/standings.svg" in readme and "python race.py results=results/race" in readme
    ElementTree.fromstring((RESULTS / "standings.svg").read_text())
