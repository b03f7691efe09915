"""The protocol by which the shared code of a link handles connection events; client and server implement it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from transport.errors import DecodeError
from transport.link.errors import LinkError
from transport.link.messages import LinkMessage
from transport.link.peer import Peer

if TYPE_CHECKING:
    from transport.link.zmq_sockets import ReceivedFrames


class Connections(Protocol):
    """Each method is called under the link's lock, except `handle_socket_changes` and `handle_drained`."""

    def handle_socket_changes(self, poller: Any) -> None:
        """Handle connections that opened or broke. Called in the I/O thread."""

    def handle_drained(self, poller: Any) -> None:
        """All frames received before the last `handle_socket_changes` have been read. Called in the I/O thread."""

    def should_ignore(self, received: ReceivedFrames) -> bool:
        """Return whether the connection was refused, so that its messages are dropped."""

    def handle(self, received: ReceivedFrames, message: LinkMessage) -> Peer | None:
        """Handle a message about the connection itself (greeting, BYE, ...); return the peer of any other message."""

    def reject(self, received: ReceivedFrames, error: DecodeError | LinkError) -> None:
        """Handle data that violates the protocol."""

    def handle_lost_connection(self, peer: Peer) -> None:
        """The connection of a peer accepts no more data."""

    def check_silence(self) -> None:
        """Report peers that have been silent for too long."""

    def check_waiting(self, peer: Peer, since: float) -> None:
        """Raise `PeerLostError` if the peer is lost. `since`: `active_seconds` at which the wait began."""

    def check_receiving(self, since: float) -> None:
        """Raise `PeerLostError` if no message can be received. `since`: as for `check_waiting`.

        Raises `MessageRejectedError` if the peer rejected a message: the awaited message may be the response to it.
        """
