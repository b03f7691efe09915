"""The orchestrator's end: binds, and talks to any number of workers."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transport.errors import DecodeError
from transport.link.base import Deadline, Link, check_times, lost, require_zmq
from transport.link.errors import LinkError, PeerLostError
from transport.link.keys import ServerKeys
from transport.link.limits import LinkLimits
from transport.link.messages import Greeting, Hello, LinkMessage, Refused, Signal, Welcome
from transport.link.peer import Peer
from transport.link.values import PeerChange

if TYPE_CHECKING:
    from transport.link.sockets import Arrival

_BANNED_KEPT = 4096
_GONE = {PeerChange.LOST: "has been silent", PeerChange.LEFT: "has left"}


class LinkServer(Link):
    """Bound to `tcp://127.0.0.1:port` (`*` for any free port) or `ipc://path`; `address` is what clients connect to.

    Other addresses need `allow_remote=True` and `keys`. `resume` maps the session of a `Delivery` to its last sequence
    number that is safely stored: a restarted server that has it hands out nothing up to there again.

    `heartbeat` and `peer_timeout` are in seconds: a peer that has been silent for the latter is lost. That is an event
    and fails what waits for it, but ends nothing: when it comes back both streams go on. `linger` is for how long
    `close` waits for acknowledgements.

    Without keys, whoever may connect may take any name; and ZeroMQ gathers a message of any number of frames before
    this code sees the first, so only keys keep out a local user who wants to fill the memory.
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
        check_times(heartbeat, peer_timeout)
        require_zmq()
        from transport.link.sockets import RouterSocket

        limits = limits or LinkLimits()
        self._resume = {bytes.fromhex(session): sequence for session, sequence in (resume or {}).items()}
        self._routes: dict[bytes, Peer] = {}
        self._banned: OrderedDict[bytes, None] = OrderedDict()
        socket = RouterSocket(address, keys, allow_remote=allow_remote, max_frame=limits.decode.max_total_bytes)
        super().__init__(socket, limits, heartbeat, peer_timeout, linger)
        self._thread.start()

    def send(self, peer: str, obj: object, timeout: float | None = None) -> int:
        """Queue `obj` for a peer and return its sequence number; it is sent, and sent again, until acknowledged.

        Waits up to `timeout` seconds (None: for ever) while the peer's queue is full. Raises `LinkTimeoutError`,
        `PeerLostError` for a peer that is lost, has left or never came, `EncodeError`, `MessageTooLargeError`.
        """
        attempt = self._queueing(lambda: self._present(peer), self._encode(obj))
        return self._wait(attempt, Deadline(timeout), f"room in the queue to {peer!r}")

    async def send_async(self, peer: str, obj: object) -> int:
        """`send` for an event loop; encoding runs in a thread."""
        attempt = self._queueing(lambda: self._present(peer), await asyncio.to_thread(self._encode, obj))
        return await self._wait_async(attempt)

    def peers(self) -> dict[str, PeerChange]:
        """The last thing that happened to each peer: `CONNECTED` for those that are there."""
        with self._changed:
            return {peer.name: peer.state for peer in self._peers.values()}

    def unacknowledged(self, peer: str) -> tuple[int, ...]:
        """Sequence numbers of what a peer was sent and has not acknowledged."""
        with self._changed:
            known = self._peers.get(peer)
            return known.outbox.unacknowledged if known else ()

    def drop_peer(self, peer: str) -> tuple[int, ...]:
        """Forget a peer, what it was sent and what came from it and was not handed out; returns as `unacknowledged`.

        A client that is still there connects anew, and sends again what was not acknowledged.
        """
        with self._changed:
            known = self._peers.get(peer)
            if known is None:
                return ()
            if known.route is not None:
                self._parting.append((known.route, Signal.AGAIN))
            self._forget(known, PeerChange.FORGOTTEN)
            self._ring()
            self._announce()
            return known.outbox.unacknowledged

    def _present(self, name: str) -> Peer:
        peer = self._peers.get(name)
        if peer is None:
            raise PeerLostError(name, "is not known here")
        self._check_waiting(peer, 0.0)
        return peer

    def _check_waiting(self, peer: Peer, since: float) -> None:
        if not peer.connected:
            raise lost(peer, _GONE.get(peer.state, "is gone"))

    def _check_receiving(self, since: float) -> None:
        """There is always use: another peer may come."""

    def _look_at_connection(self, poller: Any) -> None:
        """A server only hears from its connections."""

    def _ignores(self, arrival: Arrival) -> bool:
        if arrival.route not in self._banned:
            return False
        with self._changed:
            self._stats.ignored += 1
        return True

    def _greeted(self, arrival: Arrival, message: LinkMessage) -> Peer | None:
        peer = self._routes.get(arrival.route)
        if isinstance(message, Hello) and peer is None:
            self._welcome(arrival, message)
            return None
        if peer is None:
            self._stats.ignored += 1
            self._parting.append((arrival.route, Signal.AGAIN))
            return None
        self._heard(peer)
        if message is Signal.BYE:
            self._unbind(peer)
            self._report(peer, PeerChange.LEFT)
        elif isinstance(message, Refused):
            self._forget(peer, PeerChange.REFUSED, f"the client refuses: {message.reason}")
        elif isinstance(message, Hello | Welcome):
            self._refuse(arrival.route, "a client greets once, with HELLO")
        return peer if peer.route is not None else None

    def _welcome(self, arrival: Arrival, hello: Hello) -> None:
        greeting = hello.greeting
        peer = self._peers.get(hello.name)
        if peer is not None and peer.owner != arrival.user:
            self._refuse(arrival.route, f"the name {hello.name!r} belongs to another key")
            return
        if peer is None:
            peer = self._admit(hello.name, arrival)
            if peer is None:
                return
        self._leave_old_route(peer, arrival.route, greeting)
        first = max(greeting.first_kept, self._resume.get(greeting.session, 0) + 1)
        fresh = greeting.session != peer.inbox.session
        self._routes[arrival.route] = peer
        peer.route = arrival.route
        peer.greet(greeting, first if fresh else None)
        peer.greeting = Welcome
        self._stats.connections += 1
        peer.last_heard = self._clock
        self._report(peer, PeerChange.CONNECTED)

    def _admit(self, name: str, arrival: Arrival) -> Peer | None:
        if len(self._peers) >= self._limits.peers and not self._make_room():
            self._refuse(arrival.route, f"{self._limits.peers} peers are there already")
            return None
        window = self._window(1 + sum(peer.connected for peer in self._peers.values()))
        peer = Peer(name, self._limits, window, self._store, self._stats)
        peer.owner = arrival.user
        self._peers[name] = peer
        return peer

    def _make_room(self) -> bool:
        """Forget the peer that has been gone longest, unless something of its still waits here."""
        gone = [peer for peer in self._peers.values() if not peer.connected and peer.inbox.idle]
        if not gone:
            return False
        self._forget(min(gone, key=lambda peer: peer.last_heard), PeerChange.FORGOTTEN)
        return True

    def _leave_old_route(self, peer: Peer, route: bytes, greeting: Greeting) -> None:
        old = peer.route
        if old is None or old == route:
            return
        self._unbind(peer)
        if greeting.session != peer.inbox.session:
            self._parting.append((old, Refused("another process took over this name")))
            self._report(peer, PeerChange.REPLACED)

    def _reject(self, arrival: Arrival, error: DecodeError | LinkError) -> None:
        self._refuse(arrival.route, str(error))

    def _refuse(self, route: bytes, reason: str) -> None:
        """Say so, and listen no more."""
        self._ban(route)
        self._stats.refused += 1
        self._parting.append((route, Refused(reason)))
        peer = self._routes.get(route)
        if peer is not None:
            self._forget(peer, PeerChange.REFUSED, reason)

    def _undecodable(self, peer: Peer, error: DecodeError) -> None:
        if self._peers.get(peer.name) is not peer:
            return  # dropped since
        if peer.route is not None:
            self._refuse(peer.route, str(error))
        else:
            self._stats.refused += 1
            self._forget(peer, PeerChange.REFUSED, str(error))
        self._ring()

    def _ban(self, route: bytes) -> None:
        self._banned[route] = None
        if len(self._banned) > _BANNED_KEPT:
            self._banned.popitem(last=False)

    def _unbind(self, peer: Peer) -> None:
        if peer.route is not None:
            self._routes.pop(peer.route, None)
        peer.disconnect()

    def _forget(self, peer: Peer, change: PeerChange, reason: str = "") -> None:
        self._unbind(peer)
        self._peers.pop(peer.name, None)
        self._ready.pop(peer.name, None)
        self._report(peer, change, reason)

    def _heard(self, peer: Peer) -> None:
        peer.last_heard = self._clock
        if not peer.connected:
            self._report(peer, PeerChange.CONNECTED)

    def _tend(self) -> None:
        connected = 0
        for peer in self._peers.values():
            if peer.connected and self._clock - peer.last_heard > self._peer_timeout:
                self._report(peer, PeerChange.LOST, f"silent for {self._peer_timeout:g} s")
                self._announce()
            connected += peer.connected
        window = self._window(connected)
        for peer in self._peers.values():
            if peer.connected and peer.inbox.grant(window):
                peer.ack_due = True
