"""Which prompts a task has, wherever they come from, and which of them are asked."""

import json
import random
from pathlib import Path
from typing import Any

import datasets
import pytest
from omegaconf import OmegaConf

from data.generate import BuiltinPrompts
from data.prompts import SourcePrompt
from eval.tasks import (
    DEEPSPEC_SEED,
    TASKS,
    Protocol,
    Task,
    TaskOptions,
    known_tasks,
    load_task,
    load_tasks,
    turn_prompt,
)
from models.config import to_dataclass

BUILTIN = BuiltinPrompts(seed=0, num_train=6, num_heldout=6)
SHARED = Path(__file__).parents[2] / "shared" / "prompts"
NINE = {"gsm8k", "math500", "aime25", "humaneval", "mbpp", "livecodebench", "mt-bench", "alpaca", "arena-hard"}


def options(folder: Path | None = None, **changes: Any) -> TaskOptions:
    return TaskOptions(BUILTIN, None if folder is None else str(folder), **{"num_prompts": None, **changes})


def texts(prompts: list[SourcePrompt]) -> list[str]:
    return [source.first_turn.messages[-1]["content"] for source in prompts]


def write_turns(path: Path, *chats: list[str]) -> Path:
    path.write_text("".join(json.dumps({"turns": turns}) + "\n" for turns in chats))
    return path


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Every data set has one row with all fields that any task names; what was asked for is returned."""
    asked: list[tuple[Any, ...]] = []
    row = {"question": "Q?", "problem": "P?", "prompt": ["one", "two"], "instruction": "Do it.", "input": "with this"}

    def load_dataset(path: str, name: str | None, *, split: str, data_files: str | None) -> datasets.Dataset:
        asked.append((path, name, split, data_files))
        own = row if path.endswith("mt_bench_prompts") else {**row, "prompt": "def f():"}
        return datasets.Dataset.from_list([own])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    return asked


def test_the_papers_nine_tasks_are_known(tmp_path: Path) -> None:
    assert set(known_tasks()) == NINE
    for name in NINE:
        task = to_dataclass(Task, OmegaConf.load(TASKS / f"{name}.yaml"), section=name)
        assert task.file.endswith(".jsonl") and 0 < task.deepspec_prompts <= 500


@pytest.mark.parametrize("name", sorted(NINE - {"livecodebench"}))
def test_a_task_without_a_folder_comes_from_the_hub(name: str, hub: list[tuple[Any, ...]]) -> None:
    (source,) = load_task(name, options())
    (asked,) = hub
    assert "/" in asked[0] and asked[2] in ("test", "train")
    text, domain = source.first_turn.messages[-1]["content"], source.prompt.domain
    assert domain == name and "{" not in text.replace("\\boxed{}", "")
    expected = {"mt-bench": "one", "arena-hard": "def f():", "mbpp": "def f():"}
    expected["alpaca"] = "Do it.\n\nInput:\nwith this"
    assert text == expected.get(name, text)
    assert len([m for m in source.prompt.messages if m["role"] == "user"]) == (2 if name == "mt-bench" else 1)


@pytest.mark.skipif(not SHARED.is_dir(), reason="the reference's prompt files are not there")
@pytest.mark.parametrize(
    ("name", "field", "before"),
    [
        ("gsm8k", "question", ""),
        ("math500", "problem", ""),
        ("humaneval", "prompt", "Write a solution to the following problem and make sure that it passes the tests:\n"),
    ],
)
def test_a_record_of_the_hub_is_asked_in_the_references_words(
    monkeypatch: pytest.MonkeyPatch, name: str, field: str, before: str
) -> None:
    """The question cut out of the reference's own file, put through the template, is that file's text again."""
    reference = texts(load_task(name, options(SHARED)))[:20]
    after = "\nPlease reason step by step, and put your final answer within \\boxed{}."
    questions = [
        text.removeprefix(before + "```python\n").removesuffix("\n```") if before else text.removesuffix(after)
        for text in reference
    ]
    assert all(len(question) < len(text) for question, text in zip(questions, reference, strict=True))
    rows = datasets.Dataset.from_list([{field: question} for question in questions])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    assert texts(load_task(name, options())) == reference


def test_a_folder_is_preferred_to_the_hub(tmp_path: Path, hub: list[tuple[Any, ...]]) -> None:
    write_turns(tmp_path / "arena-hard-v2.jsonl", ["first"], ["second"])
    found = load_task("arena-hard", options(tmp_path))
    assert texts(found) == ["first", "second"] and {s.prompt.domain for s in found} == {"arena-hard"} and not hub


def test_a_record_without_the_fields_of_its_task_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = datasets.Dataset.from_list([{"text": "x", "label": 1}])
    monkeypatch.setattr(datasets, "load_dataset", lambda *_, **__: rows)
    with pytest.raises(ValueError, match=r"openai/gsm8k:test\[0\] has no field 'question', only label, text"):
        load_task("gsm8k", options())


def test_tasks_that_are_not_found_are_named_and_the_rest_is_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    own = write_turns(tmp_path / "own.jsonl", ["hello"], ["there"], ["again"])
    names = ["heldout", "gsm8k", "livecodebench", "nothing", str(own), "own"]
    found, missing = load_tasks(names, options(tmp_path, num_prompts=2))
    assert [s.prompt.domain for s in found][-4:] == ["own"] * 4 and len(found) == 6
    assert ["gsm8k" in missing[0], "livecodebench" in missing[1], "nothing" in missing[2]] == [True] * 3
    assert f"there is no {tmp_path / 'gsm8k.jsonl'}" in missing[0] and "cannot load the hub data set" in missing[0]
    assert "aime25" in missing[2] and "heldout" in missing[2], "says what there is"
    with pytest.raises(ValueError, match="tasks: nothing is none of heldout, aime25"):
        load_tasks(["nothing"], options())


def test_a_damaged_file_is_not_a_missing_one(tmp_path: Path) -> None:
    (tmp_path / "gsm8k.jsonl").write_text('{"turns": 3}\n')
    with pytest.raises(ValueError, match=r"gsm8k\.jsonl:1: turns must be a list"):
        load_tasks(["gsm8k", "heldout"], options(tmp_path))


def test_protocol_deepspec_draws_the_references_prompts(tmp_path: Path) -> None:
    """Shuffled by its seed, then the first ones; a task of one's own is asked as it is."""
    questions = [f"question {index}" for index in range(1319)]
    write_turns(tmp_path / "gsm8k.jsonl", *[[text] for text in questions])
    write_turns(tmp_path / "own.jsonl", ["b"], ["a"])
    found, _ = load_tasks(["gsm8k", "own"], options(tmp_path, protocol=Protocol.deepspec))
    order = list(range(1319))
    random.Random(DEEPSPEC_SEED).shuffle(order)
    assert texts(found) == [questions[index] for index in order[:500]] + ["b", "a"]
    found, _ = load_tasks(["gsm8k"], options(tmp_path))
    assert texts(found) == questions


def test_a_turn_is_asked_behind_the_answers_to_those_before(tmp_path: Path) -> None:
    path = write_turns(tmp_path / "own.jsonl", ["one", "two", "three"])
    lines = [{"messages": [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]}]
    (tmp_path / "chat.jsonl").write_text(json.dumps(lines[0]) + "\n")
    (source,), (chat,) = (load_task(str(p), options()) for p in (path, tmp_path / "chat.jsonl"))
    asked = [turn_prompt(source, answers) for answers in ([], ["1"], ["1", "2"], ["1", "2", "3"])]
    assert [None if prompt is None else [m["content"] for m in prompt.messages] for prompt in asked] == [
        ["one"],
        ["one", "1", "two"],
        ["one", "1", "two", "2", "three"],
        None,
    ]
    assert asked[2] is not None and [m["role"] for m in asked[2].messages] == ["user", "assistant"] * 2 + ["user"]
    assert turn_prompt(chat, []) == chat.prompt and turn_prompt(chat, ["x"]) is None
