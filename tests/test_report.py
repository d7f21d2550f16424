"""What a report says: documented keys, plain words where speculation is slower, stages merged into the summary."""

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from eval.autotune import LengthChoice
from eval.markdown import lossless_line, render, speed_remark
from eval.report import build_report, measurement_of, model_card, row_of, write_summary
from eval.rounds import Generation, Round
from eval.stats import Pass
from eval.subject import VANILLA, Subject, told_apart
from models.files import write_json

ROW_KEYS = {
    *("target", "drafter", "temperature", "rule", "schedule", "num_draft_tokens", "slot_layout", "dtype", "device"),
    *("num_prompts", "rounds", "proposed", "accepted", "acceptance_length", "acceptance_length_per_request"),
    *("acceptance_rate", "survival", "conditional_acceptance", "outputs_identical_to_vanilla"),
    *("near_tie_divergences", "tokens_per_second", "vanilla_tokens_per_second", "per_domain"),
}
SUMMARY_KEYS = ROW_KEYS | {"n_gram", "peak_rss_gib", "seconds"}
IDENTICAL = {"outputs_identical_to_vanilla": True, "near_tie_divergences": 0}


def pass_of(drafter: str, *, accepted: int, seconds: float, temperature: float = 0.0, task_set: str = "main") -> Pass:
    """Two requests of different domains, 3 rounds each."""
    num_drafts = 0 if drafter == "vanilla" else 4
    about = {
        "target": "tiny",
        "drafter": drafter,
        "temperature": temperature,
        "rule": "greedy",
        "lossless": True,
        "schedule": "fixed",
        "num_draft_tokens": num_drafts,
        "slot_layout": "anchor_first" if drafter == "dspark" else None,
        "dtype": "float32",
        "quantization": None,
        "lossy_threshold": None,
        "device": "cpu",
        "batch_size": 2,
        "max_new_tokens": 64,
        "task_set": task_set,
    }
    rounds = [Round(num_drafts, accepted, bonus=True)] * 3
    generations = [Generation(index, list(range(10)), list(rounds), "length") for index in range(2)]
    times = (seconds, 0.2 * seconds, 0.7 * seconds)
    return Pass(generations, *times, about=about, domains=["math", "code"], prompts=[[1], [2]])


def some_report(*, dspark_seconds: float = 1.0, choice: LengthChoice | None = None) -> dict[str, Any]:
    passes = [
        pass_of("vanilla", accepted=0, seconds=2.0),
        pass_of("ngram", accepted=1, seconds=1.6),
        pass_of("dspark", accepted=2, seconds=dspark_seconds),
        pass_of("vanilla", accepted=0, seconds=4.0, temperature=1.0),
        pass_of("dspark", accepted=1, seconds=3.0, temperature=1.0),
        pass_of("dspark", accepted=1, seconds=1.0, task_set="extra"),
    ]
    return build_report(passes, {1: IDENTICAL, 2: IDENTICAL}, choice)


def test_every_documented_key_is_in_the_summary(tmp_path: Path) -> None:
    write_json(tmp_path / "eval" / "report.json", some_report())
    summary = write_summary(tmp_path, {"eval": {"seconds": 1.0, "peak_rss_gib": 2.0}})
    assert set(summary) >= SUMMARY_KEYS
    assert all(set(row) >= ROW_KEYS for row in summary["rows"])
    assert set(summary["n_gram"]) >= ROW_KEYS
    assert set(summary["per_domain"]) == {"math", "code"}
    assert json.loads((tmp_path / "summary.json").read_text()) == summary


def test_the_main_row_is_the_drafter_and_not_a_baseline() -> None:
    report = some_report()
    assert (report["drafter"], report["temperature"], report["acceptance_length"]) == ("dspark", 0.0, 3.0)
    assert (report["n_gram"]["drafter"], report["n_gram"]["acceptance_length"]) == ("ngram", 2.0)
    only_vanilla = build_report([pass_of("vanilla", accepted=0, seconds=1.0)], {}, None)
    assert only_vanilla["drafter"] == "vanilla" and only_vanilla["n_gram"] == {}


def test_each_row_is_compared_with_vanilla_of_its_own_temperature_and_tasks() -> None:
    rows = some_report()["rows"]
    assert [row["tokens_per_second"] for row in rows] == pytest.approx([10, 12.5, 20, 5, 20 / 3, 20])
    assert [row["vanilla_tokens_per_second"] for row in rows] == [10, 10, 10, 5, 5, None]


def test_a_domain_has_the_statistics_of_its_own_requests() -> None:
    measured = pass_of("dspark", accepted=2, seconds=1.0)
    measured.generations[1].rounds[:] = [Round(4, 4, bonus=True)]
    row = row_of(measured, None)
    assert row["per_domain"]["math"]["acceptance_length"] == 3.0
    assert row["per_domain"]["code"]["acceptance_length"] == 5.0
    assert row["per_domain"]["code"]["num_prompts"] == 1
    assert row["acceptance_length"] == (3 * 3 + 5) / 4 and row["acceptance_length_per_request"] == 4.0


def test_slower_than_vanilla_is_said_in_plain_words() -> None:
    slow, fast = some_report(dspark_seconds=3.0), some_report(dspark_seconds=1.0)
    remark = next(line for line in render(slow).splitlines() if line.startswith("- dspark T=0"))
    assert "0.67x vanilla, SLOWER" in remark and "few drafts pay" in remark
    remark = next(line for line in render(fast).splitlines() if line.startswith("- dspark T=0"))
    assert "2.00x vanilla, faster" in remark and "few drafts pay" not in remark
    assert speed_remark(fast["rows"][0]) is None, "nothing to say about vanilla itself"
    assert speed_remark(fast["rows"][-1]) is None, "nothing to compare with"


def test_the_table_names_what_it_counts_and_keeps_task_sets_apart() -> None:
    text = render(some_report())
    main, extra = text.split("Benchmark prompts, another distribution")
    assert sum(line.startswith("| dspark") for line in extra.splitlines()) == 1
    assert "plus the bonus token" in text and "pooled over all rounds" in text and "per request" in text
    table, conditional = main.split("P(draft token k is accepted | those before it were)")
    for part in (table, conditional):
        assert sum(line.startswith(("| dspark", "| ngram", "| vanilla")) for line in part.splitlines()) == 5
        columns = {len(line.split("|")) for line in part.splitlines() if line.startswith("|")}
        assert len(columns) == 1, "every line of a table has the same columns"


def test_outputs_that_are_not_identical_stand_out() -> None:
    passes = [pass_of("vanilla", accepted=0, seconds=2.0), pass_of("dspark", accepted=2, seconds=1.0)]
    report = build_report(passes, {1: {**IDENTICAL, "outputs_identical_to_vanilla": False}}, None)
    assert "| NO " in render(report)
    check = {"num_prompts": 3, "outputs_identical_to_vanilla": False}
    assert "3 greedy outputs against transformers' own generate: NOT EQUAL" in render(
        {**report, "transformers_generate": check}
    )


@pytest.mark.parametrize(("chosen", "words"), [(2, "chose 2 draft tokens"), (0, "no length pays at this batch size")])
def test_the_chosen_length_is_explained(chosen: int, words: str) -> None:
    table = [
        {
            "num_draft_tokens": length,
            "draft_ms": 1.0 * length,
            "verify_ms": 5.0,
            "expected_tokens_per_round": 1.0 + length,
            "expected_tokens_per_second": 1.0,
        }
        for length in range(3)
    ]
    text = render(some_report(choice=LengthChoice(chosen, 8, table)))
    assert words in text and "K=2: 2 + 5 ms for 3.00 tokens" in text


def test_what_the_simple_formula_promised_stands_beside_what_was_measured() -> None:
    """4 drafts: 0.2 s of drafting and 0.7 of verifying a second for 3 tokens; the row has 20 tokens in a second."""
    keys = ("num_draft_tokens", "draft_ms", "verify_ms", "expected_tokens_per_round", "expected_tokens_per_second")
    table = [dict(zip(keys, (k, 3.0, 7.0, 1.0 + k, 10.0 + 5 * k), strict=True)) for k in range(5)]
    text = render(some_report(choice=LengthChoice(4, 8, table)))
    line = next(line for line in text.splitlines() if line.startswith("At K=4 the simple formula"))
    assert "predicts 3.00x vanilla (30.0 tokens/s" in line and "measured 2.00x (20.0 tokens/s" in line
    assert "tau 3.00" in line
    assert "simple formula" not in render(some_report(choice=LengthChoice(3, 8, table))), "no row at 3 drafts"
    assert "simple formula" not in render(some_report(choice=LengthChoice(0, 8, table)))


def requests(tokens_of_rounds: list[list[int]], *, num_drafts: int = 4) -> list[Generation]:
    return [
        Generation(index, [7] * sum(rounds), [Round(num_drafts, tokens - 1, bonus=True) for tokens in rounds])
        for index, rounds in enumerate(tokens_of_rounds)
    ]


def test_pooled_and_per_request_lengths_are_told_apart_by_name() -> None:
    """10 tokens in 10 rounds and 90 in 30: pooled 100 / 40, per request the mean of 1 and 3; four of each."""
    of = {"generations": requests([[1] * 10, [3] * 30] * 4), "domains": ["math"] * 8, "prompts": [[1]] * 8}
    measured = replace(pass_of("dspark", accepted=2, seconds=1.0), **of)
    row = row_of(measured, None)
    assert (row["acceptance_length"], row["acceptance_length_per_request"]) == (2.5, 2.0)
    head, _, cells = (
        [cell.strip() for cell in line.split("|")]
        for line in render(build_report([measured], {}, None)).splitlines()[2:5]
    )
    shown = dict(zip(head, cells, strict=True))
    assert shown["acceptance length"].startswith("2.50 (") and shown["per request"] == "2.00"


def test_a_drafter_is_compared_with_every_other_one_on_the_same_prompts() -> None:
    def rows(name: str, generations: list[Generation], temperature: float = 0.0) -> Pass:
        measured = pass_of(name, accepted=0, seconds=1.0, temperature=temperature)
        count = len(generations)
        return replace(measured, generations=generations, domains=["math"] * count, prompts=[[1]] * count)

    base = [[1 + (i * j) % 4 for j in range(1, 9)] for i in range(30)]
    better = [[min(5, tokens + (j % 2)) for j, tokens in enumerate(rounds)] for rounds in base]
    shuffled = [rounds[::-1] for rounds in base[::-1]]
    passes = [rows("vanilla", requests(base)), rows("ngram", requests(base)), rows("dspark new", requests(better))]
    passes += [
        rows("dspark old", requests(base)),
        rows("eagle3", requests(shuffled)),
        rows("dflash", requests(base), 1),
    ]
    report = build_report(passes, {}, None)
    pairs = [(one["drafter"], one["other"]) for one in report["comparisons"]]
    assert pairs == list(combinations(["dspark new", "dspark old", "eagle3", "ngram"], 2)), "of one temperature alone"
    found = {one["other"]: one for one in report["comparisons"] if one["drafter"] == "dspark new"}
    assert found["dspark old"]["is_real"] and found["dspark old"]["difference"] > 0.4
    lines = [line for line in render(report).splitlines() if " against " in line]
    assert "dspark new against dspark old at T=0" in lines[0] and "higher, and the difference is real" in lines[0]
    swapped = build_report([passes[3], passes[4]], {}, None)["comparisons"][0]
    assert swapped["difference"] == pytest.approx(0) and not swapped["is_real"]
    assert "which may be chance" in render(build_report([passes[3], passes[4]], {}, None))


def test_where_drafts_fail_and_where_the_time_goes_is_said() -> None:
    rounds = [Round(2, 0, True, ranks=(16, 0)), Round(2, 1, True, ranks=(0, 3)), Round(2, 2, True, ranks=(0, 0))]
    generations = [Generation(0, [7] * 6, rounds, first_token_seconds=0.25)]
    measured = replace(
        pass_of("dspark", accepted=2, seconds=2.0), generations=generations, prompts=[[1]], domains=["a"]
    )
    measured = replace(measured, prompt_seconds=0.1, steps=4)
    (line,) = [line for line in render(build_report([measured], {}, None)).splitlines() if "were corrected" in line]
    assert (
        "2 drafts were corrected, 50% to a token outside" in line and "recall at 1 0.67/0.50, at 16 0.67/1.00" in line
    )
    assert "2.33 tokens a round if" in line
    # of 2 seconds 0.4 drafting, 1.4 verifying, 0.1 prompts, in 4 rounds
    assert "draft 100.0, verify 350.0, overhead 25.0; first token after 250 ms" in line
    assert not any("were corrected" in line for line in render(some_report()).splitlines()), "nothing recorded"


def test_drafters_of_one_kind_are_told_apart_by_their_runs(tmp_path: Path) -> None:
    folders = [tmp_path / run / "checkpoints" / step for run, step in (("a", "s1"), ("b", "s1"), ("b", "s2"))]
    subjects = [Subject("dspark", None, None, "x", folder) for folder in folders]
    subjects += [VANILLA, Subject("eagle3", None, None, "x", tmp_path / "exported")]
    assert [s.name for s in told_apart(subjects)] == ["dspark a", "dspark b s1", "dspark b s2", "vanilla", "eagle3"]


def test_the_summary_merges_seconds_and_the_largest_memory_of_all_stages(tmp_path: Path) -> None:
    stages = {"train": {"seconds": 10.0, "peak_rss_gib": 3.0}, "eval": {"seconds": 5.0, "peak_rss_gib": 1.0}}
    summary = write_summary(tmp_path, stages)
    assert summary == {"seconds": {"train": 10.0, "eval": 5.0}, "peak_rss_gib": 3.0}
    assert (tmp_path / "summary.md").read_text() == "no evaluation yet\n"
    write_json(tmp_path / "eval" / "report.json", some_report())
    write_summary(tmp_path, stages)
    assert "seconds, all runs in this folder: train 10, eval 5" in (tmp_path / "summary.md").read_text()


def test_a_model_card_says_how_to_serve_what_was_measured_and_where_it_comes_from() -> None:
    provenance = {"git_commit": "abc123", "versions": {"torch": "2.13"}, "command": "train.py model=dspark"}
    card = model_card("DSpark", "tiny", provenance, serving="vllm serve it", measured="| dspark 1.5")
    for part in (
        "# DSpark drafter for tiny",
        "vllm serve it",
        "| dspark",
        "commit abc123; torch 2.13",
        "train.py model=",
    ):
        assert part in card


def test_sampled_outputs_that_were_too_few_for_a_test_are_not_called_equal() -> None:
    about = {"drafter": "dspark", "temperature": 1.0, "num_draft_tokens": 4, "lossless": True, "rule": "ratio"}
    none = {"task": "math", "num_prompts": 3, "first_verified_token_p": None, "length_p": None}
    some = {"task": "code", "num_prompts": 9, "first_verified_token_p": None, "length_p": 0.25}
    untested = lossless_line(about | {"tasks": [none]})
    assert untested.endswith(
        "not compared with vanilla's; too few for a test: first verified tokens of math, lengths of math."
    )
    tested = lossless_line(about | {"tasks": [none, some]})
    assert "compared with vanilla's: lengths of code p = 0.250; too few for a test: first verified" in tested


def test_a_card_has_the_numbers_of_just_these_weights(tmp_path: Path) -> None:
    """Not those of whatever else was measured in a run folder, and those of the drafter's own run wherever it goes."""
    for name, weights in (("other", "b" * 64), ("own", "a" * 64)):
        write_json(tmp_path / name / "eval" / "report.json", some_report() | {"weights": {f"dspark {name}": weights}})
    folders = [tmp_path / "nowhere", tmp_path / "other", tmp_path / "own"]
    exact, rounded = (measurement_of("a" * 64, folders, dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert "This drafter is `dspark own`.\n" in exact and "| dspark" in exact
    assert "not yet rounded to bfloat16" in rounded
    assert measurement_of("a" * 64, folders[:2], dtype="float32").startswith("Not measured yet")
    assert "| dspark" not in measurement_of("c" * 64, folders, dtype="float32")
