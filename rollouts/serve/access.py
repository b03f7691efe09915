"""Who may send requests, and how large they may be: middlewares of pure ASGI, in front of all routes."""

import asyncio
import hmac
from collections.abc import Collection
from ipaddress import ip_address
from urllib.parse import SplitResult, urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rollouts.serve.errors import RequestError, error_response

_NO_KEY = (
    "this server needs its API key: send the header Authorization: Bearer KEY or x-api-key: KEY (api_key of a client)"
)


class ApiKeyMiddleware:
    """Refuses requests without `Authorization: Bearer KEY` or `x-api-key: KEY` (401), but for `/health`."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            headers = Headers(scope=scope)
            received = headers.get("authorization", f"Bearer {headers.get('x-api-key', '')}").encode("latin-1")
            if not hmac.compare_digest(received, self._expected):
                response = error_response(RequestError(401, _NO_KEY, code="invalid_api_key"), scope["path"])
                response.headers["WWW-Authenticate"] = "Bearer"
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)


class BrowserMiddleware:
    """Refuses what web pages of other origins make a browser send to this server.

    A page cannot set `Authorization`, but a server on a loopback address without a key would obey it. A
    browser names the page in `Origin`, and the name by which the page reached this server in `Host`.
    """

    def __init__(self, app: ASGIApp, hosts: Collection[str]) -> None:
        self._app = app
        self._hosts = frozenset(hosts)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            headers = Headers(scope=scope)
            host, origin = headers.get("host", ""), headers.get("origin")
            reason = None
            if not self._is_known(_split(f"//{host}").hostname):
                reason = f"the Host header {host[:100]!r} is no name of this server; use its address"
            elif origin is not None and _split(origin).netloc != host:
                reason = f"requests of web pages of {origin[:100]!r} are not answered"
            if reason is not None:
                response = error_response(RequestError(403, reason, code="foreign_origin"), scope["path"])
                await response(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _is_known(self, hostname: str | None) -> bool:
        return hostname in self._hosts or is_loopback(hostname or "")


class BodyLimitMiddleware:
    """Refuses bodies of more than `max_bytes` bytes with status 413, unread where they tell their size.

    `option` raises the bound. A body that has not arrived `seconds` after it was first asked for is refused
    with status 408.
    """

    def __init__(
        self, app: ASGIApp, max_bytes: int, seconds: float = 300.0, option: str = "--max-body-mb of the server"
    ) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._seconds = seconds
        message = f"the body is larger than {max_bytes} bytes; send less, or smaller images, or raise {option}"
        self._too_large = RequestError(413, message, code="body_too_large")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        length = Headers(scope=scope).get("content-length", "")
        if length.isdecimal() and int(length[:20]) > self._max_bytes:
            response = error_response(self._too_large, scope["path"])
            response.headers["connection"] = "close"  # the body is not read
            await response(scope, receive, send)
            return
        received, deadline, has_all = 0, 0.0, False

        async def limited_receive() -> Message:
            nonlocal received, deadline, has_all
            if has_all:  # what follows is the end of the connection, which may take as long as it likes
                return await receive()
            deadline = deadline or asyncio.get_running_loop().time() + self._seconds
            try:
                async with asyncio.timeout_at(deadline):
                    message = await receive()
            except TimeoutError:
                reason = f"the body did not arrive within {self._seconds:g} s; send it without pauses"
                raise RequestError(408, reason, code="body_timeout") from None
            has_all = not message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > self._max_bytes:
                raise self._too_large
            return message

        await self._app(scope, limited_receive, send)


def _split(url: str) -> SplitResult:
    """The parts of a URL, all empty where it is none."""
    try:
        return urlsplit(url)
    except ValueError:  # a bracket that no other one closes
        return urlsplit("")


def is_loopback(host: str) -> bool:
    """Whether a host is an address of this machine that no other machine reaches."""
    if host == "localhost":
        return True
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return False
