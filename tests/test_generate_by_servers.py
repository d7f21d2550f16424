"""Whole runs by servers, over real HTTP: every record once, failures aside, nothing lost when servers or we die."""

import json
import logging
import os
import shutil
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hydra.core.global_hydra import GlobalHydra

import data.generate as generate_module
from data.conversation import Conversation, Regenerate, response_line
from data.generate import GenerateConfig, answer_batch, generate_by_servers
from models.sampling import SamplingConfig
from models.target import Target, TargetConfig
from tests.chat_server import (  # noqa: F401 (fixtures among them)
    RESET,
    Body,
    ChatServer,
    echo,
    refused,
    said,
    serve,
    short_pauses,
)
from tests.conftest import run_killed, tiny_tokenizer
from tests.test_conf import load_script
from tests.test_conversation import CHATS, chats_config
from tests.test_generate import GREEDY, answers_of, config_of, run


def numbered_config(folder: Path, server: Any, num_prompts: int = 24, **changes: Any) -> GenerateConfig:
    path = folder / "numbers.jsonl"
    lines = [{"id": f"r{i}", "prompt": f"{i}"} for i in range(num_prompts)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return config_of(folder, prompts=str(path), server=server, **changes)


def run_by_servers(config: GenerateConfig, target: Target, *, thinking: bool | None = None) -> None:
    generate_by_servers(config, target.spec, tiny_tokenizer(), thinking=thinking)


def failed(config: GenerateConfig) -> dict[str, Any]:
    path = Path(config.output_dir) / "responses.failed.jsonl"
    return {line["id"]: line for line in map(json.loads, path.read_text().splitlines())} if path.is_file() else {}


def user_texts(server: ChatServer) -> list[str]:
    return [body["messages"][-1]["content"] for body in server.bodies]


def test_every_prompt_is_answered_once_with_its_sampling_and_never_again(
    serve: Callable[..., ChatServer], tiny_target: Target, tmp_path: Path
) -> None:
    server = serve(echo)
    config = numbered_config(tmp_path, server.url)
    run_by_servers(config, tiny_target, thinking=True)
    lines = answers_of(config)
    assert {id: line["messages"][-1]["content"] for id, line in lines.items()} == {
        f"r{i}": f"{i} {i}" for i in range(24)
    }
    expected = {**vars(GREEDY), "max_new_tokens": 16, "thinking": True, "regenerate": "last", "server_model": "tiny"}
    assert all(line["sampling"] == expected and line["finish_reason"] == "stop" for line in lines.values())
    assert all(body["chat_template_kwargs"] == {"enable_thinking": True} for body in server.bodies)
    run_by_servers(config, tiny_target, thinking=True)
    assert len(server.bodies) == 24 and answers_of(config) == lines


def test_answers_that_were_written_are_not_kept_in_memory(
    serve: Callable[..., ChatServer], tiny_target: Target, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At the end of a run of many, only those of the last moment live."""
    alive: weakref.WeakSet[Conversation] = weakref.WeakSet()
    counts = []

    def line_of(chat: Conversation, sampling: Any) -> dict[str, Any]:
        alive.add(chat)
        counts.append(len(alive))
        return response_line(chat, sampling)

    monkeypatch.setattr(generate_module, "response_line", line_of)
    config = numbered_config(tmp_path, serve(echo).url, 200, concurrency=2)
    run_by_servers(config, tiny_target)
    assert len(counts) == 200 and max(counts) < 60


def test_answers_from_elsewhere_are_not_mixed(
    serve: Callable[..., ChatServer], tiny_target: Target, tmp_path: Path
) -> None:
    """Another thinking mode, another model and the target itself count as other sampling options."""
    config = numbered_config(tmp_path, serve(echo).url)
    run_by_servers(config, tiny_target)
    with pytest.raises(ValueError, match="holds answers with sampling"):
        run_by_servers(config, tiny_target, thinking=False)
    with pytest.raises(ValueError, match="holds answers with sampling"):
        run_by_servers(replace(config, server_model="other"), tiny_target)
    with pytest.raises(ValueError, match="holds answers with sampling"):
        run(config, tiny_target)


def test_capture_needs_the_target_here(tiny_target: Target, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="capture=bf16 keeps features of a target that runs here: set it null"):
        run_by_servers(numbered_config(tmp_path, "http://127.0.0.1:1", capture="bf16"), tiny_target)


def test_concurrency_is_reached_and_never_exceeded_and_servers_share_the_load(
    serve: Callable[..., ChatServer], tiny_target: Target, tmp_path: Path
) -> None:
    def slow(body: Body, number: int) -> Body:
        time.sleep(0.03)
        return echo(body, number)

    servers = [serve(slow), serve(slow)]
    run_by_servers(numbered_config(tmp_path, [s.url for s in servers], 60, concurrency=3), tiny_target)
    assert [server.most_at_once for server in servers] == [3, 3]
    assert all(len(server.bodies) >= 20 for server in servers)


def test_a_server_that_dies_midway_costs_no_answer(
    serve: Callable[..., ChatServer], tiny_target: Target, tmp_path: Path
) -> None:
    """Even with a single attempt, those that find the door closed are not lost."""

    def dying(body: Body, number: int) -> Any:
        if number == 5:
            threading.Thread(target=servers[0].close).start()
        time.sleep(0.02)
        return RESET if number >= 5 else echo(body, number)

    def slow(body: Body, number: int) -> Body:
        time.sleep(0.02)
        return echo(body, number)

    servers = [serve(dying), serve(slow)]
    config = numbered_config(tmp_path, [s.url for s in servers], 60)
    run_by_servers(config, tiny_target)
    assert len(answers_of(config)) == 60 and not failed(config)
    assert 5 <= len(servers[0].bodies) <= 5 + 2 * config.concurrency and len(servers[1].bodies) >= 50
    assert servers[1].most_at_once == config.concurrency, "the load of two is not put on one"


def test_when_all_servers_are_gone_the_run_ends_at_once_and_answers_stay(
    serve: Callable[..., ChatServer], tiny_target: Target, tmp_path: Path
) -> None:
    def dying(body: Body, number: int) -> Any:
        if number == 6:
            threading.Thread(target=server.close).start()
        time.sleep(1.0 if number == 5 else 0.0)
        return echo(body, number) if number < 6 else RESET

    server = serve(dying)  # it still answers one request after it has closed its door
    config = numbered_config(tmp_path, server.url, 200, max_attempts=20)
    with pytest.raises(
        ValueError, match=r"6 connections in a row were refused; start the servers and run the same comm"
    ):
        run_by_servers(config, tiny_target)
    assert len(answers_of(config)) == 6 and not failed(config)
    again = serve(echo)
    run_by_servers(replace(config, server=again.url), tiny_target)
    assert len(answers_of(config)) == 200 and len(again.bodies) == 194


def test_failures_are_written_aside_tried_again_and_leave_the_file_when_they_pass(
    serve: Callable[..., ChatServer], tiny_target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    bad = {"3": refused(400, "bad é"), "7": refused(503), "11": {"choices": []}}
    server = serve(lambda body, number: bad.get(body["messages"][-1]["content"]) or echo(body, number))
    config = numbered_config(tmp_path, server.url)
    run_by_servers(config, tiny_target)
    assert len(answers_of(config)) == 21
    assert {id: line["attempts"] for id, line in failed(config).items()} == {"r3": 1, "r7": 3, "r11": 3}
    assert failed(config)["r3"]["error"] == f"{server.url}: status 400, bad é"
    assert "3 prompts have no answer" in caplog.text and "responses.failed.jsonl says why" in caplog.text
    del bad["3"], bad["11"]
    asked = len(server.bodies)
    run_by_servers(config, tiny_target)
    assert sorted(user_texts(server)[asked:]) == ["11", "3", "7", "7", "7"], "only failures are asked again"
    assert set(failed(config)) == {"r7"}
    run_by_servers(replace(config, num_prompts=7), tiny_target)
    assert not failed(config), "r7 is not asked any more"
    with pytest.raises(ValueError, match="none of 1 prompts could be answered"):
        run_by_servers(config, tiny_target)
    assert set(failed(config)) == {"r7"}
    bad.clear()
    run_by_servers(config, tiny_target)
    assert len(answers_of(config)) == 24
    assert not (tmp_path / "responses.failed.jsonl").exists()


def test_a_run_in_which_no_prompt_could_be_answered_is_one_error_and_leaves_no_responses(
    serve: Callable[..., ChatServer], tiny_target: Target, tmp_path: Path
) -> None:
    bad = {str(i): refused(400, "too odd") for i in range(3)}
    server = serve(lambda body, number: bad.get(body["messages"][-1]["content"]) or echo(body, number))
    config = numbered_config(tmp_path, server.url, 3, concurrency=1)
    for _ in range(2):
        with pytest.raises(ValueError) as caught:
            run_by_servers(config, tiny_target)
        assert str(caught.value) == (
            f"none of 3 prompts could be answered, {tmp_path}/responses.failed.jsonl says why; the first, r0: "
            f"{server.url}: status 400, too odd"
        )
        assert set(failed(config)) == {"r0", "r1", "r2"} and not Path(config.responses).exists()
    del bad["2"]
    run_by_servers(config, tiny_target)
    run_by_servers(config, tiny_target)
    assert set(failed(config)) == {"r0", "r1"}, "what fails for ever beside answers is no error each time"
    bad |= {str(i): refused(503) for i in range(3, 9)}
    with pytest.raises(ValueError, match="none of 8 prompts could be answered"):
        run_by_servers(numbered_config(tmp_path, server.url, 9), tiny_target)
    assert set(answers_of(config)) == {"r2"}


def test_a_retry_and_a_resumed_run_ask_the_same(
    serve: Callable[..., ChatServer], tiny_target: Target, tmp_path: Path
) -> None:
    sampling = SamplingConfig(0.7, 0, 0.9, 0.0, 3)
    server = serve(lambda _body, _number: refused(503))
    config = numbered_config(tmp_path, server.url, 2, sampling=sampling, max_attempts=2)
    for _ in range(2):
        with pytest.raises(ValueError, match="none of 2 prompts could be answered"):
            run_by_servers(config, tiny_target)
    assert len(server.bodies) == 8
    assert len({json.dumps(body, sort_keys=True) for body in server.bodies}) == 2
    assert len({body["seed"] for body in server.bodies}) == 2


@pytest.mark.parametrize(
    "kill_at",
    [(generate_module, "append_lines", 3), (os, "fsync", 4), (generate_module, "response_line", 7)],
    ids=lambda kill_at: kill_at[1],
)
def test_a_killed_run_is_resumed_to_each_answer_exactly_once(
    serve: Callable[..., ChatServer], tiny_target: Target, tmp_path: Path, kill_at: tuple[Any, str, int]
) -> None:
    def slow(body: Body, number: int) -> Body:
        time.sleep(0.005)
        return echo(body, number)

    server = serve(slow)
    config = numbered_config(tmp_path, server.url)
    assert run_killed(lambda: run_by_servers(config, tiny_target), kill_at=kill_at) == -9
    kept = answers_of(config)
    assert 0 < len(kept) < 24
    asked = len(server.bodies)
    run_by_servers(config, tiny_target)
    lines = answers_of(config)
    assert {id: line["messages"][-1]["content"] for id, line in lines.items()} == {
        f"r{i}": f"{i} {i}" for i in range(24)
    }
    assert len(server.bodies) - asked == 24 - len(kept), "what was written is not asked again"


def test_a_run_that_is_asked_to_stop_keeps_what_is_on_its_way_and_exits_with_0(
    serve: Callable[..., ChatServer], tiny_target: Target, tmp_path: Path
) -> None:
    started = threading.Event()

    def slow(body: Body, number: int) -> Body:
        if number == 8:
            started.set()
        time.sleep(0.15)
        return echo(body, number)

    server = serve(slow)
    config = numbered_config(tmp_path, server.url, 100)
    child = os.fork()
    if child == 0:
        status = 1
        try:
            run_by_servers(config, tiny_target)
            status = 0
        finally:
            os._exit(status)
    assert started.wait(10)
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    answered = answers_of(config)
    assert set(user_texts(server)) == {id.removeprefix("r") for id in answered}, "what was asked was written"
    assert 9 <= len(answered) < 30 and not failed(config)


def test_a_stop_request_drops_chats_that_wait_and_says_how_to_go_on(
    serve: Callable[..., ChatServer], tiny_target: Target, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One in a pause before its next attempt, others before their next turn or before their first."""
    caplog.set_level(logging.INFO)

    def respond(body: Body, number: int) -> Any:
        if number == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.1)
        return refused(503, Retry_After="600") if number == 0 else echo(body, number)

    server = serve(respond)
    chats = {f"c{i}": [{"role": "user", "content": f"{i} 1"}, {"role": "user", "content": "2"}] for i in range(10)}
    config = chats_config(tmp_path, chats, server=server.url)
    began = time.monotonic()
    run_by_servers(config, tiny_target)
    assert time.monotonic() - began < 5 and len(server.bodies) <= 8
    assert not Path(config.responses).exists() and not failed(config)
    assert "asked to stop after 0 of 10; the same command goes on from there" in caplog.text


@pytest.fixture
def interruptible() -> Iterator[None]:
    """A shell starts what runs behind `&` with SIGINT ignored, tests among it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_keeps_what_is_on_its_way(
    serve: Callable[..., ChatServer], tiny_target: Target, tmp_path: Path, interruptible: None
) -> None:
    def slow(body: Body, number: int) -> Body:
        time.sleep(0.1)
        if number == 0:
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        return echo(body, number)

    server = serve(slow)
    config = numbered_config(tmp_path, server.url)
    with pytest.raises(KeyboardInterrupt):
        run_by_servers(config, tiny_target)
    assert 0 < len(answers_of(config)) == len(server.bodies) <= config.concurrency


def test_every_turn_is_sent_with_the_answers_so_far_and_a_cut_one_ends_the_chat(
    serve: Callable[..., ChatServer], tiny_target: Target, tmp_path: Path
) -> None:
    """Recorded answers are not sent; a call of a tool ends the chat as well, since nobody answers it."""
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {}}}

    def respond(body: Body, number: int) -> Body:
        text = body["messages"][-1]["content"]
        if text == "2 2":
            return said("cut", "length")
        if text == "40 1":
            return said(None, "tool_calls", tool_calls=[call])
        return said(f"answer to {text}", reasoning_content="hm")

    server = serve(respond)
    system = [*CHATS["system"], {"role": "user", "content": "6 6"}]
    config = chats_config(tmp_path, {**CHATS, "system": system}, server=server.url)
    run_by_servers(config, tiny_target)
    lines = answers_of(config)
    texts = {id: [message["content"] for message in line["messages"]] for id, line in lines.items()}
    assert texts == {
        "plain": ["3 1", "answer to 3 1", "7 2", "answer to 7 2"],
        "system": ["1", "5 5", "answer to 5 5", "2", "40 1", ""],
        "three": ["11 3", "answer to 11 3", "2 2", "cut"],
        "one": ["20 2", "answer to 20 2"],
        "tool": ["4 4", "answer to 4 4"],
    }
    reasons = {id: line["finish_reason"] for id, line in lines.items()}
    assert reasons == {"plain": "stop", "system": "tool_calls", "three": "length", "one": "stop", "tool": "stop"}
    assert lines["system"]["messages"][-1]["tool_calls"] == [call]
    sent = next(body["messages"] for body in server.bodies if body["messages"][-1]["content"] == "7 2")
    assert sent == lines["plain"]["messages"][:3] and sent[1]["reasoning_content"] == "hm"


def test_a_chat_that_fails_at_a_later_turn_is_a_failure_and_begins_anew(
    serve: Callable[..., ChatServer], tiny_target: Target, tmp_path: Path
) -> None:
    bad = {"7 2"}
    server = serve(lambda b, n: refused(400) if b["messages"][-1]["content"] in bad else echo(b, n))
    config = chats_config(tmp_path, CHATS, server=server.url)
    run_by_servers(config, tiny_target)
    assert set(failed(config)) == {"plain"} == set(CHATS) - set(answers_of(config))
    bad.clear()
    run_by_servers(config, tiny_target)
    assert user_texts(server)[-2:] == ["3 1", "7 2"] and len(answers_of(config)["plain"]["messages"]) == 4


@pytest.mark.parametrize("regenerate", list(Regenerate))
def test_a_server_of_the_target_gives_the_messages_that_the_target_gives_here(
    serve: Callable[..., ChatServer], tiny_target: Target, tmp_path: Path, regenerate: Regenerate
) -> None:
    tokenizer, lock = tiny_tokenizer(), threading.Lock()
    config = chats_config(tmp_path, CHATS, regenerate=regenerate)

    def respond(body: Body, _number: int) -> Body:
        assert (body["temperature"], body["max_tokens"]) == (0.0, 40)
        with lock:
            ids = tokenizer.apply_chat_template(body["messages"], add_generation_prompt=True, return_dict=False)
            [answer] = answer_batch(tiny_target, [ids], [0], config)
        content = answer.tokens[:-1] if answer.finish_reason == "stop" else answer.tokens
        return said(tokenizer.decode(content), answer.finish_reason)

    run(config, tiny_target)
    served = replace(config, server=serve(respond).url, responses=str(tmp_path / "served.jsonl"))
    run_by_servers(served, tiny_target)

    def without_source(lines: dict[str, Any]) -> dict[str, Any]:
        return {id: {key: value for key, value in line.items() if key != "sampling"} for id, line in lines.items()}

    assert without_source(answers_of(served)) == without_source(answers_of(config))


def test_the_script_needs_no_weights_where_servers_answer(
    serve: Callable[..., ChatServer], tiny_target_config: TargetConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "target"
    shutil.copytree(tiny_target_config.path, folder, ignore=shutil.ignore_patterns("*.safetensors"))
    servers = [serve(echo), serve(echo)]
    config = numbered_config(tmp_path, None, 6)
    overrides = ["target=custom", f"target.path={folder}", "target.name=tiny", f"output_dir={tmp_path}"]
    overrides += [f"server=[{servers[0].url},{servers[1].url}/v1]", f"prompts=[{config.prompts}]", "concurrency=1"]
    monkeypatch.setattr(sys, "argv", ["generate.py", *overrides, "max_new_tokens=16"])
    GlobalHydra.instance().clear()
    script = load_script("generate")
    script.main.__wrapped__.__module__ = "__main__"  # Hydra then finds conf/ beside the file, as when it is run
    script.main()
    assert len(answers_of(config)) == 6 == sum(len(server.bodies) for server in servers)
