"""Sweeps say what a threshold buys and costs: against slow references, and against decoding itself."""

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from eval.decode import decode
from eval.rounds import Generation, Round
from eval.schedule import Scaling, Schedule, ScheduleName
from eval.stats import Pass, acceptance_stats
from eval.sweeps import altered_share, confidence_sweep, lossy_sweep
from eval.verify import Rule, altered_of, verify
from models.base import Proposal
from models.dspark import DSpark
from models.sampling import Sampler, SamplingConfig
from models.target import Target
from tests.test_decode import SAMPLED, config_of

THRESHOLD = 0.3


def pass_of(generations: list[Generation], domains: list[str] | None = None) -> Pass:
    count = len(generations)
    return Pass(
        about={}, domains=domains or ["a"] * count, prompts=[[1]] * count, generations=generations, seconds=1.0,
        draft_seconds=0.0, verify_seconds=0.0,
    )  # fmt: skip


def round_of(*confidence: float, accepted: int, proposed: int | None = None) -> Round:
    return Round(len(confidence) if proposed is None else proposed, accepted, True, confidence)


def test_a_confidence_threshold_cuts_before_the_first_unsure_draft() -> None:
    generations = [
        Generation(0, rounds=[round_of(0.9, 0.2, 0.9, accepted=2), round_of(0.6, 0.9, 0.9, accepted=0)]),
        Generation(1, rounds=[round_of(0.9, 0.9, 0.9, accepted=1, proposed=1)]),  # the output ended there
    ]
    everything, first, second = confidence_sweep(pass_of(generations, ["x", "y"]), None)
    assert [one["task"] for one in (everything, first, second)] == [None, "x", "y"]
    points = {round(point.pop("threshold"), 2): tuple(point.values()) for point in everything["thresholds"]}
    assert points[0.0] == pytest.approx((7 / 3, 3 / 7, 2))  # drafts a round, acceptance rate, acceptance length
    # at 0.5: one of the first round, three of the second, one of the third
    assert points[0.5] == pytest.approx((5 / 3, 2 / 5, 1 + 2 / 3))
    assert points[0.95] == (0, None, 1)
    scaling = Scaling((1.0,) * 3, (-20.0,) * 3, (0.0,) * 3)  # sure of nothing
    (sweep, *_) = confidence_sweep(pass_of(generations, ["x", "y"]), scaling)
    assert sweep["thresholds"][1]["drafts_per_round"] == 0
    assert confidence_sweep(pass_of([Generation(0, rounds=[Round(2, 1, True)])]), None) == []


def test_the_sweep_has_the_rates_of_decoding_at_the_threshold(
    tiny_target: Target, tiny_dspark: DSpark, tiny_prompts: list[list[int]]
) -> None:
    """Nearly: a round that is cut moves those behind it."""
    target = tiny_target.capturing(tiny_dspark.target_layer_ids)
    config = config_of(max_new_tokens=40, batch_size=8)
    recorded = decode(target, tiny_dspark, tiny_prompts, config).generations
    point = confidence_sweep(pass_of(recorded), None)[0]["thresholds"][10]
    schedule = Schedule(ScheduleName.confidence, point["threshold"])
    found = acceptance_stats(decode(target, tiny_dspark, tiny_prompts, replace(config, schedule=schedule)).generations)
    fixed = acceptance_stats(recorded)
    assert fixed.acceptance_rate is not None and found.acceptance_rate is not None
    assert point["acceptance_rate"] == pytest.approx(found.acceptance_rate, abs=0.04)
    assert point["acceptance_rate"] > 1.3 * fixed.acceptance_rate, "there is something to see"


def random_case(seed: int, *, candidates: bool) -> tuple[Proposal, torch.Tensor]:
    rng = torch.Generator().manual_seed(seed)
    target = torch.rand(3, 3, 6, generator=rng).pow(3).double()
    target = target / target.sum(-1, keepdim=True)
    ids = torch.stack([torch.randperm(6, generator=rng)[:4] for _ in range(6)]).view(3, 2, 4) if candidates else None
    probs = torch.rand(3, 2, 4 if candidates else 6, generator=rng).double()
    probs = probs / probs.sum(-1, keepdim=True)
    return Proposal(torch.zeros(3, 2, dtype=torch.int64), probs, torch.full((3,), 2), ids), target


@pytest.mark.parametrize("candidates", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_altered_is_the_distance_of_what_the_rule_gives_from_the_target(seed: int, candidates: bool) -> None:
    proposal, target = random_case(seed, candidates=candidates)
    found = altered_of(proposal, target, THRESHOLD)
    for row in range(3):
        for slot in range(2):
            drafts, wanted = [0.0] * 6, target[row, slot].tolist()
            for place, prob in enumerate(proposal.probs[row, slot].tolist()):
                ids = proposal.candidate_ids
                drafts[place if ids is None else int(ids[row, slot, place])] = prob
            given, rejected = [0.0] * 6, 0.0
            for token, prob in enumerate(drafts):
                keep = 1.0 if wanted[token] >= THRESHOLD else min(1.0, wanted[token] / prob) if prob else 0.0
                given[token] += prob * keep
                rejected += prob * (1 - keep)
            rest = [max(p - q, 0.0) for p, q in zip(wanted, drafts, strict=True)]
            given = [g + rejected * r / sum(rest) for g, r in zip(given, rest, strict=True)]
            distance = sum(abs(g - p) for g, p in zip(given, wanted, strict=True)) / 2
            assert float(found[row, slot]) == pytest.approx(distance, abs=1e-12)
    assert float(altered_of(proposal, target, 1.0).max()) == pytest.approx(0, abs=1e-12), "then it is the lossless rule"


def test_altered_is_what_verification_does() -> None:
    """First tokens of 40,000 verifications of one case."""
    count, rng = 40_000, torch.Generator().manual_seed(0)
    target = torch.tensor([0.35, 0.3, 0.2, 0.15], dtype=torch.float64).expand(1, 2, 4)
    proposal = Proposal(
        torch.zeros(1, 1, dtype=torch.int64),
        torch.tensor([[[0.7, 0.1, 0.2, 0.0]]], dtype=torch.float64),
        torch.ones(1, dtype=torch.int64),
    )
    drafts = torch.multinomial(proposal.probs[0, 0], count, replacement=True, generator=rng)
    many = Proposal(drafts[:, None], proposal.probs.expand(count, -1, -1), torch.ones(count, dtype=torch.int64))
    probs = target.expand(count, -1, -1)
    sampler = Sampler(SamplingConfig(1.0, 0, 1.0, 0.0, 5), torch.arange(count))
    positions = torch.ones(count, dtype=torch.int64)
    verdict = verify(Rule.lossy_threshold, many, probs, positions, sampler, threshold=THRESHOLD)
    first = torch.where(verdict.num_accepted > 0, drafts, verdict.next_token)
    counts = Counter(first.tolist())
    distance = sum(abs(counts[token] / count - float(target[0, 0, token])) for token in range(4)) / 2
    altered = float(altered_of(proposal, target, THRESHOLD)[0, 0])
    assert altered > 0.05 and distance == pytest.approx(altered, abs=0.01)


def test_rounds_record_alterations_of_a_lossy_rule_alone(
    tiny_target: Target, tiny_dspark: DSpark, tiny_prompts: list[list[int]]
) -> None:
    target = tiny_target.capturing(tiny_dspark.target_layer_ids)
    shares: list[Any] = []
    for rule, threshold in ((Rule.ratio, 1.0), (Rule.lossy_threshold, 0.5), (Rule.lossy_threshold, 0.02)):
        config = config_of(sampling=SAMPLED, rule=rule, lossy_threshold=threshold, diagnose=True, max_new_tokens=30)
        generations = decode(target, tiny_dspark, tiny_prompts, config).generations
        assert all(len(r.altered) == (0 if rule is Rule.ratio else r.proposed) for g in generations for r in g.rounds)
        shares.append(altered_share(generations))
    assert shares[0] == 0 <= shares[1] < shares[2] < 1, "a lower bar alters more"


def test_only_slots_that_were_decided_count_as_altered() -> None:
    rounds = [Round(3, 1, True, altered=(0.1, 0.2, 0.4)), Round(2, 2, True, altered=(0.3, 0.1))]
    assert altered_share([Generation(0, rounds=rounds)]) == pytest.approx((0.1 + 0.2 + 0.3 + 0.1) / 5)


def test_a_lossy_sweep_lines_up_behind_its_lossless_row() -> None:
    def row(threshold: float | None, **changes: Any) -> dict[str, Any]:
        same = {"drafter": "d", "temperature": 1.0, "num_draft_tokens": 4, "task_set": "main", "schedule": "fixed"}
        rest = {"acceptance_length": 2.0, "acceptance_length_interval": None, "tokens_per_second": 1.0}
        about = {"lossless": threshold is None, "lossy_threshold": threshold, "altered_share": threshold}
        return same | rest | about | changes

    rows = [row(None, temperature=0.0), row(None, drafter="other"), row(None), row(0.1), row(0.5)]
    assert [one["lossy_threshold"] for one in lossy_sweep(rows)] == [None, 0.5, 0.1]
    assert all(one["drafter"] == "d" and one["temperature"] == 1 for one in lossy_sweep(rows))
    assert lossy_sweep(rows[:3]) == []
