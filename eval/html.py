"""A report as one self-contained page: sentences, tables, pictures, and a race that replays. It loads nothing."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from eval import charts
from eval.charts import Chart, Row
from eval.markdown import LOSSLESS, between, comparison_line, lossy_note, number, precision_of, setting_of, speed_remark
from eval.plots import themed

TEMPLATE = "report.html.jinja"
THRESHOLDS_SHOWN = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9)


class Table(NamedTuple):
    """One without rows is not shown. `words`: columns of text."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: frozenset[int] = frozenset()


class Tile(NamedTuple):
    name: str
    value: str
    remark: str
    state: str = ""  # good or bad


def render_page(report: Mapping[str, Any]) -> str:
    """`report` is report.json's."""
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent), autoescape=True, undefined=StrictUndefined, trim_blocks=True
    )
    environment.globals |= {"figure": figure_of, "table": table_of}
    rows = [row for row in report["rows"] if row["task_set"] == "main"]
    pictures = {
        "acceptance": charts.acceptance(report["rows"]),
        "differences": charts.differences(report["comparisons"]),
        "conditional": charts.conditional([row for row in rows if row["lossless"]]),
        "tasks": charts.tasks(rows),
        "context": charts.context(rows),
        "rejections": charts.rejections(rows),
        "recall": charts.recall(rows),
        "lossy": charts.lossy(report["lossy_sweep"]),
        "times": charts.times(rows),
        "load": charts.load(report.get("simulation")),
        "reliability": charts.reliability(report["calibration"]),
        "thresholds": charts.thresholds(report["confidence_sweep"]),
    }
    has_confidence = bool(pictures["reliability"] or pictures["thresholds"])
    race = report["race"]
    return environment.get_template(TEMPLATE).render(
        title=f"{report['drafter']} for {report['target']}",
        setting=setting(rows[0]),
        sections=sections(has_race=race is not None, has_confidence=has_confidence),
        warnings=[f"Not measured: {reason}." for reason in report["missing_tasks"]],
        tiles=tiles(report, rows),
        headline=headline(report, rows),
        summary=summary(report["rows"]),
        charts=pictures,
        lanes=lanes(race),
        race_setting="" if race is None else _temperature(race["lanes"][0]["temperature"]),
        question="" if race is None else race["question"],
        conditional=conditional(rows),
        tasks=tasks(rows),
        findings=report["findings"],
        lossless_words=lossless_words(report["rows"]),
        losslessness=losslessness(report["losslessness"]),
        divergences=divergences(report["losslessness"]),
        lossy=lossy(report["lossy_sweep"]),
        speed=[
            line.removeprefix("- ")
            for row in rows
            if row["temperature"] == rows[0]["temperature"] and (line := speed_remark(row))
        ],
        loads=loads(report.get("simulation")),
        calibration=thresholds(report["confidence_sweep"]),
        facts=facts(report, rows),
    )


def figure_of(chart: Chart | None) -> Markup:
    if chart is None:
        return Markup("")
    kind = Markup(' class="wide"') if chart.is_wide else ""
    # the picture's text is escaped where it was drawn
    return Markup('<figure{}><div class="frame">{}</div><figcaption>{}</figcaption></figure>').format(
        kind, Markup(themed(chart.svg)), chart.caption
    )


def table_of(table: Table) -> Markup:
    if not table.rows:
        return Markup("")

    def cells(kind: str, texts: Sequence[str]) -> Markup:
        return Markup("").join(
            Markup('<{} class="text">{}</{}>' if column in table.words else "<{}>{}</{}>").format(kind, text, kind)
            for column, text in enumerate(texts)
        )

    body = Markup("").join(Markup("<tr>{}</tr>").format(cells("td", row)) for row in table.rows)
    head = cells("th", table.head)
    return Markup('<div class="scroll"><table><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>').format(
        head, body
    )


def sections(*, has_race: bool, has_confidence: bool) -> Iterator[tuple[str, str]]:
    yield "result", "In short"
    if has_race:
        yield "race", "Race"
    yield from (("positions", "How far"), ("tasks", "By task"), ("why", "Why no higher"), ("lossless", "Lossless?"))
    yield "speed", "Time and load"
    if has_confidence:
        yield "confidence", "Confidence"
    yield "words", "How it was measured"


def setting(row: Row) -> str:
    tasks = ", ".join(sorted(row["per_domain"]))
    return (
        f"{row['num_prompts']} prompts ({tasks}), at most {row['max_new_tokens']} new tokens, {precision_of(row)} on "
        f"{row['device']}, batch {row['batch_size']}"
    )


def best_row(report: Mapping[str, Any], rows: Sequence[Row]) -> Row | None:
    """Of the drafters at the report's first temperature, the lossless row with most tokens a round."""
    known = [row for row in charts.drafting(rows) if row["lossless"] and row["temperature"] == report["temperature"]]
    return max(known, key=lambda row: row["acceptance_length"], default=None)


def tiles(report: Mapping[str, Any], rows: Sequence[Row]) -> list[Tile]:
    best = best_row(report, rows)
    if best is None:
        return []
    what = f"{best['drafter']}, {_temperature(best['temperature'])}"
    found = [
        Tile(
            what,
            f"{best['acceptance_length']:.2f}",
            f"tokens a round{between(best['acceptance_length_interval'])}; plain decoding has 1",
        )
    ]
    measured = [row for row in charts.drafting(rows) if row["lossless"] and row["vanilla_tokens_per_second"]]
    if measured:
        fastest = max(measured, key=lambda row: row["tokens_per_second"] / row["vanilla_tokens_per_second"])
        ratio = fastest["tokens_per_second"] / fastest["vanilla_tokens_per_second"]
        remark = f"of plain decoding's, {setting_of(fastest)}, batch {fastest['batch_size']}"
        found.append(Tile("highest speed measured", f"{ratio:.2f}×", remark, "good" if ratio >= 1 else "bad"))
    greedy = [row for row in rows if row["outputs_identical_to_vanilla"] is not None]
    if greedy:
        same = all(row["outputs_identical_to_vanilla"] for row in greedy)
        ties = sum(row["near_tie_divergences"] for row in greedy)
        remark = "greedy outputs against plain decoding's" + (f", {ties} near ties" if ties else "")
        found.append(Tile("lossless", "equal" if same else "NOT equal", remark, "good" if same else "bad"))
    return found


def headline(report: Mapping[str, Any], rows: Sequence[Row]) -> list[str]:
    """What a reader should know who reads no further."""
    best = best_row(report, rows)
    if best is None:
        return ["No drafter was measured."]
    found = [
        f"Best here: {best['drafter']} with {best['acceptance_length']:.2f} tokens a round"
        f"{between(best['acceptance_length_interval'])}, "
        f"{_temperature(best['temperature'])}, K={best['num_draft_tokens']}."
    ]
    found += [comparison_line(one).removeprefix("- ") for one in report["comparisons"]]
    choice = report["length_choice"]
    if choice is not None:
        chosen = choice["num_draft_tokens"]
        found.append(
            f"Fastest number of drafts here at batch {choice['batch_size']}, by measured costs: "
            f"{chosen or 'none, plain decoding is faster'}."
        )
    for subject in report["findings"][:1]:
        if subject["findings"]:
            first = subject["findings"][0]
            found.append(f"Next for {subject['name']}: {first['cause'].lower()}. {first['advice']}")
    return found


def summary(rows: Sequence[Row]) -> Table:
    head = [
        "drafter",
        "T",
        "K",
        "tokens a round",
        "95 %",
        "per prompt",
        "drafts accepted",
        "tokens/s",
        "vanilla ×",
        "output",
    ]
    lines = []
    for row in rows:
        vanilla, low_high = row["vanilla_tokens_per_second"], row["acceptance_length_interval"]
        extra = "" if row["task_set"] == "main" else f" ({', '.join(sorted(row['per_domain']))})"
        lines.append(
            [
                row["drafter"] + extra,
                f"{row['temperature']:g}",
                str(row["num_draft_tokens"]),
                number(row["acceptance_length"]),
                "–" if low_high is None or row["drafter"] == "vanilla" else f"{low_high[0]:.2f} to {low_high[1]:.2f}",
                number(row["acceptance_length_per_request"]),
                "–" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.0%}",
                f"{row['tokens_per_second']:.1f}",
                f"{row['tokens_per_second'] / vanilla:.2f}" if vanilla else "–",
                _output(row),
            ]
        )
    return Table(head, lines, frozenset({9}))


def _output(row: Row) -> str:
    if not row["lossless"]:
        return f"LOSSY, threshold {row['lossy_threshold']:g}"
    if row["drafter"] == "vanilla":
        return "the target's own"
    known = {True: "equal to vanilla's", False: "NOT vanilla's", None: "lossless by its rule"}
    return known[row["outputs_identical_to_vanilla"]]


def conditional(rows: Sequence[Row]) -> Table:
    shown = [row for row in charts.drafting(rows) if row["lossless"]]
    longest = max((len(row["conditional_acceptance"]) for row in shown), default=0)
    lines = [
        [
            setting_of(row),
            row["slot_layout"] or "–",
            *_padded([_share(x) for x in row["conditional_acceptance"]], longest),
        ]
        for row in shown
    ]
    return Table(["drafter", "slot layout", *(f"draft {k + 1}" for k in range(longest))], lines, frozenset({1}))


def tasks(rows: Sequence[Row]) -> Table:
    names = sorted({name for row in rows for name in row["per_domain"]})
    lines = []
    for row in charts.drafting(rows):
        cells = []
        for name in names:
            part = row["per_domain"].get(name, {})
            vanilla = part.get("vanilla_tokens_per_second")
            speed = f", {part['tokens_per_second'] / vanilla:.2f}×" if vanilla else ""
            sure = between(part.get("acceptance_length_interval"))
            cells.append(number(part.get("acceptance_length")) + sure + speed)
        lines.append([setting_of(row), *cells])
    return Table(["tokens a round (95 %), speed of plain decoding's", *names], lines)


def lossless_words(rows: Sequence[Row]) -> str:
    lossy_rows = [row for row in rows if not row["lossless"]]
    how = (
        " Greedy outputs are compared token by token with plain decoding's, sampled ones by two tests, of the first "
        "token that came out of a verification and of the length (p-values; - where too few to say). Of some dozen of "
        "them one under 0.001 would be a fault."
    )
    return (LOSSLESS if not lossy_rows else lossy_note(lossy_rows)).strip() + how


def losslessness(found: Sequence[Row]) -> Table:
    tasks = list(dict.fromkeys(task["task"] for one in found for task in one["tasks"]))
    lines = []
    for one in found:
        parts = {task["task"]: _agreement(task) for task in one["tasks"]}
        lines.append([setting_of(one), str(one["rule"]), *(parts.get(task, "–") for task in tasks)])
    return Table(["drafter", "rule", *tasks], lines, frozenset(range(1, 2 + len(tasks))))


def _agreement(task: Row) -> str:
    if "equal" in task:
        ties = f", {task['near_ties']} near ties" if task["near_ties"] else ""
        return f"{task['equal']} of {task['num_prompts']} equal{ties}"
    return "p = " + ", ".join(number(task[key], 3) for key in ("first_verified_token_p", "length_p"))


def divergences(found: Sequence[Row]) -> Table:
    lines = [
        [setting_of(one), task["task"], str(place["prompt"]), str(place["position"]), f"{place['top2_gap']:.6f}"]
        for one in found
        for task in one["tasks"]
        for place in task.get("divergences", ())
    ]
    return Table(["drafter", "task", "prompt", "token", "gap of the two best logits"], lines, frozenset({1}))


def lossy(sweep: Sequence[Row]) -> Table:
    lines = [
        [
            "lossless" if one["lossless"] else f"{one['lossy_threshold']:g}",
            number(one["acceptance_length"]) + between(one["acceptance_length_interval"]),
            "0 %" if one["lossless"] else f"{one['altered_share']:.1%}",
            f"{one['tokens_per_second']:.1f}",
        ]
        for one in sweep
    ]
    return Table(["threshold", "tokens a round", "tokens altered", "tokens/s"], lines)


def loads(simulation: Mapping[str, Any] | None) -> Table:
    if not simulation:
        return Table([], [])
    schedules = simulation["schedules"]
    lines = [
        [name, *(f"{row['tokens_per_second']:.0f} ({row['drafts_per_request']:.1f})" for row in rows)]
        for name, rows in schedules.items()
    ]
    head = ["tokens/s (drafts verified), requests:", *(str(row["num_requests"]) for row in schedules["vanilla"])]
    return Table(head, lines)


def thresholds(sweep: Sequence[Row]) -> Table:
    lines = [
        [
            one["task"] or "all tasks",
            *(
                f"{_share(point['acceptance_rate'])} ({point['acceptance_length']:.2f})"
                for point in one["thresholds"]
                if round(point["threshold"], 2) in THRESHOLDS_SHOWN
            ),
        ]
        for one in sweep
    ]
    return Table(["acceptance rate (tokens a round)", *(f"from {x:g}" for x in THRESHOLDS_SHOWN)], lines)


def lanes(race: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    if race is None:
        return []
    vanilla = next(lane for lane in race["lanes"] if lane["drafter"] == "vanilla")
    found = []
    for lane in race["lanes"]:
        rate, plain = (one["num_tokens"] / one["seconds"] for one in (lane, vanilla))
        versus = "" if lane is vanilla else f", {rate / plain:.2f} times vanilla"
        remark = f"{lane['num_tokens']} tokens in {lane['seconds']:.2f} s: {rate:.1f} tokens/s{versus}"
        name = lane["drafter"] + (f", K={lane['num_draft_tokens']}" if lane["num_draft_tokens"] else "")
        found.append({"name": name, "remark": remark, "steps": lane["steps"]})
    return found


def facts(report: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    row = rows[0]
    yield "target", f"{row['target']}, {precision_of(row)}".rstrip(",")
    yield "device", f"{row['device']}, at most {row['batch_size']} requests at a time"
    yield "prompts", ", ".join(f"{name} {part['num_prompts']}" for name, part in row["per_domain"].items())
    yield "new tokens", f"at most {row['max_new_tokens']} a prompt"
    for name, layout, length in dict.fromkeys(
        (one["drafter"], one["slot_layout"], one["num_draft_tokens"]) for one in charts.drafting(rows)
    ):
        yield f"drafter {name}", f"at most {length} drafts a round" + (f", slots {layout}" if layout else "")
    yield "rules", ", ".join(dict.fromkeys(str(one["rule"]) for one in rows if one["drafter"] != "vanilla")) or "–"
    yield "schedules", ", ".join(dict.fromkeys(one["schedule"] for one in rows))
    yield "drafter's features", f"{row['feature_dtype']}"
    check = report["transformers_generate"]
    if check:
        verdict = "equal" if check["outputs_identical_to_vanilla"] else "NOT equal"
        yield "against transformers", f"{check['num_prompts']} greedy outputs of generate(): {verdict}"
    yield (
        "counting",
        "pooled over all rounds, the bonus token counted, but not in a round that an accepted stop token ended",
    )
    yield (
        "speed",
        "tokens over wall time with the prompts' own forward; times of what only this report needs are left out",
    )


def _temperature(value: float) -> str:
    return "greedy" if value == 0 else f"temperature {value:g}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _padded(cells: Sequence[str], length: int) -> list[str]:
    return [*cells, *["–"] * (length - len(cells))]
