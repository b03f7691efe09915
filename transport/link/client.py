"""A worker's end: connects to one server, and connects again when that goes."""

from __future__ import annotations

import asyncio
import uuid

from transport.link.client_connection import ClientConnection
from transport.link.endpoint import Link, check_times, require_zmq
from transport.link.keys import ClientKeys
from transport.link.limits import LinkLimits
from transport.link.messages import MAX_NAME_BYTES
from transport.link.state import LinkState
from transport.link.waiting import Deadline


class LinkClient(Link):
    """Connected to a `LinkServer`, or trying to be: sending before the server is there is fine.

    `name` is who this worker is to the server, which sends what a worker did not acknowledge to the next one of that
    name; at most 200 bytes, by default one of its own. Two processes must not use one name at a time: the newer one is
    served, the older one is refused. `Delivery.peer` and errors call the server by its address.

    A call that waits raises `PeerLostError` when the server has been silent for `peer_timeout` seconds, counted from
    the call on; the link goes on trying, so the call may be repeated. A connection that is silent for that long is
    given up and opened anew, so allow for the time that the largest message from the server takes to cross. The other
    arguments are those of `LinkServer`.
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
        check_times(heartbeat, peer_timeout)
        require_zmq()
        from transport.link.sockets import DealerSocket

        self.name = name = uuid.uuid4().hex if name is None else name
        if not 0 < len(name.encode()) <= MAX_NAME_BYTES or not name.isprintable():
            raise ValueError(f"link name {name!r:.80} must be printable and of 1 to {MAX_NAME_BYTES} bytes.")
        limits = limits or LinkLimits()
        socket = DealerSocket(address, keys, max_frame=limits.decode.max_total_bytes)

        def connect(state: LinkState) -> ClientConnection:
            connection = ClientConnection(state, socket, name)
            self._server = connection.server
            return connection

        super().__init__(socket, limits, heartbeat, peer_timeout, linger, connect)

    @property
    def session(self) -> str:
        """Names this life of the link, as `Delivery.session` does at the server."""
        return self._server.session.hex()

    @property
    def connected(self) -> bool:
        """Whether the server has been heard of within `peer_timeout`."""
        return self._server.connected

    def send(self, obj: object, timeout: float | None = None) -> int:
        """Queue `obj` and return its sequence number; it is sent, and sent again, until acknowledged.

        Waits up to `timeout` seconds (None: for ever) while the queue is full. Raises `LinkTimeoutError`,
        `PeerLostError`, `LinkRefusedError`, `EncodeError`, `MessageTooLargeError`.
        """
        attempt = self._queueing(lambda: self._server, self._encode(obj))
        return self._wait(attempt, Deadline(timeout), "room in the queue")

    async def send_async(self, obj: object) -> int:
        """`send` for an event loop; encoding runs in a thread."""
        attempt = self._queueing(lambda: self._server, await asyncio.to_thread(self._encode, obj))
        return await self._wait_async(attempt)

    def unacknowledged(self) -> tuple[int, ...]:
        """Sequence numbers of what was sent and is not acknowledged."""
        with self._lock:
            return self._server.outbox.unacknowledged
