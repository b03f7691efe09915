"""The state that callers of a link and its I/O thread share, guarded by one lock."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import math
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from transport.errors import TransportError
from transport.link.application_types import LinkStats, PeerConnected, PeerEvent, PeerLost
from transport.link.errors import LinkClosedError, LinkTimeoutError
from transport.link.limits import LinkLimits
from transport.link.messages import LinkMessage
from transport.link.peer import Incoming, Peer

T = TypeVar("T")


class SharedState:
    """All methods except the constructor, `wait` and `wait_async` are called under `lock`.

    `address` and `wake`, which ends the poll of the I/O thread, are set when the socket exists.
    """

    address: str
    wake: Callable[[], None]

    def __init__(self, limits: LinkLimits, heartbeat: float, peer_timeout: float) -> None:
        if not 0 < 2 * heartbeat <= peer_timeout:
            raise ValueError(
                f"peer_timeout is {peer_timeout:g} s and heartbeat {heartbeat:g} s. "
                "Make the heartbeat positive and the timeout at least twice that."
            )
        self.lock = threading.Condition()
        self.limits = limits
        self.heartbeat = heartbeat
        self.peer_timeout = peer_timeout
        self.stats = LinkStats()
        self.peers: dict[str, Peer] = {}  # the connected ones, by name
        self.first_messages: list[tuple[bytes, LinkMessage]] = []  # by route; sent before those of peers
        self.failure: TransportError | None = None  # why no message can be sent or received any more
        self.unreported = 0  # unacknowledged messages lost by `failure`, until a call has raised it
        self.closing = False
        self.close_by = 0.0  # `time.monotonic` at which a closing link stops waiting for its peers
        # Seconds during which the I/O thread ran. A process that was stopped or suspended received nothing from its
        # peers; that time must not count as silence of the peers.
        self.active_seconds = 0.0
        self._last_advance = time.monotonic()
        # What the application has not received, in order, with the connection to which it belongs.
        self._unread: deque[tuple[Peer, Incoming | PeerEvent]] = deque()
        self._departed: set[Peer] = set()  # ended connections with unread messages or events
        self._wake_requested = False
        self._process = os.getpid()
        self._async_waiters: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()

    # -- callers

    def check_process(self) -> None:
        """Raise `LinkClosedError` in a child process after a fork, in which the lock may be held without an owner."""
        if os.getpid() != self._process:
            raise LinkClosedError(self.address, f"was made by process {self._process}, before this one was forked")

    def wait(self, attempt: Callable[[], T | None], timeout: float | None, what: str) -> T:
        """Call `attempt` under the lock until it returns a value other than None, which must be true; return it."""
        if timeout is not None and math.isnan(timeout):
            raise ValueError(f"timeout is {timeout}. Pass a number of seconds, or None for no limit.")
        self.check_process()
        with self.lock:
            longest = None if timeout is None else min(timeout, threading.TIMEOUT_MAX)
            result = self.lock.wait_for(lambda: self._attempt(attempt), longest)
        if result is None:
            raise LinkTimeoutError(what, timeout or 0.0)
        return result

    async def wait_async(self, attempt: Callable[[], T | None]) -> T:
        """`wait` for an event loop."""
        self.check_process()
        event = asyncio.Event()
        waiter = (asyncio.get_running_loop(), event)
        try:
            while True:
                with self.lock:
                    event.clear()
                    result = self._attempt(attempt)
                    if result is not None:
                        return result
                    self._async_waiters.add(waiter)
                await event.wait()
        finally:
            with self.lock:
                self._async_waiters.discard(waiter)

    def _attempt(self, attempt: Callable[[], T | None]) -> T | None:
        if self.closing:
            raise LinkClosedError(self.address)
        result = attempt()
        if result is None and self.failure is not None:
            self.unreported = 0
            raise copy.copy(self.failure)  # the callers' threads would share its traceback
        return result

    def notify_waiters(self) -> None:
        self.lock.notify_all()
        for loop, event in self._async_waiters:
            with contextlib.suppress(RuntimeError):  # the loop was closed during the call
                loop.call_soon_threadsafe(event.set)
        self._async_waiters.clear()

    # -- the I/O thread

    def wake_io_thread(self) -> None:
        if not self._wake_requested:
            self._wake_requested = True
            self.wake()

    def begin_turn(self, now: float) -> None:
        """Let `active_seconds` follow the time, by no more than a heartbeat, and accept the next wake."""
        self.active_seconds += min(now - self._last_advance, self.heartbeat)
        self._last_advance = now
        self._wake_requested = False

    def is_silent(self, since: float) -> bool:
        """Whether nothing has been received for `peer_timeout`. `since` is in `active_seconds`."""
        return self.active_seconds - since > self.peer_timeout

    def fail(self, error: TransportError, unacknowledged: int = 0) -> None:
        """Every further call raises `error`, after all received messages; the first error is kept."""
        if self.failure is None:
            self.failure = error
            self.unreported = unacknowledged
        self.notify_waiters()

    # -- peers and what was received of them

    @property
    def occupied_places(self) -> int:
        """The number of connections that use memory: unread messages are kept when a connection ends."""
        return len(self.peers) + len(self._departed)

    def add_peer(self, peer: Peer, *, report: bool) -> None:
        self.peers[peer.name] = peer
        self.stats.connections += 1
        if report:
            self.add_unread(peer, PeerConnected(peer.name))
        self.notify_waiters()

    def remove_peer(self, peer: Peer, reason: str, *, report: bool) -> None:
        """End a connection. With `report`, the application receives `PeerLost` after its messages."""
        del self.peers[peer.name]
        self.stats.lost += 1
        if report:
            self._departed.add(peer)
            self.add_unread(peer, PeerLost(peer.name, reason, peer.unacknowledged))
        self.notify_waiters()

    def add_unread(self, peer: Peer, item: Incoming | PeerEvent) -> None:
        peer.unread += 1
        self._unread.append((peer, item))
        self.notify_waiters()

    def next_unread(self) -> tuple[Peer, Incoming | PeerEvent] | None:
        """Remove and return what was received first; None if there is nothing."""
        if not self._unread:
            return None
        peer, item = self._unread.popleft()
        peer.unread -= 1
        if not peer.unread:
            self._departed.discard(peer)
        return peer, item

    def return_unread(self, peer: Peer, item: Incoming | PeerEvent) -> None:
        """Undo `next_unread`."""
        peer.unread += 1
        self._unread.appendleft((peer, item))
        self.notify_waiters()
