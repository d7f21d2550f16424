"""Answers of the target: equal to transformers one by one, resumable, and cut where they say so."""

import copy
import json
import logging
import os
import signal
import tracemalloc
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import data.generate as generate_module
from data.conversation import Regenerate
from data.generate import BuiltinPrompts, GenerateConfig, answer_batch, generate
from data.prompts import read_prompts
from data.run import append_lines, iter_lines, read_lines
from eval.decode import DecodeConfig, decode
from eval.schedule import Schedule, ScheduleName
from eval.verify import Rule
from models.sampling import SamplingConfig
from models.target import Target, TargetConfig, TargetIdentity
from tests.conftest import run_killed, tiny_tokenizer
from tests.test_mixing import OPTIONS

IDENTITY = TargetIdentity("tiny", "c" * 64, "w" * 64)
GREEDY = SamplingConfig(0.0, 0, 1.0, 0.0, 0)
SAMPLED = SamplingConfig(1.0, 0, 0.9, 0.0, 3)
NUM_PROMPTS = 10


def config_of(folder: Path, **changes: Any) -> GenerateConfig:
    """Ten prompts of 1 to 5 numbers in a file, and a place for the answers."""
    prompts = folder / "prompts.jsonl"
    if not prompts.is_file():
        lines = [
            {"id": f"p{index}", "prompt": " ".join(str((7 * index + n) % 50) for n in range(1 + index % 5))}
            for index in range(NUM_PROMPTS)
        ]
        prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    base = GenerateConfig(
        name="tiny",
        output_dir=str(folder),
        responses=str(folder / "responses.jsonl"),
        target=None,
        prompts=str(prompts),
        builtin=BuiltinPrompts(0, 0, 0),
        sampling=GREEDY,
        max_new_tokens=16,
        batch_size=4,
        capture=None,
        captured=str(folder / "captured"),
        **vars(OPTIONS),
        server=None,
        server_model=None,
        api_key_file=None,
        concurrency=4,
        request_timeout=10.0,
        max_attempts=3,
    )
    return replace(base, **changes)


def run(config: GenerateConfig, target: Target) -> None:
    generate(config, target, tiny_tokenizer(), IDENTITY, thinking=None)


def answers_of(config: GenerateConfig) -> dict[str, dict[str, Any]]:
    lines = [json.loads(line) for line in Path(config.responses).read_text().splitlines()]
    assert len({line["id"] for line in lines}) == len(lines), "a prompt was answered twice"
    return {line["id"]: line for line in lines}


def test_a_prompt_that_leaves_no_room_for_its_answer_is_named(tmp_path: Path, tiny_target: Target) -> None:
    config = config_of(tmp_path, max_new_tokens=600)
    with pytest.raises(ValueError, match=r"prompt p\d .*max_new_tokens=600 exceed the target's context of 512"):
        run(config, tiny_target)


@pytest.mark.parametrize("batch_size", [1, 4, 12])
def test_batched_greedy_answers_equal_those_of_transformers_one_by_one(
    tiny_target: Target,
    tiny_target_config: TargetConfig,
    tiny_prompts: list[list[int]],
    tmp_path: Path,
    batch_size: int,
) -> None:
    config = config_of(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tiny_target_config.path, dtype=torch.float32).eval()
    for start in range(0, 12, batch_size):
        prompts = tiny_prompts[start : start + batch_size]
        answers = answer_batch(tiny_target, prompts, range(len(prompts)), config)
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = torch.tensor([prompt])
            output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=16)
            assert output[0, len(prompt) :].tolist() == answer.tokens
            assert answer.finish_reason == ("stop" if answer.tokens[-1] in tiny_target.spec.eos_token_ids else "length")


def test_sampled_answers_do_not_depend_on_the_batch(
    tiny_target: Target, tiny_prompts: list[list[int]], tmp_path: Path
) -> None:
    config = config_of(tmp_path, sampling=SAMPLED)
    together = answer_batch(tiny_target, tiny_prompts, range(12), config)
    assert len({len(answer.tokens) for answer in together}) > 2
    backwards = answer_batch(tiny_target, tiny_prompts[::-1], range(11, -1, -1), config)
    assert backwards[::-1] == together
    assert [answer_batch(tiny_target, [tiny_prompts[i]], [i], config)[0] for i in range(12)] == together


def test_answers_are_those_of_the_vanilla_runtime(
    tiny_target: Target, tiny_prompts: list[list[int]], tmp_path: Path
) -> None:
    """Generation and evaluation share noise and stopping, so a drafter is trained on what it is measured on."""
    answers = answer_batch(tiny_target, tiny_prompts, range(12), config_of(tmp_path, sampling=SAMPLED))
    vanilla = DecodeConfig(16, 12, 0, Rule.ratio, Schedule(ScheduleName.fixed, 0.0), SAMPLED)
    generations = decode(tiny_target, None, tiny_prompts, vanilla).generations
    assert [(a.tokens, a.finish_reason) for a in answers] == [(g.tokens, g.finish_reason) for g in generations]


def test_the_stop_token_is_no_content_and_a_cut_answer_says_so(tiny_target: Target, tmp_path: Path) -> None:
    config = config_of(tmp_path, max_new_tokens=12)
    run(config, tiny_target)
    lines = answers_of(config)
    assert {line["finish_reason"] for line in lines.values()} == {"stop", "length"}
    for line in lines.values():
        assert set(line) == {"id", "domain", "split", "messages", "finish_reason", "sampling"}
        user, assistant = line["messages"]
        assert (user["role"], assistant["role"], line["split"]) == ("user", "assistant", "train")
        words = assistant["content"].split()
        assert "<end>" not in words
        assert len(words) == 12 if line["finish_reason"] == "length" else len(words) < 12
        others = {"thinking": None, "regenerate": "last", "server_model": None}
        assert line["sampling"] == {**vars(GREEDY), "max_new_tokens": 12, **others}


def test_every_stop_token_ends_an_answer(tiny_target: Target, tiny_prompts: list[list[int]], tmp_path: Path) -> None:
    config = config_of(tmp_path)
    other = copy.copy(tiny_target)
    tokens = answer_batch(tiny_target, tiny_prompts[:1], [0], config)[0].tokens
    for stop in dict.fromkeys(tokens):
        other.spec = replace(tiny_target.spec, eos_token_ids=(*tiny_target.spec.eos_token_ids, stop))
        answer = answer_batch(other, tiny_prompts[:1], [0], config)[0]
        assert (answer.tokens, answer.finish_reason) == (tokens[: tokens.index(stop) + 1], "stop")


@pytest.mark.parametrize("sampling", [GREEDY, SAMPLED])
def test_a_killed_run_resumes_to_the_same_answers(
    tiny_target: Target, tmp_path: Path, sampling: SamplingConfig
) -> None:
    """Equal line by line as sets: a resumed run forms other batches, so lines may come in another order."""
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    for folder in (whole, broken):
        folder.mkdir()
    config = config_of(whole, sampling=sampling)
    run(config, tiny_target)
    wanted = sorted(Path(config.responses).read_text().splitlines())
    resumed = config_of(broken, sampling=sampling)
    counts = []
    kills = ((generate_module, "append_lines", 2), (os, "fsync", 1), (generate_module, "answer_batch", 1))
    for owner, name, call in kills:
        code = run_killed(
            lambda: run(resumed, tiny_target),  # type: ignore[arg-type]
            kill_at=(owner, name, call),
        )
        assert code == -9
        counts.append(len(answers_of(resumed)))
    assert counts == [4, 8, 8], "batches that were written count, also before their fsync"
    run(resumed, tiny_target)
    assert sorted(Path(resumed.responses).read_text().splitlines()) == wanted
    before = Path(resumed.responses).read_bytes()
    run(resumed, tiny_target)
    assert Path(resumed.responses).read_bytes() == before, "a finished run has nothing to do"


@pytest.mark.parametrize("cut", [1, 40])
def test_a_line_torn_by_a_crash_is_answered_again(tiny_target: Target, tmp_path: Path, cut: int) -> None:
    """Cut in the middle of the last line, or just before its newline."""
    config = config_of(tmp_path)
    run(config, tiny_target)
    path = Path(config.responses)
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    run(config, tiny_target)
    assert sorted(path.read_bytes().splitlines()) == sorted(whole.splitlines())


def test_a_file_without_a_final_newline_loses_no_whole_record(tmp_path: Path) -> None:
    """As editors and other tools leave it; what is appended later stands on its own line."""
    path = tmp_path / "chats.jsonl"
    path.write_text('{"id": "a"}\n{"id": "b"}')
    before = path.read_bytes()
    assert read_lines(path, repair=False) == [{"id": "a"}, {"id": "b"}]
    assert path.read_bytes() == before, "a file that is only read stays as it is"
    assert read_lines(path, repair=True) == [{"id": "a"}, {"id": "b"}]
    append_lines(path, [{"id": "é"}])
    assert read_lines(path, repair=True) == [{"id": "a"}, {"id": "b"}, {"id": "é"}]


def test_a_file_of_answers_is_read_line_by_line(tmp_path: Path) -> None:
    """A resumed run reads gigabytes; the highest memory is that of some lines."""
    path = tmp_path / "responses.jsonl"
    path.write_text("".join(json.dumps({"id": f"r{i}", "text": "x" * 10_000}) + "\n" for i in range(1000)) + '{"id": "')
    tracemalloc.start()
    numbered = [(number, record["id"]) for number, record in iter_lines(path, repair=True)]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert numbered == [(i + 1, f"r{i}") for i in range(1000)]
    assert peak < 1_000_000 < path.stat().st_size
    assert path.read_bytes().endswith(b'"}\n'), "the torn line is gone"


@pytest.mark.parametrize("torn", [False, True])
def test_a_bad_line_that_is_not_the_last_is_named_and_stays(tmp_path: Path, torn: bool) -> None:
    path = tmp_path / "responses.jsonl"
    path.write_text('{"id": "a"}\n\n{"id"\n{"id": "b"}' + ("" if torn else "\n"))
    before = path.read_bytes()
    with pytest.raises(ValueError, match=r"responses.jsonl:3 is not valid JSON"):
        read_lines(path, repair=True)
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "line", [{"id": "a", "messages": []}, {"sampling": {}}, {"id": 3, "sampling": {}}, ["a"]], ids=json.dumps
)
def test_a_file_that_generate_did_not_write_is_one_error_that_names_the_line(
    tiny_target: Target, tmp_path: Path, line: Any
) -> None:
    config = config_of(tmp_path)
    run(config, tiny_target)
    append_lines(Path(config.responses), [line])
    with pytest.raises(ValueError, match=r"responses.jsonl:11 has no `id` and `sampling` .* choose another responses="):
        run(config, tiny_target)


@pytest.mark.parametrize("changes", [{"max_new_tokens": 8}, {"sampling": SAMPLED}, {"regenerate": Regenerate.all}])
def test_other_sampling_options_are_refused(tiny_target: Target, tmp_path: Path, changes: dict[str, Any]) -> None:
    run(config_of(tmp_path), tiny_target)
    before = (tmp_path / "responses.jsonl").read_bytes()
    with pytest.raises(ValueError, match="holds answers with sampling"):
        run(config_of(tmp_path, **changes), tiny_target)
    assert (tmp_path / "responses.jsonl").read_bytes() == before


def test_another_batch_size_resumes_and_changes_no_answer(tiny_target: Target, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    run(config, tiny_target)
    wanted = answers_of(config)
    lines = (tmp_path / "responses.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "responses.jsonl").write_text("".join(lines[:3]))
    run(replace(config, batch_size=3), tiny_target)
    assert answers_of(config) == wanted


def test_only_training_prompts_are_answered(tiny_target: Target, tmp_path: Path) -> None:
    config = config_of(tmp_path)
    path = Path(str(config.prompts))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[0] |= {"split": "heldout", "prompt": "1 2 3 4 5 6"}  # equal to no other, numbers masked
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(config, tiny_target)
    assert set(answers_of(config)) == {f"p{index}" for index in range(1, NUM_PROMPTS)}


def test_sources_are_mixed_and_their_held_out_prompts_stand_in_a_file(tiny_target: Target, tmp_path: Path) -> None:
    sources = []
    for name in "ab":
        path = tmp_path / f"{name}.jsonl"
        lines = [{"prompt": " ".join([str(k) for k in range(i + 1)] + [name])} for i in range(12)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))
        sources.append(str(path))
    config = config_of(tmp_path, prompts=sources, heldout=0.3, weights=[2.0, 1.0])
    run(config, tiny_target)
    heldout = read_prompts(tmp_path / "heldout.jsonl")
    assert {prompt.split for prompt in heldout} == {"heldout"} and {prompt.domain for prompt in heldout} == {"a", "b"}
    assert not {prompt.id for prompt in heldout} & set(answers_of(config))
    domains = [line["domain"] for line in answers_of(config).values()]
    assert domains.count("a") in range(2 * domains.count("b") - 2, 2 * domains.count("b") + 3)
    before = (tmp_path / "heldout.jsonl").stat().st_mtime_ns
    run(config, tiny_target)
    assert (tmp_path / "heldout.jsonl").stat().st_mtime_ns == before


def test_answers_to_prompts_that_are_held_out_now_are_refused(tiny_target: Target, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [{"id": f"p{i}", "group": i, "prompt": f"{i} 1"} for i in range(10)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    run(config_of(tmp_path), tiny_target)
    with pytest.raises(ValueError, match=r"holds answers to \d+ prompts that are held out now, p\d among them"):
        run(config_of(tmp_path, heldout=0.7), tiny_target)


@pytest.mark.parametrize("prompts", [[], [3], {"a": 1}])
def test_prompts_that_are_no_sources_are_refused(tiny_target: Target, tmp_path: Path, prompts: Any) -> None:
    with pytest.raises(ValueError, match=r"prompts=.* must be null, one source or a list of sources"):
        run(config_of(tmp_path, prompts=prompts), tiny_target)


def test_a_stop_request_ends_the_run_after_the_batch_in_progress(
    tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)

    def stopped(*args: Any) -> Any:
        os.kill(os.getpid(), signal.SIGTERM)
        return answer_batch(*args)

    config = config_of(tmp_path)
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patch:
        patch.setattr(generate_module, "answer_batch", stopped)
        run(config, tiny_target)
    signal.signal(signal.SIGTERM, before)
    assert len(answers_of(config)) == config.batch_size
    assert "asked to stop after 4 of 10; the same command goes on from there" in caplog.text
    run(config, tiny_target)
    assert len(answers_of(config)) == NUM_PROMPTS
