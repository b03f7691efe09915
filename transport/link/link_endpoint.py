"""The methods that client and server share: receive, acknowledge, flush, close.

One lock guards the state. Callers encode and decode in their own threads, add and remove messages under the lock, and
wake the I/O thread. Only the I/O thread uses the sockets.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Self, TypeVar

from renderers.media.source import MediaSource
from transport.errors import DecodeError, MissingExtraError
from transport.link.application_types import Delivery, LinkStats, PeerEvent
from transport.link.errors import (
    LinkClosedError,
    LinkError,
    PeerLostError,
    UnacknowledgedError,
    UndecodableMessageError,
)
from transport.link.io_thread import Connections, IoThread
from transport.link.limits import LinkLimits
from transport.link.message_streams import Incoming, Payload
from transport.link.peer import Peer
from transport.link.shared_state import Deadline, SharedState
from transport.wire.codec import decode_frames, encode_frames

if TYPE_CHECKING:
    from transport.link.io_thread import Socket

T = TypeVar("T")

_LOG = logging.getLogger("transport.link")
_MIN_CLOSE_SECONDS = 0.2  # seconds
_EVERYTHING = "not all sent messages were acknowledged"


def check_requirements(heartbeat: float, peer_timeout: float) -> None:
    """Raise `ValueError` unless `peer_timeout` is at least two heartbeats, `MissingExtraError` without pyzmq."""
    if not 0 < 2 * heartbeat <= peer_timeout:
        raise ValueError(
            f"peer_timeout is {peer_timeout:g} s and heartbeat {heartbeat:g} s. "
            "Make the heartbeat positive and the timeout at least twice that."
        )
    try:
        import zmq  # noqa: F401
    except ModuleNotFoundError as error:
        raise MissingExtraError("a link", "zmq", "pyzmq") from error


class Link:
    """Base of `LinkServer` and `LinkClient`. `connect` creates the `Connections`, in which they differ."""

    address: str

    def __init__(
        self,
        socket: Socket,
        limits: LinkLimits,
        heartbeat: float,
        peer_timeout: float,
        linger: float,
        connect: Callable[[SharedState], Connections],
    ) -> None:
        from transport.link.zmq_sockets import Wake

        wake = Wake()
        self.address = socket.address
        self._linger = linger
        self._state = SharedState(socket.address, limits, heartbeat, peer_timeout, wake.wake_io_thread)
        self._lock = self._state.lock
        self._connections = connect(self._state)
        self._thread = IoThread(self._state, socket, self._connections, wake)
        self._thread.start()

    def recv(self, timeout: float | None = None, *, acknowledge: bool = True) -> Delivery:
        """Return the next object: peers in turn, the messages of each peer in order.

        With `acknowledge=False` the peer keeps the message until `link.acknowledge(delivery)`, and resends it if this
        process dies before. By default the message is acknowledged when it is returned. Arrays are views of the
        received frames.

        `timeout` is in seconds; None: no limit, 0: no wait. Raises `LinkTimeoutError`, `LinkClosedError`, and, once for
        each message that cannot be decoded, `UndecodableMessageError`: the message is reported to its sender and not
        resent, and the next call returns the next message. On a client also `PeerLostError`, `LinkRefusedError`, and
        `MessageRejectedError` or `MessageTooLargeError` if the server could not decode a message or does not accept it.
        """
        deadline = Deadline(timeout)
        peer, incoming = self._state.wait(self._receive_attempt(), deadline, "no message arrived")
        with self._returned_if_interrupted(peer, incoming):
            delivery = self._decode(peer, incoming)
        if acknowledge:
            self.acknowledge(delivery)
        return delivery

    async def recv_async(self, *, acknowledge: bool = True) -> Delivery:
        """`recv` for an event loop; use `asyncio.timeout` for a time limit.

        A cancelled call loses no message: the next call returns it.
        """
        peer, incoming = await self._state.wait_async(self._receive_attempt())
        with self._returned_if_interrupted(peer, incoming):
            delivery = await asyncio.to_thread(self._decode, peer, incoming)
        if acknowledge:
            self.acknowledge(delivery)
        return delivery

    def acknowledge(self, delivery: Delivery) -> None:
        """Acknowledge a message: its sender deletes it. A second call has no effect.

        Raises `LinkClosedError` if the link is closed: the sender gets no acknowledgement and resends the message.
        """
        with self._lock:
            peer = self._state.peers.get(delivery.peer)
            if peer is None or not peer.inbox.acknowledge(bytes.fromhex(delivery.session), delivery.sequence):
                return
            if self._state.closing:
                raise LinkClosedError(self.address)
            peer.ack_needed = True
            self._state.wake_io_thread()

    def flush(self, timeout: float | None = None) -> None:
        """Wait until all sent messages are acknowledged.

        Raises `LinkTimeoutError`, `LinkClosedError`, `PeerLostError` for a lost peer, `MessageRejectedError` if a
        peer could not decode a message, `MessageTooLargeError` if a message was queued that is larger than a peer
        accepts, on a client `LinkRefusedError`.
        """
        self._state.wait(self._flush_attempt(), Deadline(timeout), _EVERYTHING)

    async def flush_async(self) -> None:
        """`flush` for an event loop."""
        await self._state.wait_async(self._flush_attempt())

    def next_event(self, timeout: float | None = None) -> PeerEvent:
        """Return the next `PeerEvent`; the last 10,000 are kept. Raises the errors of `recv`."""
        events = self._state.events
        return self._state.wait(lambda: events.popleft() if events else None, Deadline(timeout), "no event happened")

    def stats(self) -> LinkStats:
        """Return a copy of the counters."""
        with self._lock:
            return replace(self._state.stats)

    def close(self, timeout: float | None = None) -> None:
        """Wait until all messages are acknowledged and every peer has received our acknowledgements, then close.

        Waits up to `timeout` seconds (default: `linger`), and not for peers that left or are lost. Closes in any case.
        Raises `UnacknowledgedError` if messages remain unacknowledged, and `MessageRejectedError` or
        `MessageTooLargeError` for messages that a peer could not decode or does not accept and that no call has
        reported yet. A second call has no effect.
        """
        deadline = Deadline(self._linger if timeout is None else timeout)
        try:
            self._state.wait(self._drain_attempt(), deadline, _EVERYTHING)
        except (LinkError, DecodeError):
            pass  # the unacknowledged messages are counted below
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

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
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

    def _send_attempt(self, find_peer: Callable[[], Peer], payload: Payload) -> Callable[[], int | None]:
        since = self._state.active_seconds

        def attempt() -> int | None:
            peer = find_peer()
            peer.check_rejected()
            if not peer.outbox.has_room(payload.size):
                self._connections.check_waiting(peer, since)
                return None
            number = peer.put(payload)
            self._state.wake_io_thread()
            return number

        return attempt

    # -- receiving

    def _receive_attempt(self) -> Callable[[], tuple[Peer, Incoming] | None]:
        since = self._state.active_seconds

        def attempt() -> tuple[Peer, Incoming] | None:
            taken = self._state.next_incoming()
            if taken is None:
                self._connections.check_receiving(since)
            return taken

        return attempt

    def _decode(self, peer: Peer, incoming: Incoming) -> Delivery:
        """Decode a message. Raises `UndecodableMessageError`, and reports the failure to the sender."""
        session = incoming.session.hex()
        try:
            obj = decode_frames(incoming.frames, limits=self._state.limits.decode, find_media=incoming.media.get)
        except DecodeError as error:
            with self._lock:
                self._state.stats.undecodable += 1
                if peer.inbox.reject(incoming.session, incoming.sequence, str(error)):
                    peer.ack_needed = True
                    self._state.wake_io_thread()
            undecodable = UndecodableMessageError(peer.name, session, incoming.sequence, error)
            _LOG.error("%s", undecodable)
            raise undecodable from error
        with self._lock:
            self._state.stats.delivered += 1
        return Delivery(peer.name, obj, session, incoming.sequence)

    @contextmanager
    def _returned_if_interrupted(self, peer: Peer, incoming: Incoming) -> Iterator[None]:
        """Return the message to the front of its queue if decoding is interrupted (cancellation, Ctrl-C)."""
        try:
            yield
        except UndecodableMessageError:
            raise
        except BaseException:
            with self._lock:
                peer.inbox.return_to_front(incoming)
                self._state.mark_ready(peer)
                self._state.notify_waiters()
            raise

    # -- waiting

    def _flush_attempt(self) -> Callable[[], bool | None]:
        since = self._state.active_seconds

        def attempt() -> bool | None:
            for peer in self._state.peers.values():
                peer.check_rejected()
            waiting = [peer for peer in self._state.peers.values() if len(peer.outbox)]
            for peer in waiting:
                self._connections.check_waiting(peer, since)
            return None if waiting else True

        return attempt

    def _drain_attempt(self) -> Callable[[], bool | None]:
        """`_flush_attempt` that does not wait for lost peers."""
        since = self._state.active_seconds

        def worth_waiting(peer: Peer) -> bool:
            try:
                self._connections.check_waiting(peer, since)
            except PeerLostError:
                return False
            return len(peer.outbox) > 0

        return lambda: None if any(worth_waiting(peer) for peer in self._state.peers.values()) else True

    def _stop(self, wait: float) -> bool:
        """End the I/O thread after every peer has received our acknowledgements. Returns True if it had ended before.

        Waits up to `wait` seconds, and at least `_MIN_CLOSE_SECONDS`.
        """
        with self._lock:
            already, self._state.closing = self._state.closing, True
            if not already:
                self._state.close_by = time.monotonic() + max(wait, _MIN_CLOSE_SECONDS)
            self._state.wake_io_thread()
            self._state.notify_waiters()
        self._thread.join()
        return already
