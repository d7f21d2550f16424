"""Mixtures are balanced and repeatable, repeat no text, and keep what is held out apart from what is trained on."""

import logging
import random
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data.conversation import Regenerate
from data.mixing import MixOptions, Mixture, interleaved, mix, write_heldout
from data.prompts import Prompt, SourcePrompt, Split, read_prompts
from tests.conftest import counting_chat

OPTIONS = MixOptions(
    regenerate=Regenerate.last,
    weights=None,
    mix_seed=0,
    num_prompts=None,
    min_prompt_tokens=1,
    max_prompt_tokens=None,
    heldout=0.0,
)


def found(id: str, *texts: str, own_split: Split | None = None, group: str | None = None) -> SourcePrompt:
    """One text is a prompt, several are the user turns of a record with `turns`."""
    messages = [{"role": "user", "content": text} for text in texts]
    prompt = Prompt(id, "domain", own_split or "train", messages)
    return SourcePrompt(prompt, f"x.jsonl:{id}", own_split, group, is_turns=len(texts) > 1)


def source(name: str, size: int) -> list[SourcePrompt]:
    words = "abcdefghijklmnopqrstuvwxyz"
    return [found(f"{name}{i}", f"{name} {words[i % 26]} {words[i // 26]}") for i in range(size)]


def mixture(*sources: list[SourcePrompt], **changes: Any) -> Mixture:
    """A word is a token."""

    def num_tokens(prompt: Prompt, regenerate: Regenerate) -> int:
        return sum(len(message["content"].split()) for message in prompt.messages)

    names = [f"source{index}.jsonl" for index in range(len(sources))]
    return mix(sources, replace(OPTIONS, **changes), num_tokens, names=names)


def ids(prompts: list[Prompt]) -> list[str]:
    return [prompt.id for prompt in prompts]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.lists(st.integers(1, 1000), min_size=1, max_size=7))
def test_every_prefix_of_a_mixture_is_balanced_to_the_weights_within_one_prompt(weights: list[int]) -> None:
    counts: Counter[int] = Counter()
    for length, index in enumerate(islice(interleaved(weights), 400), start=1):
        counts[index] += 1
        for i, weight in enumerate(weights):
            assert abs(counts[i] - length * weight / sum(weights)) < 1


def test_decimal_weights_are_exact_shares() -> None:
    """0.1 + 0.2 is not 0.3 in binary, and 7 of 10 would become 6 or 8."""
    assert Counter(islice(interleaved([0.1, 0.2, 0.7]), 1000)) == {0: 100, 1: 200, 2: 700}


def test_a_mixture_ends_where_the_first_source_is_used_up_at_its_share() -> None:
    prompts = ids(mixture(source("a", 100), source("b", 10), weights=[3, 1]).train)
    assert sum(id.startswith("b") for id in prompts) == 10
    assert abs(len(prompts) - 40) <= 4 and len(set(prompts)) == len(prompts)


def test_sources_are_shuffled_by_the_mix_seed_alone_and_fewer_prompts_are_a_prefix() -> None:
    sources = [source("a", 50), source("b", 50)]
    whole = ids(mixture(*sources, weights=[1, 2]).train)
    assert ids(mixture(*sources, weights=[1, 2]).train) == whole
    assert ids(mixture(*sources, weights=[1, 2], num_prompts=20).train) == whole[:20]
    assert ids(mixture(*sources, weights=[1, 2], mix_seed=1).train) != whole
    of_a = [id for id in whole if id.startswith("a")]
    assert of_a != sorted(of_a, key=lambda id: int(id[1:]))


def test_without_weights_all_prompts_of_all_sources_come_in_order() -> None:
    sources = [source("a", 5), source("b", 30)]
    assert ids(mixture(*sources).train) == [f"a{i}" for i in range(5)] + [f"b{i}" for i in range(30)]
    assert ids(mixture(*sources, num_prompts=7).train) == ["a0", "a1", "a2", "a3", "a4", "b0", "b1"]


def test_a_text_that_repeats_an_earlier_one_but_for_case_and_white_space_is_left_out_and_counted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    first = [found("a", "What is  Rust?"), found("b", "what is go?"), found("c", "WHAT IS\nrust? ")]
    second = [found("d", "what is rust?"), found("e", "what is rust ?")]
    assert ids(mixture(first, second).train) == ["a", "b", "e"]
    assert "left out 2 with the text of an earlier prompt" in caplog.text


def chat(*messages: tuple[str, str]) -> list[dict[str, str]]:
    return [{"role": role, "content": text} for role, text in messages]


def test_what_counts_as_repeated_is_what_the_target_is_asked() -> None:
    """Recorded answers are history with `last` and not read with `all`."""
    one, other = found("a", ""), found("b", "")
    one.prompt.messages[:] = chat(("user", "hi"), ("assistant", "x"), ("user", "go"), ("assistant", "1"))
    other.prompt.messages[:] = chat(("user", "hi"), ("assistant", "y"), ("user", "go"))
    assert ids(mixture([one, other]).train) == ["a", "b"]
    assert ids(mixture([one, other], regenerate=Regenerate.all).train) == ["a"]
    other.prompt.messages[1]["content"] = "x"
    assert ids(mixture([one, other]).train) == ["a"]


def recorded(id: str, *texts: str, own_split: Split | None = None, group: str | None = None) -> SourcePrompt:
    """A chat: a system turn, then user texts with recorded answers between them."""
    prompt = found(id, "", own_split=own_split, group=group)
    turns = [turn for text in texts for turn in (("user", text), ("assistant", f"answer of {id}"))]
    prompt.prompt.messages[:] = chat(("system", "s"), *turns[:-1])
    return prompt


@pytest.mark.parametrize("group", [None, "of its own"])
def test_with_all_no_training_chat_asks_the_first_turn_of_a_held_out_prompt(group: str | None) -> None:
    """Whether the held-out one is a whole chat or its first turn alone, and also where groups name no relation."""
    for held in (("Hi",), ("Hi", "other")):
        prompts = [recorded("a", "hi", "go"), recorded("b", *held, own_split="heldout", group=group)]
        prompts += [recorded("c", "on", "hi"), recorded("d", "on", "go")]
        sides = mixture(prompts, regenerate=Regenerate.all)
        assert [ids(side) for side in sides] == [["c", "d"], ["b"]], "training chats may begin alike"
        assert ids(mixture(prompts).train) == ["a", "c", "d"], "with last another history is another prompt"


def test_with_all_chats_that_begin_alike_are_held_out_together() -> None:
    prompts = [
        recorded(f"{i}-{j}", f"{'abcdefghij'[i]} {j}", f"then {'abcdefghij'[j]}") for i in range(10) for j in range(4)
    ]
    train, heldout = mixture(prompts, regenerate=Regenerate.all, heldout=0.5)
    assert heldout and train and not template_ids(train) & template_ids(heldout)


def test_a_source_with_a_weight_but_no_prompt_left_is_one_error_that_names_it() -> None:
    same = [replace(prompt, prompt=replace(prompt.prompt, id=f"x{i}")) for i, prompt in enumerate(source("a", 3))]
    with pytest.raises(
        ValueError, match=r"prompts\[1\]=source1.jsonl with weights\[1\]=2.0 has no training prompt left"
    ):
        mixture(source("a", 9), same, weights=[1.0, 2.0])
    assert len(mixture(source("a", 9), same).train) == 9
    with pytest.raises(ValueError, match=r"prompts\[0\]=source0.jsonl .*'of fewer than min_prompt_tokens=4': 5"):
        mixture([found("b", "x")], [found("c", "x x x x"), *source("d", 4)], weights=[1, 1], min_prompt_tokens=4)


def test_the_log_names_the_source_that_ends_a_mixture(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    mixture(source("a", 100), source("b", 10), weights=[1, 1], num_prompts=5)
    mixture(source("a", 100), source("b", 10))
    assert "ends the mixture" not in caplog.text
    mixture(source("a", 100), source("b", 10), weights=[1, 1])
    assert "prompts[1]=source1.jsonl is used up and ends the mixture at 21 prompts; 89 of all" in caplog.text


def test_prompts_outside_the_length_limits_are_left_out_and_counted_by_reason(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    prompts = [found(str(n), " ".join("abcdefgh"[:n])) for n in range(1, 8)]
    assert ids(mixture(prompts, min_prompt_tokens=3, max_prompt_tokens=6).train) == ["3", "4", "5", "6"]
    assert "left out 2 of fewer than min_prompt_tokens=3" in caplog.text
    assert "left out 1 of more than max_prompt_tokens=6" in caplog.text


def test_tokens_are_not_counted_without_a_limit() -> None:
    """A million prompts take minutes to tokenise."""

    def num_tokens(prompt: Prompt, regenerate: Regenerate) -> int:
        raise AssertionError("counted")

    assert len(mix([source("a", 3)], OPTIONS, num_tokens, names=["a"]).train) == 3


def templated(name: str, *, own: dict[str, Split] | None = None) -> list[SourcePrompt]:
    """Three variants each of 60 templates, which differ in numbers, case and white space only."""
    prompts = []
    for t in range(60):
        words = f"{name} {'abcdefghij'[t % 10]} {'abcdef'[t // 10]}"
        for variant, text in enumerate((f"{words} 1 plus 22", f"{words.upper()} 7 plus 8", f"{words}  135 plus\n0")):
            id = f"{name}-{t}-{variant}"
            prompts.append(found(id, text, own_split=(own or {}).get(id)))
    return prompts


def template_ids(prompts: list[Prompt]) -> set[str]:
    return {prompt.id.rpartition("-")[0] for prompt in prompts}


def test_variants_of_a_template_never_stand_on_both_sides_and_the_share_is_held_out() -> None:
    train, heldout = mixture(templated("a"), heldout=0.25)
    assert not template_ids(train) & template_ids(heldout)
    assert len(train) + len(heldout) == 180
    assert 8 <= len(template_ids(heldout)) <= 22, "a quarter of 60"
    assert {prompt.split for prompt in heldout} == {"heldout"} and {prompt.split for prompt in train} == {"train"}
    assert not mixture(templated("a"), heldout=0.0).heldout


def test_adding_sources_and_other_mixture_options_move_no_prompt_to_the_other_side() -> None:
    alone = mixture(templated("b"), heldout=0.3)
    more = mixture(templated("a"), templated("b"), heldout=0.3, weights=[1, 1], mix_seed=5)
    assert set(ids(alone.heldout)) == {id for id in ids(more.heldout) if id.startswith("b")}
    wider = mixture(templated("b"), heldout=0.5)
    assert set(ids(alone.heldout)) < set(ids(wider.heldout)), "a larger share only adds"


def test_a_group_field_decides_in_place_of_the_text() -> None:
    prompts = [
        found(f"{i}-{j}", f"text {chr(97 + i)} {chr(97 + j)}", group=f"g{i}") for i in range(26) for j in range(4)
    ]
    train, heldout = mixture(prompts, heldout=0.4)
    groups = [{id.split("-")[0] for id in ids(side)} for side in (train, heldout)]
    assert groups[1] and not groups[0] & groups[1]


def test_the_split_of_a_record_wins_over_the_hash_and_pulls_no_relative_to_the_other_side(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Relatives without a field of their own that would stand on the other side are left out and counted."""
    caplog.set_level(logging.INFO)
    before = mixture(templated("a"), heldout=0.3)
    held = next(iter(sorted(template_ids(before.heldout))))
    trained = next(iter(sorted(template_ids(before.train))))
    own: dict[str, Split] = {f"{held}-0": "train", f"{trained}-1": "heldout"}
    train, heldout = mixture(templated("a", own=own), heldout=0.3)
    assert f"{held}-0" in ids(train) and f"{trained}-1" in ids(heldout)
    assert not template_ids(train) & template_ids(heldout)
    assert len(train) + len(heldout) == 180 - 4
    assert "left out 2 for the train split: their group is in the heldout split by a record's own field" in caplog.text
    assert "left out 2 for the heldout split" in caplog.text


def test_a_group_that_records_place_on_both_sides_is_held_out() -> None:
    prompts = [found("a", "x 1", own_split="train"), found("b", "x 2", own_split="heldout"), found("c", "y")]
    assert [ids(side) for side in mixture(prompts)] == [["c"], ["b"]]


def test_a_training_prompt_with_the_text_of_a_held_out_one_is_left_out_whatever_its_group() -> None:
    first, second = found("a", "same", group="g"), found("b", "Same", own_split="heldout", group="h")
    assert [ids(side) for side in mixture([first, second, found("c", "y")])] == [["c"], ["b"]]


def test_of_turns_only_the_first_is_held_out_and_all_are_answered_with_all() -> None:
    prompts = [found("a", "one", "two"), found("b", "three", "four", own_split="heldout")]
    for regenerate, num_asked in ((Regenerate.last, 1), (Regenerate.all, 2)):
        train, heldout = mixture(prompts, regenerate=regenerate)
        assert [len(prompt.messages) for prompt in (*train, *heldout)] == [num_asked, 1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heldout": 1.0}, r"heldout must be in \[0, 1\), got 1.0"),
        ({"weights": [1.0]}, r"weights must be null or 2 numbers > 0, one per source of prompts=, got \[1.0\]"),
        ({"weights": [1.0, 0.0]}, "weights must be null or 2 numbers > 0"),
        ({"num_prompts": 0}, "num_prompts must be null or > 0, got 0"),
        ({"min_prompt_tokens": 5, "max_prompt_tokens": 4}, "max_prompt_tokens must be null or >= min_prompt_tokens=5"),
        ({"min_prompt_tokens": 50}, r"none is left to answer; 0 are held out, left out are \{'of fewer than min"),
    ],
)
def test_options_out_of_range_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mixture(source("a", 3), source("b", 3), **changes)


def test_an_id_in_two_sources_is_one_error_that_names_both_places() -> None:
    with pytest.raises(ValueError, match=r"x.jsonl:a0: id 'a0' is already used at x.jsonl:a0"):
        mixture(source("a", 3), source("a", 1))


def test_held_out_prompts_are_a_task_file_that_a_second_run_leaves_alone(tmp_path: Path) -> None:
    rng, path = random.Random(0), tmp_path / "out" / "heldout.jsonl"
    tools = [{"type": "function", "function": {"name": "f"}}]
    chats = [Prompt(f"c{i}", "count", "heldout", counting_chat(rng), tools if i else None) for i in range(3)]
    write_heldout(path, chats)
    assert read_prompts(path) == [replace(prompt, messages=prompt.messages[:1]) for prompt in chats]
    before = path.stat().st_mtime_ns
    write_heldout(path, chats)
    assert path.stat().st_mtime_ns == before
    write_heldout(path, chats[:2])
    assert len(read_prompts(path)) == 2
    write_heldout(path, [])
    assert not path.exists(), "what is trained on now must not be measured on"
