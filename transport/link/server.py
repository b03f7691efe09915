"""The server: binds an address and exchanges messages with any number of clients."""

from __future__ import annotations

import asyncio

from transport.link.application_types import Delivery, PeerEvent
from transport.link.keys import ServerKeys
from transport.link.limits import LinkLimits
from transport.link.link_endpoint import Link, encode_payload
from transport.link.server_connections import ServerConnections
from transport.link.shared_state import SharedState
from transport.link.zmq_sockets import RouterSocket


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
