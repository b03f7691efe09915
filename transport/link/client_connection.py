"""The connection of a client to its server: opened, greeted, and reopened after it breaks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from transport.errors import DecodeError
from transport.link.application_types import PeerChange
from transport.link.errors import LinkRefusedError
from transport.link.messages import Hello, LinkMessage, Refused, Signal, Welcome
from transport.link.peer import Peer
from transport.link.shared_state import SharedState

if TYPE_CHECKING:
    from transport.link.zmq_sockets import DealerSocket, ReceivedFrames


class ClientConnection:
    """A client's side of `io_thread.Connections`. The only peer is the server; its name is its address."""

    def __init__(self, state: SharedState, dealer: DealerSocket, name: str) -> None:
        self._state = state
        self._dealer = dealer
        self._name = name
        self.server = Peer(state.address, state.limits, state.window(1), state.store, state.stats)
        state.peers[state.address] = self.server
        self._reopen_needed = False
        self._broken = False  # reopen the connection as soon as all frames received over it are read
        self._opened = 0.0  # `active_seconds` when the connection was last reopened

    def handle_socket_changes(self, poller: Any) -> None:
        from transport.link.zmq_sockets import Change

        changes = self._dealer.changes()
        with self._state.lock:
            if Change.DENIED in changes:
                self._fail(LinkRefusedError(self._state.address, "the server does not accept this client's key"))
            if Change.BROKEN in changes or self._reopen_needed:
                self._reopen_needed = False
                self._broken = self.server.broken = True
            if Change.OPENED in changes and not self._broken and self._usable:
                self.server.route = b""
                self.server.greeting = lambda greeting: Hello(greeting, self._name)

    def handle_drained(self, poller: Any) -> None:
        if not self._broken:
            return
        with self._state.lock:
            self._broken = False
            self._opened = self._state.active_seconds
            self.server.disconnect()
        if self._usable:
            self._dealer.reopen(poller)

    @property
    def _usable(self) -> bool:
        return self._state.failure is None and not self._state.closing

    def should_ignore(self, received: ReceivedFrames) -> bool:
        return self._state.failure is not None

    def handle(self, received: ReceivedFrames, message: LinkMessage) -> Peer | None:
        server = self.server
        server.last_received = self._state.active_seconds
        if isinstance(message, Refused):
            self._fail(LinkRefusedError(self._state.address, message.reason))
            server.disconnect()
        elif isinstance(message, Welcome):
            server.greet(message.greeting)
            self._state.stats.connections += 1
            self._state.report(server, PeerChange.CONNECTED)
        elif message is Signal.RECONNECT:
            self._reopen()
        elif message is Signal.BYE:
            self._state.final_messages += [(b"", answer) for answer in server.answer_to_bye()]
            server.disconnect()
            self._state.report(server, PeerChange.LEFT)
        elif server.open:
            if not server.connected:
                self._state.report(server, PeerChange.CONNECTED)
            return server
        return None

    def reject(self, received: ReceivedFrames, error: DecodeError) -> None:
        self._state.stats.refused += 1
        if self.server.route is not None:
            self._state.final_messages.append((self.server.route, Refused(str(error))))
        self.server.disconnect()
        self._fail(LinkRefusedError(self._state.address, f"the server sent data that violates the protocol: {error}"))

    def handle_lost_connection(self, peer: Peer) -> None:
        """Nothing to do: a DEALER socket does not report this; `handle_socket_changes` finds a broken connection."""

    def check_silence(self) -> None:
        """Reopen a connection that has been silent for `peer_timeout`: a dead connection is not always reported."""
        silent = self._state.active_seconds - max(self.server.last_received, self._opened)
        if silent <= self._state.peer_timeout or self._state.failure is not None:
            return
        if self.server.connected:
            self._state.report(self.server, PeerChange.LOST, f"silent for {self._state.peer_timeout:g} s")
            self._state.notify_waiters()
        self._reopen()

    def check_waiting(self, peer: Peer, since: float) -> None:
        if self._state.active_seconds - max(peer.last_received, since) > self._state.peer_timeout:
            raise peer.lost(f"has been silent for {self._state.peer_timeout:g} s")

    def check_receiving(self, since: float) -> None:
        """Raise `PeerLostError` if no message can be received; `since` as in `check_waiting`.

        Raises the errors of `Peer.check_rejected`, too: the awaited message may be the response to a lost one.
        """
        self.server.check_rejected()
        self.check_waiting(self.server, since)

    def _fail(self, error: Exception) -> None:
        self._state.failure = error
        self._state.notify_waiters()

    def _reopen(self) -> None:
        self._reopen_needed = True
        self._state.wake_io_thread()
