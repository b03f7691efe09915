"""The connections of a server: which peer each one belongs to, and which ones are accepted or refused."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transport.errors import DecodeError
from transport.link.application_types import PeerChange
from transport.link.errors import PeerLostError, shortened_list
from transport.link.messages import Greeting, Hello, LinkMessage, Refused, Signal, Welcome
from transport.link.peer import Peer
from transport.link.shared_state import SharedState

if TYPE_CHECKING:
    from transport.link.zmq_sockets import ReceivedFrames

_REFUSED_ROUTES_KEPT = 4096
_SESSIONS_KEPT = 4096
_ABSENCE = {PeerChange.LOST: "has been silent", PeerChange.LEFT: "has left"}


class ServerConnections:
    """A server's side of `io_thread.Connections`. A route identifies one connection; a peer has at most one at a time.

    `resume` maps a session to the last sequence number that is not to be delivered again.
    """

    def __init__(self, state: SharedState, resume: Mapping[bytes, int]) -> None:
        self._state = state
        self._resume = resume
        self._acknowledged_by_session: OrderedDict[bytes, int] = OrderedDict()  # the same for removed peers
        self._routes: dict[bytes, Peer] = {}
        self._refused_routes: OrderedDict[bytes, None] = OrderedDict()

    def connected_peer(self, name: str) -> Peer:
        """Return the peer with this name. Raises `PeerLostError` unless it is connected."""
        peer = self._state.peers.get(name)
        if peer is None:
            connected = [repr(each.name) for each in self._state.peers.values() if each.connected]
            raise PeerLostError(
                name,
                "is unknown: no client with this name has connected",
                cure=f"Connected are {shortened_list(connected)}." if connected else "No client is connected.",
            )
        self.check_waiting(peer, 0.0)
        return peer

    def drop(self, peer: Peer) -> None:
        """Remove a peer. If it is still connected, it is told to reconnect."""
        if peer.route is not None:
            self._state.final_messages.append((peer.route, Signal.RECONNECT))
        self._forget(peer, PeerChange.FORGOTTEN)

    def handle_socket_changes(self, poller: Any) -> None:
        """Handle connections that opened or broke. Nothing to do: a ROUTER socket does not report them."""

    def handle_drained(self, poller: Any) -> None:
        """Handle that all frames received before `handle_socket_changes` have been read.

        Nothing to do: ZeroMQ keeps the frames of a broken connection until they are read.
        """

    def should_ignore(self, received: ReceivedFrames) -> bool:
        """Return whether the connection was refused, so that its messages are dropped."""
        if received.route not in self._refused_routes:
            return False
        self._state.stats.ignored += 1
        return True

    def handle(self, received: ReceivedFrames, message: LinkMessage) -> Peer | None:
        """Handle a message about the connection itself (greeting, BYE, ...); return the peer of any other message."""
        peer = self._routes.get(received.route)
        if isinstance(message, Hello) and peer is None:
            self._welcome(received, message)
            return None
        if peer is None:
            self._state.stats.ignored += 1
            self._state.final_messages.append((received.route, Signal.RECONNECT))
            return None
        peer.last_received = self._state.active_seconds
        if not peer.connected:
            self._state.report(peer, PeerChange.CONNECTED)
        if message is Signal.BYE:
            self._state.final_messages += [(received.route, answer) for answer in peer.answer_to_bye()]
            self._unbind(peer)
            self._state.report(peer, PeerChange.LEFT)
        elif isinstance(message, Refused):
            self._forget(peer, PeerChange.REFUSED, f"the client refuses: {message.reason}")
        elif isinstance(message, Hello | Welcome):
            self._refuse(received.route, "a client greets once, with HELLO")
        return peer if peer.route is not None else None

    def reject(self, received: ReceivedFrames, error: DecodeError) -> None:
        self._refuse(received.route, str(error))

    def handle_lost_connection(self, peer: Peer) -> None:
        """The connection of a peer accepts no more data."""
        # The frames received over the broken connection are still read, above all acknowledgements. The connection is
        # removed when the peer greets over a new one, which may belong to another process with the same name.
        peer.broken = True

    def check_silence(self) -> None:
        """Report peers that have been silent for too long."""
        connected = 0
        for peer in self._state.peers.values():
            if peer.connected and self._state.active_seconds - peer.last_received > self._state.peer_timeout:
                self._state.report(peer, PeerChange.LOST, f"silent for {self._state.peer_timeout:g} s")
                self._state.notify_waiters()
            connected += peer.connected
        window = self._state.window(connected)
        for peer in self._state.peers.values():
            if peer.connected and peer.inbox.grant(window):
                peer.ack_needed = True

    def check_waiting(self, peer: Peer, since: float) -> None:
        """Raise `PeerLostError` if the peer is lost. `since`: `active_seconds` at which the wait began."""
        if not peer.connected:
            raise peer.lost(_ABSENCE.get(peer.state, "is not connected"))

    def check_receiving(self, since: float) -> None:
        """A server never gives up: another peer may connect."""

    def _welcome(self, received: ReceivedFrames, hello: Hello) -> None:
        greeting = hello.greeting
        peer = self._state.peers.get(hello.name)
        if peer is not None and peer.owner != received.user:
            self._refuse(received.route, f"the name {hello.name!r} belongs to another key")
            return
        if peer is None:
            peer = self._add_peer(hello.name, received)
            if peer is None:
                return
        new_session = greeting.session != peer.inbox.session
        old = peer.route
        if old is not None and old != received.route:
            self._unbind(peer)
            if new_session:
                self._state.final_messages.append(
                    (old, Refused("another process took over this name; give each worker its own name"))
                )
                self._state.report(peer, PeerChange.REPLACED)
        self._routes[received.route] = peer
        peer.route = received.route
        peer.greet(greeting, self._first_undelivered(greeting) if new_session else None)
        peer.greeting = Welcome
        self._state.stats.connections += 1
        peer.last_received = self._state.active_seconds
        self._state.report(peer, PeerChange.CONNECTED)

    def _first_undelivered(self, greeting: Greeting) -> int:
        """Return the first message of a session that was not delivered and acknowledged here."""
        settled = max(self._resume.get(greeting.session, 0), self._acknowledged_by_session.pop(greeting.session, 0))
        return max(greeting.first_kept, settled + 1)

    def _add_peer(self, name: str, received: ReceivedFrames) -> Peer | None:
        state = self._state
        if len(state.peers) >= state.limits.peers and not self._remove_absent_peer():
            self._refuse(received.route, f"{state.limits.peers} peers are already known")
            return None
        window = state.window(1 + sum(peer.connected for peer in state.peers.values()))
        peer = Peer(name, state.limits, window, state.store, state.stats)
        peer.owner = received.user
        state.peers[name] = peer
        return peer

    def _remove_absent_peer(self) -> bool:
        """Remove the peer that has been absent longest and is idle. Returns False if there is none."""
        absent = [peer for peer in self._state.peers.values() if not peer.connected and peer.inbox.idle]
        if not absent:
            return False
        self._forget(min(absent, key=lambda peer: peer.last_received), PeerChange.FORGOTTEN)
        return True

    def _refuse(self, route: bytes, reason: str) -> None:
        """Send REFUSED, and ignore the connection from now on."""
        self._refused_routes[route] = None
        if len(self._refused_routes) > _REFUSED_ROUTES_KEPT:
            self._refused_routes.popitem(last=False)
        self._state.stats.refused += 1
        self._state.final_messages.append((route, Refused(reason)))
        peer = self._routes.get(route)
        if peer is not None:
            self._forget(peer, PeerChange.REFUSED, reason)

    def _unbind(self, peer: Peer) -> None:
        if peer.route is not None:
            self._routes.pop(peer.route, None)
        peer.disconnect()

    def _forget(self, peer: Peer, change: PeerChange, reason: str = "") -> None:
        self._unbind(peer)
        self._state.remove(peer)
        # Remembered, because the last acknowledgement may not have reached the client.
        self._acknowledged_by_session[peer.inbox.session] = peer.inbox.acknowledged
        if len(self._acknowledged_by_session) > _SESSIONS_KEPT:
            self._acknowledged_by_session.popitem(last=False)
        self._state.report(peer, change, reason)
