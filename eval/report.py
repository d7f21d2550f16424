"""What was measured, as JSON and as a model card. Every number says what it is a number of."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import combinations
from pathlib import Path
from statistics import median
from typing import Any

from data.tracking import WandbConfig, open_wandb
from eval.autotune import LengthChoice
from eval.evidence import evidence
from eval.intervals import difference_interval, length_interval, tokens_and_rounds
from eval.markdown import render
from eval.rounds import Generation
from eval.stats import Pass, acceptance_stats, first_of_each
from eval.sweeps import altered_share
from models.files import read_json, write_json, write_text

TIMES = (
    "tokens_per_second",
    "draft_share_of_time",
    "verify_share_of_time",
    "draft_step_seconds",
    "verify_step_seconds",
    "overhead_step_seconds",
    "first_token_seconds",
)


def build_report(
    passes: Sequence[Pass], identities: Mapping[int, dict[str, Any]], choice: LengthChoice | None
) -> dict[str, Any]:
    """The main row's keys at top level (the drafter at the first temperature and its full length), all rows beside."""
    rows = [row_of(p, identities.get(index)) for index, p in enumerate(passes)]
    for row in rows:
        vanilla = next((other for other in rows if is_vanilla_of(row, other)), {})
        row["vanilla_tokens_per_second"] = vanilla.get("tokens_per_second")
        for domain, part in row["per_domain"].items():
            plain = vanilla.get("per_domain", {}).get(domain, {})
            part["vanilla_tokens_per_second"] = plain.get("tokens_per_second")
    main = next((row for row in rows if row["drafter"] not in ("vanilla", "ngram")), rows[0])
    n_gram = next((r for r in rows if r["drafter"] == "ngram" and r["temperature"] == main["temperature"]), {})
    return {
        **main,
        "n_gram": n_gram,
        "rows": rows,
        "length_choice": None if choice is None else asdict(choice),
        "comparisons": comparisons(passes),
    }


def row_of(measured: Pass, identity: Mapping[str, Any] | None) -> dict[str, Any]:
    """One row: what was run, pooled statistics, and the same per domain, with [tokens, rounds] of each request."""
    identity, lossless = identity or {}, measured.about["lossless"]
    per_domain = {}
    for domain in sorted(set(measured.domains)):
        members = [index for index, own in enumerate(measured.domains) if own == domain]
        generations, prompts = [measured.generations[i] for i in members], [measured.prompts[i] for i in members]
        alone = measured.of_domain(domain)
        times: dict[str, Any] = dict.fromkeys(TIMES) if alone is None else times_of(alone)
        requests = tokens_and_rounds(generations).astype(int).tolist()
        numbers = numbers_of(generations, prompts, lossless)
        per_domain[domain] = {"num_prompts": len(members), "requests": requests, **numbers, **times}
    return {
        **measured.about,
        "bonus_counted": True,
        "num_prompts": len(measured.generations),
        "num_tokens": measured.num_tokens,
        **numbers_of(measured.generations, measured.prompts, lossless),
        "outputs_identical_to_vanilla": identity.get("outputs_identical_to_vanilla"),
        "near_tie_divergences": identity.get("near_tie_divergences"),
        **times_of(measured),
        "per_domain": per_domain,
    }


def numbers_of(generations: Sequence[Generation], prompts: Sequence[Sequence[int]], lossless: bool) -> dict[str, Any]:
    """All that does not depend on how fast it went."""
    return {
        **stats_of(generations),
        **evidence(generations, prompts),
        "altered_share": None if lossless else altered_share(generations),
    }


def times_of(measured: Pass) -> dict[str, Any]:
    """TIMES: of steps the mean seconds in a round of a batch, of first tokens the median seconds since the request was
    taken."""
    rest = measured.seconds - measured.prompt_seconds - measured.draft_seconds - measured.verify_seconds
    parts = {"draft": measured.draft_seconds, "verify": measured.verify_seconds, "overhead": rest}
    first = [g.first_token_seconds for g in measured.generations]
    return {
        "tokens_per_second": measured.tokens_per_second,
        "draft_share_of_time": measured.draft_seconds / measured.seconds,
        "verify_share_of_time": measured.verify_seconds / measured.seconds,
        **{f"{name}_step_seconds": x / measured.steps if measured.steps else None for name, x in parts.items()},
        "first_token_seconds": median(first) if first else None,
    }


def is_vanilla_of(row: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    same = all(row[key] == other[key] for key in ("temperature", "task_set"))
    return same and other["drafter"] == "vanilla"


def stats_of(generations: Sequence[Generation]) -> dict[str, Any]:
    """Acceptance statistics with the interval of the acceptance length (95 %, bootstrap over prompts)."""
    interval = length_interval(generations)
    found = acceptance_stats(generations).to_dict()
    return found | {"acceptance_length_interval": None if interval is None else list(interval)}


def comparisons(passes: Sequence[Pass]) -> list[dict[str, Any]]:
    """Every pair of drafters, as each was measured first at a temperature, on the same prompts: the difference of their
    acceptance lengths, and whether it is real. n-gram lookup comes last in a pair."""
    main = [p for p in passes if p.about["task_set"] == "main" and p.about["lossless"]]
    found = []
    for temperature in dict.fromkeys(p.about["temperature"] for p in main):
        own = [p for p in main if p.about["temperature"] == temperature and p.about["drafter"] != "vanilla"]
        first = first_of_each(own, lambda p: p.about["drafter"])
        for ours, theirs in combinations(sorted(first, key=lambda p: p.about["drafter"] == "ngram"), 2):
            if (one := _comparison(ours, theirs)) is not None:
                found.append(one)
    return found


def _comparison(ours: Pass, theirs: Pass) -> dict[str, Any] | None:
    """None where they ran on other prompts, or nothing can be said."""
    if ours.about["max_new_tokens"] != theirs.about["max_new_tokens"] or len(ours.generations) != len(
        theirs.generations
    ):
        return None
    interval = difference_interval(ours.generations, theirs.generations)
    lengths = [acceptance_stats(p.generations).acceptance_length for p in (ours, theirs)]
    if interval is None or None in lengths:
        return None
    return {
        "drafter": ours.about["drafter"],
        "other": theirs.about["drafter"],
        "temperature": ours.about["temperature"],
        "num_draft_tokens": [p.about["num_draft_tokens"] for p in (ours, theirs)],
        "acceptance_lengths": lengths,
        "difference": lengths[0] - lengths[1],  # type: ignore[operator]
        "interval": list(interval),
        "is_real": interval.low > 0 or interval.high < 0,
    }


def write_summary(output_dir: Path, stages: Mapping[str, Mapping[str, float]]) -> dict[str, Any]:
    """`summary.json` and `summary.md` of a run: its report, and the seconds and peak memory of every stage."""
    report_path = output_dir / "eval" / "report.json"
    summary = read_json(report_path) if report_path.is_file() else {}
    summary["seconds"] = {name: stage["seconds"] for name, stage in stages.items()}
    summary["peak_rss_gib"] = max((stage["peak_rss_gib"] for stage in stages.values()), default=None)
    write_json(output_dir / "summary.json", summary)
    write_text(output_dir / "summary.md", render(summary))
    return summary


IN_WANDB = ("acceptance_length", "acceptance_length_per_request", "acceptance_rate", "tokens_per_second")


def show_in_wandb(
    report: Mapping[str, Any], config: WandbConfig, output_dir: Path, run_config: Mapping[str, Any]
) -> None:
    """A run of the job `eval`: the main row's figures as its summary, all rows as a table, the page as it is."""
    import wandb

    folder = output_dir / "eval"
    run = open_wandb(config, output_dir, folder / "wandb_run_id", run_config, job="eval")
    about = ("drafter", "temperature", "num_draft_tokens", "rule", "schedule", "task_set")
    rows: list[Any] = [[row[key] for key in (*about, *IN_WANDB)] for row in report["rows"]]
    run.log(
        {
            "rows": wandb.Table(columns=[*about, *IN_WANDB], data=rows),
            "report": wandb.Html((folder / "report.html").read_text(encoding="utf-8"), inject=False),
        }
    )
    run.summary.update({key: report[key] for key in IN_WANDB if report[key] is not None})
    for task, part in report["per_domain"].items():
        run.summary[f"acceptance_length/{task}"] = part["acceptance_length"]
    run.finish()


# How an exported folder is served, by engine.
CALIBRATED = (
    "`calibration.json` holds a temperature for each draft token, which divides the logit of its confidence before "
    "those of a block are multiplied; SGLang reads it by `--speculative-dspark-confidence-sts-path`.\n\n"
)


def measurement_of(fingerprint: str, folders: Sequence[Path], *, dtype: str) -> str:
    """Markdown for a model card: the first report in these run folders that has a drafter of just these weights, whose
    export has them in `dtype`."""
    places = list(dict.fromkeys(folders))
    for folder in places:
        path = folder / "eval" / "report.json"
        report = read_json(path) if path.is_file() else {}
        names = [name for name, weights in report.get("weights", {}).items() if weights == fingerprint]
        if names:
            rounded = "" if dtype == "float32" else f", with weights that were not yet rounded to {dtype}"
            return f"This drafter is `{names[0]}`{rounded}.\n\n{render(report)}"
    named = " or ".join(map(str, places))
    return f"Not measured yet: {named} has no report of these weights; run eval.py, then export again.\n"


def model_card(
    drafter: str,
    target: str,
    provenance: Mapping[str, Any],
    *,
    serving: str,
    measured: str,
    calibrated: bool = False,
) -> str:
    """README.md of an exported folder: what it is, how to serve it (`serving`, Markdown), what was `measured`, where it
    comes from."""
    versions = ", ".join(f"{name} {version}" for name, version in provenance.get("versions", {}).items())
    return (
        f"# {drafter} drafter for {target}\n\n"
        f"A speculative-decoding drafter trained with Draftsmith. It proposes tokens that {target} verifies, so the "
        "target's output distribution is unchanged.\n\n"
        f"## Serving\n\n{serving}\n\n{CALIBRATED if calibrated else ''}"
        f"## Measured\n\n{measured}\n"
        f"## Provenance\n\ncommit {provenance.get('git_commit', 'unknown')}; {versions or 'versions unknown'}\n\n"
        f"command: `{provenance.get('command', 'unknown')}`\n"
    )
