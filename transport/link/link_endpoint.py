"""What client and server share: encoding, receiving, closing.

One lock guards the state. Callers encode and decode in their own threads, add and remove messages under the lock, and
wake the I/O thread. Only the I/O thread uses the sockets.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Generic, Self, TypeVar

from renderers.media.source import MediaSource
from transport.errors import DecodeError
from transport.link.application_types import Delivery, LinkStats
from transport.link.errors import LinkClosedError, UnacknowledgedError, UndecodableMessageError
from transport.link.io_thread import Connections, IoThread, Socket
from transport.link.peer import Incoming, Payload, Peer
from transport.link.shared_state import SharedState
from transport.link.zmq_sockets import Wake
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
