"""The state that callers of a link and its I/O thread share, guarded by one lock."""

from __future__ import annotations

import asyncio
import contextlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from transport.link.application_types import LinkStats, PeerChange, PeerEvent
from transport.link.errors import LinkClosedError, LinkTimeoutError
from transport.link.limits import Credit, LinkLimits
from transport.link.message_streams import Incoming, MediaCache
from transport.link.messages import LinkMessage
from transport.link.peer import Peer

T = TypeVar("T")

_EVENTS_KEPT = 10_000


class Deadline:
    """The time `timeout` seconds from now; None: no deadline. Raises `ValueError` for NaN."""

    def __init__(self, timeout: float | None) -> None:
        if timeout is not None and math.isnan(timeout):
            raise ValueError(f"timeout is {timeout}. Pass a number of seconds, or None for no limit.")
        self._timeout = math.inf if timeout is None else timeout
        self._end = time.monotonic() + self._timeout

    def left(self) -> float:
        return max(self._end - time.monotonic(), 0.0)

    def step(self, what: str, most: float) -> float:
        """Return the seconds to wait, at most `most`. Raises `LinkTimeoutError` after the deadline."""
        left = self.left()
        if not left:
            raise LinkTimeoutError(what, self._timeout)
        return min(left, most)


class SharedState:
    """All methods except the constructor, `wait` and `wait_async` are called under `lock`.

    `wake` ends the poll of the I/O thread. Callers that wait check their condition after each notification and every
    `heartbeat` seconds: the silence of a peer causes no notification.
    """

    def __init__(
        self, address: str, limits: LinkLimits, heartbeat: float, peer_timeout: float, wake: Callable[[], None]
    ) -> None:
        self.lock = threading.Condition()
        self.address = address
        self.limits = limits
        self.heartbeat = heartbeat
        self.peer_timeout = peer_timeout
        self.stats = LinkStats()
        self.store = MediaCache(limits.blob_bytes)
        self.peers: dict[str, Peer] = {}
        self.events: deque[PeerEvent] = deque(maxlen=_EVENTS_KEPT)
        self.final_messages: list[tuple[bytes, LinkMessage]] = []  # to connections that have no peer
        self.failure: Exception | None = None
        self.closing = False
        self.close_by = 0.0  # `time.monotonic` at which a closing link stops waiting for its peers
        self.ended = False
        # Seconds during which the I/O thread ran. A process that was stopped or suspended received nothing from its
        # peers; that time must not count as silence of the peers.
        self.active_seconds = 0.0
        self._last_advance = time.monotonic()
        self._ready: dict[str, None] = {}  # names of peers with a complete message, in turn (an ordered set)
        self._wake = wake
        self.wake_requested = False  # reset by the I/O thread when it starts a run
        self._async_waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    def check_usable(self) -> None:
        """Raise the error that ended the link, if it has ended."""
        if self.failure is not None:
            raise self.failure
        if self.closing or self.ended:
            raise LinkClosedError(self.address)

    def wait(self, attempt: Callable[[], T | None], deadline: Deadline, what: str) -> T:
        """Call `attempt` under the lock until it returns a value other than None; return that value.

        Raises the error that ended the link, if it has ended.
        """
        with self.lock:
            while True:
                self.check_usable()
                result = attempt()
                if result is not None:
                    return result
                self.lock.wait(deadline.step(what, self.heartbeat))

    async def wait_async(self, attempt: Callable[[], T | None]) -> T:
        """`wait` for an event loop."""
        event = asyncio.Event()
        sleeper = (asyncio.get_running_loop(), event)
        try:
            while True:
                with self.lock:
                    event.clear()
                    self.check_usable()
                    result = attempt()
                    if result is not None:
                        return result
                    self._async_waiters.add(sleeper)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), self.heartbeat)
        finally:
            with self.lock:
                self._async_waiters.discard(sleeper)

    def notify_waiters(self) -> None:
        """Wake all waiting callers. Called under the lock."""
        self.lock.notify_all()
        for loop, event in self._async_waiters:
            with contextlib.suppress(RuntimeError):  # the loop was closed during the call
                loop.call_soon_threadsafe(event.set)
        self._async_waiters.clear()

    def wake_io_thread(self) -> None:
        if not self.wake_requested:
            self.wake_requested = True
            self._wake()

    def advance_clock(self, now: float) -> None:
        """Let `clock` follow the time, but for no longer than a heartbeat at once."""
        self.active_seconds += min(now - self._last_advance, self.heartbeat)
        self._last_advance = now

    def mark_ready(self, peer: Peer) -> None:
        """Add a peer to the turn if it has a complete message."""
        if peer.inbox.ready:
            self._ready[peer.name] = None

    def next_incoming(self) -> tuple[Peer, Incoming] | None:
        """Return a message of the next peer in turn."""
        while self._ready:
            name = next(iter(self._ready))
            del self._ready[name]
            peer = self.peers.get(name)
            if peer is not None and peer.inbox.ready:
                incoming = peer.inbox.pop_ready()
                self.mark_ready(peer)
                return peer, incoming
        return None

    def remove(self, peer: Peer) -> None:
        """Remove a peer and its undelivered messages."""
        self.peers.pop(peer.name, None)
        self._ready.pop(peer.name, None)

    def report(self, peer: Peer, change: PeerChange, reason: str = "") -> None:
        if change is not PeerChange.REJECTED:  # which leaves the connection unchanged
            peer.state = change
        self.events.append(PeerEvent(change, peer.name, peer.inbox.session.hex(), reason, peer.outbox.unacknowledged))
        if change is PeerChange.LOST:
            self.stats.lost += 1

    def window(self, peers: int) -> Credit:
        """Return the share of one peer of the receive limits."""
        share = max(peers, 1)
        return Credit(max(self.limits.receive_messages // share, 1), max(self.limits.receive_bytes // share, 1))
