"""The project's own prompts, and what a JSONL of prompts or chats may and may not hold."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from data.messages import normalise_messages, prompt_part
from data.prompts import TEMPLATES, Prompt, builtin_prompts, check_ids, read_prompts, read_source
from data.records import source_stem


def text_of(prompt: Prompt) -> str:
    return prompt.messages[0]["content"]


def write_lines(path: Path, *records: object) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


def test_builtin_prompts_are_distinct_and_enough_for_full_runs() -> None:
    prompts = builtin_prompts(3, num_train=1500, num_heldout=150)
    assert Counter((prompt.domain, prompt.split) for prompt in prompts) == {
        (domain, split): number
        for domain in ("math", "code", "chat")
        for split, number in (("train", 500), ("heldout", 50))
    }
    assert len({text_of(prompt) for prompt in prompts}) == len({prompt.id for prompt in prompts}) == 1650
    assert not [text_of(prompt) for prompt in prompts if set("{}") & set(text_of(prompt))]


def test_builtin_prompts_depend_on_the_seed_alone() -> None:
    first = builtin_prompts(0, num_train=90, num_heldout=9)
    assert first == builtin_prompts(0, num_train=90, num_heldout=9)
    assert first != builtin_prompts(1, num_train=90, num_heldout=9)


def test_fewer_prompts_are_a_prefix_of_more_and_held_out_ones_stay() -> None:
    few, many = (builtin_prompts(0, num_train=number, num_heldout=12) for number in (100, 400))
    assert few[:100] == many[:100]
    assert few[100:] == many[400:]


@pytest.mark.parametrize("num_train", [1, 5, 30, 300])
def test_every_prefix_is_balanced_over_domains(num_train: int) -> None:
    prompts = builtin_prompts(0, num_train=num_train, num_heldout=0)
    for stop in range(num_train + 1):
        counts = [sum(prompt.domain == domain for prompt in prompts[:stop]) for domain in ("math", "code", "chat")]
        assert max(counts) - min(counts) <= 1


def test_splits_share_no_template_and_no_slot_value() -> None:
    sections: Any = OmegaConf.to_container(OmegaConf.load(TEMPLATES))
    for domain, section in sections.items():
        train, heldout = section["train"], section["heldout"]
        texts = [[t if isinstance(t, str) else t["text"] for t in split["templates"]] for split in (train, heldout)]
        assert not set(texts[0]) & set(texts[1]), domain
        for name, values in heldout["slots"].items():
            assert not set(values) & set(train["slots"].get(name, [])), (domain, name)


def test_templates_list_no_slot_value_twice() -> None:
    sections: Any = OmegaConf.to_container(OmegaConf.load(TEMPLATES))
    for domain, section in sections.items():
        for split, part in section.items():
            for name, values in part["slots"].items():
                repeated = [value for value, count in Counter(values).items() if count > 1]
                assert not repeated, (domain, split, name)
                assert all(isinstance(value, str) for value in values), (domain, split, name)


def test_more_prompts_than_templates_give_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"num_heldout=3000: code would need 1000 distinct prompts .* ask for fewer"):
        builtin_prompts(0, num_train=0, num_heldout=3000)
    with pytest.raises(ValueError, match="num_train must be 0 or more, got -1"):
        builtin_prompts(0, num_train=-1, num_heldout=0)


USER, ASSISTANT = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "ok"}


@pytest.mark.parametrize(
    ("record", "messages"),
    [
        ({"prompt": "hi"}, [USER]),
        ({"turns": ["hi", "more"]}, [USER]),
        ({"messages": [USER, ASSISTANT]}, [USER, ASSISTANT]),
        ({"messages": [{**USER, "name": "x"}], "prompt": "other"}, [{**USER, "name": "x"}]),
        ({"messages": None, "turns": None, "prompt": "hi"}, [USER]),
        (
            {
                "conversations": [
                    {"from": "system", "value": "s"},
                    {"from": "human", "value": "hi"},
                    {"from": "gpt", "value": "ok"},
                ]
            },
            [{"role": "system", "content": "s"}, USER, ASSISTANT],
        ),
        ({"conversations": [USER, ASSISTANT]}, [USER, ASSISTANT]),
    ],
)
def test_each_accepted_line_gives_its_messages(tmp_path: Path, record: object, messages: list[dict[str, str]]) -> None:
    [prompt] = read_prompts(write_lines(tmp_path / "x.jsonl", record))
    assert prompt == Prompt("x-1", "x", "train", messages)


def test_all_turns_are_kept_on_request(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", {"turns": ["hi", "more"]})
    [prompt] = read_prompts(path, first_turn_only=False)
    assert [message["content"] for message in prompt.messages] == ["hi", "more"]


def test_fields_of_a_line_win_over_defaults(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    lines = [{"id": 7, "domain": "math", "split": "heldout", "prompt": "a"}, {"prompt": "b\u2028c", "id": None}]
    path.write_text(json.dumps(lines[0]) + "\n\n" + json.dumps(lines[1], ensure_ascii=False), encoding="utf-8")
    first, second = read_prompts(path, "chat", split="train")
    assert (first.id, first.domain, first.split) == ("7", "math", "heldout")
    assert (second.id, second.domain, second.split) == ("x-3", "chat", "train")
    assert text_of(second) == "b\u2028c"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "hi"', ":2: broken JSON"),
        ('{"prompt": "\xff"}', ":2: broken JSON"),
        ('["hi"]', ":2: expected a JSON object"),
        (
            '{"text": "hi"}',
            r":2: none of messages, conversations, turns, prompt, instruction among .* \['text'\]",
        ),
        ('{"prompt": ["hi"]}', r":2, prompt: message 0 must be an object with role and content, got 'hi'"),
        ('{"turns": "hi"}', ":2: turns must be a list of user texts, got 'hi'"),
        ('{"turns": []}', ":2, turns: expected a non-empty list"),
        ('{"messages": [{"role": "bot", "content": "x"}]}', ":2, messages: message 0 has unknown role 'bot'"),
        ('{"messages": [{"content": "x"}]}', "message 0 has unknown role None"),
        ('{"messages": [{"role": "user", "content": null}]}', "must have a text as content, got None"),
        ('{"messages": ["hi"]}', "message 0 must be an object with role and content, got 'hi'"),
        ('{"messages": [{"role": "assistant", "content": "x"}]}', ":2: the chat has no user turn"),
        (
            '{"prompt": "b", "id": "one"}',
            r":2: id 'one' is already used at .*x.jsonl:1",
        ),
        ('{"prompt": "b", "id": [1]}', ":2: id must be a text or a number"),
        ('{"prompt": "b", "split": "test"}', ":2: split must be one of train, heldout, got 'test'"),
    ],
)
def test_each_unreadable_line_is_one_error_that_names_it(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b'{"prompt": "a", "id": "one"}\n' + line.encode("latin-1") + b"\n")
    with pytest.raises(ValueError, match=message) as caught:
        read_prompts(path)
    assert str(path) in str(caught.value)


def test_missing_and_empty_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no such file: .*x\.jsonl"):
        read_prompts(tmp_path / "x.jsonl")
    (tmp_path / "x.jsonl").write_text("\n \n")
    with pytest.raises(ValueError, match=r"x\.jsonl is empty"):
        read_prompts(tmp_path / "x.jsonl")


def test_prompt_part_ends_with_the_last_user_turn() -> None:
    assert prompt_part([USER, ASSISTANT, USER, ASSISTANT]) == [USER, ASSISTANT, USER]
    assert prompt_part([USER]) == [USER]
    with pytest.raises(ValueError, match="a prompt needs a user turn"):
        prompt_part([ASSISTANT])


def test_normalised_messages_are_copies() -> None:
    raw = [dict(USER)]
    normalise_messages(raw, "here")[0]["content"] = "changed"
    assert raw == [USER]


def test_tools_of_a_record_come_with_its_prompt(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    first, second = read_prompts(write_lines(tmp_path / "x.jsonl", {"prompt": "a", "tools": tools}, {"prompt": "b"}))
    assert (first.tools, second.tools) == (tools, None)


def test_a_json_list_is_a_source_whose_ids_are_places_in_it(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_text(json.dumps([{"prompt": "a"}, {"instruction": "b", "input": "c", "output": "d"}]))
    assert [(prompt.id, prompt.domain, text_of(prompt)) for prompt in read_prompts(path)] == [
        ("x-0", "x", "a"),
        ("x-1", "x", "b\n\nc"),
    ]


def test_a_hub_data_set_is_named_by_its_name_and_split() -> None:
    assert source_stem("owner/some.chats:train_sft") == "some.chats-train_sft"
    assert source_stem("owner/chats") == "chats"


def test_ids_that_sources_share_are_one_error_that_names_both_places(tmp_path: Path) -> None:
    """Own ids, and those made from equal file names."""
    paths = [tmp_path / folder / "x.jsonl" for folder in ("a", "b")]
    for path, record in zip(paths, ({"prompt": "a", "id": "x-2"}, {"prompt": "b", "id": 5}), strict=True):
        path.parent.mkdir()
        write_lines(path, record, {"prompt": "c"})
    with pytest.raises(ValueError, match=r"a/x.jsonl:2: id 'x-2' is already used at .*a/x.jsonl:1"):
        check_ids([read_source(str(paths[0]))])
    write_lines(paths[0], {"prompt": "a", "id": "5"})
    with pytest.raises(ValueError, match=r"b/x.jsonl:1: id '5' is already used at .*a/x.jsonl:1; make it unique"):
        check_ids([read_source(str(path)) for path in paths])


def test_group_and_own_split_are_what_the_record_says(tmp_path: Path) -> None:
    records = [{"group": "g", "template": 7}, {"template": 7, "split": "heldout"}, {"split": "train"}, {}]
    path = write_lines(tmp_path / "x.jsonl", *({"prompt": "a", **record} for record in records))
    found = [(source.group, source.own_split, source.prompt.split) for source in read_source(str(path))]
    assert found == [("g", None, "train"), ("7", "heldout", "heldout"), (None, "train", "train"), (None, None, "train")]


def test_the_first_turn_keeps_the_system_text(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "x.jsonl", {"system": "s", "turns": ["hi", "more"]}, {"messages": [USER, ASSISTANT]})
    turns, chat = read_source(str(path))
    assert turns.first_turn.messages == [{"role": "system", "content": "s"}, USER]
    assert len(turns.prompt.messages) == 3 and chat.first_turn is chat.prompt
