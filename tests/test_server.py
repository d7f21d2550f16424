"""One request to servers that misbehave in every way, over real HTTP; and what a request holds."""

import base64
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from email.utils import formatdate
from pathlib import Path
from typing import Any

import httpx
import pytest

import data.server as server_module
from data.access import server_urls
from data.server import RequestError, ServerOptions, Servers, record_seed, request_body, retry_after
from models.sampling import SamplingConfig
from tests.chat_server import (  # noqa: F401 (fixtures among them)
    HANG,
    RESET,
    Body,
    ChatServer,
    echo,
    refused,
    said,
    serve,
    short_pauses,
)

GREEDY = SamplingConfig(0.0, 0, 1.0, 0.0, 0)


def options(server: Any, **changes: Any) -> ServerOptions:
    base = ServerOptions(
        server=server, server_model=None, api_key_file=None, concurrency=2, request_timeout=5.0, max_attempts=3
    )
    return replace(base, **changes)


def ask(server: ChatServer, **changes: Any) -> Any:
    with Servers(options(server.url, **changes)) as servers:
        return servers.ask({"messages": [{"role": "user", "content": "1"}]})


def in_turn(*results: Any) -> Callable[[Body, int], Any]:
    return lambda _body, number: results[min(number, len(results) - 1)]


FINE = said("fine")


@pytest.mark.parametrize(
    "trouble",
    [
        refused(503),
        refused(500),
        refused(429),
        refused(408),
        refused(409),
        RESET,
        HANG,
        (200, {}, b'{"choices": ['),
        (200, {}, b"[]"),
        {"choices": []},
        said("half", "abort"),
        said("half", "error"),
    ],
    ids=lambda trouble: str(trouble)[:40],
)
def test_trouble_that_may_pass_is_met_by_asking_again(serve: Callable[..., ChatServer], trouble: Any) -> None:
    server = serve(in_turn(trouble, trouble, FINE))
    reply = ask(server, request_timeout=0.3)
    assert (reply.message, reply.finish_reason) == ({"role": "assistant", "content": "fine"}, "stop")
    assert len(server.bodies) == 3
    lasting = serve(in_turn(trouble))
    with pytest.raises(RequestError) as caught:
        ask(lasting, request_timeout=0.3)
    assert caught.value.num_attempts == 3 and len(lasting.bodies) == 3


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (refused(400, "prompt is too long"), "status 400, prompt is too long"),
        (refused(404, "no such model"), "status 404, no such model"),
        ((422, {}, b"plain text"), "status 422, plain text"),
        (said("some", "content_filter"), "finish_reason 'content_filter'"),
        (said("some", None), "finish_reason None"),
        (said(None), "must have a text as content, got None"),
        (said(None, "tool_calls", tool_calls=[{"function": {"name": "f", "arguments": "{"}}]), "broken JSON"),
    ],
)
def test_an_answer_that_asking_again_cannot_mend_fails_at_once_with_the_servers_reason(
    serve: Callable[..., ChatServer], answer: Any, message: str
) -> None:
    server = serve(in_turn(answer))
    with pytest.raises(RequestError, match=message) as caught:
        ask(server)
    assert caught.value.num_attempts == 1 == len(server.bodies)


@pytest.mark.parametrize(
    ("answer", "message", "finish_reason"),
    [
        (said(""), {"content": ""}, "stop"),
        (said("1 2", "length"), {"content": "1 2"}, "length"),
        (said(None, "length", reasoning_content="so"), {"content": "", "reasoning_content": "so"}, "length"),
        (said("4", reasoning_content="2+2"), {"content": "4", "reasoning_content": "2+2"}, "stop"),
        (
            said(None, "tool_calls", tool_calls=[{"id": "c", "function": {"name": "f", "arguments": '{"x": 1}'}}]),
            {
                "content": "",
                "tool_calls": [{"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}],
            },
            "tool_calls",
        ),
    ],
)
def test_answers_keep_text_reasoning_tool_calls_and_the_finish_reason(
    serve: Callable[..., ChatServer], answer: Body, message: Body, finish_reason: str
) -> None:
    reply = ask(serve(in_turn(answer)))
    assert (reply.message, reply.finish_reason) == ({"role": "assistant", **message}, finish_reason)


def test_requests_go_to_the_least_loaded_server(serve: Callable[..., ChatServer]) -> None:
    all_here = threading.Barrier(8, timeout=5)

    def gathering(body: Body, number: int) -> Body:
        all_here.wait()
        return echo(body, number)

    pair = [serve(gathering), serve(gathering)]
    with Servers(options([server.url for server in pair], concurrency=8)) as servers, ThreadPoolExecutor(8) as threads:
        body = {"messages": [{"content": "1"}]}
        assert len({reply.finish_reason for reply in threads.map(servers.ask, [body] * 8)}) == 1
    assert [len(server.bodies) for server in pair] == [4, 4]


def test_another_attempt_goes_to_another_server(serve: Callable[..., ChatServer]) -> None:
    pair = [serve(in_turn(refused(503))), serve(echo)]
    with Servers(options([server.url for server in pair], max_attempts=2)) as servers:
        servers.ask({"messages": [{"content": "1"}]})
    assert [len(server.bodies) for server in pair] == [1, 1]


def test_retry_after_is_waited_for(serve: Callable[..., ChatServer]) -> None:
    began = time.monotonic()
    ask(serve(in_turn(refused(429, Retry_After="1"), FINE)))
    assert 1.0 <= time.monotonic() - began < 4


def test_retry_after_is_read_as_seconds_or_a_date() -> None:
    in_an_hour = formatdate(time.time() + 3600, usegmt=True)
    for value, seconds in (("7", 7.0), (in_an_hour, 3600.0), (formatdate(0, usegmt=True), 0.0)):
        assert retry_after(httpx.Response(429, headers={"Retry-After": value})) == pytest.approx(seconds, abs=30)


@pytest.mark.parametrize("value", ["", "soon", "inf", "-1"])
def test_a_retry_after_that_says_nothing_leaves_the_wait_to_us(value: str) -> None:
    assert retry_after(httpx.Response(429, headers={"Retry-After": value})) is None


def test_waits_double_up_to_a_limit_with_chance_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "BACKOFF_SECONDS", 1.0)
    monkeypatch.setattr(server_module, "MAX_BACKOFF_SECONDS", 6.0)
    for attempt, most in ((1, 1.0), (2, 2.0), (3, 4.0), (4, 6.0), (40, 6.0)):
        waits = [server_module.backoff(attempt) for _ in range(50)]
        assert most / 2 <= min(waits) < max(waits) <= most


def body_of(sampling: SamplingConfig, *, tools: Any = None, thinking: bool | None = None, id: str = "a") -> Body:
    messages = [{"role": "user", "content": "1"}]
    return request_body(messages, tools, sampling, max_new_tokens=9, thinking=thinking, record_id=id)


def test_what_is_on_is_sent_under_its_own_name_and_what_is_off_is_absent() -> None:
    messages = [{"role": "user", "content": "1"}]
    plain = {"messages": messages, "max_tokens": 9, "temperature": 0.0}
    assert body_of(GREEDY) == plain, "no default system prompt, no seed"
    assert body_of(SamplingConfig(0.0, 5, 0.5, 0.1, 3)) == plain, "greedy has no use for them"
    seed = record_seed(3, "a")
    assert body_of(SamplingConfig(0.7, 0, 1.0, 0.0, 3)) == {**plain, "temperature": 0.7, "seed": seed}
    every = {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1, "seed": seed}
    assert body_of(SamplingConfig(0.7, 20, 0.8, 0.1, 3)) == {**plain, **every}
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert body_of(GREEDY, tools=tools, thinking=False) == {
        **plain,
        "tools": tools,
        "chat_template_kwargs": {"enable_thinking": False},
    }


def test_a_record_has_its_own_seed_in_31_bits_that_stays() -> None:
    seeds = [record_seed(0, f"r{i}") for i in range(500)]
    assert len(set(seeds)) == 500 and 2**30 < max(seeds) < 2**31 and min(seeds) >= 0
    assert record_seed(0, "r0") == 240158442, "in every process and version"
    assert record_seed(1, "r0") != seeds[0]


def test_arguments_of_tool_calls_are_sent_as_json_text() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": "é"}}}
    history = [{"role": "assistant", "content": "", "tool_calls": [call]}, {"role": "user", "content": "1"}]
    body = request_body(history, None, GREEDY, max_new_tokens=9, thinking=None, record_id="a")
    assert body["messages"][0]["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"x": "é"}'}
    assert call["function"]["arguments"] == {"x": "é"}, "the record's own message stays"


def test_urls_are_taken_with_and_without_v1_from_a_text_or_a_list() -> None:
    assert server_urls("http://a:1/v1/, https://b") == ["http://a:1", "https://b"]
    assert server_urls(["http://a:1/v1", "http://b/x/"]) == ["http://a:1", "http://b/x"]


@pytest.mark.parametrize("server", ["localhost:8000", "", "http://", "http://a,http://a/v1", [], "ftp://a"])
def test_what_is_no_url_is_named(server: Any) -> None:
    with pytest.raises(ValueError, match=r"^server="):
        server_urls(server)


def test_a_request_writes_no_line_into_the_log(
    serve: Callable[..., ChatServer], caplog: pytest.LogCaptureFixture
) -> None:
    """There are a million of them."""
    caplog.set_level(logging.INFO)
    logging.getLogger("httpx").setLevel(logging.NOTSET)
    ask(serve(echo))
    assert not caplog.records


def test_a_base_url_with_v1_reaches_the_same_server(serve: Callable[..., ChatServer]) -> None:
    with Servers(options(f"{serve(echo).url}/v1/")) as servers:
        assert servers.ask({"messages": [{"content": "5"}]}).message["content"] == "5 5"


def test_the_model_is_the_servers_first_or_the_one_that_is_named(serve: Callable[..., ChatServer]) -> None:
    server = serve(echo)
    for model, asked in ((None, "tiny"), ("other", "other")):
        ask(server, server_model=model)
        assert server.bodies[-1]["model"] == asked


def test_servers_that_cannot_be_used_are_one_clear_error(serve: Callable[..., ChatServer]) -> None:
    server, other = serve(echo), serve(echo, models=("another",))
    with pytest.raises(ValueError, match=rf"{other.url} serves \['another'\], not the model 'tiny': set server_model="):
        Servers(options([server.url, other.url]))
    with pytest.raises(ValueError, match=r"serves \['tiny', 'other'\], not the model 'big'"):
        Servers(options(server.url, server_model="big"))
    with pytest.raises(ValueError, match=rf"{server.url}/x does not answer GET /v1/models \(.*404"):
        Servers(options(f"{server.url}/x"))
    other.close()
    with pytest.raises(ValueError, match=rf"{other.url} does not answer GET /v1/models .* start it"):
        Servers(options([server.url, other.url]))
    with pytest.raises(ValueError, match="concurrency must be more than 0, got 0"):
        Servers(options(server.url, concurrency=0))


def test_a_server_that_comes_back_is_used_again_to_the_full(serve: Callable[..., ChatServer]) -> None:
    """A refused connection costs no attempt."""
    server, both_here = serve(echo), threading.Barrier(2, timeout=3)

    def gathering(body: Body, number: int) -> Body:
        if number > 0:
            both_here.wait()
        return echo(body, number)

    body = {"messages": [{"content": "5"}]}
    with Servers(options(server.url, max_attempts=1)) as servers, ThreadPoolExecutor(2) as threads:
        server.close()
        port = int(server.url.rpartition(":")[2])
        opening = threading.Timer(0.06, lambda: serve(gathering, port=port))
        opening.start()
        assert servers.ask(body).message["content"] == "5 5"
        opening.join()
        assert len(list(threads.map(servers.ask, [body] * 2))) == 2


KEY = "sk-Key~1"
BASIC = "Basic " + base64.b64encode(b"us@er:pass word").decode()


def with_credentials(server: ChatServer) -> str:
    return server.url.replace("http://", "http://us%40er:pass%20word@")


def test_a_key_of_a_file_and_credentials_of_a_url_are_sent_with_every_request(
    serve: Callable[..., ChatServer], tmp_path: Path
) -> None:
    """Those of a URL only to its own server, which gets no key."""
    file = tmp_path / "key"
    file.write_text(f"{KEY}\n")
    both_here = threading.Barrier(2, timeout=5)

    def gathering(body: Body, number: int) -> Body:
        both_here.wait()
        return echo(body, number)

    for_all, own = serve(gathering, authorization=f"Bearer {KEY}"), serve(gathering, authorization=BASIC)
    given = options([for_all.url, with_credentials(own)], api_key_file=str(file), concurrency=1)
    with Servers(given) as servers, ThreadPoolExecutor(2) as threads:
        list(threads.map(servers.ask, [{"messages": [{"content": "1"}]}] * 4))
    assert (len(for_all.bodies), len(own.bodies)) == (2, 2), "a refused request would have raised"


def test_a_server_that_refuses_access_says_so_and_how_to_get_in(
    serve: Callable[..., ChatServer], tmp_path: Path
) -> None:
    """In one line each, before the first prompt where the model list is closed too; and no error shows a secret."""
    file = tmp_path / "key"
    file.write_text("sk-wrong")
    way_in = r"give the key in a file as api_key_file=PATH, or user and password as server=http://USER:PASSWORD@HOST"
    for status in (401, 403):
        server = serve(echo, authorization=BASIC, status=status)
        wrong = server.url.replace("http://", "http://name:secret@")
        for changes in ({}, {"api_key_file": str(file)}, {"server": wrong}):
            with pytest.raises(ValueError) as caught:
                Servers(replace(options(server.url), **changes))
            assert (
                str(caught.value) == f"server {server.url}: the server refuses access (status {status}, who?): {way_in}"
            )
        open_list = serve(in_turn(refused(status, "no key")))
        with pytest.raises(
            RequestError, match=rf"refuses access \(status {status}, no key\): {way_in}"
        ) as caught_later:
            ask(open_list)
        assert caught_later.value.num_attempts == 1


@pytest.mark.parametrize("content", [None, b"", b" \n", b"two words", b"two\nlines", "sk-\u00e9".encode()])
def test_a_file_that_holds_no_key_is_named_and_not_shown(tmp_path: Path, content: bytes | None) -> None:
    file = tmp_path / "key"
    if content is not None:
        file.write_bytes(content)
    message = rf"api_key_file={file} " + ("is no file" if content is None else "must hold one key of printable ASCII")
    with pytest.raises(ValueError, match=message) as caught:
        Servers(options("http://127.0.0.1:1", api_key_file=str(file)))
    assert "two" not in str(caught.value) and "sk-" not in str(caught.value)
