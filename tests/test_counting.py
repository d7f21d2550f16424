"""What engines would count of our rounds, against engines that count by themselves."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from eval.counting import Counts, as_llama_cpp, as_sglang, as_vllm
from eval.decode import DecodeConfig, decode
from eval.engines import Settings, find_engine, spec_decode_counters
from eval.rounds import Generation, Round
from eval.schedule import FIXED
from eval.verify import Rule
from models.dspark import DSpark
from models.sampling import GREEDY
from models.target import Target
from tests.engine_servers import FAKES, FakeEngine, K, fake, running  # noqa: F401 (fixture)

COUNT = {"vLLM": as_vllm, "SGLang": as_sglang, "llama.cpp": as_llama_cpp}


@pytest.mark.parametrize("name", FAKES)
@pytest.mark.parametrize("limit", [1, 2, 3, 5, 8, 13, 18, 24])
def test_rounds_are_turned_into_what_each_engine_counts(
    name: str,
    limit: int,
    fake: Callable[..., FakeEngine],
    tiny_target: Target,
    tiny_dspark: DSpark,
    tiny_prompts: list[list[int]],
) -> None:
    """At every limit; some outputs are ended by it, some by a stop token that was drafted, some by one that was not."""
    target = tiny_target.capturing(tiny_dspark.target_layer_ids)
    config = DecodeConfig(limit, 5, K, Rule.ratio, FIXED, GREEDY)
    generations = decode(target, tiny_dspark, tiny_prompts, config).generations
    settings = Settings(limit, K, GREEDY, tiny_target.spec.eos_token_ids)
    with running(fake(name)) as url:
        engine = find_engine(url, api_key_file=None, timeout=10, concurrency=1)
        answers = engine.answer_all(tiny_prompts, settings, [0] * len(tiny_prompts), concurrency=1).answers
    assert engine.name == name and [a.tokens for a in answers] == [g.tokens for g in generations]
    assert [a.counts for a in answers] == [COUNT[name](generation, limit) for generation in generations]
    if limit == 18:
        assert {generation.finish_reason for generation in generations} == {"stop", "length"}
    if limit == 24:
        last = [generation.rounds[-1] for generation in generations]
        assert {r.bonus for r in last} == {True, False} and any(sum(r.behind) for r in last)


def test_a_round_that_the_deepspec_protocol_adds_at_the_limit_is_not_counted() -> None:
    rounds = [Round(4, 2, True), Round(4, 4, True), Round(4, 1, True)]
    generation = Generation(0, [7] * 9, rounds, "length")
    assert as_vllm(generation, 9) == as_sglang(generation, 9) == Counts(2, 8, 6)
    assert as_llama_cpp(generation, 9) == Counts(2, 8, 6)
    assert as_llama_cpp(generation, 8) == Counts(2, 4 + 3, 2 + 3), "capped where the output ends"
    assert as_vllm(generation, 10) == Counts(3, 12, 7)


def test_rounds_without_drafts_are_none_in_vllm_alone() -> None:
    generation = Generation(0, [7] * 5, [Round(0, 0, True), Round(4, 2, True)], "length")
    assert as_vllm(generation, 5) == Counts(1, 4, 2) and as_vllm(generation, 5).by_position == (1, 1, 0, 0)
    assert as_sglang(generation, 5).rounds == as_llama_cpp(generation, 5).rounds == 2


def test_kept_rounds_that_do_not_say_what_stood_behind_a_stop_token_are_refused() -> None:
    old = Generation(0, [7] * 4, [Round(2, 2, False)], "stop")
    with pytest.raises(ValueError, match=r"eval/passes .* delete that folder"):
        as_vllm(old, 9)
    assert as_vllm(replace(old, rounds=[Round(2, 2, False, behind=(2, 1))]), 9) == Counts(1, 4, 3)


def test_counters_of_all_engines_of_a_server_are_added_up() -> None:
    text = ""
    for engine in (0, 1):
        label = f'engine="{engine}",model_name="m"'
        for name, value in (("num_drafts", 10), ("num_draft_tokens", 40), ("num_accepted_tokens", 12)):
            text += f"vllm:spec_decode_{name}_total{{{label}}} {value + engine}.0\n"
        for place, value in ((1, 4), (0, 8)):
            text += f'vllm:spec_decode_num_accepted_tokens_per_pos_total{{{label},position="{place}"}} {value}.0\n'
    found = spec_decode_counters(text)
    assert found == Counts(21, 81, 25) and found.by_position == (16, 8)
    assert spec_decode_counters("vllm:prompt_tokens_total 3.0\n") is None
