"""The connections of a server: which peer each one belongs to, and which ones are accepted or refused."""

from __future__ import annotations

from transport.errors import DecodeError, MalformedError
from transport.link.errors import PeerLostError
from transport.link.messages import MAX_REASON, Bye, Hello, LinkMessage, Refused, Welcome, is_valid_name
from transport.link.peer import Peer
from transport.link.shared_state import SharedState
from transport.link.zmq_sockets import ReceivedFrames

_MAX_LISTED = 5  # peers listed in an error text


class ServerConnections:
    """A server's side of `io_thread.Connections`. A route identifies one connection; a name has at most one at a time.

    A client that connects again before the end of its old connection was noticed replaces that connection.
    """

    def __init__(self, state: SharedState) -> None:
        self._state = state
        self._routes: dict[bytes, Peer] = {}

    def find(self, name: str) -> Peer:
        """Return the peer with this name. Raises `PeerLostError` if none is connected."""
        peer = self._state.peers.get(name)
        if peer is None:
            names = [repr(each) for each in self._state.peers]
            listed = ", ".join(names[:_MAX_LISTED]) + (", ..." if len(names) > _MAX_LISTED else "")
            raise PeerLostError(name, f"is not connected (connected: {listed or 'none'})")
        return peer

    def refuse(self, peer: Peer, reason: str) -> None:
        """End a connection; its client receives the reason as `LinkRefusedError`."""
        self._refuse_route(peer.route, reason)
        self.end(peer, f"was refused: {reason}")

    def end(self, peer: Peer, reason: str) -> None:
        """End a connection."""
        del self._routes[peer.route]
        self._state.remove_peer(peer, reason, report=True)

    # -- called by the I/O thread

    def handle_socket_changes(self) -> None:
        """Nothing to do: a ROUTER socket reports no changes."""

    def handle(self, received: ReceivedFrames, message: LinkMessage) -> Peer | None:
        """Handle a message about the connection itself; return the peer of any other message."""
        peer = self._routes.get(received.route)
        if peer is None:
            if isinstance(message, Hello):
                self._welcome(received, message)
            else:
                self._state.stats.ignored += 1
            return None
        peer.last_received = self._state.active_seconds
        if isinstance(message, Bye):
            if not peer.bye_sent:
                self._state.first_messages.append((peer.route, Bye()))
            self.end(peer, "closed its link")
        elif isinstance(message, Refused):
            self.end(peer, f"refuses this server: {message.reason}")
        elif isinstance(message, Hello | Welcome):
            self.refuse(peer, "a client greets once, with HELLO")
        else:
            return peer
        return None

    def reject(self, received: ReceivedFrames, error: DecodeError) -> None:
        """Refuse the connection, which violated the protocol."""
        peer = self._routes.get(received.route)
        if peer is not None:
            self.refuse(peer, str(error))
        else:
            self._refuse_route(received.route, str(error))

    def handle_broken(self, peer: Peer) -> None:
        self.end(peer, "closed its connection, or its process ended")

    def end_dead_connections(self, *, drained: bool) -> None:
        """End the connections that have been silent for too long."""
        for peer in list(self._state.peers.values()):
            if self._state.is_silent(peer.last_received):
                # For a client that was only stopped: without this message it waits for the server for `peer_timeout`.
                self._state.first_messages.append((peer.route, Bye()))
                self.end(peer, f"has been silent for {self._state.peer_timeout:g} s")

    def _welcome(self, received: ReceivedFrames, hello: Hello) -> None:
        state = self._state
        if not is_valid_name(hello.name):
            raise MalformedError(f"client name of {len(hello.name)} characters")
        old = state.peers.get(hello.name)
        if old is not None and old.user != received.user:
            self._refuse_route(received.route, f"the name {hello.name!r} is used by a client with another key")
            return
        if old is not None:
            self.refuse(old, "another process took over this name; give each worker its own name")
        if state.occupied_places >= state.limits.peers:
            self._refuse_route(received.route, f"the server has {state.limits.peers} peers, which is its limit")
            return
        peer = Peer(
            hello.name, received.route, received.user, hello.window, state.limits, state.stats, state.active_seconds
        )
        self._routes[peer.route] = peer
        state.first_messages.append((peer.route, Welcome(state.limits.window)))
        state.add_peer(peer, report=True)

    def _refuse_route(self, route: bytes, reason: str) -> None:
        self._state.stats.refused += 1
        self._state.first_messages.append((route, Refused(reason[:MAX_REASON])))
