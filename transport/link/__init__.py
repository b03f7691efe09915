"""Workers and their orchestrator: objects over ZeroMQ (tcp, ipc), acknowledged, in order, none twice. Extra `zmq`.

    with LinkServer("tcp://127.0.0.1:*") as server:          # the orchestrator
        delivery = server.recv(timeout=60, acknowledge=False)
        store(delivery.obj)
        server.acknowledge(delivery)                         # now the worker may forget it
        server.send(delivery.peer, {"next": "job"})

    with LinkClient(address, name="worker-7") as client:     # a worker
        client.send(trajectory)
        job = client.recv(timeout=60).obj

What is promised, in each direction:

- A message is kept by its sender until the receiving application has acknowledged it, and sent again after every lost
  connection. Messages of one peer arrive in the order in which they were sent.
- Within one life (`session`) of both processes nothing is handed out twice, and what was acknowledged to its sender is
  not handed out by any later life either.
- A link that is closed waits, up to its `linger`, until each connected peer has heard what was acknowledged here.
- A receiver that is killed after it stored a message, and before the acknowledgement reached the sender, gets that
  message again: only the application knows what is safely stored, so the link keeps no journal of its own. A restarted
  server that is given `LinkServer(resume={session: sequence})`, the last stored message of each session, hands out
  none of those; a worker compares `(delivery.session, delivery.sequence)`, which name a message for good.
- With `acknowledge=True`, the default, a message is the application's as soon as it is handed out, and a kill after
  that loses it.
- What a process has not had acknowledged when it dies dies with it. A worker that must not lose finished work writes it
  with `RecordWriter` first. Messages *to* a worker outlive it: they go to the next client of its name.
- A message that the receiver cannot decode is an error on both sides and the end of that message, not of the link.
  Types of this distribution are known without an import; those of others the receiver must import.
- Memory is bounded (`LinkLimits`): a reader that stops stops the writer, whose `send` blocks and then raises.
- A media source crosses a connection once in each direction, whatever refers to it, and is pulled again if the receiver
  no longer holds it.

Arrays and media are not copied on their way to the socket: leave them unchanged until their message is acknowledged.
Make links after forking, not before.
"""

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
from transport.link.values import Delivery, LinkStats, PeerChange, PeerEvent

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
