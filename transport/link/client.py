"""The client: one connection to a server."""

from __future__ import annotations

import asyncio
import uuid

from transport.link.application_types import Delivery
from transport.link.client_connection import ClientConnection
from transport.link.keys import ClientKeys
from transport.link.limits import LinkLimits
from transport.link.link_endpoint import Link, encode_payload
from transport.link.messages import MAX_NAME_BYTES, is_valid_name
from transport.link.shared_state import SharedState
from transport.link.zmq_sockets import DealerSocket


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
