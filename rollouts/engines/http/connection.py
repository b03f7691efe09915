"""Requests to a server: deadlines, retries after failures."""

import asyncio
import logging
import math
import random
import time
from asyncio import sleep
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import urlencode
from urllib.request import getproxies, proxy_bypass

import aiohttp
from yarl import URL

from renderers.media.fetching import client_tls_context
from rollouts.engines.event_loop import EngineLoop, expire
from rollouts.engines.http.address import key_remover, parse_address
from rollouts.engines.http.events import EventDecoder
from rollouts.engines.http.exchange import Body, Call, SegmentsPayload
from rollouts.engines.http.responses import HttpResponse, response_error
from rollouts.errors import (
    EngineClosedError,
    EngineError,
    MalformedResultError,
    ServerTimeoutError,
)
from rollouts.values import Bounded, number_field, whole_field


@dataclass(frozen=True, slots=True)
class HttpLimits(Bounded):
    """Bounds of requests to one server: seconds, bytes, counts.

    At most `concurrency` requests are in flight per engine, whatever their routes. `total_seconds` bounds a
    whole call, including the wait for a slot and the retries. Nothing bounds the time between two pieces of a
    response, because a long completion sends nothing until it is done. Idle connections are closed after
    `keepalive_seconds`, which must be less than the server's own time (5 s in vLLM), so that no request is
    sent on a connection that the server is closing. The wait before retry number n is at most
    `backoff_seconds` * 2**(n - 1) and at most `longest_backoff_seconds`, which also bounds what a server can
    demand with Retry-After. `response_bytes` bounds a response.
    """

    concurrency: int = whole_field(512)
    connect_seconds: float = number_field(10.0, above=0)
    total_seconds: float = number_field(3600.0, above=0)
    keepalive_seconds: float = number_field(3.0, least=0)
    retries: int = whole_field(8, least=0)
    backoff_seconds: float = number_field(0.25, least=0)
    longest_backoff_seconds: float = number_field(15.0, least=0)
    response_bytes: int = whole_field(256 * 2**20)

    def retry_delay(self, attempt: int, retry_after: str | None) -> float:
        """Seconds to wait after failed attempt number `attempt` (from 1).

        Full jitter: between 0 and the bound of this retry, so that requests which failed together do not
        return together. Where the server's Retry-After header gave a time, the wait is that time and the
        jitter of a first attempt: not earlier than demanded, and spread. Source: M. Brooker, "Exponential
        Backoff And Jitter", AWS Architecture Blog, 2015.
        """
        demanded = _retry_after_seconds(retry_after)
        chance = random.random()  # noqa: S311 not a secret
        if demanded is not None:
            return min(demanded, self.longest_backoff_seconds) + chance * self.backoff_seconds
        # The exponent has a bound because 2.0 ** 1024 raises `OverflowError`.
        return chance * min(self.longest_backoff_seconds, self.backoff_seconds * 2.0 ** min(attempt - 1, 62))


def _retry_after_seconds(value: str | None) -> float | None:
    """Seconds from now, for both forms of RFC 9110 section 10.2.3 (a number, a date); None for anything else."""
    try:
        seconds = float(value or "")
        return seconds if 0 <= seconds < math.inf else None
    except ValueError:
        pass
    try:
        return max(0.0, parsedate_to_datetime(value or "").timestamp() - time.time())
    except (ValueError, OverflowError):
        return None


# Requests to one server: an aiohttp session, slots, deadlines, retries.


_LOG = logging.getLogger("rollouts.engines.http")
_CONTROL_SLOTS = 32


@dataclass(eq=False, slots=True)
class _Open:
    """What belongs to the event loop, whose end (`loop_end`) closes the session."""

    session: aiohttp.ClientSession
    slots: asyncio.Semaphore
    control_slots: asyncio.Semaphore
    loop_end: AsyncGenerator[None, None]
    running: set[asyncio.Timeout] = field(default_factory=set)


class ServerConnection:
    """Requests to one server, from one event loop (`EngineLoop`).

    Failed connections (refused, reset, ended within a response) and the statuses that `is_retried` names,
    HTTP 429 and 503, are tried again; nothing else is. A cancelled call closes its connection and frees its
    slot at once. `on_lost` is called whenever a connection was refused or broke, because the server may have
    restarted and lost its caches; it must not block. `without_key` removes the key from a text, which may be
    the server's. `is_root`: see
    `parse_address`.

    Proxy settings of the environment are used only where `uses_proxies`: an engine inside a cluster must not
    send its prompts, images and key through the proxy that a shell's `HTTP_PROXY` names.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        limits: HttpLimits | None = None,
        on_lost: Callable[[], None] = lambda: None,
        is_retried: Callable[[int], bool] = lambda status: status in (429, 503),
        uses_proxies: bool = False,
        is_root: bool = True,
    ) -> None:
        self.base_url, authorization = parse_address(base_url, api_key=api_key, is_root=is_root)
        self.limits = limits or HttpLimits()
        self._on_lost = on_lost
        self._is_retried = is_retried
        self._proxy = _proxy_to(self.base_url) if uses_proxies else None
        # Nothing compressed is asked for: see `auto_decompress`.
        self._headers = {"User-Agent": "mmrollouts", "Accept-Encoding": "identity"}
        if authorization is not None:
            self._headers["Authorization"] = authorization
        self.without_key = key_remover((authorization or "").rpartition(" ")[2])
        self._loop = EngineLoop()
        self._open: _Open | None = None
        self._former: _Open | None = None  # of a loop that was closed
        self._closed = False
        self._failing = False

    async def request(
        self,
        method: str,
        path: str,
        *,
        name: str,
        body: Body | None = None,
        params: Mapping[str, str | int | bool] | None = None,
        headers: Mapping[str, str] | None = None,
        seconds: float | None = None,
        retry: bool = True,
        slot: bool = True,
    ) -> HttpResponse:
        """Send a request and read the whole response, of whatever status (those of `is_retried` after the retries).

        `body` is JSON in segments, which are sent without joining them; they must not change until the call
        is over. `seconds` replaces `total_seconds`. `retry=False` is for what must not happen twice: one
        attempt, on a new connection. `slot=False` is for control calls, which must not queue behind
        generations; they have 32 slots of their own. Raises `ServerUnreachableError`, `ServerTimeoutError`,
        `EngineClosedError`, `MalformedResultError` (not HTTP, too large, an invalid encoding) and
        `ServerError` (a redirect, which is not followed: the key and the prompts are for this server only).
        """
        if params:
            query = {key: str(value).lower() if isinstance(value, bool) else value for key, value in params.items()}
            path += "?" + urlencode(query)
        call = self._call(method, path, name, body, headers, seconds)
        async with self._slot(call, control=not slot) as session:
            if retry:
                response, content = await self._respond(call, session)
            else:
                # A kept connection may be one that the server closes: whether it has the request is unknown.
                async with self._session(force_close=True) as new_session:
                    response, content = await self._respond(call, new_session, retry=False)
            return HttpResponse(response.status, response.headers, content, name, call.sent)

    @asynccontextmanager
    async def stream(
        self,
        path: str,
        *,
        name: str,
        body: Body,
        headers: Mapping[str, str] | None = None,
        seconds: float | None = None,
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """POST, and iterate over the `data` of the server-sent events of the response, up to `[DONE]`.

        Retries like `request` until the head of a response has arrived. The slot is held, and the deadline
        runs, until the context is left; leaving it before the end closes the connection. An error status
        raises `ServerError`, a stream without `[DONE]` `MalformedResultError`, a connection that breaks
        `ServerUnreachableError`.
        """
        call = self._call("POST", path, name, body, headers, seconds)
        async with self._slot(call) as session:
            response, content = await self._respond(call, session, whole=False)
            if response.status >= 400:
                failed = HttpResponse(response.status, response.headers, content, name, call.sent)
                raise response_error(name, failed, call.place)
            try:
                yield self._events(call, response)
            finally:
                response.release()  # which closes the connection if the body has not been read to its end

    async def close(self) -> None:
        """End all requests with `EngineClosedError`, and close. Raises `EngineError` on another loop."""
        self.enter("close")
        self._closed = True
        former, state = self._former, self._open
        self._former = self._open = None
        running = set() if state is None else state.running
        expire(running)
        try:
            while running:  # noqa: ASYNC110 a few rounds, until the ended calls have unwound
                await asyncio.sleep(0)
        finally:  # also if the closing task is cancelled, as one that closes inside of its own stream is
            for each in (former, state):
                if each is not None:
                    await each.loop_end.aclose()

    def _call(
        self,
        method: str,
        path: str,
        name: str,
        body: Body | None,
        headers: Mapping[str, str] | None,
        seconds: float | None,
    ) -> Call:
        url = URL(self.base_url + path, encoded=True)
        payload = None if body is None else SegmentsPayload(body)
        seconds = self.limits.total_seconds if seconds is None else seconds
        return Call(name, method, url, payload, headers, seconds, self.limits.response_bytes)

    @asynccontextmanager
    async def _slot(self, call: Call, *, control: bool = False) -> AsyncIterator[aiohttp.ClientSession]:
        """A slot, under the deadline of the call, with the session of the running loop."""
        self._raise_if_closed(call)
        self.enter(call.name)
        if self._open is None:
            await self._open_session()
        state = self._open
        assert state is not None  # it is closed by `close` alone
        call.deadline = asyncio.get_running_loop().time() + call.seconds
        scope = asyncio.timeout_at(call.deadline)
        try:
            async with scope:
                state.running.add(scope)
                # `close` ends the call by this scope; it also bounds the wait for the slot.
                async with state.control_slots if control else state.slots:
                    # The engine may have been closed while the call waited for its slot.
                    self._raise_if_closed(call)
                    yield state.session
        except TimeoutError:
            # It is a TimeoutError of the block, or of a timeout of the caller.
            if not scope.expired():
                raise
            self._raise_if_closed(call)
            raise ServerTimeoutError(
                call.name,
                f"{call.place} was not over after {call.seconds:g} s; it was {call.stage} (attempt "
                f"{call.attempt}). Raise total_seconds (of a chat endpoint timeout_seconds) if such requests "
                "take longer",
            ) from None
        finally:
            state.running.discard(scope)

    async def _respond(
        self, call: Call, session: aiohttp.ClientSession, *, whole: bool = True, retry: bool = True
    ) -> tuple[aiohttp.ClientResponse, bytes]:
        """A response after as many attempts as it takes, with its body (empty if not `whole` and no error)."""
        retries = self.limits.retries if retry else 0
        kept_connection_lost = not retry
        while True:
            failure: ConnectionError | None = None
            retry_after, immediately = None, False
            try:
                response, content = await call.send(session, whole=whole)
            except ConnectionError as error:
                self._on_lost()
                self._raise_if_closed(call)
                failure, reason = error, str(error)
                if call.unanswered and not kept_connection_lost and retries:
                    # This is how a kept connection ends that the server has closed: not counted, once per
                    # call.
                    kept_connection_lost = immediately = True
                    retries += 1
            else:
                if not self._is_retried(response.status):
                    if self._failing:
                        self._failing = False
                        _LOG.info("%s responds again", self.base_url)
                    return response, content
                reason, retry_after = f"HTTP {response.status}", response.headers.get("retry-after")
            delay = 0.0 if immediately else self.limits.retry_delay(call.attempt, retry_after)
            if call.attempt > retries or asyncio.get_running_loop().time() + delay >= call.deadline:
                # A status that does not pass is returned: the caller reads the server's own message.
                if failure is None:
                    return response, content
                raise call.unreachable(failure) from failure
            # One warning when a series of failures begins and one line at its end: a restart fails hundreds
            # of requests.
            level = logging.DEBUG if self._failing else logging.WARNING
            self._failing = True
            message = "%s: %s (request %s, attempt %d), next in %.2f s"
            _LOG.log(level, message, call.place, reason, call.name, call.attempt, delay)
            call.stage = f"waiting to try again after: {reason}"
            if delay:
                await sleep(delay)

    async def _events(self, call: Call, response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
        decoder = EventDecoder()
        call.stage = "reading the response"
        try:
            while piece := await call.read(response):
                for event in decoder.feed(piece):
                    if event != b"[DONE]":
                        yield event
                        continue
                    # Only the end of the encoding may follow; a server that sends more loses the connection.
                    with suppress(TimeoutError, ConnectionError, EngineError):
                        async with asyncio.timeout(1.0):
                            await call.read(response)
                    return
        except ConnectionError as error:
            self._on_lost()
            raise call.unreachable(error) from error
        raise MalformedResultError(call.name, f"{call.place}: the stream ended without [DONE]")

    def _raise_if_closed(self, call: Call) -> None:
        if self._closed:
            raise EngineClosedError(call.name, "the engine is closed") from None

    def enter(self, name: str) -> None:
        """Begin a call on the running loop. Raises `EngineError` where the engine belongs to another one."""
        if self._loop.enter(name):
            self._former, self._open = self._open, None

    async def _open_session(self) -> None:
        """A session for the running loop. That of a loop before it is closed, where the loop was not wound up."""
        session = self._session(keepalive_timeout=self.limits.keepalive_seconds)
        slots, control_slots = asyncio.Semaphore(self.limits.concurrency), asyncio.Semaphore(_CONTROL_SLOTS)
        self._open = _Open(session, slots, control_slots, _closing(session))
        former, self._former = self._former, None
        # Begun, because the end of an event loop closes only generators that have begun.
        await anext(self._open.loop_end)
        if former is not None:
            await former.loop_end.aclose()

    def _session(self, **connector: Any) -> aiohttp.ClientSession:
        tls = client_tls_context() if self.base_url.startswith("https:") else True
        return aiohttp.ClientSession(
            # The slots are the limit; aiohttp's own, 100 connections, would hold calls of control back.
            connector=aiohttp.TCPConnector(limit=0, ssl=tls, **connector),
            cookie_jar=aiohttp.DummyCookieJar(),
            auto_decompress=False,  # a small body could become gigabytes
            headers=self._headers,
            proxy=self._proxy,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self.limits.connect_seconds),
        )


def _proxy_to(base_url: str) -> str | None:
    """The proxy that the environment names for a server (HTTPS_PROXY, NO_PROXY...)."""
    url = URL(base_url)
    return None if proxy_bypass(url.host or "") else getproxies().get(url.scheme)


async def _closing(session: aiohttp.ClientSession) -> AsyncGenerator[None, None]:
    """Closes the session when the generator is closed."""
    try:
        yield
    finally:
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                await session.close()
