"""The server: binds an address and exchanges messages with any number of clients."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from transport.link.application_types import PeerChange
from transport.link.keys import ServerKeys
from transport.link.limits import LinkLimits
from transport.link.link_endpoint import Link, check_requirements
from transport.link.server_connections import ServerConnections
from transport.link.shared_state import Deadline, SharedState


class LinkServer(Link):
    """Bound to `tcp://127.0.0.1:port` (`*` for any free port) or `ipc://path`; clients connect
    to `address`.

    Other addresses need `allow_remote=True` and `keys`. Only the owner can connect to an `ipc` path; every
    local user can connect to an abstract one (`ipc://@name`). The socket of a killed server is replaced.
    `LinkAddressError` is raised for a path at which a live server listens, and for one that is not a socket.

    `resume` maps the session of a `Delivery` to the last sequence number that is safely stored: the restarted server
    does not deliver the messages up to that number again.

    `heartbeat` and `peer_timeout` are in seconds: a peer that has been silent for `peer_timeout` is lost. This is
    reported as an event, and calls that wait for the peer raise; when the peer reconnects, both directions continue.
    `linger`: seconds for which `close` waits for the acknowledgements of both sides.

    Without keys, any process that can connect can use any name. ZeroMQ also assembles a message of any number of frames
    before this code receives it, so only keys prevent a hostile local user from filling the memory.
    """

    def __init__(
        self,
        address: str = "tcp://127.0.0.1:*",
        *,
        keys: ServerKeys | None = None,
        allow_remote: bool = False,
        resume: Mapping[str, int] | None = None,
        limits: LinkLimits | None = None,
        heartbeat: float = 1.0,
        peer_timeout: float = 10.0,
        linger: float = 5.0,
    ) -> None:
        check_requirements(heartbeat, peer_timeout)
        from transport.link.zmq_sockets import RouterSocket

        limits = limits or LinkLimits()
        settled = {bytes.fromhex(session): sequence for session, sequence in (resume or {}).items()}
        socket = RouterSocket(address, keys, allow_remote=allow_remote, max_frame=limits.decode.max_total_bytes)

        def connect(state: SharedState) -> ServerConnections:
            self._clients = ServerConnections(state, settled)
            return self._clients

        super().__init__(socket, limits, heartbeat, peer_timeout, linger, connect)

    def send(self, peer: str, obj: object, timeout: float | None = None) -> int:
        """Queue `obj` for a peer and return its sequence number. The link resends it until it is acknowledged.

        Waits up to `timeout` seconds (None: no limit) while the peer's queue is full. Raises `LinkTimeoutError`,
        `PeerLostError` for a peer that is lost, has left or is unknown, `EncodeError`, `MessageTooLargeError`.
        """
        attempt = self._send_attempt(lambda: self._clients.connected_peer(peer), self._encode(obj))
        return self._state.wait(attempt, Deadline(timeout), f"no room in the queue to {peer!r}")

    async def send_async(self, peer: str, obj: object) -> int:
        """`send` for an event loop; encoding runs in a thread."""
        attempt = self._send_attempt(
            lambda: self._clients.connected_peer(peer), await asyncio.to_thread(self._encode, obj)
        )
        return await self._state.wait_async(attempt)

    def peers(self) -> dict[str, PeerChange]:
        """Return the last event of each peer; `CONNECTED` for connected peers."""
        with self._lock:
            return {peer.name: peer.state for peer in self._state.peers.values()}

    def unacknowledged(self, peer: str) -> tuple[int, ...]:
        """Return the sequence numbers of the messages that a peer has not acknowledged."""
        with self._lock:
            known = self._state.peers.get(peer)
            return known.outbox.unacknowledged if known else ()

    def drop_peer(self, peer: str) -> tuple[int, ...]:
        """Remove a peer with the messages queued to it and received from it. Returns the same as `unacknowledged`.

        A client that is still running reconnects and resends its unacknowledged messages.
        """
        with self._lock:
            known = self._state.peers.get(peer)
            if known is None:
                return ()
            self._clients.drop(known)
            self._state.wake_io_thread()
            self._state.notify_waiters()
            return known.outbox.unacknowledged
