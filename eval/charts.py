"""What a report shows as pictures, each with a caption on how to read it. None where there is nothing to show."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from eval.markdown import setting_of
from eval.plots import Bar, interval_chart, line_chart, reliability_diagram, stacked_chart

Row = Mapping[str, Any]


class Chart(NamedTuple):
    svg: str
    caption: str
    is_wide: bool = False


def drafting(rows: Sequence[Row]) -> list[Row]:
    """Rows of drafters that had rounds."""
    return [row for row in rows if row["drafter"] != "vanilla" and row["acceptance_length"] is not None]


def acceptance(rows: Sequence[Row]) -> Chart | None:
    shown = drafting(rows)
    bars = [
        Bar(setting_of(row), row["acceptance_length"], row["acceptance_length_interval"], _series(row, shown))
        for row in shown
    ]
    if not bars:
        return None
    svg = interval_chart("acceptance", "tokens a round", bars)
    return Chart(svg, "Acceptance length with its 95 % interval. Compare rows of one temperature and one K.")


def differences(comparisons: Sequence[Row]) -> Chart | None:
    bars = [
        Bar(f"{one['drafter']} − {one['other']}, T={one['temperature']:g}", one["difference"], one["interval"])
        for one in comparisons
    ]
    if not bars:
        return None
    svg = interval_chart("differences", "tokens a round more", bars, zero=True)
    return Chart(svg, "Differences on the same prompts with 95 % intervals: real where the interval is off the 0 line.")


def conditional(rows: Sequence[Row]) -> list[Chart]:
    """A chart for every temperature, of lossless rows."""
    found = []
    for temperature in dict.fromkeys(row["temperature"] for row in drafting(rows)):
        same = [row for row in drafting(rows) if row["temperature"] == temperature]
        longest = max(len(row["conditional_acceptance"]) for row in same)
        svg = line_chart(
            f"conditional-{temperature:g}".replace(".", "-"),
            ("draft token", range(1, longest + 1)),
            {f"temperature {temperature:g}": {_name(row, same): row["conditional_acceptance"] for row in same}},
            percent=(f"temperature {temperature:g}",),
            whole=True,
            lowest=0,
            series=_colours(same, rows),
        )
        found.append(Chart(svg, "Of the rounds that drafted it, and in which all drafts before it were accepted."))
    return found


def tasks(rows: Sequence[Row]) -> Chart | None:
    """Of the first temperature."""
    bars = [
        Bar(
            f"{task}: {_name(row, same)}",
            part["acceptance_length"],
            part["acceptance_length_interval"],
            _series(row, drafting(rows)),
        )
        for same in [_of_first_temperature(rows)]
        for task in sorted({task for row in same for task in row["per_domain"]})
        for row in same
        if (part := row["per_domain"].get(task)) and part["acceptance_length"] is not None
    ]
    if not bars:
        return None
    return Chart(interval_chart("tasks", "tokens a round", bars), "By task, at the first temperature, 95 % intervals.")


def context(rows: Sequence[Row]) -> Chart | None:
    same = _of_first_temperature(rows)
    classes = [[one for one in row["acceptance_by_context"] if one["rounds"] >= 20] for row in same]
    if max((len(one) for one in classes), default=0) < 2:
        return None
    starts = sorted({one["from"] for found in classes for one in found})
    lines = {
        _name(row, same): [{one["from"]: one["acceptance_length"] for one in found}.get(start) for start in starts]
        for row, found in zip(same, classes, strict=True)
    }
    svg = line_chart(
        "context",
        ("tokens before the round, at least", starts),
        {"tokens a round": lines},
        lowest=1,
        series=_colours(same, rows),
    )
    return Chart(svg, "By the length of the context (classes of 20 rounds or more).")


def rejections(rows: Sequence[Row]) -> Chart | None:
    bars = {}
    for row in drafting(rows):
        if split := row["rejections"]:
            rounds = row["rounds"]
            bars[setting_of(row)] = {
                "accepted": row["accepted"] / rounds,
                "right one in its top 16": split["in_top_16"] / rounds,
                "not in its top 16": split["not_in_top_16"] / rounds,
            }
    if not bars:
        return None
    svg = stacked_chart("rejections", "drafts a round", bars)
    return Chart(svg, "What came of the drafts that were decided; those behind a rejected one are not.")


def recall(rows: Sequence[Row]) -> Chart | None:
    same = [row for row in _of_first_temperature(rows) if row["rejections"]]
    if not same:
        return None
    longest = max(len(row["recall_at_1"]) for row in same)
    titles = {"the likeliest": "recall_at_1", "among the likeliest 16": "recall_at_16"}
    panels = {title: {_name(row, same): row[key] for row in same} for title, key in titles.items()}
    svg = line_chart(
        "recall",
        ("draft token", range(1, longest + 1)),
        panels,
        percent=tuple(titles),
        whole=True,
        lowest=0,
        series=_colours(same, rows),
    )
    return Chart(svg, "How often the right token is what the drafter thinks likeliest, or one of 16.", is_wide=True)


def lossy(sweep: Sequence[Row]) -> Chart | None:
    if len(sweep) < 2:
        return None
    bars = [
        Bar(
            "lossless"
            if one["lossless"]
            else f"threshold {one['lossy_threshold']:g}, {one['altered_share']:.1%} altered",
            one["acceptance_length"],
            one["acceptance_length_interval"],
        )
        for one in sweep
    ]
    svg = interval_chart("lossy", "tokens a round", bars)
    return Chart(svg, "Acceptance bought at each threshold, and the share of tokens it alters.")


def times(rows: Sequence[Row]) -> Chart | None:
    names = {"draft": "drafting", "verify": "verifying", "overhead": "the rest"}
    bars = {
        setting_of(row): {shown: 1e3 * row[f"{part}_step_seconds"] for part, shown in names.items()}
        for row in rows
        if row["draft_step_seconds"] is not None and row["lossless"]
    }
    if not bars:
        return None
    batch = rows[0]["batch_size"]
    return Chart(
        stacked_chart("times", "milliseconds", bars), f"A round of the whole batch ({batch} requests at most)."
    )


def load(simulation: Mapping[str, Any] | None) -> Chart | None:
    if not simulation:
        return None
    schedules = simulation["schedules"]
    loads = [row["num_requests"] for row in schedules["vanilla"]]
    plain = [row["tokens_per_second"] for row in schedules["vanilla"]]
    shown = {"best fixed K": [row for _, row in best_fixed(schedules)]}
    shown |= {name: rows for name, rows in schedules.items() if name.endswith("gate")}
    panels = {
        "speed, plain decoding = 1": {
            name: [row["tokens_per_second"] / base for row, base in zip(rows, plain, strict=True)]
            for name, rows in shown.items()
        },
        "drafts verified, a request and round": {
            name: [row["drafts_per_request"] for row in rows] for name, rows in shown.items()
        },
    }
    svg = line_chart("load", ("requests at a time", loads), panels, doubling=True)
    caption = (
        "Simulated load: costs measured here (once, to some percent), this run's rounds replayed. With the gate a "
        "schedule stops drafting where that does not pay. Lines that agree hide each other."
    )
    return Chart(svg, caption, is_wide=True)


def best_fixed(schedules: Mapping[str, Sequence[Row]]) -> list[tuple[str, Row]]:
    """Of every simulated load: the fixed length with most tokens a second, as its name and row."""
    fixed = [[(name, row) for row in rows] for name, rows in schedules.items() if name.startswith("fixed")]
    return [max(column, key=lambda one: one[1]["tokens_per_second"]) for column in zip(*fixed, strict=True)]


def reliability(calibration: Mapping[str, Any] | None) -> Chart | None:
    if not calibration:
        return None
    caption = (
        "Of blocks predicted to survive beyond a draft with some chance, the share that did. The area of a mark is "
        "its share of the rounds."
    )
    return Chart(reliability_diagram(calibration), caption, is_wide=True)


def thresholds(sweep: Sequence[Row]) -> Chart | None:
    if not sweep:
        return None
    places = [one["threshold"] for one in sweep[0]["thresholds"]]
    panels = {
        title: {one["task"] or "all": [point[key] for point in one["thresholds"]] for one in sweep}
        for title, key in (("acceptance rate", "acceptance_rate"), ("tokens a round", "acceptance_length"))
    }
    svg = line_chart("thresholds", ("confidence threshold", places), panels, percent=("acceptance rate",))
    caption = (
        "Verifying only drafts that are sure enough (schedule=confidence): fewer are wasted, and fewer tokens come out "
        "of a round. Recorded rounds, cut at each threshold."
    )
    return Chart(svg, caption, is_wide=True)


def _of_first_temperature(rows: Sequence[Row]) -> list[Row]:
    found = drafting(rows)
    return [row for row in found if row["temperature"] == found[0]["temperature"] and row["lossless"]]


def _colours(same: Sequence[Row], rows: Sequence[Row]) -> dict[str, int]:
    """Of the lines of rows of one temperature: those of their drafters."""
    return {_name(row, same): _series(row, drafting(rows)) for row in same}


def _series(row: Row, rows: Sequence[Row]) -> int:
    """Of the drafter, by the order in which drafters stand there."""
    return list(dict.fromkeys(other["drafter"] for other in rows)).index(row["drafter"])


def _name(row: Row, same: Sequence[Row]) -> str:
    """The drafter, with what tells it from others of the same name."""
    twins = [other for other in same if other["drafter"] == row["drafter"]]
    if len(twins) == 1:
        return row["drafter"]
    return f"{row['drafter']} K={row['num_draft_tokens']}"
