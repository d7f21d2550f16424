"""A report as Markdown: tables that line up in a terminal, and a line for everything that a number does not say."""

from collections.abc import Mapping, Sequence
from typing import Any

NOTE = (
    "Acceptance lengths count accepted draft tokens plus the bonus token of every verification, pooled over all "
    "rounds, with 95 % intervals (bootstrap over prompts); `per request` is the mean of each request's own ratio."
)
LOSSLESS = (
    " Verification is lossless throughout: greedy rows match exactly, sampled rows keep the target's distribution."
)


def render(report: Mapping[str, Any]) -> str:
    """The report as Markdown, made for a terminal as well."""
    if "rows" not in report:
        return "no evaluation yet\n"
    main = [row for row in report["rows"] if row["task_set"] == "main"]
    extra = [row for row in report["rows"] if row["task_set"] == "extra"]
    first = report["rows"][0]
    lines = [
        f"target {first['target']}, {precision_of(first)} on {first['device']}, batch {first['batch_size']}, "
        f"at most {first['max_new_tokens']} new tokens, {first['num_prompts']} prompts",
        "",
        *_table(main),
        "",
    ]
    lines += [f"NOT MEASURED: {reason}." for reason in report.get("missing_tasks", [])]
    lines += ["Conditional acceptance: P(draft token k is accepted | those before it were), pooled:", ""]
    lines += [*_conditional_table(main), ""]
    if extra:
        about = f"{extra[0]['num_prompts']} prompts, at most {extra[0]['max_new_tokens']} new tokens"
        lines += [f"Benchmark prompts, another distribution than the training prompts ({about}):", ""]
        lines += [*_table(extra), ""]
    lossy = [row for row in report["rows"] if not row["lossless"]]
    lines += [NOTE + (LOSSLESS if not lossy else lossy_note(lossy)), ""]
    lines += [line for row in main if (line := speed_remark(row))]
    lines += [line for row in main if (line := evidence_line(row))]
    lines += [lossless_line(found) for found in report.get("losslessness", [])]
    lines += [comparison_line(found) for found in report.get("comparisons", [])]
    lines += [lossy_line(found) for found in report.get("lossy_sweep", []) if not found["lossless"]]
    lines += [line for found in report.get("findings", []) for line in finding_lines(found)]
    lines += _server_lines(report.get("server"))
    lines += _length_lines(report.get("length_choice"), main)
    lines += _calibration_lines(report.get("calibration"))
    lines += _simulation_lines(report.get("simulation"))
    if check := report.get("transformers_generate"):
        equal = "equal" if check["outputs_identical_to_vanilla"] else "NOT EQUAL"
        lines.append(f"{check['num_prompts']} greedy outputs against transformers' own generate: {equal}.")
    if report.get("seconds"):
        lines.append(
            "seconds, all runs in this folder: "
            + ", ".join(f"{name} {value:.0f}" for name, value in report["seconds"].items())
        )
    return "\n".join(lines).rstrip() + "\n"


def precision_of(row: Mapping[str, Any]) -> str:
    """Of the target."""
    quantization = row.get("quantization")  # earlier reports have none
    return row["dtype"] + (f", quantised by {quantization}," if quantization else "")


def lossy_note(rows: Sequence[Mapping[str, Any]]) -> str:
    names = ", ".join(dict.fromkeys(f"{row['drafter']} T={row['temperature']:g} ({row['rule']})" for row in rows))
    return f" LOSSY: {names}: outputs are NOT distributed as the target's own. All other rows are lossless."


def setting_of(row: Mapping[str, Any]) -> str:
    lossy = "" if row["lossless"] else f" lossy {row['lossy_threshold']:g}"
    return f"{row['drafter']} T={row['temperature']:g} K={row['num_draft_tokens']}{lossy}"


def speed_of(row: Mapping[str, Any]) -> float | None:
    """Of plain decoding's in the same run."""
    vanilla = row["vanilla_tokens_per_second"]
    return row["tokens_per_second"] / vanilla if vanilla else None


def speed_remark(row: Mapping[str, Any]) -> str | None:
    """Says plainly where speculation is slower than plain decoding, and why."""
    ratio = speed_of(row)
    if row["drafter"] == "vanilla" or ratio is None or row["acceptance_length"] is None:
        return None
    verdict = "faster" if ratio >= 1 else "SLOWER"
    why = (
        f"{row['acceptance_length']:.2f} tokens a round; drafting takes {row['draft_share_of_time']:.0%} of the time "
        f"and verifying at most {row['num_draft_tokens'] + 1} tokens a row {row['verify_share_of_time']:.0%}, the rest "
        "is the prompts' own forward and the loop's"
    )
    if ratio < 1:
        why += "; on this device a verification costs more for every token it checks, so few drafts pay"
    return f"- {setting_of(row)}: {ratio:.2f}x vanilla, {verdict} ({why})."


def evidence_line(row: Mapping[str, Any]) -> str | None:
    """Where drafts fail, and where the time goes."""
    rejections = row.get("rejections")
    if not rejections or row["draft_step_seconds"] is None:
        return None
    total = rejections["in_top_16"] + rejections["not_in_top_16"]
    missed = f"{rejections['not_in_top_16'] / total:.0%}" if total else "none"
    recalls = ["/".join(number(value) for value in row[f"recall_at_{count}"]) for count in (1, 16)]
    times = ", ".join(f"{name} {1e3 * row[f'{name}_step_seconds']:.1f}" for name in ("draft", "verify", "overhead"))
    return (
        f"- {setting_of(row)}: {total} drafts were corrected, "
        f"{missed} to a token outside the drafter's likeliest 16; recall at 1 {recalls[0]}, at 16 {recalls[1]}; "
        f"{number(row['oracle_length'])} tokens a round if the right one of 16 were always drafted; milliseconds a "
        f"round of the batch: {times}; first token after {1e3 * row['first_token_seconds']:.0f} ms."
    )


def lossless_line(found: Mapping[str, Any]) -> str:
    """Equality with plain decoding, task by task: p-values under 0.001 of some dozen would be a fault."""
    parts, untested = [], []
    for task in found["tasks"]:
        if "equal" in task:
            ties = f", {task['near_ties']} near ties" if task["near_ties"] else ""
            parts.append(f"{task['task']} {task['equal']} of {task['num_prompts']}{ties}")
        else:
            for name, what in (("first_verified_token_p", "first verified tokens"), ("length_p", "lengths")):
                if task[name] is None:
                    untested.append(f"{what} of {task['task']}")
                else:
                    parts.append(f"{what} of {task['task']} p = {task[name]:.3f}")
    if found["temperature"] == 0:
        said = f"outputs equal to vanilla's: {'; '.join(parts)}"
    else:
        said = f"compared with vanilla's: {'; '.join(parts)}" if parts else "not compared with vanilla's"
        said += f"; too few for a test: {', '.join(untested)}" if untested else ""
    return f"- {setting_of(found)} ({found['rule']}): {said}."


def comparison_line(found: Mapping[str, Any]) -> str:
    low, high = found["interval"]
    verdict = "higher" if found["difference"] > 0 else "lower"
    meaning = f"{verdict}, and the difference is real" if found["is_real"] else "which may be chance"
    lengths = " against ".join(
        f"{length:.2f} (K={k})"
        for length, k in zip(found["acceptance_lengths"], found["num_draft_tokens"], strict=True)
    )
    return (
        f"- {found['drafter']} against {found['other']} at T={found['temperature']:g}: {lengths} tokens a round, "
        f"{found['difference']:+.2f} ({low:+.2f} to {high:+.2f}), {meaning}."
    )


def lossy_line(found: Mapping[str, Any]) -> str:
    return (
        f"- {found['drafter']} at T={found['temperature']:g}, lossy from {found['lossy_threshold']:g} on: "
        f"{number(found['acceptance_length'])} tokens a round, {found['altered_share']:.1%} of the tokens altered."
    )


SERVER_HEAD = ("T", "K", "task", "prompts", "engine", "here", "difference", "tokens/s", "same outputs", "same counts")


def _server_lines(found: Mapping[str, Any] | None) -> list[str]:
    if not found:
        return []
    table = aligned([SERVER_HEAD, ["---"] * len(SERVER_HEAD), *server_table(found)])
    verdicts = [f"- {server_verdict(found, row)}" for row in found["rows"]]
    return ["", server_setting(found), "", *table, "", *verdicts, ""]


def server_setting(found: Mapping[str, Any]) -> str:
    """What was asked, and how it counts."""
    told = ", ".join(value for value in (found["dtype"], found["device"]) if value is not None)
    count = found["concurrency"]
    at_a_time = "one request at a time" if count == 1 else f"{count} requests at a time"
    return (
        f"A running engine: {_engine(found)}, model {found['model']} ({told or 'float type not told'}); {at_a_time}, "
        f"seed {found['seed']}. Acceptance lengths of both as it counts: {found['counted']}."
    )


def server_table(found: Mapping[str, Any]) -> list[list[str]]:
    """Lines under SERVER_HEAD: each temperature, and its tasks where there are several."""
    lines = []
    for row in found["rows"]:
        parts = [{"task": "all", **row}, *(row["tasks"] if len(row["tasks"]) > 1 else ())]
        for part in parts:
            total, difference = part["num_prompts"], part["difference"]
            same = (part["equal_outputs"], part["equal_counts"])
            lines.append(
                [
                    f"{row['temperature']:g}",
                    str(row["num_draft_tokens"]),
                    part["task"],
                    str(total),
                    number(part["acceptance_length"], 3),
                    number(part["offline_acceptance_length"], 3),
                    "-" if difference is None else f"{difference:+.1%}",
                    f"{part['tokens_per_second']:.0f}",
                    *("-" if count is None else f"{count} of {total}" for count in same),
                ]
            )
    return lines


def server_verdict(found: Mapping[str, Any], row: Mapping[str, Any]) -> str:
    """Whether it agrees with the runtime here, and on which tasks not; and where not, the likely causes."""
    what = f"{_engine(found)} at T={row['temperature']:g}, K={row['num_draft_tokens']}"
    if row["difference"] is None:
        return f"{what}: no rounds to compare."
    lengths = f"{row['acceptance_length']:.3f} tokens a round, {row['offline_acceptance_length']:.3f} here"
    within = f"{found['tolerance']:.0%} ({row['difference']:+.1%})"
    if row["equal_counts"] == row["num_prompts"]:
        verdict = "the same counts on every prompt"
    elif row["agrees"]:
        verdict = f"they agree within {within}"
        if row["equal_counts"] is not None:
            verdict += f", with the same counts on {row['equal_counts']} of {row['num_prompts']} prompts"
    else:
        verdict = f"they DISAGREE by more than {within}"
    tasks = [part for part in row["tasks"] if not part["agrees"] and part["difference"] is not None]
    if tasks and len(row["tasks"]) > 1:
        apart = ", ".join(f"{part['task']} {part['difference']:+.1%}" for part in tasks)
        verdict += f"; by more than {found['tolerance']:.0%} on: {apart}"
    if row["causes"]:
        causes = "; ".join(f"({place}) {cause}" for place, cause in enumerate(row["causes"], start=1))
        verdict += f". Likely causes: {causes}"
    return f"{what}: {lengths}, counted alike: {verdict}."


def _engine(found: Mapping[str, Any]) -> str:
    return found["engine"] if found["version"] is None else f"{found['engine']} {found['version']}"


def finding_lines(found: Mapping[str, Any]) -> list[str]:
    """Why the acceptance of one drafter is no higher, what costs most first."""
    return [
        f"- {found['name']}: {one['cause'].lower()} ({one['evidence']}). {one['advice']}" for one in found["findings"]
    ]


def _length_lines(choice: Mapping[str, Any] | None, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What auto chose and why; and, of that row, what the costs promised and what came of it."""
    if not choice:
        return []
    costs = "; ".join(
        f"K={row['num_draft_tokens']}: {row['draft_ms']:.0f} + {row['verify_ms']:.0f} ms for "
        f"{row['expected_tokens_per_round']:.2f} tokens"
        for row in choice["table"]
    )
    chosen = choice["num_draft_tokens"]
    meaning = f"{chosen} draft tokens" if chosen else "no drafting at all: no length pays at this batch size"
    how = f"draft + verify per round, greedy, batch {choice['batch_size']}"
    lines = [f"num_draft_tokens=auto chose {meaning} ({how}: {costs})."]
    plain, best = (choice["table"][k]["expected_tokens_per_second"] for k in (0, chosen))
    measured = next(
        (
            row
            for row in rows
            if row["drafter"] not in ("vanilla", "ngram")
            and (row["num_draft_tokens"], row["schedule"]) == (chosen, "fixed")
            and row["vanilla_tokens_per_second"] is not None
        ),
        None,
    )
    if chosen and measured is not None:
        ratio = speed_of(measured)
        lines.append(
            f"At K={chosen} the simple formula, (T_draft + T_verify) / tau seconds a token, predicts "
            f"{best / plain:.2f}x vanilla ({best:.1f} tokens/s with every row busy); measured {ratio:.2f}x "
            f"({measured['tokens_per_second']:.1f} tokens/s, the prompts' own forward and the last rows included, "
            f"temperature {measured['temperature']:g}, tau {measured['acceptance_length']:.2f})."
        )
    return lines


def _calibration_lines(found: Mapping[str, Any] | None) -> list[str]:
    if not found:
        return []
    before, after = found["before"], found["after"]
    state = "not calibrated: eval.py calibrate.enabled=true" if after is None else "before and after calibration"
    head = ["draft", "rounds", "temperature, bias, floor", "survived", "predicted", "ECE", "AUC", "Brier"]
    lines = [head, ["---"] * len(head)]
    for slot, rounds in enumerate(before["rounds"]):
        pairs = [
            " to ".join(number(part[key][slot], digits) for part in (before, after) if part is not None)
            for key, digits in (("mean_predicted", 3), ("ece", 4), ("auc", 3), ("brier", 3))
        ]
        scaling = "-"
        if after is not None:
            scaling = ", ".join(number(found["scaling"][name][slot]) for name in ("temperatures", "biases", "floors"))
        lines.append([str(slot + 1), str(rounds), scaling, number(before["mean_survived"][slot], 3), *pairs])
    return [
        "",
        f"Confidence that a block survives its k-th draft, over {found['rounds']} measured rounds at temperature "
        f"{found['temperature']:g} ({state}; calibration error over 20 bins, pooled):",
        "",
        *aligned(lines),
        "",
    ]


def _simulation_lines(found: Mapping[str, Any] | None) -> list[str]:
    if not found:
        return []
    schedules = found["schedules"]
    loads = [row["num_requests"] for row in next(iter(schedules.values()))]
    head = ["schedule", *(f"{load} requests" for load in loads)]
    lines = [head, ["---"] * len(head)]
    for name, rows in schedules.items():
        lines.append([name, *(f"{row['tokens_per_second']:.1f} ({row['drafts_per_request']:.2f})" for row in rows)])
    return [
        "",
        "Simulated tokens a second (drafts verified, a request and round) by schedule and load, from costs measured "
        f"here and this run's rounds at temperature {found['temperature']:g}:",
        "",
        *aligned(lines),
        "",
    ]


def _table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    domains = sorted({domain for row in rows for domain in row["per_domain"]})
    head = ["drafter", "T", "K", "layout", "acceptance length", *domains, "per request", "accepted/proposed"]
    head += ["tokens/s", "vs vanilla", "identical"]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        ratio = speed_of(row)
        lines.append(
            [
                row["drafter"] + ("" if row["lossless"] else f" (LOSSY {row['lossy_threshold']:g})"),
                f"{row['temperature']:g}",
                str(row["num_draft_tokens"]),
                row["slot_layout"] or "-",
                number(row["acceptance_length"]) + between(row.get("acceptance_length_interval")),
                *[number(row["per_domain"].get(domain, {}).get("acceptance_length")) for domain in domains],
                number(row["acceptance_length_per_request"]),
                number(row["acceptance_rate"]),
                f"{row['tokens_per_second']:.0f}",
                "-" if ratio is None else f"{ratio:.2f}x",
                {True: "yes", False: "NO", None: "-"}[row["outputs_identical_to_vanilla"]],
            ]
        )
    return aligned(lines)


def _conditional_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    longest = max(len(row["conditional_acceptance"]) for row in rows)
    head = ["drafter", "T", "K", "layout", *(str(k + 1) for k in range(longest))]
    lines = [head, ["---"] * len(head)]
    for row in rows:
        values = [*row["conditional_acceptance"], *[None] * longest][:longest]
        name = [row["drafter"], f"{row['temperature']:g}", str(row["num_draft_tokens"]), row["slot_layout"] or "-"]
        lines.append(name + [number(value) for value in values])
    return aligned(lines)


def aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    """Markdown rows whose columns line up in a terminal as well."""
    widths = [max(len(line[column]) for line in lines) for column in range(len(lines[0]))]
    padded = [
        [cell.ljust(width, "-" if cell == "---" else " ") for cell, width in zip(line, widths, strict=True)]
        for line in lines
    ]
    return ["| " + " | ".join(line) + " |" for line in padded]


def between(interval: Sequence[float] | None) -> str:
    return "" if interval is None or interval[0] == interval[1] else f" ({interval[0]:.2f} to {interval[1]:.2f})"


def number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
