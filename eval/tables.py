"""What a report shows as tables of text."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from eval.charts import Row, drafting
from eval.markdown import SERVER_HEAD, between, number, server_table, setting_of, speed_of

THRESHOLDS_SHOWN = (0.0, 0.2, 0.4, 0.6, 0.8, 0.9)


class Table(NamedTuple):
    """One without rows is not shown. `words`: columns of text."""

    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: frozenset[int] = frozenset()


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
        low_high = row["acceptance_length_interval"]
        extra = "" if row["task_set"] == "main" else f" ({', '.join(sorted(row['per_domain']))})"
        lines.append(
            [
                row["drafter"] + extra + ("" if row["lossless"] else f", lossy {row['lossy_threshold']:g}"),
                f"{row['temperature']:g}",
                str(row["num_draft_tokens"]),
                number(row["acceptance_length"]),
                "–" if low_high is None or row["drafter"] == "vanilla" else f"{low_high[0]:.2f} to {low_high[1]:.2f}",
                number(row["acceptance_length_per_request"]),
                "–" if row["acceptance_rate"] is None else f"{row['acceptance_rate']:.0%}",
                f"{row['tokens_per_second']:.1f}",
                "–" if (ratio := speed_of(row)) is None else f"{ratio:.2f}",
                _output(row),
            ]
        )
    return Table(head, lines, frozenset({9}))


def _output(row: Row) -> str:
    if not row["lossless"]:
        return "LOSSY"
    if row["drafter"] == "vanilla":
        return "the target's own"
    known = {True: "equal to vanilla's", False: "NOT vanilla's", None: "lossless"}
    return known[row["outputs_identical_to_vanilla"]]


def conditional(rows: Sequence[Row]) -> Table:
    shown = [row for row in drafting(rows) if row["lossless"]]
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
    for row in drafting(rows):
        cells = []
        for name in names:
            part = row["per_domain"].get(name, {})
            speed = f", {ratio:.2f}×" if part and (ratio := speed_of(part)) is not None else ""
            sure = between(part.get("acceptance_length_interval"))
            cells.append(number(part.get("acceptance_length")) + sure + speed)
        lines.append([setting_of(row), *cells])
    return Table(["tokens a round (95 %), speed (vanilla = 1)", *names], lines)


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
    values = ", ".join(number(task[key], 3) for key in ("first_verified_token_p", "length_p"))
    return f"p = {values} ({task['num_prompts']} prompts)"


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


def server(found: Mapping[str, Any] | None) -> Table:
    return Table([], []) if not found else Table(SERVER_HEAD, server_table(found), frozenset({2}))


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


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.0%}"


def _padded(cells: Sequence[str], length: int) -> list[str]:
    return [*cells, *["–"] * (length - len(cells))]
