"""A small OpenAI-compatible server for tests, which records what it is asked and misbehaves on request."""

import json
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

import data.server as server_module

Body = dict[str, Any]
Respond = Callable[[Body, int], Any]
RESET, HANG = "reset", "hang"


class ChatServer:
    """`respond(body, number)` says what comes of a request, `number` from 0: a reply (dict), a status with headers and
    bytes, RESET or HANG. Where `authorization` is given, requests without that header get `status` instead."""

    def __init__(
        self,
        respond: Respond,
        models: tuple[str, ...] = ("tiny", "other"),
        port: int = 0,
        *,
        authorization: str | None = None,
        status: int = 401,
    ) -> None:
        self.bodies: list[Body] = []
        self.most_at_once, self._at_once, self._lock = 0, 0, threading.Lock()
        self.released = threading.Event()
        self.idle: set[socket.socket] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            timeout = 5
            disable_nagle_algorithm = True  # a header and its body would wait for each other

            def setup(self) -> None:
                super().setup()
                outer.idle.add(self.connection)

            def do_GET(self) -> None:
                found = {"data": [{"id": model} for model in models]}
                if authorization not in (None, self.headers["Authorization"]):
                    return self._send(refused(status, "who?"))
                self._send((200, {}, json.dumps(found).encode()) if self.path == "/v1/models" else (404, {}, b""))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                assert self.path == "/v1/chat/completions"
                if authorization not in (None, self.headers["Authorization"]):
                    return self._send(refused(status, "who?"))
                with outer._counted(body, self.connection) as number:
                    result = respond(body, number)
                    if result == HANG:
                        outer.released.wait(5)
                    if result in (RESET, HANG):
                        linger = struct.pack("ii", 1, 0)
                        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                        self.connection.close()
                        self.close_connection = True
                        return
                self._send((200, {}, json.dumps(result).encode()) if isinstance(result, dict) else result)

            def _send(self, result: tuple[int, dict[str, str], bytes]) -> None:
                status, headers, content = result
                self.send_response(status)
                for name, value in {**headers, "Content-Length": str(len(content))}.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(content)

            def finish(self) -> None:
                with suppress(OSError, ValueError):  # a connection that was reset is closed already
                    super().finish()

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self._server.daemon_threads = True
        self._server.handle_error = lambda *_: None  # type: ignore[method-assign]
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()

    @contextmanager
    def _counted(self, body: Body, connection: socket.socket) -> Iterator[int]:
        with self._lock:
            self.idle.discard(connection)
            number = len(self.bodies)
            self.bodies.append(body)
            self._at_once += 1
            self.most_at_once = max(self.most_at_once, self._at_once)
        try:
            yield number
        finally:
            with self._lock:
                self._at_once -= 1
                self.idle.add(connection)

    def close(self) -> None:
        """No more connections, as when a process ends; but what it is asked already is still answered."""
        self.released.set()
        self._server.shutdown()
        self._server.server_close()
        for connection in list(self.idle):
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


@pytest.fixture
def serve() -> Iterator[Callable[..., ChatServer]]:
    """Starts servers, all closed at the end."""
    servers: list[ChatServer] = []

    def start(
        respond: Respond, models: tuple[str, ...] = ("tiny", "other"), port: int = 0, **access: Any
    ) -> ChatServer:
        servers.append(ChatServer(respond, models, port, **access))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Where it is imported: waits of some milliseconds, and the SIGTERM handler as it was."""
    monkeypatch.setattr(server_module, "BACKOFF_SECONDS", 0.01)
    monkeypatch.setattr(server_module, "MAX_BACKOFF_SECONDS", 0.05)
    monkeypatch.setattr(server_module, "POLL_SECONDS", 0.02)
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def said(content: str | None, finish_reason: str | None = "stop", **fields: Any) -> Body:
    message = {"role": "assistant", "content": content, **fields}
    return {"choices": [{"index": 0, "message": message, "finish_reason": finish_reason}]}


def refused(status: int, message: str = "no", **headers: str) -> tuple[int, dict[str, str], bytes]:
    return (
        status,
        {name.replace("_", "-"): value for name, value in headers.items()},
        json.dumps({"error": {"message": message}}).encode(),
    )


def echo(body: Body, _number: int) -> Body:
    """The last user text, doubled."""
    text = body["messages"][-1]["content"]
    return said(f"{text} {text}")
