"""What both ends of a link share: the thread that owns the socket, and the calls that wait for it.

All state is under one lock. Callers encode and decode in their own threads, queue and take under the lock, and ring the
I/O thread; only that thread touches sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

from renderers.media.source import MediaSource
from transport.codec import decode_frames, encode_frames
from transport.errors import DecodeError
from transport.link.blobs import BlobStore
from transport.link.errors import (
    LinkClosedError,
    LinkError,
    LinkTimeoutError,
    MissingExtraError,
    PeerLostError,
    UnacknowledgedError,
)
from transport.link.limits import Credit, LinkLimits
from transport.link.messages import Blob, LinkMessage, Refused, Signal, from_frames, to_frames
from transport.link.peer import Due, Peer
from transport.link.protocol import Incoming, Payload
from transport.link.values import Delivery, LinkStats, PeerChange, PeerEvent
from transport.unpacking import build_media
from transport.wire import Buffer

if TYPE_CHECKING:
    from transport.link.sockets import Arrival, DealerSocket, RouterSocket

    Socket: TypeAlias = RouterSocket | DealerSocket

T = TypeVar("T")

_EVENTS_KEPT = 10_000
_BATCH = 256  # messages read, or sent to one peer, before the other direction gets its turn
_FULL_RETRY = 0.001  # seconds; ZeroMQ does not say when a ROUTER's queue to one peer has room again


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
        raise MissingExtraError("pyzmq", "zmq") from error


class Link(ABC):
    """One end. `LinkServer` and `LinkClient` say how connections come about and who the peers are."""

    address: str

    def __init__(
        self, socket: Socket, limits: LinkLimits, heartbeat: float, peer_timeout: float, linger: float
    ) -> None:
        from transport.link.sockets import Wake

        self.address = socket.address
        self._limits = limits
        self._heartbeat = heartbeat
        self._peer_timeout = peer_timeout
        self._linger = linger
        self._stats = LinkStats()
        self._store = BlobStore(limits.blob_bytes)
        self._peers: dict[str, Peer] = {}
        self._ready: dict[str, None] = {}  # names of peers with something to hand out, in turn
        self._events: deque[PeerEvent] = deque(maxlen=_EVENTS_KEPT)
        self._parting: list[tuple[bytes, LinkMessage]] = []  # last words to connections that have no peer
        self._changed = threading.Condition()
        self._sleepers: set[tuple[asyncio.AbstractEventLoop, asyncio.Event]] = set()
        self._failure: Exception | None = None
        self._closing = False
        self._ended = False
        # Seconds in which this process was there to listen. One that was stopped, or that hung, has not heard of its
        # peers either and must not blame them.
        self._clock = 0.0
        self._last_turn = time.monotonic()
        self._wake = Wake()
        self._ringing = False
        self._thread = threading.Thread(target=self._run, args=(socket,), name=f"link {self.address}", daemon=True)

    # -- what the application calls

    def recv(self, timeout: float | None = None, *, acknowledge: bool = True) -> Delivery:
        """The next object, from whichever peer's turn it is; each peer's come in order.

        With `acknowledge=False` the peer keeps the message until `link.acknowledge(delivery)`, and sends it again
        should this process die before. The default acknowledges it as it is handed over. Arrays are views on the
        frames.

        `timeout` is in seconds; None waits for ever, 0 does not wait. Raises `LinkTimeoutError`, `LinkClosedError`; on
        a client also `PeerLostError`, `LinkRefusedError`, and `DecodeError` for what cannot be decoded. A server
        refuses a peer whose message cannot be decoded, tells it why, and goes on.
        """
        deadline = Deadline(timeout)
        while True:
            peer, incoming = self._wait(self._taking(), deadline, "a message")
            try:
                delivery = self._decode(peer, incoming)
            except BaseException:
                self._give_back(peer, incoming)
                raise
            if delivery is not None:
                if acknowledge:
                    self.acknowledge(delivery)
                return delivery

    async def recv_async(self, *, acknowledge: bool = True) -> Delivery:
        """`recv` for an event loop, which has `asyncio.timeout`.

        Cancelling it loses nothing: the message is handed to the next call.
        """
        while True:
            peer, incoming = await self._wait_async(self._taking())
            try:
                delivery = await asyncio.to_thread(self._decode, peer, incoming)
            except BaseException:
                self._give_back(peer, incoming)
                raise
            if delivery is not None:
                if acknowledge:
                    self.acknowledge(delivery)
                return delivery

    def acknowledge(self, delivery: Delivery) -> None:
        """Tell the sender that it may forget this message. A second time does nothing."""
        with self._changed:
            peer = self._peers.get(delivery.peer)
            if peer is not None and peer.inbox.acknowledge(bytes.fromhex(delivery.session), delivery.sequence):
                peer.ack_due = True
                self._ring()

    def flush(self, timeout: float | None = None) -> None:
        """Wait until everything sent is acknowledged. Raises as `recv` does, and `PeerLostError` for a lost peer."""
        self._wait(self._flushing(), Deadline(timeout), "acknowledgement of everything sent")

    async def flush_async(self) -> None:
        """`flush` for an event loop."""
        await self._wait_async(self._flushing())

    def next_event(self, timeout: float | None = None) -> PeerEvent:
        """The next thing that happened to a peer; the last 10,000 are kept. Raises as `recv` does."""
        return self._wait(self._take_event, Deadline(timeout), "an event")

    def stats(self) -> LinkStats:
        """Counts as of now."""
        with self._changed:
            return replace(self._stats)

    def close(self, timeout: float | None = None) -> None:
        """Wait up to `timeout` seconds (default: the link's `linger`) for what was sent to be acknowledged, and close.

        Closes in any case. Raises `UnacknowledgedError` if something was not acknowledged. Closing twice is allowed.
        """
        deadline = Deadline(self._linger if timeout is None else timeout)
        try:
            self._wait(self._draining(), deadline, "acknowledgement of everything sent")
        except (LinkError, DecodeError):
            pass  # what is left is counted below
        finally:
            already = self._stop()
        left = {peer.name: len(peer.outbox) for peer in self._peers.values() if len(peer.outbox)}
        if left and not already:
            raise UnacknowledgedError(left)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
        else:
            self._stop()

    # -- what the ends add

    @abstractmethod
    def _greeted(self, arrival: Arrival, message: LinkMessage) -> Peer | None:
        """The peer a message belongs to, unless the message was about the connection. Under the lock."""

    @abstractmethod
    def _reject(self, arrival: Arrival, error: DecodeError | LinkError) -> None:
        """Something arrived that an honest peer does not send. Under the lock."""

    @abstractmethod
    def _undecodable(self, peer: Peer, error: DecodeError) -> None:
        """A message that came whole cannot be decoded. Under the lock; may raise `error`."""

    @abstractmethod
    def _tend(self) -> None:
        """Notice what changed without a message. Under the lock, in the I/O thread."""

    @abstractmethod
    def _check_waiting(self, peer: Peer, since: float) -> None:
        """Raise `PeerLostError` if waiting for a peer, since that time on the link's clock, has no use."""

    @abstractmethod
    def _check_receiving(self, since: float) -> None:
        """Raise `PeerLostError` if waiting for a message, since that time likewise, has no use."""

    @abstractmethod
    def _look_at_connection(self, poller: Any) -> None:
        """Notice connections that opened or broke. In the I/O thread."""

    @abstractmethod
    def _ignores(self, arrival: Arrival) -> bool:
        """Whether a connection was refused, so that its messages are not worth reading."""

    # -- sending

    def _encode(self, obj: object) -> Payload:
        sources: list[MediaSource] = []

        def leave_out(source: MediaSource) -> bool:
            sources.append(source)
            return True

        return Payload.of(encode_frames(obj, held=leave_out), sources)

    def _queueing(self, find_peer: Callable[[], Peer], payload: Payload) -> Callable[[], int | None]:
        since = self._clock

        def attempt() -> int | None:
            peer = find_peer()
            if not peer.outbox.has_room(payload.size):
                self._check_waiting(peer, since)
                return None
            number = peer.put(payload)
            self._ring()
            return number

        return attempt

    # -- receiving

    def _taking(self) -> Callable[[], tuple[Peer, Incoming] | None]:
        since = self._clock

        def attempt() -> tuple[Peer, Incoming] | None:
            while self._ready:
                name = next(iter(self._ready))
                del self._ready[name]
                peer = self._peers.get(name)
                if peer is not None and peer.inbox.ready:
                    incoming = peer.inbox.hand_out()
                    self._mark_ready(peer)
                    return peer, incoming
            self._check_receiving(since)
            return None

        return attempt

    def _decode(self, peer: Peer, incoming: Incoming) -> Delivery | None:
        try:
            obj = decode_frames(incoming.frames, limits=self._limits.decode, find_media=incoming.media.get)
        except DecodeError as error:
            with self._changed:
                self._undecodable(peer, error)
                self._announce()
            return None
        with self._changed:
            self._stats.delivered += 1
        return Delivery(peer.name, obj, incoming.session.hex(), incoming.sequence)

    def _give_back(self, peer: Peer, incoming: Incoming) -> None:
        with self._changed:
            peer.inbox.give_back(incoming)
            self._mark_ready(peer)
            self._announce()

    def _mark_ready(self, peer: Peer) -> None:
        if peer.inbox.ready:
            self._ready[peer.name] = None

    # -- waiting

    def _flushing(self) -> Callable[[], bool | None]:
        since = self._clock

        def attempt() -> bool | None:
            waiting = [peer for peer in self._peers.values() if len(peer.outbox)]
            for peer in waiting:
                self._check_waiting(peer, since)
            return None if waiting else True

        return attempt

    def _draining(self) -> Callable[[], bool | None]:
        """`_flushing` that does not wait for those who are gone."""
        since = self._clock

        def worth_waiting(peer: Peer) -> bool:
            try:
                self._check_waiting(peer, since)
            except PeerLostError:
                return False
            return len(peer.outbox) > 0

        return lambda: None if any(worth_waiting(peer) for peer in self._peers.values()) else True

    def _take_event(self) -> PeerEvent | None:
        return self._events.popleft() if self._events else None

    def _wait(self, attempt: Callable[[], T | None], deadline: Deadline, what: str) -> T:
        """What `attempt` gives under the lock as soon as it gives something."""
        with self._changed:
            while True:
                self._check_usable()
                result = attempt()
                if result is not None:
                    return result
                self._changed.wait(deadline.step(what, self._heartbeat))

    async def _wait_async(self, attempt: Callable[[], T | None]) -> T:
        event = asyncio.Event()
        sleeper = (asyncio.get_running_loop(), event)
        try:
            while True:
                with self._changed:
                    self._check_usable()
                    event.clear()
                    result = attempt()
                    if result is not None:
                        return result
                    self._sleepers.add(sleeper)
                with contextlib.suppress(TimeoutError):  # look again: a peer may be lost by now
                    await asyncio.wait_for(event.wait(), self._heartbeat)
        finally:
            with self._changed:
                self._sleepers.discard(sleeper)

    def _check_usable(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._closing or self._ended:
            raise LinkClosedError(self.address)

    def _announce(self) -> None:
        """Wake everyone who waits. Under the lock."""
        self._changed.notify_all()
        for loop, event in self._sleepers:
            with contextlib.suppress(RuntimeError):  # the loop was closed under the call
                loop.call_soon_threadsafe(event.set)
        self._sleepers.clear()

    # -- the I/O thread

    def _ring(self) -> None:
        """Have the I/O thread look at what is due. Under the lock."""
        if not self._ringing:
            self._ringing = True
            self._wake.ring()

    def _stop(self) -> bool:
        """End the thread; True if that was done before."""
        with self._changed:
            already, self._closing = self._closing, True
            self._ring()
            self._announce()
        self._thread.join()
        return already

    def _run(self, socket: Socket) -> None:
        import zmq

        poller = zmq.Poller()
        try:
            poller.register(self._wake.fileno(), zmq.POLLIN)
            socket.register(poller)
            pause = 0.0
            while not self._closing:
                poller.poll(round(pause * 1000))
                pause = self._turn(socket, poller)
            self._part(socket)
        finally:
            with self._changed:
                self._ended = True
                self._announce()
            socket.close()
            self._wake.close()

    def _turn(self, socket: Socket, poller: Any) -> float:
        """Read and write once. Returns for how many seconds nothing is to do unless something happens."""
        with self._changed:
            self._wake.clear()
            self._ringing = False
        self._look_at_connection(poller)
        read = 0
        while read < _BATCH:
            arrival = socket.receive()
            if arrival is None:
                break
            read += 1
            self._take(arrival)
        with self._changed:
            now = time.monotonic()
            self._clock += min(now - self._last_turn, self._heartbeat)
            self._last_turn = now
            self._tend()
            more = [self._send_due(socket, peer, now) for peer in list(self._peers.values())]
            for route, message in self._parting:
                socket.send(route, to_frames(message))
            self._parting.clear()
        if read == _BATCH:
            return 0.0
        return min(more, default=self._heartbeat / 2)

    def _take(self, arrival: Arrival) -> None:
        if self._ignores(arrival):
            return
        try:
            message = from_frames(arrival.frames)
            # Hashing takes a while, so it happens before the lock is taken.
            content = build_media(message.digest, memoryview(message.data)) if isinstance(message, Blob) else message
        except DecodeError as error:
            with self._changed:
                self._reject(arrival, error)
                self._announce()
            return
        with self._changed:
            self._stats.bytes_received += _size(arrival.frames)
            try:
                peer = self._greeted(arrival, message)
                if peer is not None and not isinstance(content, Signal | Refused):
                    peer.take(content)  # type: ignore[arg-type]  # greetings belong to no peer
                    self._mark_ready(peer)
            except (DecodeError, LinkError) as error:
                self._reject(arrival, error)
            self._announce()

    def _send_due(self, socket: Socket, peer: Peer, now: float) -> float:
        """Send a peer what is due to it. Returns in how many seconds to try again."""
        for _ in range(_BATCH):
            if peer.route is None:
                return self._heartbeat / 2
            due = peer.next_due()
            if due is None:
                if not peer.open or now - peer.last_sent < self._heartbeat:
                    return self._heartbeat / 2
                due = peer.ping()
            if not self._send_one(socket, peer, peer.route, due, now):
                return _FULL_RETRY
        return 0.0

    def _send_one(self, socket: Socket, peer: Peer, route: bytes, due: Due, now: float) -> bool:
        from transport.link.sockets import Sent

        frames = to_frames(due.message)
        outcome = socket.send(route, frames)
        if outcome is Sent.FULL:
            return False
        if outcome is Sent.GONE:
            peer.disconnect()
            return True
        due.done()
        peer.last_sent = now
        self._stats.bytes_sent += _size(frames)
        return True

    def _part(self, socket: Socket) -> None:
        with self._changed:
            routes = [peer.route for peer in self._peers.values() if peer.route is not None]
        for route in routes:
            socket.send(route, to_frames(Signal.BYE))

    # -- events

    def _report(self, peer: Peer, change: PeerChange, reason: str = "") -> None:
        peer.state = change
        self._events.append(PeerEvent(change, peer.name, peer.inbox.session.hex(), reason, peer.outbox.unacknowledged))
        if change is PeerChange.LOST:
            self._stats.lost += 1

    def _window(self, peers: int) -> Credit:
        """One peer's share of what this end may hold."""
        share = max(peers, 1)
        return Credit(max(self._limits.receive_messages // share, 1), max(self._limits.receive_bytes // share, 1))


class Deadline:
    """A moment `timeout` seconds from now; None: never."""

    def __init__(self, timeout: float | None) -> None:
        self._timeout = timeout
        self._end = None if timeout is None else time.monotonic() + timeout

    def step(self, what: str, most: float) -> float:
        """For how long to wait before looking again. Raises `LinkTimeoutError` when the moment has come."""
        if self._end is None or self._timeout is None:
            return most
        left = self._end - time.monotonic()
        if left <= 0:
            raise LinkTimeoutError(what, self._timeout)
        return min(left, most)


def _size(frames: list[Buffer]) -> int:
    return sum([memoryview(frame).nbytes for frame in frames])


def lost(peer: Peer, reason: str) -> PeerLostError:
    return PeerLostError(peer.name, reason, peer.outbox.unacknowledged)
