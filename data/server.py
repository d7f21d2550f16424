"""OpenAI-compatible servers that answer chats: load shared between them, retries, and one error when all are gone.

A server that refuses connections is left alone for a while and then tried by one request at a time; requests that meet
it go elsewhere and lose no attempt, since a refused connection says nothing about the request.
"""

import hashlib
import json
import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from itertools import islice
from types import TracebackType
from typing import Any, TypeVar

import httpx

from data.access import REFUSED_STATUS, open_client, refusal, server_urls, without_credentials
from data.messages import Message, normalise_messages
from data.run import StopRequest
from models.sampling import SamplingConfig

T = TypeVar("T")

log = logging.getLogger(__name__)

BACKOFF_SECONDS = 1.0
"""Before the second attempt; doubled before each further one, less up to half of it by chance."""
MAX_BACKOFF_SECONDS = 30.0
GONE_AFTER = 6
"""Connections in a row that a server refuses, with back-off between them, before it counts as gone."""
POLL_SECONDS = 0.5
"""How long a stop request may go unseen."""

RETRIED_STATUS = (408, 409, 429)
FINISH_REASONS = ("stop", "length", "tool_calls")
PASSING_FINISH_REASONS = ("abort", "error")
"""The server's trouble and not the answer's, so asking again may help."""


@dataclass(kw_only=True)
class ServerOptions:
    """Which servers answer and how they are asked; conf/generate.yaml holds the values."""

    server: Any
    server_model: str | None
    api_key_file: str | None
    concurrency: int
    request_timeout: float
    max_attempts: int


@dataclass(frozen=True)
class Reply:
    message: Message
    finish_reason: str  # stop, length or tool_calls


class RequestError(Exception):
    """A request that is given up; the text says why."""

    def __init__(self, reason: str, num_attempts: int) -> None:
        super().__init__(reason)
        self.num_attempts = num_attempts


class ServersGoneError(ValueError):
    """No server accepts connections any more."""


class StoppedError(Exception):
    """`Servers.stop` came before the request was sent."""


class _FailedAttempt(Exception):
    def __init__(self, reason: str, *, may_pass: bool, retry_after: float | None = None) -> None:
        super().__init__(reason)
        self.may_pass = may_pass  # asking again may help
        self.retry_after = retry_after  # seconds, where the server says so


@dataclass
class _Server:
    url: str
    auth: httpx.BasicAuth | None
    num_in_flight: int = 0
    num_refused: int = 0  # connections in a row
    down_until: float = 0.0
    is_probed: bool = False  # a request is finding out whether it is back


class Servers:
    """Answers requests from any number of threads; close it, or use it as a context.

    Raises ValueError when a server cannot be reached or does not serve the model.
    """

    def __init__(self, options: ServerOptions) -> None:
        for name in ("concurrency", "request_timeout", "max_attempts"):
            if not getattr(options, name) > 0:
                raise ValueError(f"{name} must be more than 0, got {getattr(options, name)}")
        self.options = options
        self._servers = [_Server(*without_credentials(url)) for url in server_urls(options.server)]
        self._changed = threading.Condition()
        self._stopped = threading.Event()
        self._client = open_client(
            options.api_key_file, timeout=options.request_timeout, num_connections=self.num_slots
        )
        try:
            self.model = self._common_model(options.server_model)
        except ValueError:
            self._client.close()
            raise

    def __enter__(self) -> "Servers":
        return self

    def __exit__(self, _type: type | None, _error: BaseException | None, _trace: TracebackType | None) -> None:
        self.stop()
        self._client.close()

    @property
    def num_slots(self) -> int:
        """Requests that all servers together take at a time."""
        return len(self._servers) * self.options.concurrency

    def stop(self) -> None:
        """Let requests end that are on their way, and raise StoppedError for those that wait."""
        self._stopped.set()
        with self._changed:
            self._changed.notify_all()

    def ask(self, body: Mapping[str, Any]) -> Reply:
        """The answer to a chat completion request; `model` is filled in.

        Raises RequestError when attempts are used up or repeating cannot help, and ServersGoneError when no server
        accepts connections any more.
        """
        content = json.dumps({"model": self.model, **body}).encode()
        num_failed, server = 0, None
        while True:
            server, pause = self._take(avoided=server), 0.0
            try:
                reply = self._post(server, content)
                if reply is not None:
                    return reply
            except _FailedAttempt as error:
                num_failed += 1
                if not error.may_pass or num_failed >= self.options.max_attempts:
                    raise RequestError(str(error), num_failed) from error
                pause = backoff(num_failed) if error.retry_after is None else error.retry_after
            finally:
                self._give_back(server)
            if self._stopped.wait(pause):
                raise StoppedError

    def _common_model(self, wanted: str | None) -> str:
        """The model to ask for: the wanted one, or the first that the first server names; all servers must have it."""
        for server in self._servers:
            names = list(served_models(self._client, server.url, server.auth))
            if wanted is None and names:
                wanted = names[0]
            if wanted not in names:
                raise ValueError(f"server {server.url} serves {names}, not the model {wanted!r}: set server_model=")
        assert wanted is not None
        return wanted

    def _take(self, avoided: _Server | None) -> _Server:
        """A slot of the least loaded server that is up, another one than `avoided` where there is a choice."""
        with self._changed:
            while True:
                if self._stopped.is_set():
                    raise StoppedError
                if all(server.num_refused >= GONE_AFTER for server in self._servers):
                    urls = ", ".join(server.url for server in self._servers)
                    raise ServersGoneError(
                        f"server={urls}: {GONE_AFTER} connections in a row were refused; start the servers and run the "
                        "same command again, answers so far are kept"
                    )
                now = time.monotonic()
                free = [server for server in self._servers if server.down_until <= now and self._has_slot(server)]
                if free:
                    server = min(free, key=lambda server: (server is avoided, server.num_in_flight))
                    server.num_in_flight += 1
                    server.is_probed = server.num_refused > 0
                    return server
                waits = [server.down_until - now for server in self._servers if server.down_until > now]
                self._changed.wait(min(waits, default=None))

    def _has_slot(self, server: _Server) -> bool:
        return server.num_in_flight < self.options.concurrency and not (server.num_refused and server.is_probed)

    def _give_back(self, server: _Server) -> None:
        with self._changed:
            server.num_in_flight -= 1
            server.is_probed = False
            self._changed.notify()

    def _post(self, server: _Server, content: bytes) -> Reply | None:
        """None where the server refused the connection; raises _FailedAttempt for any other trouble."""
        num_refused = server.num_refused
        url, headers = f"{server.url}/v1/chat/completions", {"Content-Type": "application/json"}
        try:
            response = self._client.request("POST", url, content=content, headers=headers, auth=server.auth)
        except (httpx.ConnectError, httpx.ConnectTimeout) as error:
            self._mark_refused(server, num_refused, error)
            return None
        except httpx.RequestError as error:
            raise _FailedAttempt(f"{server.url}: {type(error).__name__} {error}".rstrip(), may_pass=True) from error
        if server.num_refused:
            with self._changed:
                server.num_refused = 0
                self._changed.notify_all()
        if response.is_success:
            return read_reply(response.content, server.url)
        status, message = response.status_code, error_message(response)
        raise _FailedAttempt(
            f"{server.url}: {refusal(status, message) if status in REFUSED_STATUS else f'status {status}, {message}'}",
            may_pass=status in RETRIED_STATUS or status >= 500,
            retry_after=retry_after(response),
        )

    def _mark_refused(self, server: _Server, num_refused: int, error: httpx.TransportError) -> None:
        """`num_refused` is what the request saw before it was sent: those that were refused together count once."""
        with self._changed:
            if server.num_refused == num_refused:
                server.num_refused += 1
                server.down_until = time.monotonic() + backoff(server.num_refused)
                log.warning("server %s refuses connections (%s), %d in a row", server.url, error, server.num_refused)
            self._changed.notify_all()


def served_models(client: httpx.Client, url: str, auth: httpx.BasicAuth | None) -> dict[str, dict[str, Any]]:
    """What the server says of each model, by name. Raises ValueError where it cannot be asked."""
    try:
        response = client.get(f"{url}/v1/models", auth=auth)
        return {model["id"]: model for model in response.raise_for_status().json()["data"]}
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        reason = str(error) or type(error).__name__
        if isinstance(error, httpx.HTTPStatusError) and error.response.status_code in REFUSED_STATUS:
            reason = refusal(error.response.status_code, error_message(error.response))
            raise ValueError(f"server {url}: {reason}") from error
        raise ValueError(
            f"server {url} does not answer GET /v1/models ({reason}): start it or correct server="
        ) from error


def answer_all(
    servers: Servers, chats: Iterable[T], answer: Callable[[T], None], stop: StopRequest
) -> Iterator[list[tuple[T, RequestError | None]]]:
    """Call `answer(chat)`, which asks the servers, in as many threads as they have slots; yields those that are done.

    A chat that failed comes with its error. After a stop request or an interrupt only requests on their way are waited
    for, and chats that want another one are dropped. Once all that can still end has ended, raises ServersGoneError or
    KeyboardInterrupt where that was the reason.
    """
    waiting, running = iter(chats), dict[Future[None], T]()
    ending: BaseException | None = None
    executor = ThreadPoolExecutor(servers.num_slots)
    try:
        while True:
            if stop.received or ending is not None:
                servers.stop()
            else:
                for chat in islice(waiting, 2 * servers.num_slots - len(running)):
                    running[executor.submit(answer, chat)] = chat
            if not running:
                break
            try:
                done = wait(running, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED).done
            except KeyboardInterrupt as error:
                if ending is not None:
                    raise
                ending = error
                log.info("waiting for requests on their way; a second interrupt drops them")
                continue
            outcomes = []
            for future in done:
                chat, error = running.pop(future), future.exception()
                if isinstance(error, ServersGoneError):
                    ending = ending or error
                elif error is None or isinstance(error, RequestError):
                    outcomes.append((chat, error))
                elif not isinstance(error, StoppedError):
                    raise error
            if outcomes:
                yield outcomes
    finally:
        servers.stop()
        executor.shutdown(wait=False, cancel_futures=True)
    if ending is not None:
        raise ending


def read_reply(content: bytes, url: str) -> Reply:
    """The first choice of a chat completion. An empty text is an answer, none at all is not."""
    try:
        choice = json.loads(content)["choices"][0]
        message, finish_reason = {**choice["message"], "role": "assistant"}, choice["finish_reason"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        shown = content[:200].decode(errors="replace")
        raise _FailedAttempt(f"{url}: no chat completion, but {shown!r}", may_pass=True) from error
    if finish_reason not in FINISH_REASONS:
        may_pass = finish_reason in PASSING_FINISH_REASONS
        raise _FailedAttempt(f"{url}: finish_reason {finish_reason!r}", may_pass=may_pass)
    try:
        [answer] = normalise_messages([message], url)
    except ValueError as error:
        raise _FailedAttempt(str(error), may_pass=False) from error
    return Reply(answer, finish_reason)


def request_body(
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None,
    sampling: SamplingConfig,
    *,
    max_new_tokens: int,
    thinking: bool | None,
    record_id: str,
) -> dict[str, Any]:
    """A chat completion request under the API's own names; what is off is left out, and nothing is added."""
    body: dict[str, Any] = {
        "messages": [_sent(message) for message in messages],
        "max_tokens": max_new_tokens,
        "temperature": 0.0 if sampling.is_greedy else sampling.temperature,
    }
    if not sampling.is_greedy:
        off = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
        values = {"top_k": sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
        body |= {name: value for name, value in values.items() if value != off[name]}
        body["seed"] = record_seed(sampling.seed, record_id)
    if tools:
        body["tools"] = list(tools)
    if thinking is not None:
        body["chat_template_kwargs"] = {"enable_thinking": thinking}
    return body


def record_seed(seed: int, record_id: str) -> int:
    """31 bits, the same in every process: a record asked again is asked the same."""
    digest = hashlib.sha256(json.dumps([seed, record_id]).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def backoff(attempt: int) -> float:
    """Seconds to wait after a failed attempt (from 1). Chance keeps those that failed together from meeting again."""
    return min(MAX_BACKOFF_SECONDS, BACKOFF_SECONDS * 2 ** (attempt - 1)) * random.uniform(0.5, 1.0)


def retry_after(response: httpx.Response) -> float | None:
    """Seconds until the server wants to be asked again, from a number or a date; None where it does not say."""
    value = response.headers.get("Retry-After", "")
    try:
        seconds = float(value) if value.isdigit() else parsedate_to_datetime(value).timestamp() - time.time()
    except ValueError:
        return None
    return max(0.0, seconds)


def error_message(response: httpx.Response) -> str:
    """What the server says went wrong: the message of an OpenAI error, else the beginning of the text."""
    try:
        value = response.json()
        return str(value.get("error", value)["message"])
    except (ValueError, KeyError, TypeError, AttributeError):
        return response.text[:300]


def _sent(message: Message) -> Message:
    """The API takes the arguments of tool calls as JSON text."""
    if "tool_calls" not in message:
        return message
    calls = []
    for call in message["tool_calls"]:
        arguments = json.dumps(call["function"]["arguments"], ensure_ascii=False)
        calls.append({**call, "function": {**call["function"], "arguments": arguments}})
    return {**message, "tool_calls": calls}
