"""A server that is asked for numbers: no request is repeated that may have been counted."""

import time
from collections.abc import Mapping
from typing import Any

import httpx

from data.access import REFUSED_STATUS, refusal
from data.server import backoff, error_message

BUSY_STATUS = (429, 503)  # nothing was decoded, so asking again changes no count
MAX_ATTEMPTS = 4


class Connection:
    """A server that is asked; every failure is a ValueError that names it."""

    def __init__(self, client: httpx.Client, url: str, auth: httpx.BasicAuth | None, timeout: float) -> None:
        self.client, self.url, self.auth, self.timeout = client, url, auth, timeout

    def post(self, path: str, body: Mapping[str, Any]) -> dict[str, Any]:
        response = self.checked("POST", path, self._send("POST", path, body))
        try:
            return dict(response.json())
        except (ValueError, TypeError) as error:
            raise ValueError(
                f"server={self.url}: POST {path} gives no JSON object, but {response.text[:100]!r}: correct server="
            ) from error

    def get(self, path: str) -> httpx.Response:
        """Whatever its status."""
        return self._send("GET", path)

    def told(self, path: str) -> dict[str, Any]:
        """Nothing where the server does not say or may not be asked."""
        response = self.get(path)
        try:
            return dict(response.json()) if response.is_success else {}
        except (ValueError, TypeError):
            return {}

    def checked(self, method: str, path: str, response: httpx.Response) -> httpx.Response:
        if response.is_success:
            return response
        status, message = response.status_code, error_message(response)
        reason = refusal(status, message) if status in REFUSED_STATUS else f"status {status}, {message}"
        raise ValueError(f"server={self.url}: {method} {path} was not answered: {reason}")

    def _send(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> httpx.Response:
        trouble = ""
        for attempt in range(1, MAX_ATTEMPTS + 1):
            try:
                response = self.client.request(method, f"{self.url}{path}", json=body, auth=self.auth)
            except (httpx.ConnectError, httpx.ConnectTimeout) as error:
                trouble = str(error) or type(error).__name__
            except httpx.TimeoutException as error:
                raise ValueError(
                    f"request_timeout={self.timeout:g} seconds are over and server={self.url} has not answered "
                    f"{method} {path}: give it more, or ask less at once (batch_size=, max_new_tokens=)"
                ) from error
            except httpx.RequestError as error:
                raise ValueError(
                    f"server={self.url} broke off {method} {path} ({type(error).__name__} {error}): see its log, start "
                    "it and run the same command again"
                ) from error
            else:
                if response.status_code not in BUSY_STATUS:
                    return response
                trouble = f"status {response.status_code}, {error_message(response)}"
            if attempt < MAX_ATTEMPTS:
                time.sleep(backoff(attempt))
        raise ValueError(
            f"server={self.url} does not take {method} {path} ({trouble}): start it or correct server=, then run the "
            "same command again"
        )
