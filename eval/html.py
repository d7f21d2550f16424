"""A report as one self-contained page: sentences, tables, pictures, and a replay of one prompt. It loads nothing."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from eval import charts, tables
from eval.charts import Chart, Row
from eval.markdown import (
    LOSSLESS,
    between,
    comparison_line,
    lossy_note,
    precision_of,
    server_setting,
    server_verdict,
    setting_of,
    speed_of,
    speed_remark,
)
from eval.plots import themed
from eval.tables import Table

TEMPLATE = "report.html.jinja"


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
        "acceptance": charts.acceptance(rows),
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
    replay, server = report["replay"], report.get("server")
    return environment.get_template(TEMPLATE).render(
        title=f"{title(rows)} for {report['target']}",
        setting=setting(rows[0]),
        sections=sections(has_replay=replay is not None, has_server=bool(server), has_confidence=has_confidence),
        warnings=[f"Not measured: {reason}." for reason in report["missing_tasks"]],
        tiles=tiles(report, rows),
        headline=headline(report, rows),
        summary=tables.summary(report["rows"]),
        charts=pictures,
        lanes=lanes(replay),
        replay_setting="" if replay is None else _temperature(replay["lanes"][0]["temperature"]),
        question="" if replay is None else replay["question"],
        conditional=tables.conditional(rows),
        tasks=tables.tasks(rows),
        findings=report["findings"],
        lossless_words=lossless_words(report["rows"]),
        losslessness=tables.losslessness(report["losslessness"]),
        divergences=tables.divergences(report["losslessness"]),
        lossy=tables.lossy(report["lossy_sweep"]),
        speed=[
            line.removeprefix("- ")
            for row in rows
            if row["temperature"] == rows[0]["temperature"] and (line := speed_remark(row))
        ],
        loads=tables.loads(report.get("simulation")),
        server=tables.server(server),
        server_words=server_words(server),
        calibration=tables.thresholds(report["confidence_sweep"]),
        facts=facts(report, rows),
        confidence_words=confidence_words(report["calibration"]),
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


def sections(*, has_replay: bool, has_server: bool, has_confidence: bool) -> Iterator[tuple[str, str]]:
    yield "result", "In short"
    if has_replay:
        yield "replay", "Replay"
    yield from (("positions", "How far"), ("tasks", "By task"), ("why", "Why no higher"), ("lossless", "Lossless?"))
    yield "speed", "Time and load"
    if has_server:
        yield "server", "In an engine"
    if has_confidence:
        yield "confidence", "Confidence"
    yield "words", "How it was measured"


def title(rows: Sequence[Row]) -> str:
    names = [name for name in dict.fromkeys(row["drafter"] for row in rows) if name not in ("vanilla", "ngram")]
    return " and ".join(names) or rows[-1]["drafter"]


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
    if (ratio := speed_of(best)) is not None:
        remark = f"of plain decoding's, {setting_of(best)}, batch {best['batch_size']} on {best['device']}"
        found.append(Tile("speed", f"{ratio:.2f}×", remark, "good" if ratio >= 1 else "bad"))
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
        return ["No lossless drafter was measured."]
    found = [
        f"Best here: {best['drafter']} with {best['acceptance_length']:.2f} tokens a round"
        f"{between(best['acceptance_length_interval'])}, "
        f"{_temperature(best['temperature'])}, K={best['num_draft_tokens']}."
    ]
    subjects = {subject["name"]: subject["findings"] for subject in report["findings"]}
    learnt = [row for row in charts.drafting(rows) if setting_of(row) in subjects]
    trained = max(learnt, key=lambda row: row["acceptance_length"], default=best)
    if trained is not best:
        found.append(f"Best of those that are trained: {setting_of(trained)}, {trained['acceptance_length']:.2f}.")
    same = [one for one in report["comparisons"] if one["temperature"] == best["temperature"]]
    found += [comparison_line(one).removeprefix("- ") for one in same]
    quick = [row for row in charts.drafting(rows) if row["lossless"] and speed_of(row) is not None]
    if quick:
        fastest = max(quick, key=lambda row: speed_of(row) or 0.0)
        batch = f"batch {fastest['batch_size']} on {fastest['device']}"
        found.append(
            f"Fastest at {batch}: {setting_of(fastest)}, {speed_of(fastest):.2f} times plain decoding."
            if (speed_of(fastest) or 0.0) > 1
            else f"At {batch} none of the measured settings is faster than plain decoding."
        )
    if report.get("simulation"):
        found.append(worth_drafting(report["simulation"]))
    for finding in subjects.get(setting_of(trained), [])[:1]:
        found.append(f"Next for {trained['drafter']}: {finding['cause'].lower()}. {finding['advice']}")
    return found


def server_words(server: Mapping[str, Any] | None) -> list[str]:
    return [] if not server else [server_setting(server), *(server_verdict(server, row) for row in server["rows"])]


def worth_drafting(simulation: Mapping[str, Any]) -> str:
    """At which simulated loads a fixed number of drafts is faster than none."""
    schedules = simulation["schedules"]
    gains = []
    for (name, row), plain in zip(charts.best_fixed(schedules), schedules["vanilla"], strict=True):
        ratio = row["tokens_per_second"] / plain["tokens_per_second"]
        if ratio > 1:
            gains.append(f"{plain['num_requests']} ({ratio:.2f} times, K={name.removeprefix('fixed ')})")
    who = f"{simulation['drafter']} ({_temperature(simulation['temperature'])})"
    if not gains:
        return f"By the load simulation of {who} plain decoding is fastest at every load."
    return f"By the load simulation of {who}, drafting beats plain decoding at loads of {', '.join(gains)} requests."


def confidence_words(calibration: Mapping[str, Any] | None) -> str:
    if not calibration:
        return ""
    before, after = calibration["before"], calibration["after"]
    said = f"{calibration['rounds']} measured rounds at {_temperature(calibration['temperature'])}. "
    said += f"Mean error over all drafts (ECE): {before['mean_ece']:.1%} as the head says it"
    if after is not None:
        said += f", {after['mean_ece']:.1%} with the scaling that was fitted on other prompts (after)"
    aucs = ["-" if value is None else f"{value:.2f}" for value in (after or before)["auc"]]
    return said + (
        f". How well it tells blocks that survive from those that do not (AUC, 0.5 = not at all, 1 = always), draft by "
        f"draft: {', '.join(aucs)}."
    )


def lossless_words(rows: Sequence[Row]) -> str:
    lossy_rows = [row for row in rows if not row["lossless"]]
    how = (
        " Greedy outputs are compared token by token with plain decoding's. Sampled ones can only be compared by tests "
        "(the first token that came out of a verification; the length), which on few prompts find gross faults alone: "
        "p under 0.001 would be one, a high p proves nothing. That a rule is lossless is shown by the project's own "
        "tests; what a lossy one alters is computed below."
    )
    return (LOSSLESS if not lossy_rows else lossy_note(lossy_rows)).strip() + how


def lanes(replay: Mapping[str, Any] | None) -> list[dict[str, Any]]:
    if replay is None:
        return []
    vanilla = next(lane for lane in replay["lanes"] if lane["drafter"] == "vanilla")
    found = []
    for lane in replay["lanes"]:
        rate, plain = (one["num_tokens"] / one["seconds"] for one in (lane, vanilla))
        versus = "" if lane is vanilla else f", {rate / plain:.2f} times vanilla"
        remark = f"{lane['num_tokens']} tokens in {lane['seconds']:.2f} s: {rate:.1f} tokens/s{versus}"
        name = lane["drafter"] + (f", K={lane['num_draft_tokens']}" if lane["num_draft_tokens"] else "")
        found.append({"name": name, "remark": remark, "steps": lane["steps"]})
    return found


def facts(report: Mapping[str, Any], rows: Sequence[Row]) -> Iterator[tuple[str, str]]:
    row = rows[0]
    yield "target", f"{row['target']}, {precision_of(row)}".rstrip(",")
    machine = report["machine"]
    threads = f", {machine['threads']} threads" if row["device"] == "cpu" else ""
    yield (
        "device",
        f"{row['device']}{threads}, at most {row['batch_size']} requests at a time, torch {machine['torch']}",
    )
    yield "seed", str(machine["seed"])
    yield "prompts", ", ".join(f"{name} {part['num_prompts']}" for name, part in row["per_domain"].items())
    yield "new tokens", f"at most {row['max_new_tokens']} a prompt"
    for name, layout, length in dict.fromkeys(
        (one["drafter"], one["slot_layout"], one["num_draft_tokens"]) for one in charts.drafting(rows)
    ):
        yield f"drafter {name}", f"at most {length} drafts a round" + (f", slots {layout}" if layout else "")
    for subject in report["findings"]:
        end = subject["training"]
        trained = "" if end is None else f", trained for {end['step']} steps"
        yield subject["name"], f"{subject['parameters'] / 1e6:.1f} million parameters{trained}"
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
