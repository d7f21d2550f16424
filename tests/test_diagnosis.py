"""A diagnosis names what was done to a drafter, and nothing to one that is well."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from data.tracking import METRICS, PROBE_PREFIX
from eval.decode import decode
from eval.diagnosis import Finding, diagnose, training_record
from eval.report import row_of
from eval.stats import Pass
from models.base import Proposal, Proposer
from models.dspark import DSpark
from models.ngram import NgramDrafter
from models.sampling import Sampler
from models.target import Target
from tests.test_decode import config_of

BROKEN = "The drafter does not get what it was trained on"
BEATEN = "Looking up the prompt does better"
BY_HEART = "It does not carry over to these prompts"
CHOICE = "Often it knows the right token but drafts another"
KNOWLEDGE = "Often it does not know the right token"
FALLING = "Later drafts are guessed worse than the first"
SHORT = "Its blocks are short"


def measured_row(
    target: Target, drafter: Proposer, prompts: Sequence[list[int]], domains: Sequence[str] | None = None
) -> dict[str, Any]:
    length = drafter.num_draft_tokens
    config = config_of(max_new_tokens=24, batch_size=8, diagnose=True, num_draft_tokens=length)
    result = decode(target, drafter, prompts, config)
    about = {"drafter": "x", "temperature": 0.0, "num_draft_tokens": length, "lossless": True}
    names = list(domains) if domains is not None else ["a"] * len(prompts)
    return row_of(Pass(**vars(result), about=about, domains=names, prompts=list(prompts)), None)


def trained(length: float, probe: float | None = None) -> dict[str, Any]:
    rates = {"sampled_acceptance_length": length, "greedy_acceptance_length": length}
    return {"step": 9, **rates, "probe_acceptance_length": probe}


def causes(found: Sequence[Finding]) -> list[str]:
    return [one.cause for one in found]


@pytest.fixture
def target(tiny_target: Target, tiny_dspark: DSpark) -> Target:
    return tiny_target.capturing(tiny_dspark.target_layer_ids)


@pytest.fixture
def healthy(target: Target, tiny_dspark: DSpark, tiny_prompts: list[list[int]]) -> dict[str, Any]:
    return measured_row(target, tiny_dspark, tiny_prompts)


def test_a_drafter_that_is_fed_wrong_features_is_called_broken(
    tiny_target: Target, target: Target, tiny_dspark: DSpark, tiny_prompts: list[list[int]], healthy: dict[str, Any]
) -> None:
    record = trained(1 + 1.8 * (healthy["acceptance_length"] - 1))  # on its training answers
    assert BROKEN not in causes(diagnose(healthy, record, {}))
    wrong = tiny_target.capturing(tiny_dspark.target_layer_ids, lambda features: features.flip(-1))
    row = measured_row(wrong, tiny_dspark, tiny_prompts)
    found = diagnose(row, record, {})
    assert causes(found)[0] == BROKEN and f"{row['acceptance_length']:.2f}" in found[0].evidence
    assert "target_layer_ids" in found[0].advice and "slot_layout" in found[0].advice
    assert BROKEN in causes(diagnose(row, trained(record["greedy_acceptance_length"], probe=3.0), {}))


def test_one_that_was_as_weak_when_it_was_probed_in_training_was_not_broken_since(healthy: dict[str, Any]) -> None:
    weak = healthy | {"acceptance_length": 1.2}
    assert BROKEN in causes(diagnose(weak, trained(3.0), {}))
    found = causes(diagnose(weak, trained(3.0, probe=1.25), {}))
    assert BROKEN not in found and BY_HEART in found


def test_of_a_drafter_from_elsewhere_its_first_drafts_list_says_whether_it_is_broken(healthy: dict[str, Any]) -> None:
    assert BROKEN not in causes(diagnose(healthy, None, {}))
    assert BROKEN in causes(diagnose(healthy | {"recall_at_16": [0.1, 0.9]}, None, {}))
    assert BROKEN not in causes(diagnose(healthy | {"recall_at_16": []}, None, {})), "nothing was recorded"


def test_a_lookup_that_does_better_is_named(
    target: Target, tiny_prompts: list[list[int]], healthy: dict[str, Any]
) -> None:
    n_gram = measured_row(target, NgramDrafter(4), tiny_prompts)
    assert n_gram["acceptance_length"] < healthy["acceptance_length"]
    assert BEATEN not in causes(diagnose(healthy, None, n_gram))
    (finding,) = [one for one in diagnose(healthy | {"acceptance_length": 1.0}, None, n_gram) if one.cause == BEATEN]
    assert finding.at_stake == pytest.approx(n_gram["acceptance_length"] - 1)


def test_a_gap_to_the_training_answers_is_learning_by_heart(healthy: dict[str, Any]) -> None:
    length = healthy["acceptance_length"]
    (finding,) = [one for one in diagnose(healthy, trained(1 + 1.6 * (length - 1)), {}) if one.cause == BY_HEART]
    assert finding.at_stake == pytest.approx(0.6 * (length - 1)) and "More answers" in finding.advice
    assert BY_HEART not in causes(diagnose(healthy, trained(1 + 1.1 * (length - 1)), {}))
    assert BY_HEART not in causes(diagnose(healthy, None, {}))


@pytest.mark.parametrize(("is_listed", "expected"), [(True, CHOICE), (False, KNOWLEDGE)])
def test_a_wrong_choice_and_a_wrong_list_are_told_apart(
    target: Target, tiny_dspark: DSpark, tiny_prompts: list[list[int]], is_listed: bool, expected: str
) -> None:
    """Every draft is the second likeliest token; the list is the drafter's own, or one of padding."""

    class Wrong:
        def __getattr__(self, name: str) -> Any:
            return getattr(tiny_dspark, name)

        def propose(self, state: Any, last: Tensor, sampler: Sampler, length: int) -> Proposal:
            found = tiny_dspark.propose(state, last, sampler, length)
            assert found.ranked is not None
            tokens = found.ranked[..., 1]
            ranked = found.ranked if is_listed else torch.zeros_like(found.ranked)
            probs = torch.zeros_like(found.probs).scatter_(2, tokens[..., None], 1.0)
            return replace(found, tokens=tokens, probs=probs, ranked=ranked)

    row = measured_row(target, Wrong(), tiny_prompts)  # type: ignore[arg-type]
    found = [one for one in diagnose(row, None, {}) if one.cause in (CHOICE, KNOWLEDGE)]
    assert max(found, key=lambda one: one.at_stake or 0).cause == expected, row["rejections"]


def test_weak_tasks_and_late_slots_and_short_blocks_are_named(healthy: dict[str, Any]) -> None:
    domains = {name: {"acceptance_length": length} for name, length in (("maths", 3.0), ("chat", 1.4))}
    found = diagnose(healthy | {"acceptance_length": 2.4, "per_domain": domains}, None, {})
    (weak,) = [one for one in found if one.cause.startswith("It is weak on")]
    assert weak.cause.endswith("chat") and weak.at_stake == pytest.approx(1.0)
    assert FALLING in causes(diagnose(healthy | {"conditional_acceptance": [0.8, 0.6, 0.4]}, None, {}))
    assert FALLING not in causes(diagnose(healthy | {"conditional_acceptance": [0.6, 0.7, 0.7]}, None, {}))
    assert SHORT in causes(diagnose(healthy | {"survival": [0.9, 0.7]}, None, {}))
    assert SHORT not in causes(diagnose(healthy | {"survival": [0.9, 0.3]}, None, {}))
    contexts = [
        {"from": 0, "rounds": 99, "acceptance_length": 3.0},
        {"from": 128, "rounds": 99, "acceptance_length": 2.0},
    ]
    assert "It loses its way in long contexts" in causes(
        diagnose(healthy | {"acceptance_by_context": contexts}, None, {})
    )
    contexts[1]["rounds"] = 3
    assert "It loses its way in long contexts" not in causes(
        diagnose(healthy | {"acceptance_by_context": contexts}, None, {})
    )


def test_what_costs_most_comes_first_and_nothing_is_said_of_no_rounds(healthy: dict[str, Any]) -> None:
    found = diagnose(healthy, trained(9.0), {})
    stakes = [one.at_stake for one in found]
    known = [stake for stake in stakes if stake is not None]
    assert known == sorted(known, reverse=True) and None not in stakes[stakes.count(None) :]
    assert diagnose(healthy | {"acceptance_length": None}, trained(9.0), {}) == []


def test_where_training_ended_is_read_from_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints" / "step_00000020"
    folder.mkdir(parents=True)
    assert training_record(folder) is None and training_record(None) is None
    lines = [
        {"step": step, "teacher_forced_acceptance_length": 2.0}
        | {"accept_rate@0": rate, "accept_rate@1": 0.5, "top1_agreement@0": 1.0}
        for step, rate in ((1, 0.0), *((k, 0.6) for k in range(2, 12)))
    ]  # fmt: skip
    lines.insert(5, {"step": 6, f"{PROBE_PREFIX}acceptance_length": 1.7})
    (tmp_path / "run" / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = training_record(folder)
    assert found is not None
    assert found["step"] == 11 and found["probe_acceptance_length"] == 1.7
    assert found["sampled_acceptance_length"] == pytest.approx(1 + 0.6 + 0.3), "the mean of the last ten lines"
    assert found["greedy_acceptance_length"] == 2.0
