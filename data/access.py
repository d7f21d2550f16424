"""Where servers are, and the client that asks them: it shows a key from a file, or user and password from the URL."""

import logging
from collections.abc import Sequence
from pathlib import Path

import httpx

CONNECT_SECONDS = 10.0
REFUSED_STATUS = (401, 403)
WAY_IN = "give the key in a file as api_key_file=PATH, or user and password as server=http://USER:PASSWORD@HOST"


def server_urls(server: str | Sequence[str]) -> list[str]:
    """Base URLs without /v1 and trailing slashes, from a list or a text with commas."""
    given = server.split(",") if isinstance(server, str) else list(server)
    urls = [str(url).strip().rstrip("/").removesuffix("/v1").rstrip("/") for url in given]
    for url in urls:
        if not _is_url(url):
            raise ValueError(f"server={server}: {url!r} is no URL; give http://HOST:PORT, several with commas between")
    if not urls or len(set(urls)) < len(urls):
        raise ValueError(f"server={server} must name at least one server, and each once")
    return urls


def _is_url(text: str) -> bool:
    try:
        url = httpx.URL(text)
    except httpx.InvalidURL:
        return False
    return url.scheme in ("http", "https") and bool(url.host)


def access_headers(api_key_file: str | None) -> dict[str, str]:
    """The headers that carry the key, none for no file. Raises ValueError, without the key, where a header cannot."""
    if api_key_file is None:
        return {}
    path = Path(api_key_file)
    if not path.is_file():
        raise ValueError(f"api_key_file={api_key_file} is no file: write the key into one, or set it null")
    key = path.read_bytes().strip()
    # What is printable ASCII without a space.
    if not key or not all(33 <= byte <= 126 for byte in key):
        raise ValueError(f"api_key_file={api_key_file} must hold one key of printable ASCII without spaces")
    return {"Authorization": f"Bearer {key.decode()}"}


def open_client(api_key_file: str | None, *, timeout: float, num_connections: int) -> httpx.Client:
    """`timeout`: seconds for one request. Its connections are kept for the next requests."""
    logging.getLogger("httpx").setLevel(logging.WARNING)  # a line for each request otherwise
    return httpx.Client(
        timeout=httpx.Timeout(timeout, connect=min(CONNECT_SECONDS, timeout)),
        limits=httpx.Limits(max_connections=None, max_keepalive_connections=num_connections),
        headers=access_headers(api_key_file),
        # A proxy of the environment is for the outside world, which these servers are hardly ever in.
        trust_env=False,
    )


def without_credentials(text: str) -> tuple[str, httpx.BasicAuth | None]:
    """The URL without user and password, so that no message shows them, and what sends them; it wins over a key."""
    url = httpx.URL(text)
    if not url.userinfo:
        return text, None
    return str(url.copy_with(userinfo=b"")).rstrip("/"), httpx.BasicAuth(url.username, url.password)


def refusal(status: int, message: str) -> str:
    return f"the server refuses access (status {status}, {message}): {WAY_IN}"
