"""Chats of several turns: every user turn answered anew, or the last one with the recorded history."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from transformers import PreTrainedTokenizerFast

from data.chat import render_chats
from data.conversation import Regenerate
from data.generate import GenerateConfig, answer_batch, generate
from data.messages import Chat
from models.target import Target
from tests.conftest import TEMPLATE, tiny_tokenizer
from tests.test_generate import IDENTITY, answers_of, config_of, run


def turn(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}


CHATS = {
    "plain": [turn("user", "3 1"), turn("assistant", "9"), turn("user", "7 2"), turn("assistant", "8")],
    "system": [
        turn("system", "1"),
        turn("user", "5 5"),
        turn("assistant", "9"),
        turn("system", "2"),
        turn("user", "40 1"),
    ],
    "three": [turn("user", "11 3"), turn("user", "2 2"), turn("user", "30 4")],
    "one": [turn("user", "20 2")],
    "tool": [
        turn("user", "4 4"),
        {**turn("assistant", ""), "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
        turn("tool", "44"),
        turn("assistant", "6"),
        turn("user", "8 8"),
    ],
}


def chats_config(folder: Path, chats: dict[str, list[dict[str, Any]]], **changes: Any) -> GenerateConfig:
    path = folder / "chats.jsonl"
    lines = [{"id": id, "messages": messages} for id, messages in chats.items()]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = {"prompts": str(path), "regenerate": Regenerate.all, "max_new_tokens": 40}
    return config_of(folder, **options | changes)


def answered_by_hand(target: Target, messages: list[dict[str, Any]], config: GenerateConfig) -> tuple[list[Any], str]:
    """One chat by itself: every user turn before the first tool turn, each in a batch of one."""
    history, reason, tokenizer = [], "", tiny_tokenizer()
    for message in messages:
        if message["role"] == "tool":
            break
        if message["role"] == "assistant":
            continue
        history.append(message)
        if message["role"] == "user":
            ids = tokenizer.apply_chat_template(history, add_generation_prompt=True, return_dict=False)
            [answer] = answer_batch(target, [ids], [0], config)
            reason = answer.finish_reason
            content = answer.tokens[:-1] if reason == "stop" else answer.tokens
            history.append(turn("assistant", tokenizer.decode(content)))
            if reason == "length":
                break
    return history, reason


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_every_user_turn_is_answered_with_the_targets_own_answers_as_history(
    tiny_target: Target, tmp_path: Path, batch_size: int
) -> None:
    """Chats of a batch end after one, two and three rounds."""
    config = chats_config(tmp_path, CHATS, batch_size=batch_size)
    run(config, tiny_target)
    for id, line in answers_of(config).items():
        assert (line["messages"], line["finish_reason"]) == answered_by_hand(tiny_target, CHATS[id], config), id
    lengths = {id: len(line["messages"]) for id, line in answers_of(config).items()}
    assert lengths == {"plain": 4, "system": 6, "three": 6, "one": 2, "tool": 2}


def test_a_cut_answer_ends_the_chat(tiny_target: Target, tmp_path: Path) -> None:
    config = chats_config(tmp_path, CHATS, max_new_tokens=3)
    run(config, tiny_target)
    cut = {id: line for id, line in answers_of(config).items() if line["finish_reason"] == "length"}
    assert {"plain", "three"} <= set(cut)
    for id, line in cut.items():
        assert [m["role"] for m in line["messages"] if m["role"] != "system"] == ["user", "assistant"], id


def test_the_last_turn_alone_is_answered_with_recorded_history_and_tool_results(
    tiny_target: Target, tmp_path: Path
) -> None:
    config = chats_config(tmp_path, CHATS, regenerate=Regenerate.last)
    run(config, tiny_target)
    lines = answers_of(config)
    assert lines["plain"]["messages"][:-1] == CHATS["plain"][:3]
    assert [message["role"] for message in lines["tool"]["messages"]] == [
        *(m["role"] for m in CHATS["tool"]),
        "assistant",
    ]
    assert lines["tool"]["messages"][2] == CHATS["tool"][2]


def test_all_turns_of_a_benchmark_record_are_answered_with_all_and_the_first_with_last(
    tiny_target: Target, tmp_path: Path
) -> None:
    path = tmp_path / "turns.jsonl"
    path.write_text(json.dumps({"turns": ["3 1", "7 2"]}))
    for regenerate, num_messages in ((Regenerate.all, 4), (Regenerate.last, 2)):
        config = chats_config(tmp_path, {}, prompts=[str(path)], regenerate=regenerate)
        config = replace(config, responses=str(tmp_path / f"{regenerate}.jsonl"))
        run(config, tiny_target)
        assert len(answers_of(config)["turns-1"]["messages"]) == num_messages


def test_a_chat_ends_before_a_turn_that_leaves_no_room_for_its_answer(
    tiny_target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    long = " ".join(["1"] * 460)
    chats = {"long": [turn("user", "3 1"), turn("user", long)], "short": [turn("user", "3 1"), turn("user", "1 1")]}
    config = chats_config(tmp_path, chats)
    run(config, tiny_target)
    lines = answers_of(config)
    assert (len(lines["long"]["messages"]), lines["long"]["finish_reason"]) == (2, "stop")
    assert len(lines["short"]["messages"]) == 4
    assert "1 chats end before a user turn that would leave no room" in caplog.text


def test_captured_features_of_a_longer_chat_are_those_of_its_last_answer(tiny_target: Target, tmp_path: Path) -> None:
    config = chats_config(tmp_path, CHATS, batch_size=3)
    run(config, tiny_target)
    capturing = replace(config, capture="float32", responses=str(tmp_path / "again.jsonl"))
    run(capturing, tiny_target)
    assert answers_of(capturing) == answers_of(config)
    tokenizer, found = tiny_tokenizer(), 0
    for path in (tmp_path / "captured").glob("*.safetensors"):
        with safe_open(path, framework="pt") as file:
            for index, id in enumerate(json.loads(file.metadata()["about"])["ids"]):
                line = answers_of(config)[id]
                ids = file.get_tensor(f"{index}.input_ids")
                chat = Chat(line["messages"], None)
                rendered = render_chats(tokenizer, chat, finish_reason=line["finish_reason"])[0].input_ids
                assert ids.tolist() == rendered[: len(ids)], id
                whole = tiny_target.forward_whole(ids[None])
                # float32 sums in another order: cached steps against one whole pass
                torch.testing.assert_close(
                    file.get_tensor(f"{index}.features"), whole.features[0], rtol=1e-4, atol=1e-4
                )
                found += len(ids) > len(rendered) - 3
    assert found == len(CHATS)


def tokenizer_with(template: str) -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def test_tools_and_thinking_reach_the_chat_template(tiny_target: Target, tmp_path: Path) -> None:
    """Each changes the prompt, and so the greedy answer; the tools stand in the response line too."""
    tokenizer = tokenizer_with(
        "{% for tool in tools or [] %}<user> 40 5 <end> {% endfor %}"
        "{% if enable_thinking is defined %}<user> {{ '9 9' if enable_thinking else '3 3' }} <end> {% endif %}"
        + TEMPLATE
    )
    path = tmp_path / "tools.jsonl"
    record = {"id": "a", "prompt": "3 1", "tools": [{"type": "function", "function": {"name": "f"}}]}
    path.write_text(json.dumps(record) + "\n" + json.dumps({"id": "b", "prompt": "3  1"}) + "\n")
    path.with_name("b.jsonl").write_text(json.dumps({"id": "b", "prompt": "3 1"}))
    shown = {}
    for name, thinking in (("tools", None), ("b", None), ("b", True), ("b", False)):
        responses = tmp_path / f"{name}-{thinking}.jsonl"
        config = config_of(tmp_path, prompts=str(path.with_name(f"{name}.jsonl")), responses=str(responses))
        generate(config, tiny_target, tokenizer, IDENTITY, thinking=thinking)
        [line] = answers_of(config).values()
        assert line["sampling"]["thinking"] is thinking
        assert line.get("tools") == (record["tools"] if name == "tools" else None)
        shown[name, thinking] = line["messages"][-1]["content"]
    assert len(set(shown.values())) == 4


def test_a_later_turn_that_the_chat_template_refuses_is_named_before_anything_is_answered(
    tiny_target: Target, tmp_path: Path
) -> None:
    tokenizer = tokenizer_with(
        "{% for m in messages %}{% if m['role'] == 'system' and not loop.first %}"
        "{{ raise_exception('system first') }}{% endif %}{% endfor %}" + TEMPLATE
    )
    late = [turn("user", "1"), turn("assistant", "2"), turn("system", "2"), turn("user", "3 3")]
    config = chats_config(tmp_path, {"plain": CHATS["plain"], "late": late}, batch_size=1)
    with pytest.raises(ValueError, match=r"prompt late: the chat template .* system first"):
        generate(config, tiny_target, tokenizer, IDENTITY, thinking=None)
    assert not Path(config.responses).exists()


def test_a_tool_turn_before_any_user_turn_cannot_be_answered_with_all(tiny_target: Target, tmp_path: Path) -> None:
    config = chats_config(tmp_path, {"odd": [turn("tool", "1"), turn("user", "2")]})
    with pytest.raises(ValueError, match="prompt odd: regenerate=all needs a user turn before the first tool turn"):
        run(config, tiny_target)
