"""Units of a pass: shared by any number of processes, kept one by one, and the same in the end."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import PreTrainedTokenizerBase

from data.prompts import Prompt, SourcePrompt
from eval.decode import decode
from eval.passes import UNIT_BATCHES, Passes, units_of
from eval.report import row_of
from eval.rounds import DecodeResult, Generation
from eval.stats import Pass
from models.dspark import DSpark
from models.target import Target, TargetConfig, load_tokenizer
from tests.test_decode import SAMPLED, config_of

BATCH = 2
ABOUT = {"drafter": "dspark", "task_set": "main", "batch_size": BATCH, "temperature": 1.0, "lossless": True}
CONFIG = config_of(max_new_tokens=8, batch_size=BATCH, num_draft_tokens=3, sampling=SAMPLED)


@pytest.fixture(scope="module")
def tokenizer(tiny_target_config: TargetConfig) -> PreTrainedTokenizerBase:
    return load_tokenizer(tiny_target_config)


def source_of(number: int, turns: Sequence[str]) -> SourcePrompt:
    messages = [{"role": "user", "content": text} for text in turns]
    return SourcePrompt(Prompt(f"p-{number}", "own", "train", messages), "here", None, None, is_turns=True)


SOURCES = [source_of(index, ["3 4", "5 6 7", "8"][: 1 + index % 3]) for index in range(11)]


class Decoder:
    """`decode` on the tiny target; counts its calls, and fails at one of them."""

    def __init__(self, target: Target, drafter: DSpark, *, fails_at: int | None = None) -> None:
        self.target, self.drafter, self.fails_at = target, drafter, fails_at
        self.calls: list[tuple[list[list[int]], list[int]]] = []

    def __call__(
        self, prompts: Sequence[list[int]], ids: Sequence[int], on_finish: Callable[[Generation], object]
    ) -> DecodeResult:
        if len(self.calls) == self.fails_at:
            raise KeyboardInterrupt
        self.calls.append((list(prompts), list(ids)))
        return decode(self.target, self.drafter, prompts, CONFIG, request_ids=ids, on_finish=on_finish)


@pytest.fixture
def decoder(tiny_target: Target, tiny_dspark: DSpark) -> Callable[..., Decoder]:
    return lambda **options: Decoder(tiny_target, tiny_dspark, **options)


@pytest.fixture
def passes(tokenizer: PreTrainedTokenizerBase) -> Callable[..., Passes]:
    def make(folder: Path, *, rank: int = 0, world: int = 1, all_turns: bool = False) -> Passes:
        accelerator: Any = SimpleNamespace(
            process_index=rank, num_processes=world, is_main_process=rank == 0, wait_for_everyone=lambda: None
        )
        return Passes(folder, accelerator, tokenizer, None, all_turns)

    return make


def content(value: Any) -> Any:
    """JSON values without times."""
    if isinstance(value, Pass):
        return content(json.loads(json.dumps(value.to_dict())))
    if isinstance(value, dict):
        return {key: content(part) for key, part in value.items() if not key.endswith("seconds")}
    return [content(part) for part in value] if isinstance(value, list) else value


def test_processes_share_the_units_and_agree_with_one(
    tmp_path: Path, passes: Callable[..., Passes], decoder: Callable[..., Decoder]
) -> None:
    alone = passes(tmp_path / "one").run(ABOUT, None, SOURCES, decoder(), "x")
    assert len(alone.generations) == 11 and alone.domains == ["own"] * 11
    assert [g.request_id for g in alone.generations] == list(range(11))
    size, seen = UNIT_BATCHES * BATCH, []
    for rank in (2, 1):  # the main process comes last: it has to wait for the others
        one = decoder()
        with pytest.raises(ValueError, match="no such file"):
            passes(tmp_path / "three", rank=rank, world=3).run(ABOUT, None, SOURCES, one, "x")
        seen += [ids for _, ids in one.calls]
    last = decoder()
    together = passes(tmp_path / "three", world=3).run(ABOUT, None, SOURCES, last, "x")
    seen += [ids for _, ids in last.calls]
    assert sorted(seen) == [list(range(first, min(first + size, 11))) for first in range(0, 11, size)]
    assert content(together) == content(alone)


@pytest.mark.parametrize("fails_at", [0, 1, 2])
def test_an_interrupted_pass_goes_on_with_the_units_that_are_left(
    tmp_path: Path, passes: Callable[..., Passes], decoder: Callable[..., Decoder], fails_at: int
) -> None:
    whole = passes(tmp_path / "whole").run(ABOUT, None, SOURCES, decoder(), "x")
    with pytest.raises(KeyboardInterrupt):
        passes(tmp_path / "cut").run(ABOUT, None, SOURCES, decoder(fails_at=fails_at), "x")
    rest = decoder()
    resumed = passes(tmp_path / "cut").run(ABOUT, None, SOURCES, rest, "x")
    assert len(rest.calls) == 3 - fails_at and content(resumed) == content(whole)
    again = decoder()
    assert content(passes(tmp_path / "cut").run(ABOUT, None, SOURCES, again, "x")) == content(whole)
    assert not again.calls


def test_nothing_is_kept_for_another_question(
    tmp_path: Path, passes: Callable[..., Passes], decoder: Callable[..., Decoder]
) -> None:
    passes(tmp_path).run(ABOUT, {"a": 1}, SOURCES, decoder(), "x")
    others = [
        (ABOUT, {"a": 2}, SOURCES, False),
        ({**ABOUT, "temperature": 0.5}, {"a": 1}, SOURCES, False),
        (ABOUT, {"a": 1}, SOURCES[1:], False),
        (ABOUT, {"a": 1}, [*SOURCES[:-1], source_of(10, ["other"])], False),
        (ABOUT, {"a": 1}, SOURCES, True),
    ]
    for about, options, sources, all_turns in others:
        one = decoder()
        passes(tmp_path, all_turns=all_turns).run(about, options, sources, one, "x")
        assert one.calls


def test_later_turns_are_asked_behind_the_targets_own_answers(
    tmp_path: Path,
    passes: Callable[..., Passes],
    decoder: Callable[..., Decoder],
    tokenizer: PreTrainedTokenizerBase,
) -> None:
    measured = passes(tmp_path, all_turns=True).run(ABOUT, None, SOURCES, decoder(), "x")
    by_id = {g.request_id: (prompt, g.tokens) for prompt, g in zip(measured.prompts, measured.generations, strict=True)}
    turns = [len(source.prompt.messages) for source in SOURCES]
    assert sorted(by_id) == sorted(i + turn * 11 for i, count in enumerate(turns) for turn in range(count))
    for index, count in enumerate(turns):
        for turn in range(1, count):
            before, answer = by_id[index + (turn - 1) * 11]
            said = tokenizer.decode(answer, skip_special_tokens=True)
            asked = SOURCES[index].prompt.messages[turn]["content"]
            chat = tokenizer.decode(before, skip_special_tokens=True).split() + said.split() + asked.split()
            assert tokenizer.decode(by_id[index + turn * 11][0], skip_special_tokens=True).split() == chat


def test_what_is_measured_once_is_measured_by_the_main_process(tmp_path: Path, passes: Callable[..., Passes]) -> None:
    path, made = tmp_path / "costs.json", list[int]()

    def make() -> dict[str, int]:
        made.append(1)
        return {"x": 1}

    assert passes(tmp_path).once(path, make) == {"x": 1} and passes(tmp_path, rank=1, world=2).once(path, make)
    assert passes(tmp_path).once(path, make) == {"x": 1} and len(made) == 1


def of_domains(*names: str) -> list[SourcePrompt]:
    prompts = [Prompt(f"p-{i}", name, "train", [{"role": "user", "content": "3 4"}]) for i, name in enumerate(names)]
    return [SourcePrompt(prompt, "here", None, None, is_turns=False) for prompt in prompts]


def test_units_hold_one_domain_where_its_prompts_stand_together() -> None:
    assert units_of(of_domains(*"aaaaabbbc"), 4) == [range(0, 4), range(4, 5), range(5, 8), range(8, 9)]
    assert units_of(of_domains(*"abababab"), 4) == [range(0, 4), range(4, 8)], "else they would be too small"
    assert units_of([], 4) == []


def test_a_domain_has_its_own_times_where_they_are_known(
    passes: Callable[..., Passes], decoder: Callable[..., Decoder], tmp_path: Path
) -> None:
    measured = passes(tmp_path / "a").run(ABOUT, None, of_domains(*"aaaaabb"), decoder(), "x")
    parts = {name: measured.of_domain(name) for name in "ab"}
    assert [len(part.generations) for part in parts.values() if part is not None] == [5, 2]
    assert sum(part.seconds for part in parts.values() if part is not None) == pytest.approx(measured.seconds)
    assert sum(part.steps for part in parts.values() if part is not None) == measured.steps
    row = row_of(measured, None)
    rates = [row["per_domain"][name]["tokens_per_second"] for name in "ab"]
    assert min(rates) <= row["tokens_per_second"] <= max(rates) and rates[0] != rates[1]
    mixed = passes(tmp_path / "b").run(ABOUT, None, of_domains(*"ababab"), decoder(), "x")
    assert mixed.of_domain("a") is None
    assert row_of(mixed, None)["per_domain"]["a"]["tokens_per_second"] is None
