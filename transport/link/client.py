"""The client: connects to one server, and reconnects when the connection breaks."""

from __future__ import annotations

import asyncio
import uuid

from transport.link.client_connection import ClientConnection
from transport.link.keys import ClientKeys
from transport.link.limits import LinkLimits
from transport.link.link_endpoint import Link, check_requirements
from transport.link.messages import MAX_NAME_BYTES
from transport.link.shared_state import Deadline, SharedState


class LinkClient(Link):
    """Connected to a `LinkServer`, or trying to connect; messages may be sent before the server is started.

    `name`: the name of this worker at the server, at most 200 bytes; by default a random one. The server sends the
    messages that a worker did not acknowledge to the next worker with the same name. Two processes must not use one
    name at the same time: the server accepts the newer one and refuses the older one. `Delivery.peer` and errors give
    the address of the server as its name.

    A call that waits raises `PeerLostError` when the server has been silent for `peer_timeout` seconds after the start
    of the call; the link continues to reconnect, so the call may be repeated. A connection that is silent for
    `peer_timeout` is reopened, so choose a `peer_timeout` longer than the transfer of the largest message. The other
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
        check_requirements(heartbeat, peer_timeout)
        from transport.link.zmq_sockets import DealerSocket

        self.name = name = uuid.uuid4().hex if name is None else name
        if not 0 < len(name.encode()) <= MAX_NAME_BYTES or not name.isprintable():
            raise ValueError(f"link name {name!r:.80} must be printable and of 1 to {MAX_NAME_BYTES} bytes.")
        limits = limits or LinkLimits()
        socket = DealerSocket(address, keys, max_frame=limits.decode.max_total_bytes)

        def connect(state: SharedState) -> ClientConnection:
            connection = ClientConnection(state, socket, name)
            self._server = connection.server
            return connection

        super().__init__(socket, limits, heartbeat, peer_timeout, linger, connect)

    @property
    def session(self) -> str:
        """Identifies this link; `Delivery.session` at the server has the same value."""
        return self._server.session.hex()

    @property
    def connected(self) -> bool:
        """Whether data of the server was received within the last `peer_timeout` seconds."""
        return self._server.connected

    def send(self, obj: object, timeout: float | None = None) -> int:
        """Queue `obj` and return its sequence number. The link sends it, and resends it until it is acknowledged.

        Waits up to `timeout` seconds (None: no limit) while the queue is full. Raises `LinkTimeoutError`,
        `PeerLostError`, `LinkRefusedError`, `EncodeError`, `MessageTooLargeError`.
        """
        attempt = self._send_attempt(lambda: self._server, self._encode(obj))
        return self._state.wait(attempt, Deadline(timeout), "no room in the queue")

    async def send_async(self, obj: object) -> int:
        """`send` for an event loop; encoding runs in a thread."""
        attempt = self._send_attempt(lambda: self._server, await asyncio.to_thread(self._encode, obj))
        return await self._state.wait_async(attempt)

    def unacknowledged(self) -> tuple[int, ...]:
        """Return the sequence numbers of the sent messages that are not acknowledged."""
        with self._lock:
            return self._server.outbox.unacknowledged
