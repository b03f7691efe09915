"""The calls that both ends of a link have: receiving, acknowledging, flushing, closing.

All state is under one lock. Callers encode and decode in their own threads, queue and take under the lock, and ring the
I/O thread; only that thread touches sockets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Self, TypeVar

from renderers.media.source import MediaSource
from transport.errors import DecodeError, MissingExtraError
from transport.link.connections import Connections
from transport.link.errors import (
    LinkClosedError,
    LinkError,
    PeerLostError,
    UnacknowledgedError,
    UndecodableMessageError,
)
from transport.link.io_thread import IoThread
from transport.link.limits import LinkLimits
from transport.link.peer import Peer
from transport.link.protocol import Incoming, Payload
from transport.link.state import LinkState
from transport.link.values import Delivery, LinkStats, PeerEvent
from transport.link.waiting import Deadline
from transport.wire.codec import decode_frames, encode_frames

if TYPE_CHECKING:
    from transport.link.io_thread import Socket

T = TypeVar("T")

_LOG = logging.getLogger("transport.link")
_LEAST_PARTING = 0.2  # seconds
_EVERYTHING = "acknowledgement of everything sent"


def check_times(heartbeat: float, peer_timeout: float) -> None:
    """Raise `ValueError` unless a peer can miss a heartbeat and not be given up."""
    if not 0 < 2 * heartbeat <= peer_timeout:
        raise ValueError(
            f"peer_timeout is {peer_timeout:g} s and heartbeat {heartbeat:g} s. "
            "Make the heartbeat positive and the timeout at least twice that."
        )


def require_zmq() -> None:
    """Raise `MissingExtraError` unless pyzmq can be imported."""
    try:
        import zmq  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtraError("a link", "zmq", "pyzmq") from error


class Link:
    """One end. `connect` makes the `Connections` by which `LinkServer` and `LinkClient` differ."""

    address: str

    def __init__(
        self,
        socket: Socket,
        limits: LinkLimits,
        heartbeat: float,
        peer_timeout: float,
        linger: float,
        connect: Callable[[LinkState], Connections],
    ) -> None:
        from transport.link.sockets import Wake

        wake = Wake()
        self.address = socket.address
        self._linger = linger
        self._state = LinkState(socket.address, limits, heartbeat, peer_timeout, wake.ring)
        self._lock = self._state.lock
        self._connections = connect(self._state)
        self._thread = IoThread(self._state, socket, self._connections, wake)
        self._thread.start()

    def recv(self, timeout: float | None = None, *, acknowledge: bool = True) -> Delivery:
        """The next object, from whichever peer's turn it is; each peer's come in order.

        With `acknowledge=False` the peer keeps the message until `link.acknowledge(delivery)`, and sends it again
        should this process die before. The default acknowledges it as it is handed over. Arrays are views on the
        frames.

        `timeout` is in seconds; None waits for ever, 0 does not wait. Raises `LinkTimeoutError`, `LinkClosedError`,
        and `UndecodableMessageError` for a message that cannot be decoded here, once: its sender is told, it is not
        sent again, and the next call gives the next message. On a client also `PeerLostError`, `LinkRefusedError`, and
        `MessageRejectedError` once the server could not decode what was sent to it.
        """
        deadline = Deadline(timeout)
        peer, incoming = self._wait(self._taking(), deadline, "a message")
        with self._given_back_if_interrupted(peer, incoming):
            delivery = self._decode(peer, incoming)
        if acknowledge:
            self.acknowledge(delivery)
        return delivery

    async def recv_async(self, *, acknowledge: bool = True) -> Delivery:
        """`recv` for an event loop, which has `asyncio.timeout`.

        Cancelling it loses nothing: the message is handed to the next call.
        """
        peer, incoming = await self._wait_async(self._taking())
        with self._given_back_if_interrupted(peer, incoming):
            delivery = await asyncio.to_thread(self._decode, peer, incoming)
        if acknowledge:
            self.acknowledge(delivery)
        return delivery

    def acknowledge(self, delivery: Delivery) -> None:
        """Tell the sender that it may forget this message. A second time does nothing.

        Raises `LinkClosedError` if the link was closed before: the sender is not told and sends the message again.
        """
        with self._lock:
            peer = self._state.peers.get(delivery.peer)
            if peer is None or not peer.inbox.acknowledge(bytes.fromhex(delivery.session), delivery.sequence):
                return
            if self._state.closing:
                raise LinkClosedError(self.address)
            peer.ack_due = True
            self._state.ring()

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything sent is acknowledged.

        Raises `LinkTimeoutError`, `LinkClosedError`, `PeerLostError` for a lost peer, `MessageRejectedError` for what a
        peer could not decode, on a client `LinkRefusedError`.
        """
        self._wait(self._flushing(), Deadline(timeout), _EVERYTHING)

    async def flush_async(self) -> None:
        """`flush` for an event loop."""
        await self._wait_async(self._flushing())

    def next_event(self, timeout: float | None = None) -> PeerEvent:
        """The next thing that happened to a peer; the last 10,000 are kept. Raises as `recv` does."""
        events = self._state.events
        return self._wait(lambda: events.popleft() if events else None, Deadline(timeout), "an event")

    def stats(self) -> LinkStats:
        """Counts as of now."""
        with self._lock:
            return replace(self._state.stats)

    def close(self, timeout: float | None = None) -> None:
        """Wait until what was sent is acknowledged and every peer has heard what was acknowledged here, and close.

        Waits up to `timeout` seconds (default: the link's `linger`), and for no peer that has left or is lost. Closes
        in any case. Raises `UnacknowledgedError` if something was not acknowledged, `MessageRejectedError` for what a
        peer could not decode and no call has said yet. Closing twice is allowed.
        """
        deadline = Deadline(self._linger if timeout is None else timeout)
        try:
            self._wait(self._draining(), deadline, _EVERYTHING)
        except (LinkError, DecodeError):
            pass  # what is left is counted below
        finally:
            already = self._stop(deadline.left())
        left = {peer.name: len(peer.outbox) for peer in self._state.peers.values() if len(peer.outbox)}
        if already:
            return
        for peer in self._state.peers.values():
            peer.check_rejected()
        if left:
            raise UnacknowledgedError(left)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._stop(self._linger)

    # -- sending

    def _encode(self, obj: object) -> Payload:
        sources: list[MediaSource] = []

        def leave_out(source: MediaSource) -> bool:
            sources.append(source)
            return True

        return Payload.of(encode_frames(obj, omit_media=leave_out), sources)

    def _queueing(self, find_peer: Callable[[], Peer], payload: Payload) -> Callable[[], int | None]:
        since = self._state.clock

        def attempt() -> int | None:
            peer = find_peer()
            peer.check_rejected()
            if not peer.outbox.has_room(payload.size):
                self._connections.check_waiting(peer, since)
                return None
            number = peer.put(payload)
            self._state.ring()
            return number

        return attempt

    # -- receiving

    def _taking(self) -> Callable[[], tuple[Peer, Incoming] | None]:
        since = self._state.clock

        def attempt() -> tuple[Peer, Incoming] | None:
            taken = self._state.hand_out()
            if taken is None:
                self._connections.check_receiving(since)
            return taken

        return attempt

    def _decode(self, peer: Peer, incoming: Incoming) -> Delivery:
        """What a message holds. Raises `UndecodableMessageError`; the sender is then told that, and nobody else."""
        session = incoming.session.hex()
        try:
            obj = decode_frames(incoming.frames, limits=self._state.limits.decode, find_media=incoming.media.get)
        except DecodeError as error:
            with self._lock:
                self._state.stats.undecodable += 1
                if peer.inbox.reject(incoming.session, incoming.sequence, str(error)):
                    peer.ack_due = True
                    self._state.ring()
            undecodable = UndecodableMessageError(peer.name, session, incoming.sequence, error)
            _LOG.error("%s", undecodable)
            raise undecodable from error
        with self._lock:
            self._state.stats.delivered += 1
        return Delivery(peer.name, obj, session, incoming.sequence)

    @contextmanager
    def _given_back_if_interrupted(self, peer: Peer, incoming: Incoming) -> Iterator[None]:
        """Decoding a message that was taken: one that is not decoded to its end is there for the next call."""
        try:
            yield
        except UndecodableMessageError:
            raise
        except BaseException:
            with self._lock:
                peer.inbox.give_back(incoming)
                self._state.mark_ready(peer)
                self._state.announce()
            raise

    # -- waiting

    def _wait(self, attempt: Callable[[], T | None], deadline: Deadline, what: str) -> T:
        return self._state.waiters.wait(self._while_usable(attempt), deadline, what)

    async def _wait_async(self, attempt: Callable[[], T | None]) -> T:
        return await self._state.waiters.wait_async(self._while_usable(attempt))

    def _while_usable(self, attempt: Callable[[], T | None]) -> Callable[[], T | None]:
        def checked() -> T | None:
            self._state.check_usable()
            return attempt()

        return checked

    def _flushing(self) -> Callable[[], bool | None]:
        since = self._state.clock

        def attempt() -> bool | None:
            for peer in self._state.peers.values():
                peer.check_rejected()
            waiting = [peer for peer in self._state.peers.values() if len(peer.outbox)]
            for peer in waiting:
                self._connections.check_waiting(peer, since)
            return None if waiting else True

        return attempt

    def _draining(self) -> Callable[[], bool | None]:
        """`_flushing` that does not wait for those who are gone."""
        since = self._state.clock

        def worth_waiting(peer: Peer) -> bool:
            try:
                self._connections.check_waiting(peer, since)
            except PeerLostError:
                return False
            return len(peer.outbox) > 0

        return lambda: None if any(worth_waiting(peer) for peer in self._state.peers.values()) else True

    def _stop(self, wait: float) -> bool:
        """End the I/O thread, once every peer has heard what was acknowledged here; True if that was done before.

        Waits for that up to `wait` seconds, and a moment in any case.
        """
        with self._lock:
            already, self._state.closing = self._state.closing, True
            if not already:
                self._state.part_by = time.monotonic() + max(wait, _LEAST_PARTING)
            self._state.ring()
            self._state.announce()
        self._thread.join()
        return already
