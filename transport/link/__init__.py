"""Send objects between workers and an orchestrator over ZeroMQ: in order, acknowledged, no duplicates. Extra `zmq`.

    with LinkServer("tcp://127.0.0.1:*") as server:          # the orchestrator
        delivery = server.recv(timeout=60, acknowledge=False)
        store(delivery.obj)
        server.acknowledge(delivery)                         # now the worker may delete it
        server.send(delivery.peer, {"next": "job"})

    with LinkClient(address, name="worker-7") as client:     # a worker
        client.send(trajectory)
        job = client.recv(timeout=60).obj

Guarantees, in each direction:

- The sender keeps a message until the receiving application has acknowledged it, and resends it after each lost
  connection. Messages of one peer arrive in the order in which they were sent.
- A session is the lifetime of one process's link. Within one session of both processes no message is delivered twice.
  A message whose acknowledgement reached its sender is not delivered in a later session either.
- `close` waits, for up to `linger` seconds, until each connected peer has received the acknowledgements.
- If a receiver is killed after it stored a message and before the acknowledgement reached the sender, the message is
  delivered again: only the application knows which messages are safely stored, so the link keeps no journal. A
  restarted server with `LinkServer(resume={session: sequence})`, the last stored message of each session, does not
  deliver those messages again; a worker compares `(delivery.session, delivery.sequence)`, a permanent unique key.
- With `acknowledge=True`, the default, `recv` acknowledges the message when it returns it. A process that is killed
  after that loses the message.
- When a process dies, the messages that it sent and that are not acknowledged are lost. A worker that must not lose
  finished work writes it with `RecordWriter` first. Messages *to* a worker are kept: the next client with the same
  name receives them.
- A message that the receiver cannot decode raises an error on both sides; the message is dropped, and the link stays
  usable. The receiver must have imported the modules that register types of other distributions.
- Memory is bounded (`LinkLimits`): if the receiver stops reading, `send` on the other side blocks and then raises.
- A media source is sent over a connection once in each direction, however many messages refer to it. The receiver
  requests it again if it has evicted it.

Arrays and media are not copied before they are written to the socket: do not change them until their message is
acknowledged. Create links after a fork, not before.
"""

from transport.link.application_types import Delivery, LinkStats, PeerChange, PeerEvent
from transport.link.client import LinkClient
from transport.link.errors import (
    LinkAddressError,
    LinkClosedError,
    LinkRefusedError,
    LinkTimeoutError,
    MessageRejectedError,
    MessageTooLargeError,
    PeerLostError,
    UnacknowledgedError,
    UndecodableMessageError,
)
from transport.link.keys import ClientKeys, ServerKeys, generate_keypair
from transport.link.limits import LinkLimits
from transport.link.server import LinkServer

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
    "MessageRejectedError",
    "MessageTooLargeError",
    "PeerChange",
    "PeerEvent",
    "PeerLostError",
    "ServerKeys",
    "UnacknowledgedError",
    "UndecodableMessageError",
    "generate_keypair",
]
