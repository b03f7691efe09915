"""Client and server of a link, and what both share: encoding, receiving, closing.

One lock guards the state. Callers encode and decode in their own threads, add and remove messages under the lock, and
wake the I/O thread. Only the I/O thread uses the sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Generic, Self, TypeVar

from renderers.media.item import MediaSource
from transport.errors import DecodeError, LinkClosedError, UnacknowledgedError, UndecodableMessageError
from transport.link.io_thread import ClientConnection, Connections, IoThread, ServerConnections, SharedState, Socket
from transport.link.limits import Delivery, LinkLimits, LinkStats, PeerEvent
from transport.link.messages import MAX_NAME_BYTES, is_valid_name
from transport.link.peer import Incoming, Payload, Peer
from transport.link.zmq_sockets import ClientKeys, DealerSocket, RouterSocket, ServerKeys, Wake
from transport.wire.codec import decode_frames, encode_frames

Received = TypeVar("Received")

_MIN_CLOSE_SECONDS = 0.2


class Link(Generic[Received]):
    """Base of `LinkServer` and `LinkClient`; `Received` is what `recv` returns."""

    def __init__(self, state: SharedState, socket: Socket, connections: Connections, linger: float) -> None:
        self.address = state.address
        self._linger = linger
        self._state = state
        wake = Wake()
        state.wake = wake.wake_io_thread
        self._thread = IoThread(state, socket, connections, wake)
        self._thread.start()
        weakref.finalize(self, _end_forgotten, state, self._thread)

    def recv(self, timeout: float | None = None) -> Received:
        """Return what was received next. The arrays of an object are views of the received frames.

        A client returns a `Delivery`. A server also returns `PeerConnected` before the objects of a connection and
        `PeerLost` after them. `timeout` is in seconds; None: no limit, 0: no wait. Raises `LinkTimeoutError`,
        `LinkClosedError`; `UndecodableMessageError`, after which the next call returns what came next; on a client
        `PeerLostError` or `LinkRefusedError`, after all received objects.
        """
        peer, item = self._state.wait(self._state.next_unread, timeout, "no message arrived")
        with self._returned_if_interrupted(peer, item):
            received: Received = self._decode(item)
            return received

    async def recv_async(self) -> Received:
        """`recv` for an event loop; use `asyncio.timeout` for a time limit.

        A cancelled call loses no message: the next call returns it.
        """
        peer, item = await self._state.wait_async(self._state.next_unread)
        with self._returned_if_interrupted(peer, item):
            return await asyncio.to_thread(self._decode, item) if isinstance(item, Incoming) else self._decode(item)

    def stats(self) -> LinkStats:
        """Return a copy of the counters."""
        with self._state.lock:
            return replace(self._state.stats)

    def close(self) -> None:
        """Send what is queued, wait until every peer confirmed that it received everything, and close.

        Waits up to `linger` seconds and closes in any case. A peer confirms what its process received; its application
        may receive it later. Raises `UnacknowledgedError` for messages that were not confirmed, unless the loss of
        the connection was raised or reported before. A second call has no effect.
        """
        if not self._stop():
            return
        state = self._state
        counts = {peer.name: peer.unacknowledged for peer in state.peers.values() if peer.unacknowledged}
        if state.unreported:
            counts[self.address] = state.unreported
        if counts:
            raise UnacknowledgedError(counts)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is None:
            self.close()
        else:
            self._stop()

    def _stop(self) -> bool:
        return _end_thread(self._state, self._thread, max(self._linger, _MIN_CLOSE_SECONDS))

    def _put(self, find_peer: Callable[[], Peer | None], payload: Payload) -> Callable[[], bool | None]:
        """Return an attempt to queue a message, for `SharedState.wait`."""

        def attempt() -> bool | None:
            peer = find_peer()
            if peer is None or not peer.put(payload):
                return None
            self._state.wake_io_thread()
            return True

        return attempt

    def _decode(self, item: Any) -> Any:
        """Return an event, or a decoded message. Raises `UndecodableMessageError`."""
        if not isinstance(item, Incoming):
            return item
        try:
            obj = decode_frames(item.frames, limits=self._state.limits.decode, find_media=item.media.get)
        except DecodeError as error:
            raise UndecodableMessageError(item.peer.name, error) from error
        return Delivery(item.peer.name, obj)

    @contextlib.contextmanager
    def _returned_if_interrupted(self, peer: Peer, item: Any) -> Iterator[None]:
        """Acknowledge a message. If decoding is interrupted (cancellation, Ctrl-C), the next call receives it."""
        undecodable = 0
        try:
            yield
        except UndecodableMessageError:
            undecodable = 1
            raise
        except BaseException:
            with self._state.lock:
                self._state.return_unread(peer, item)
            item = None
            raise
        finally:
            if isinstance(item, Incoming):
                with self._state.lock:
                    self._state.stats.undecodable += undecodable
                    peer.mark_read(item)
                    self._state.wake_io_thread()


def _end_thread(state: SharedState, thread: IoThread, seconds: float) -> bool:
    """End the I/O thread, which first sends what is queued, for up to `seconds`. Returns True in the first call."""
    state.check_process()
    with state.lock:
        first, state.closing = not state.closing, True
        if first:
            state.close_by = time.monotonic() + seconds
        state.wake_io_thread()
        state.notify_waiters()
    if thread is not threading.current_thread():
        thread.join()
    return first


def _end_forgotten(state: SharedState, thread: IoThread) -> None:
    """End the thread of a link that was not closed, also at the end of the process.

    If ZeroMQ still sent arrays whose memory the interpreter has freed, it would abort the process.
    """
    with contextlib.suppress(LinkClosedError):  # in a child after a fork
        _end_thread(state, thread, 0.0)


def encode_payload(obj: object) -> Payload:
    """Encode an object. Its media stay apart, because a connection sends each only once. Raises `EncodeError`."""
    sources: list[MediaSource] = []

    def omit(source: MediaSource) -> bool:
        sources.append(source)
        return True

    return Payload.of(encode_frames(obj, omit_media=omit), sources)


# The client: one connection to a server.


class LinkClient(Link[Delivery]):
    """One connection to a `LinkServer`; when it ends, every call raises `PeerLostError`, and a new link is needed.

    Connects in the background, for up to `peer_timeout` seconds; the server may start later than the client. `name`:
    the name of this client at the server, at most 200 bytes; by default a random one. Of two clients with one name, the
    server refuses the older one. `Delivery.peer` and errors give the address of the server as its name.

    A server that has been silent for `peer_timeout` is lost. The other arguments are those of `LinkServer`.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str | None = None,
        keys: ClientKeys | None = None,
        limits: LinkLimits | None = None,
        heartbeat: float = 1.0,
        peer_timeout: float = 10.0,
        linger: float = 5.0,
    ) -> None:
        self.name = uuid.uuid4().hex if name is None else name
        if not is_valid_name(self.name):
            raise ValueError(f"link name {name!r:.80} must be printable and of 1 to {MAX_NAME_BYTES} bytes.")
        state = SharedState(limits or LinkLimits(), heartbeat, peer_timeout)
        socket = DealerSocket(address, keys, state.limits)
        state.address = socket.address
        self._connection = ClientConnection(state, socket, self.name)
        super().__init__(state, socket, self._connection, linger)

    @property
    def connected(self) -> bool:
        """Whether the server accepted this client and the connection has not ended."""
        return self._connection.server is not None

    def send(self, obj: object, timeout: float | None = None) -> None:
        """Queue `obj`; it is sent in the background.

        Waits up to `timeout` seconds (None: no limit) while the client is connecting or the queue is full. Raises
        `LinkTimeoutError`, `PeerLostError`, `LinkRefusedError`, `LinkClosedError`, `EncodeError`,
        `MessageTooLargeError`.
        """
        attempt = self._put(lambda: self._connection.server, encode_payload(obj))
        self._state.wait(attempt, timeout, "the server did not answer, or the queue did not get room,")

    async def send_async(self, obj: object) -> None:
        """`send` for an event loop; encoding runs in a thread."""
        payload = await asyncio.to_thread(encode_payload, obj)
        await self._state.wait_async(self._put(lambda: self._connection.server, payload))


# The server: binds an address and exchanges messages with any number of clients.


class LinkServer(Link[Delivery | PeerEvent]):
    """Bound to `tcp://127.0.0.1:port` (`*` for any free port); clients connect to `address`.

    Addresses that other machines can reach need `allow_remote=True` and `keys`. `heartbeat` and `peer_timeout` are in
    seconds: the connection of a client that has been silent for `peer_timeout` ends, so choose a `peer_timeout` longer
    than the transfer of the largest message. `linger`: seconds for which `close` waits until the peers have received
    everything.

    Without keys, any process of any user of this machine can connect and use any name. ZeroMQ also assembles a message
    of any number of frames before this code receives it, so only keys prevent a hostile local user from filling the
    memory.
    """

    def __init__(
        self,
        address: str = "tcp://127.0.0.1:*",
        *,
        keys: ServerKeys | None = None,
        allow_remote: bool = False,
        limits: LinkLimits | None = None,
        heartbeat: float = 1.0,
        peer_timeout: float = 10.0,
        linger: float = 5.0,
    ) -> None:
        state = SharedState(limits or LinkLimits(), heartbeat, peer_timeout)
        socket = RouterSocket(address, keys, state.limits, allow_remote=allow_remote)
        state.address = socket.address
        self._connections = ServerConnections(state)
        super().__init__(state, socket, self._connections, linger)

    def send(self, peer: str, obj: object, timeout: float | None = None) -> None:
        """Queue `obj` for a connected peer; it is sent in the background.

        Waits up to `timeout` seconds (None: no limit) while the queue of the peer is full. Raises `LinkTimeoutError`,
        `PeerLostError` for a peer that is not connected, `LinkClosedError`, `EncodeError`, `MessageTooLargeError`.
        """
        attempt = self._put(lambda: self._connections.find(peer), encode_payload(obj))
        self._state.wait(attempt, timeout, f"no room in the queue to {peer!r}")

    async def send_async(self, peer: str, obj: object) -> None:
        """`send` for an event loop; encoding runs in a thread."""
        payload = await asyncio.to_thread(encode_payload, obj)
        await self._state.wait_async(self._put(lambda: self._connections.find(peer), payload))

    def peers(self) -> list[str]:
        """Return the names of the connected peers."""
        with self._state.lock:
            return list(self._state.peers)

    def refuse_peer(self, peer: str, reason: str) -> None:
        """End the connection of a peer, whose calls raise `LinkRefusedError` with this reason.

        Messages that are queued for it are dropped; `recv` returns `PeerLost`. No effect if it is not connected.
        """
        with self._state.lock:
            known = self._state.peers.get(peer)
            if known is not None:
                self._connections.refuse(known, reason)
                self._state.wake_io_thread()
