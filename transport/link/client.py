"""A worker's end: connects to one server, and connects again when that goes."""

from __future__ import annotations

import asyncio
import uuid
from typing import TYPE_CHECKING, Any

from transport.errors import DecodeError
from transport.link.base import Deadline, Link, check_times, lost, require_zmq
from transport.link.errors import LinkError, LinkRefusedError
from transport.link.keys import ClientKeys
from transport.link.limits import LinkLimits
from transport.link.messages import MAX_NAME_BYTES, Greeting, Hello, LinkMessage, Refused, Signal, Welcome
from transport.link.peer import Peer
from transport.link.values import PeerChange

if TYPE_CHECKING:
    from transport.link.sockets import Arrival


class LinkClient(Link):
    """Connected to a `LinkServer`, or trying to be: sending before the server is there is fine.

    `name` is who this worker is to the server, which sends what a worker did not acknowledge to the next one of that
    name; at most 200 bytes, by default one of its own. Two processes must not use one name at a time: the newer one is
    served, the older one is refused. `Delivery.peer` and errors call the server by its address.

    A call that waits raises `PeerLostError` when the server has been silent for `peer_timeout` seconds, counted from
    the call on; the link goes on trying, so the call may be repeated. The other arguments are those of `LinkServer`.
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

        self.name = uuid.uuid4().hex if name is None else name
        if not 0 < len(self.name.encode()) <= MAX_NAME_BYTES or not self.name.isprintable():
            raise ValueError(f"link name {self.name!r:.80} must be printable and of 1 to {MAX_NAME_BYTES} bytes.")
        limits = limits or LinkLimits()
        socket = DealerSocket(address, keys, max_frame=limits.decode.max_total_bytes)
        super().__init__(socket, limits, heartbeat, peer_timeout, linger)
        self._dealer = socket
        self._server = Peer(address, limits, self._window(1), self._store, self._stats)
        self._peers[address] = self._server
        self._reopen_due = False
        self._thread.start()

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
        with self._changed:
            return self._server.outbox.unacknowledged

    def _check_waiting(self, peer: Peer, since: float) -> None:
        if self._clock - max(peer.last_heard, since) > self._peer_timeout:
            raise lost(peer, f"has been silent for {self._peer_timeout:g} s")

    def _check_receiving(self, since: float) -> None:
        self._check_waiting(self._server, since)

    def _greeted(self, arrival: Arrival, message: LinkMessage) -> Peer | None:
        peer = self._server
        peer.last_heard = self._clock
        if isinstance(message, Refused):
            self._failure = LinkRefusedError(self.address, message.reason)
            peer.disconnect()
        elif isinstance(message, Welcome):
            self._welcomed(message.greeting)
        elif message is Signal.AGAIN:
            self._reopen()
        elif message is Signal.BYE:
            peer.disconnect()
            self._report(peer, PeerChange.LEFT)
        elif peer.open:
            if not peer.connected:
                self._report(peer, PeerChange.CONNECTED)
            return peer
        return None

    def _welcomed(self, greeting: Greeting) -> None:
        self._server.greet(greeting)
        self._stats.connections += 1
        self._report(self._server, PeerChange.CONNECTED)

    def _reject(self, arrival: Arrival, error: DecodeError | LinkError) -> None:
        self._stats.refused += 1
        if self._server.route is not None:
            self._parting.append((self._server.route, Refused(str(error))))
        self._server.disconnect()
        self._failure = LinkRefusedError(self.address, f"the server sent what cannot be taken: {error}")

    def _ignores(self, arrival: Arrival) -> bool:
        return self._failure is not None

    def _undecodable(self, peer: Peer, error: DecodeError) -> None:
        self._stats.refused += 1
        if peer.route is not None:
            self._parting.append((peer.route, Refused(str(error))))
        peer.disconnect()
        self._failure = error
        self._ring()
        raise error

    def _tend(self) -> None:
        peer = self._server
        if peer.connected and self._clock - peer.last_heard > self._peer_timeout:
            self._report(peer, PeerChange.LOST, f"silent for {self._peer_timeout:g} s")
            self._reopen()  # the connection may be dead without anyone having said so
            self._announce()

    def _look_at_connection(self, poller: Any) -> None:
        from transport.link.sockets import Change

        changes = self._dealer.changes()
        with self._changed:
            if Change.DENIED in changes:
                self._failure = LinkRefusedError(self.address, "the server does not accept this client's key")
                self._announce()
            broken = Change.BROKEN in changes or self._reopen_due
            if Change.OPENED in changes and not broken and self._failure is None:
                self._server.route = b""
                self._server.greeting = self._hello
            if broken:
                self._reopen_due = False
                self._server.disconnect()
        if broken and self._failure is None:
            self._dealer.reopen(poller)

    def _reopen(self) -> None:
        self._reopen_due = True
        self._ring()

    def _hello(self, greeting: Greeting) -> Hello:
        return Hello(greeting, self.name)
