"""The connection of a client to its server. A client has one; when it ends, the link is of no further use."""

from __future__ import annotations

from transport.errors import DecodeError, MalformedError
from transport.link.errors import LinkRefusedError, PeerLostError
from transport.link.messages import MAX_REASON, Bye, Hello, LinkMessage, Refused, Welcome
from transport.link.peer import Peer
from transport.link.shared_state import SharedState
from transport.link.zmq_sockets import Change, DealerSocket, ReceivedFrames

_ROUTE = b""  # a DEALER socket has one connection


class ClientConnection:
    """A client's side of `io_thread.Connections`. The only peer is the server; its name is its address."""

    def __init__(self, state: SharedState, socket: DealerSocket, name: str) -> None:
        self._state = state
        self._socket = socket
        self._name = name
        self._greeted = False
        self._broken = False

    @property
    def server(self) -> Peer | None:
        """The server, while it is connected."""
        return self._state.peers.get(self._state.address)

    # -- called by the I/O thread

    def handle_socket_changes(self) -> None:
        """Greet over a new connection, and notice a broken one."""
        for change in self._socket.changes():
            if change is Change.DENIED:
                self._end(LinkRefusedError(self._state.address, "the server does not accept this client's key"))
            elif change is Change.OPENED and not self._greeted:
                self._greeted = True
                self._state.first_messages.append((_ROUTE, Hello(self._name, self._state.limits.window)))
            elif change is Change.BROKEN and self._greeted:
                self._broken = True

    def handle(self, received: ReceivedFrames, message: LinkMessage) -> Peer | None:
        """Handle a message about the connection itself; return the server for any other message."""
        state, server = self._state, self.server
        if state.failure is not None:
            return None
        if isinstance(message, Refused):
            self._end(LinkRefusedError(state.address, message.reason[:MAX_REASON]))
        elif server is None:
            if not isinstance(message, Welcome):
                raise MalformedError("the first message of the server is not WELCOME")
            now = state.active_seconds
            state.add_peer(
                Peer(state.address, _ROUTE, "", message.window, state.limits, state.stats, now), report=False
            )
        elif isinstance(message, Bye):
            if server.bye_sent:  # the server confirms everything
                server.confirm_all()
            else:
                state.first_messages.append((_ROUTE, Bye()))
            self._lose("closed its link")
        else:
            server.last_received = state.active_seconds
            return server
        return None

    def reject(self, received: ReceivedFrames, error: DecodeError) -> None:
        self._state.stats.refused += 1
        self._state.first_messages.append((_ROUTE, Refused(str(error)[:MAX_REASON])))
        reason = f"the server sent data that violates the protocol: {error}"
        self._end(LinkRefusedError(self._state.address, reason))

    def handle_broken(self, peer: Peer) -> None:
        """A message could not be sent."""
        self._broken = True

    def end_dead_connections(self, *, drained: bool) -> None:
        """Fail if the connection broke and all frames received over it have been read, or the server is silent."""
        server = self.server
        if self._broken and drained:
            self._lose("closed its connection, or its process ended")
        elif self._state.is_silent(server.last_received if server is not None else 0.0):
            what = "has been silent for" if server is not None else "did not answer within"
            self._lose(f"{what} {self._state.peer_timeout:g} s")

    def _lose(self, reason: str) -> None:
        server = self.server
        self._end(server.lost(reason) if server is not None else PeerLostError(self._state.address, reason))

    def _end(self, error: LinkRefusedError | PeerLostError) -> None:
        server = self.server
        unacknowledged = 0
        if server is not None:
            unacknowledged = server.unacknowledged
            self._state.remove_peer(server, str(error), report=False)
        self._state.fail(error, unacknowledged)
