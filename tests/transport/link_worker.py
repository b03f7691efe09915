"""The other process of the link tests: `python link_worker.py ROLE ADDRESS ...`.

Whatever a role writes goes out in single unbuffered writes of one length that divides a page: a kill in the middle of a
write that crosses into another page would leave half a line.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from transport.link import ClientKeys, LinkClient, LinkLimits, LinkServer, LinkTimeoutError, PeerLostError, ServerKeys

SMALL = LinkLimits(send_messages=64, receive_messages=16)
QUICK = {"heartbeat": 0.1, "peer_timeout": 1.0}
MEGABYTES = 1 << 20
NARROW = LinkLimits(send_bytes=16 * MEGABYTES, receive_bytes=16 * MEGABYTES)


def write_row(log: int, session: str, sequence: int, value: int) -> None:
    os.write(log, f"{session} {sequence} {value}".ljust(63).encode() + b"\n")


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def read_log(path: str) -> list[tuple[str, int, int]]:
    """(session, sequence, value) of each line."""
    if not Path(path).exists():
        return []
    rows = [line.split() for line in Path(path).read_text().splitlines()]
    return [(session, int(sequence), int(value)) for session, sequence, value in rows]


def store(address: str, log: str, resume: str) -> None:
    """A server that writes down what it gets, and acknowledges it only then."""
    known = {session: sequence for session, sequence, _ in read_log(log)} if resume == "resume" else {}
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with LinkServer(address, resume=known, limits=SMALL) as server:
        say("ready")
        while True:
            delivery = server.recv(acknowledge=False)
            write_row(out, delivery.session, delivery.sequence, delivery.obj["value"])
            server.acknowledge(delivery)


def produce(address: str, name: str, log: str) -> None:
    """A client that sends 0, 1, 2... and writes down which of them were acknowledged."""
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with LinkClient(address, name=name, limits=SMALL) as client:
        written = 0
        for value in range(1_000_000):
            client.send({"value": value, "array": np.full(500, value)})
            settled = min(client.unacknowledged(), default=value + 2) - 1  # sequence numbers begin at 1
            if settled > written:
                write_row(out, client.session, settled, settled - 1)
                written = settled


def consume(address: str, name: str, log: str) -> None:
    """A client that writes down what it gets, and acknowledges it only then."""
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    with LinkClient(address, name=name, limits=SMALL) as client:
        say("ready")
        while True:
            delivery = client.recv(acknowledge=False)
            write_row(out, delivery.session, delivery.sequence, delivery.obj)
            client.acknowledge(delivery)


def flood(address: str) -> None:
    """A client that sends megabytes until it is held up, and says how many and what that cost."""
    with LinkClient(address, limits=NARROW, linger=0) as client:
        client.send("first")
        client.flush(10)
        before, sent = resident_bytes(), 0
        try:
            while sent < 300:
                client.send(np.full(MEGABYTES, sent % 100, np.uint8), timeout=1)
                sent += 1
        except LinkTimeoutError:
            say(sent, resident_bytes() - before)
        os._exit(0)


def stall(address: str) -> None:
    """A server that takes one message and then stops reading, and says what it costs when asked."""
    with LinkServer(address, limits=NARROW) as server:
        say(server.address)
        server.recv()
        before = resident_bytes()
        sys.stdin.readline()
        say(resident_bytes() - before)
        os._exit(0)


def idle(address: str, name: str) -> None:
    """A client that answers what it gets, and never closes its link."""
    client = LinkClient(address, name=name, heartbeat=0.1, peer_timeout=1)
    while True:
        client.send(client.recv(timeout=60).obj)


def converse(side: str, address: str, log: str, *keys: str) -> None:
    """One side of a conversation over a network that comes and goes: counts up to the other until it is told to stop,
    writes down what it gets, and says how many connections that took."""
    out = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    public, secret, theirs = keys
    link: LinkServer | LinkClient
    if side == "server":
        link = LinkServer(address, keys=ServerKeys(public, secret, [theirs]), allow_remote=True, limits=SMALL, **QUICK)
    else:
        link = LinkClient(address, name="worker", keys=ClientKeys(public, secret, theirs), limits=SMALL, **QUICK)
    told = threading.Event()

    def send(value: int) -> None:
        message = {"value": value, "array": np.full(500, value)}
        if isinstance(link, LinkServer):
            link.send("worker", message)
        else:
            link.send(message)

    def listen() -> None:
        while True:
            with contextlib.suppress(PeerLostError):
                delivery = link.recv(acknowledge=False)
                assert (delivery.obj["array"] == delivery.obj["value"]).all()
                write_row(out, delivery.session, delivery.sequence, delivery.obj["value"])
                link.acknowledge(delivery)

    def insist(call: Callable[[], None]) -> None:
        """Call until the peer is there to be called."""
        while True:
            try:
                return call()
            except PeerLostError:
                time.sleep(0.02)

    threading.Thread(target=listen, daemon=True).start()
    threading.Thread(target=lambda: (sys.stdin.readline(), told.set()), daemon=True).start()
    say("ready")
    value = 0
    while not told.is_set():
        insist(lambda value=value: send(value))
        value += 1
        time.sleep(0.001)
    insist(lambda: link.flush())
    say(value, link.stats().connections, link.stats().lost)
    time.sleep(3600)  # until killed


def leave(address: str) -> None:
    """Makes links with work undone and ends without closing them."""
    server = LinkServer()
    client = LinkClient(address)
    client.send(np.zeros(10_000_000))
    other = LinkClient(server.address)
    other.send(1)
    time.sleep(0.2)
    say("leaving")


ROLES: dict[str, Callable[..., None]] = {
    role.__name__: role for role in (store, produce, consume, flood, stall, idle, converse, leave)
}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
