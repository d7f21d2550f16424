"""Acceptance statistics on hand-made rounds."""

import json

import pytest

from eval.rounds import Generation, Round
from eval.stats import Pass, acceptance_stats


def generation_of(*rounds: tuple[int, int, bool], tokens: int = 0, request_id: int = 0) -> Generation:
    return Generation(request_id, list(range(tokens)), [Round(*round_) for round_ in rounds], "stop")


def test_pooled_and_per_request_lengths_are_different_means() -> None:
    """10 tokens in 10 rounds and 90 tokens in 30 rounds: 100 / 40 pooled, (1 + 3) / 2 per request."""
    slow, fast = generation_of(*[(4, 0, True)] * 10), generation_of(*[(4, 2, True)] * 30)
    stats = acceptance_stats([slow, fast])
    assert (stats.rounds, stats.proposed, stats.accepted) == (40, 160, 60)
    assert stats.acceptance_length == 2.5
    assert stats.acceptance_length_per_request == 2.0
    assert stats.acceptance_rate == 60 / 160


def test_survival_and_conditional_acceptance_by_hand() -> None:
    rounds = [(3, 3, True), (3, 1, True), (3, 0, True), (1, 1, True), (2, 2, False)]
    stats = acceptance_stats([generation_of(*rounds)])
    # accepted > 0: 4 of 5, > 1: 2 of 5, > 2: 1 of 5
    assert stats.survival == [4 / 5, 2 / 5, 1 / 5]
    # slot 0 was proposed in all 5; slot 1 was reached by 4, one of which had proposed no more; slot 2 by one
    assert stats.conditional_acceptance == [4 / 5, 2 / 3, 1 / 1]
    # a round that ended with an accepted stop token has no bonus
    assert stats.acceptance_length == (4 + 2 + 1 + 2 + 2) / 5


def test_a_slot_that_was_never_reached_has_no_conditional_acceptance() -> None:
    stats = acceptance_stats([generation_of((3, 0, True), (3, 0, True))])
    assert stats.survival == [0.0, 0.0, 0.0]
    assert stats.conditional_acceptance == [0.0, None, None]


def test_pooled_length_is_one_plus_the_sum_of_survival_where_every_round_has_a_bonus() -> None:
    stats = acceptance_stats([generation_of((4, 4, True), (4, 1, True), (2, 0, True), (4, 3, True))])
    assert stats.acceptance_length == pytest.approx(1 + sum(stats.survival))


def test_nothing_counted_gives_none_and_not_zero() -> None:
    for generations in ([], [generation_of()]):
        stats = acceptance_stats(generations)
        assert stats.rounds == 0 and stats.survival == [] and stats.conditional_acceptance == []
        assert stats.acceptance_length is stats.acceptance_length_per_request is stats.acceptance_rate is None
    vanilla = acceptance_stats([generation_of((0, 0, True), (0, 0, True))])
    assert (vanilla.acceptance_length, vanilla.acceptance_rate) == (1.0, None)


def test_requests_without_rounds_do_not_enter_the_mean_over_requests() -> None:
    assert acceptance_stats([generation_of(), generation_of((4, 2, True))]).acceptance_length_per_request == 3.0


def some_pass() -> Pass:
    generations = [generation_of((3, 2, True), (3, 1, False), tokens=5), generation_of(tokens=1, request_id=1)]
    about = {"drafter": "x", "temperature": 0.0}
    return Pass(generations, 2.0, 0.5, 1.25, about=about, domains=["a", "b"], prompts=[[1, 2], [3]])


def test_a_pass_comes_back_from_json() -> None:
    measured = some_pass()
    assert Pass.from_dict(json.loads(json.dumps(measured.to_dict()))) == measured
    assert measured.tokens_per_second == 6 / 2.0


def test_the_head_of_a_pass_keeps_prompts_domains_and_outputs_together() -> None:
    measured = some_pass()
    head = measured.head(1)
    assert (head.prompts, head.domains, head.generations) == ([[1, 2]], ["a"], measured.generations[:1])
    assert head.seconds == measured.seconds
