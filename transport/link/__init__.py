"""Send objects between workers and an orchestrator over ZeroMQ. Extra `zmq`.

    with LinkServer("tcp://127.0.0.1:*") as server:          # the orchestrator
        while True:
            match server.recv():
                case PeerConnected(peer):
                    server.send(peer, job)
                case Delivery(peer, trajectory):
                    ...
                case PeerLost(peer, reason):
                    ...                                      # give its job to another worker

    with LinkClient(address, name="worker-7") as client:     # a worker
        job = client.recv(timeout=60).obj
        client.send(trajectory)

Guarantees:

- Over one connection, messages arrive in the order in which they were sent, each at most once. Either all of them
  arrive, or the connection ends and both sides are told: a server receives `PeerLost` after the last message of the
  peer, a client raises `PeerLostError`. Messages that were on the way are then lost: nothing is sent again, and the
  application repeats the work whose result it did not receive.
- A client is one connection. To connect again, make a new `LinkClient`.
- The end of a connection is noticed within `peer_timeout` seconds, and at once if the other process ended.
- `close` sends what is queued, and waits for up to `linger` seconds until each peer has confirmed all of it.
- Memory is bounded (`LinkLimits`): if the receiver stops reading, `send` on the other side waits.
- A media source is sent over a connection once in each direction, however many messages refer to it, unless the
  receiver could not store it (`LinkLimits.media_bytes`).
- A message that cannot be decoded raises `UndecodableMessageError` at the receiver; the link stays usable. The receiver
  must have imported the modules that register types of other distributions.

Arrays and media are not copied before they are written to the socket: do not change them after `send`. A link belongs
to the process that made it: after a fork, calls in the child raise `LinkClosedError`.
"""

from transport.errors import MissingExtraError

try:
    import msgspec  # noqa: F401
    import zmq  # noqa: F401
except ModuleNotFoundError as error:
    raise MissingExtraError("transport.link", "zmq", "pyzmq or msgspec") from error

from transport.errors import (
    LinkAddressError,
    LinkClosedError,
    LinkRefusedError,
    LinkTimeoutError,
    MessageTooLargeError,
    PeerLostError,
    UnacknowledgedError,
    UndecodableMessageError,
)
from transport.link.endpoints import LinkClient, LinkServer
from transport.link.limits import Delivery, LinkLimits, LinkStats, PeerConnected, PeerEvent, PeerLost
from transport.link.zmq_sockets import ClientKeys, ServerKeys, generate_keypair

__all__ = [
    "ClientKeys",
    "Delivery",
    "LinkAddressError",
    "LinkClient",
    "LinkClosedError",
    "LinkLimits",
    "LinkRefusedError",
    "LinkServer",
    "LinkStats",
    "LinkTimeoutError",
    "MessageTooLargeError",
    "PeerConnected",
    "PeerEvent",
    "PeerLost",
    "PeerLostError",
    "ServerKeys",
    "UnacknowledgedError",
    "UndecodableMessageError",
    "generate_keypair",
]
