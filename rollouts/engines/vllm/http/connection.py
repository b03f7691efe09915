"""How every request reaches a vLLM server: one set of connections per event loop, deadlines, retries, bounds.

Nothing here reads proxy settings from the environment: an engine inside a cluster must not send its prompts, its images
and its key through whatever `HTTP_PROXY` a shell happens to hold. https is checked against the system's certificate
authorities (OpenSSL's `SSL_CERT_FILE` and `SSL_CERT_DIR` name others).
"""

from __future__ import annotations

import asyncio
import logging
import math
import ssl
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from urllib.parse import urlencode

from renderers.tls import client_tls_context
from rollouts.engines.vllm.http.answers import Answer, Call, EventStream, redirected, typed, unreachable
from rollouts.engines.vllm.http.http1 import Body, Http1Connection, body_bytes, header_lines, request_line
from rollouts.engines.vllm.http.response import HttpResponse, response_error
from rollouts.engines.vllm.http.retrying import Timing, backoff_seconds, retry_after_seconds
from rollouts.engines.vllm.http.server_address import parse_address, redacted
from rollouts.errors import EngineClosedError, InvalidRequestError, ServerTimeoutError, ServerUnreachableError

__all__ = ["Body", "EventStream", "HttpLimits", "HttpResponse", "ServerConnection", "response_error"]

_LOG = logging.getLogger("rollouts.engines.vllm")
# Too many requests, and not now: the two statuses that ask for another try.
_BUSY = frozenset((429, 503))
_URGENT_SLOTS = 32
_OWN_HEADERS = frozenset(
    ("host", "content-length", "content-type", "transfer-encoding", "connection", "accept-encoding", "authorization")
)


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Bounds of everything: seconds, bytes, counts.

    `concurrency` requests are in flight per engine and event loop, whatever their routes. `total_seconds` is what a
    call may take in all, its wait for a slot and its retries included; `read_seconds` bounds the silence between two
    pieces of an answer (None: only the total counts, for a long completion is silent until it is done). Idle
    connections are closed after `keepalive_seconds`, which must stay below the server's own time (5 s in vLLM), so that
    no request meets a connection that the server is just closing. Retry number n waits up to
    `backoff_seconds` * 2**(n - 1), at most `longest_backoff_seconds`, which also bounds what a server can ask for by
    Retry-After. `response_bytes` bounds an answer after decompression.
    """

    concurrency: int = 512
    connect_seconds: float = 10.0
    read_seconds: float | None = None
    total_seconds: float = 3600.0
    keepalive_seconds: float = 3.0
    retries: int = 8
    backoff_seconds: float = 0.25
    longest_backoff_seconds: float = 15.0
    response_bytes: int = 256 * 2**20

    def __post_init__(self) -> None:
        for name, least in (("concurrency", 1), ("retries", 0), ("response_bytes", 1)):
            count = getattr(self, name)
            if isinstance(count, bool) or not isinstance(count, int) or count < least:
                raise ValueError(f"HttpLimits.{name} is {count!r} and must be a whole number, at least {least}")
        for name in ("connect_seconds", "total_seconds", "read_seconds"):
            seconds = getattr(self, name)
            if seconds is not None and not 0 < seconds < math.inf:
                raise ValueError(f"HttpLimits.{name} is {seconds!r} and must be a finite time above 0 s")
        for name in ("keepalive_seconds", "backoff_seconds", "longest_backoff_seconds"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"HttpLimits.{name} is {getattr(self, name)!r} and must be 0 s or more, and finite")


@dataclass(eq=False, slots=True)
class _Loop:
    """What belongs to one event loop. Idle connections stand in the order in which they became idle."""

    slots: asyncio.Semaphore
    urgent: asyncio.Semaphore
    idle: list[Http1Connection] = field(default_factory=list)
    running: set[asyncio.Timeout] = field(default_factory=set)
    sweep: asyncio.TimerHandle | None = None
    guard: AsyncGenerator[None, None] | None = None

    def close_idle(self) -> None:
        for connection in self.idle:
            connection.abort()
        self.idle.clear()
        if self.sweep is not None:
            self.sweep.cancel()
            self.sweep = None

    def shut(self) -> None:
        """End whatever runs: its deadline is now. Reports as closed, see `ServerConnection._admitted`."""
        self.close_idle()
        for scope in list(self.running):
            if not scope.expired():
                scope.reschedule(0.0)


class ServerConnection:
    """Requests to one server, from any event loop and any number of threads at once.

    Failed connections (refused, reset, ended in mid-answer) and HTTP 429 and 503 are tried again; nothing else is. A
    cancelled call closes its connection and frees its slot at once. `on_lost` is called whenever a connection turned
    out to be refused or broken, for the server may have restarted and forgotten everything; it must not block.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        limits: HttpLimits = HttpLimits(),
        on_lost: Callable[[], None] = lambda: None,
        timing: Timing = Timing(),  # noqa: B008 frozen
    ) -> None:
        self._address = parse_address(base_url, api_key=api_key)
        self.base_url = self._address.url
        self.limits = limits
        self._on_lost = on_lost
        self._timing = timing
        headers = {"host": self._address.host_header, "user-agent": "mmrollouts", "accept-encoding": "gzip"}
        if self._address.authorization is not None:
            headers["authorization"] = self._address.authorization
        self._headers = header_lines(headers.items())
        self._tls: ssl.SSLContext | None = None
        self._loops: dict[asyncio.AbstractEventLoop, _Loop] = {}
        self._lock = threading.Lock()
        self._closed = False
        self._troubled = False

    def __repr__(self) -> str:
        return f"ServerConnection({self.base_url!r})"

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
        """Send a request and take the whole answer, of whatever status (429 and 503 only after the retries).

        `body` is JSON in segments, sent one after the other and never joined; it must not change until the call is
        over. `seconds` replaces `total_seconds`. `retry=False` is for what must not happen twice: one attempt, on a new
        connection. `slot=False` is for control calls, which must not queue behind generations; they have a few slots
        of their own. Raises `ServerUnreachableError`, `ServerTimeoutError`, `EngineClosedError`,
        `MalformedResultError` (not HTTP, too large, an unknown encoding) and `ServerError` (a redirect: never followed,
        for the key and the prompts are meant for this server only).
        """
        call = self._call(method, path, name, body, params, headers, seconds, retry, slot)
        async with self._admitted(call) as loop:
            answer = await self._answered(loop, call, whole=True)
            answer.release()
            return HttpResponse(answer.status, answer.headers, answer.loaded, name)

    def stream(
        self,
        path: str,
        *,
        name: str,
        body: Body,
        headers: Mapping[str, str] | None = None,
        seconds: float | None = None,
    ) -> AbstractAsyncContextManager[EventStream]:
        """POST, and read the answer as server-sent events.

        Tried again like `request` until the head of an answer has come. The slot is held, and the deadline runs, until
        the context is left; leaving it before the end closes the connection.
        """
        return self._stream(self._call("POST", path, name, body, None, headers, seconds, True, True))

    async def close(self) -> None:
        """Refuse further requests, end those that run with `EngineClosedError`, close every connection."""
        self._closed = True
        with self._lock:
            loops, self._loops = self._loops, {}
        here = asyncio.get_running_loop()
        for loop, held in loops.items():
            if loop is not here and not loop.is_closed():
                loop.call_soon_threadsafe(held.shut)
        if (held_here := loops.get(here)) is not None:
            held_here.shut()
            while held_here.running:  # noqa: ASYNC110 a few rounds, until the ended calls have unwound
                await asyncio.sleep(0)
            if held_here.guard is not None:
                await held_here.guard.aclose()
            await asyncio.sleep(0)  # aborted transports let go of their sockets in the next round

    # One call.

    def _call(
        self,
        method: str,
        path: str,
        name: str,
        body: Body | None,
        params: Mapping[str, str | int | bool] | None,
        headers: Mapping[str, str] | None,
        seconds: float | None,
        retry: bool,
        slot: bool,
    ) -> Call:
        target = self._address.path + path
        if params:
            words = {key: str(value).lower() if isinstance(value, bool) else value for key, value in params.items()}
            target += "?" + urlencode(words)
        for header in headers or ():
            if header.lower() in _OWN_HEADERS:
                raise InvalidRequestError(name, f"the header {header} is set by the connection; leave it out")
        framing = "" if body is None else f"content-type: application/json\r\ncontent-length: {body_bytes(body)}\r\n"
        try:
            own = header_lines(headers.items()) if headers else ""
            head = f"{request_line(method, target)}{self._headers}{framing}{own}\r\n"
        except ValueError as error:
            raise InvalidRequestError(
                name, f"{method} {path!r}: {error} holds what HTTP cannot carry; use printable ASCII, and %20 in paths"
            ) from None
        return Call(
            name=name,
            method=method,
            head=head.encode("ascii"),
            body=body or (),
            seconds=self.limits.total_seconds if seconds is None else seconds,
            retries=self.limits.retries if retry else 0,
            slot=slot,
            reuse=retry,
            where=f"{method} {self.base_url}{path}",
        )

    @asynccontextmanager
    async def _admitted(self, call: Call) -> AsyncIterator[_Loop]:
        """A slot, under the deadline of the call."""
        self._refuse_if_closed(call)
        held = await self._here()
        call.ends = asyncio.get_running_loop().time() + call.seconds
        scope = asyncio.timeout_at(call.ends)
        try:
            async with scope:
                held.running.add(scope)
                try:
                    async with held.slots if call.slot else held.urgent:
                        self._refuse_if_closed(call)
                        yield held
                finally:
                    held.running.discard(scope)
        except TimeoutError:
            if not scope.expired():
                raise
            self._refuse_if_closed(call)
            raise ServerTimeoutError(
                call.name,
                f"{call.where} was not over after {call.seconds:g} s; it was {call.stage} (attempt {call.attempt}). "
                "Raise total_seconds if such requests may take longer",
            ) from None

    async def _answered(self, held: _Loop, call: Call, *, whole: bool) -> Answer:
        """An answer after as many attempts as it takes, its body loaded if `whole`."""
        while True:
            call.attempt += 1
            try:
                answer = await self._attempt(held, call, whole)
            except ConnectionError as error:
                self._lost(held)
                trouble = redacted(str(error)) or type(error).__name__
                delay = self._delay(call, None)
                if call.stale and not call.excused:
                    call.excused, delay = True, 0.0
                    call.retries += 1
                if delay is None:
                    self._refuse_if_closed(call)
                    raise unreachable(call, trouble) from error
            else:
                if answer.status not in _BUSY:
                    self._well()
                    return answer
                trouble = f"HTTP {answer.status}"
                delay = self._delay(call, answer.headers.get("retry-after"))
                if delay is None:
                    return answer
                answer.release()
            self._trouble(call, trouble, delay)
            call.stage = f"waiting to try again after: {trouble}"
            if delay:
                await self._timing.sleep(delay)

    async def _attempt(self, held: _Loop, call: Call, whole: bool) -> Answer:
        call.stage, call.stale = "connecting", False
        connection = await self._connection(held, call)
        try:
            call.stage = "waiting for the answer"
            with typed(call):
                head = await connection.exchange(call.method, call.head, call.body)
            answer = Answer(
                call,
                connection,
                head,
                response_bytes=self.limits.response_bytes,
                give_back=partial(self._give_back, held),
                on_lost=partial(self._lost, held),
            )
            if 300 <= answer.status < 400:
                raise redirected(call, answer)
            if whole or answer.status in _BUSY:
                call.stage = "reading the answer"
                await answer.load()
        except BaseException:
            call.stale = connection.answered_nothing_when_reused
            connection.abort()
            raise
        return answer

    def _delay(self, call: Call, retry_after: str | None) -> float | None:
        """Seconds until the next attempt; None if there is to be none, or the deadline would come first."""
        if call.attempt > call.retries:
            return None
        delay = backoff_seconds(
            call.attempt,
            self._timing.chance(),
            first=self.limits.backoff_seconds,
            longest=self.limits.longest_backoff_seconds,
            retry_after=retry_after_seconds(retry_after, self._timing.wall()),
        )
        return delay if asyncio.get_running_loop().time() + delay < call.ends else None

    def _refuse_if_closed(self, call: Call) -> None:
        if self._closed:
            raise EngineClosedError(call.name, "the engine is closed") from None

    # Once per spell of trouble and once at its end: hundreds of requests meet the same restart.

    def _trouble(self, call: Call, trouble: str, delay: float) -> None:
        level = logging.DEBUG if self._troubled else logging.WARNING
        self._troubled = True
        words = "%s: %s (request %s, attempt %d), next in %.2f s"
        _LOG.log(level, words, call.where, trouble, call.name, call.attempt, delay)

    def _well(self) -> None:
        if self._troubled:
            self._troubled = False
            _LOG.info("%s answers again", self.base_url)

    # Streaming.

    @asynccontextmanager
    async def _stream(self, call: Call) -> AsyncIterator[EventStream]:
        async with self._admitted(call) as held:
            answer = await self._answered(held, call, whole=False)
            try:
                events = EventStream(answer)
                yield events
                if events.done:
                    await answer.wind_down()
            finally:
                answer.release()

    # Connections.

    async def _here(self) -> _Loop:
        """What belongs to the running loop. Loops that have died are forgotten."""
        loop = asyncio.get_running_loop()
        held = self._loops.get(loop)
        if held is None:
            held = _Loop(asyncio.Semaphore(self.limits.concurrency), asyncio.Semaphore(_URGENT_SLOTS))
            with self._lock:
                for dead in [each for each in self._loops if each.is_closed()]:
                    del self._loops[dead]
                self._loops[loop] = held
            held.guard = self._until_loop_ends(loop, held)
            await anext(held.guard)
        return held

    async def _until_loop_ends(self, loop: asyncio.AbstractEventLoop, held: _Loop) -> AsyncGenerator[None, None]:
        """Closes the loop's connections when it ends: `asyncio.run` finishes whatever generators are left."""
        try:
            yield
        finally:
            with self._lock:
                self._loops.pop(loop, None)
            held.close_idle()
            await asyncio.sleep(0)  # aborted transports let go of their sockets in the next round

    async def _connection(self, held: _Loop, call: Call) -> Http1Connection:
        while call.reuse and held.idle:
            connection = held.idle.pop()  # the one used last, so that the others may expire
            if self._still_good(connection, self._timing.monotonic()):
                return connection
            connection.abort()
        try:
            return await Http1Connection.open(
                self._address.host,
                self._address.port,
                tls=self._tls_context() if self._address.tls else None,
                connect_seconds=self.limits.connect_seconds,
                read_seconds=self.limits.read_seconds,
            )
        except ssl.SSLError as error:
            raise ServerUnreachableError(
                call.name,
                f"{call.where}: no agreement on TLS ({error}). Check that the server speaks https, and that its "
                "certificate is signed by an authority that this machine trusts (SSL_CERT_FILE adds one)",
            ) from error

    def _tls_context(self) -> ssl.SSLContext:
        with self._lock:
            if self._tls is None:
                self._tls = client_tls_context()
            return self._tls

    def _lost(self, held: _Loop) -> None:
        held.close_idle()  # they led to the same server
        self._on_lost()

    def _give_back(self, held: _Loop, connection: Http1Connection) -> None:
        if self._closed or not connection.keep(self._timing.monotonic()):
            connection.abort()
            return
        held.idle.append(connection)
        if held.sweep is None:
            self._sweep_later(held)

    def _still_good(self, connection: Http1Connection, now: float) -> bool:
        return connection.usable and now - connection.idle_since < self.limits.keepalive_seconds

    def _sweep_later(self, held: _Loop) -> None:
        held.sweep = asyncio.get_running_loop().call_later(self.limits.keepalive_seconds, self._sweep, held)

    def _sweep(self, held: _Loop) -> None:
        """Close what has been idle for too long."""
        held.sweep = None
        now, kept = self._timing.monotonic(), []
        for connection in held.idle:
            if self._still_good(connection, now):
                kept.append(connection)
            else:
                connection.abort()
        held.idle = kept
        if kept:
            self._sweep_later(held)
