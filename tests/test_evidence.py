"""What rounds record of their drafts, against what was drafted and what came out, and what is counted of it."""

import time
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import eval.decode as decode_module
from eval.decode import decode
from eval.evidence import by_context, evidence
from eval.rounds import NUM_RANKED, Generation, Round
from eval.stats import acceptance_stats
from models.dspark import DSpark
from models.eagle3 import Eagle3
from models.independent import IndependentDrafter
from models.sampling import SamplingConfig
from models.target import Target, TargetConfig
from tests.chains import lively_eagle3
from tests.test_decode import GREEDY, SAMPLED, config_of

KINDS = ["dspark", "dflash", "eagle3", "eagle3_reduced", "independent"]


@pytest.fixture(scope="module")
def drafters(tiny_target: Target, tiny_target_config: TargetConfig, tiny_dspark: DSpark, tiny_dflash: Any) -> Any:
    eagle3: Eagle3 = lively_eagle3(tiny_target, tiny_target_config)
    reduced = lively_eagle3(tiny_target, tiny_target_config, draft_vocab_size=30, own_head=True)
    own = IndependentDrafter(tiny_target, 4, tiny_target.spec.vocab_size)
    return dict(zip(KINDS, (tiny_dspark, tiny_dflash, eagle3, reduced, own), strict=True))


def rounds_of(generations: list[Generation]) -> list[tuple[Round, int]]:
    """Each round with the tokens of its output that follow its first slot, that one among them."""
    found = []
    for generation in generations:
        place = 1
        for r in generation.rounds:
            found.append((r, max(0, len(generation.tokens) - place)))
            place += r.accepted + r.bonus
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_rounds_say_where_the_outputs_token_stood(
    tiny_target: Target, tiny_prompts: list[list[int]], drafters: Any, kind: str
) -> None:
    """An accepted draft was the likeliest; the one that was corrected was not the output's."""
    config = config_of(max_new_tokens=20, batch_size=5, diagnose=True)
    generations = decode(tiny_target, drafters[kind], tiny_prompts, config).generations
    plain = decode(tiny_target, drafters[kind], tiny_prompts, replace(config, diagnose=False)).generations
    assert generations == plain and not any(r.ranks or r.overlap for g in plain for r in g.rounds)
    rounds, corrected = rounds_of(generations), set()
    for r, left in rounds:
        assert len(r.ranks) == min(r.proposed, left) and len(r.overlap) == r.proposed
        assert r.ranks[: r.accepted] == (0,) * min(r.accepted, len(r.ranks))
        assert r.overlap[: r.accepted] == (1.0,) * r.accepted
        if r.accepted < r.proposed:
            assert r.overlap[r.accepted] == 0.0
            corrected |= set(r.ranks[r.accepted : r.accepted + 1])
    assert 0 not in corrected
    assert len(corrected) > 2 or kind == "independent"  # the target drafting for itself is never corrected
    assert all(g.first_token_seconds > 0 and not g.ranked for g in generations)


def test_ranks_of_another_slot_are_noticed(
    monkeypatch: pytest.MonkeyPatch, tiny_target: Target, tiny_prompts: list[list[int]], drafters: Any
) -> None:
    right = Generation.place_ranks

    def shifted(self: Generation) -> None:
        self.ranked = [(index, first + 1, slots) for index, first, slots in self.ranked]
        right(self)

    monkeypatch.setattr(Generation, "place_ranks", shifted)
    with pytest.raises(AssertionError):
        test_greedy_rounds_say_where_the_outputs_token_stood(tiny_target, tiny_prompts, drafters, "dspark")


@pytest.mark.parametrize("kind", ["dspark", "eagle3_reduced"])
@pytest.mark.parametrize("sampling", [SAMPLED, SamplingConfig(0.7, 0, 0.9, 0.0, 5)], ids=["plain", "top_p"])
def test_the_overlap_estimates_the_acceptance_of_its_slot(
    tiny_target: Target, tiny_prompts: list[list[int]], drafters: Any, kind: str, sampling: SamplingConfig
) -> None:
    """Chances against counts: within four standard deviations, slot by slot."""
    config = config_of(sampling=sampling, max_new_tokens=24, batch_size=48, diagnose=True)
    generations = decode(tiny_target, drafters[kind], tiny_prompts * 12, config).generations
    prompts = tiny_prompts * 12
    estimate = evidence(generations, prompts)["acceptance_estimate"]
    observed = acceptance_stats(generations).conditional_acceptance
    for slot in range(2):
        reached = sum(r.accepted >= slot and r.proposed > slot for g in generations for r in g.rounds)
        assert reached > 40 and estimate[slot] is not None and observed[slot] is not None
        assert abs(estimate[slot] - observed[slot]) < 4 * (0.25 / reached) ** 0.5
        assert 0.01 < estimate[slot] < 0.99


def test_evidence_by_hand() -> None:
    rounds = [
        Round(3, 1, True, overlap=(0.9, 0.5, 0.1), ranks=(0, 4, NUM_RANKED)),
        Round(3, 0, True, overlap=(0.2, 0.6, 0.7), ranks=(NUM_RANKED, 0, 0)),
        Round(3, 3, True, overlap=(1.0, 0.4, 0.8), ranks=(1, 0, 0)),
        Round(2, 0, True, overlap=(0.3, 0.3), ranks=(2,)),  # the output ended behind the correction
        Round(0, 0, True),
    ]
    found = evidence([Generation(0, rounds=rounds)], [[1] * 126])
    assert found["acceptance_estimate"] == pytest.approx([0.6, 0.45, 0.8])
    assert found["rejections"] == {"in_top_16": 2, "not_in_top_16": 1}
    assert found["recall_at_1"] == pytest.approx([1 / 4, 1 / 2, 1.0])
    assert found["recall_at_16"] == pytest.approx([3 / 4, 1.0, 1.0])
    assert found["oracle_length"] == pytest.approx(1 + (2 + 0 + 3) / 3)  # rounds whose slots are all known
    # rounds begin at positions 127, 129, 130, 134, 135
    assert found["acceptance_by_context"] == [
        {"from": 0, "to": 128, "rounds": 1, "acceptance_length": 2.0},
        {"from": 128, "to": 256, "rounds": 4, "acceptance_length": pytest.approx(7 / 4)},
    ]


def test_nothing_recorded_says_nothing() -> None:
    found = evidence([Generation(0, rounds=[Round(2, 1, True)]), Generation(1)], [[1], [2]])
    assert found["rejections"] is None and found["oracle_length"] is None
    assert found["recall_at_1"] == found["acceptance_estimate"] == [None, None]
    assert by_context([Generation(0)], [[1]]) == []


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_diagnosis_takes_no_part_in_the_times(
    monkeypatch: pytest.MonkeyPatch, tiny_target: Target, tiny_prompts: list[list[int]], drafters: Any, sampling: Any
) -> None:
    """However long it takes: here ten milliseconds for every slot and every round."""
    overlap, topk = decode_module.overlap_of, torch.Tensor.topk

    def slow(call: Any, *arguments: Any, **options: Any) -> Any:
        time.sleep(0.01)
        return call(*arguments, **options)

    monkeypatch.setattr(decode_module, "overlap_of", partial(slow, overlap))
    monkeypatch.setattr(torch.Tensor, "topk", lambda *arguments, **options: slow(topk, *arguments, **options))
    config = config_of(sampling=sampling, max_new_tokens=12, batch_size=3, diagnose=True)
    began = time.perf_counter()
    result = decode(tiny_target, drafters["dspark"], tiny_prompts, config)
    slept = 0.01 * result.steps * (1 + config.num_draft_tokens)
    assert time.perf_counter() - began > slept > 0.5
    for seconds in (result.seconds, result.draft_seconds + result.verify_seconds + result.prompt_seconds):
        assert 0 < seconds < 0.7 * slept
