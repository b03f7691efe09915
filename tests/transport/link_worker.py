"""The other process of the link tests: `python link_worker.py ROLE ADDRESS ...`."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from transport.link import Delivery, LinkClient, LinkLimits, LinkServer, LinkTimeoutError

MEGABYTES = 1 << 20
NARROW = LinkLimits(send_bytes=16 * MEGABYTES, receive_bytes=16 * MEGABYTES)


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def receive_one(server: LinkServer) -> Delivery:
    while not isinstance(received := server.recv(timeout=60), Delivery):
        pass
    return received


def flood(address: str) -> None:
    """A client that sends megabytes until it is held up, and says how many and what that cost."""
    client = LinkClient(address, limits=NARROW, linger=0)
    client.send("first")
    before, sent = resident_bytes(), 0
    try:
        while sent < 300:
            client.send(np.full(MEGABYTES, sent % 100, np.uint8), timeout=1)
            sent += 1
    except LinkTimeoutError:
        say(sent, resident_bytes() - before)
    os._exit(0)


def stall(address: str) -> None:
    """A server that receives one message and then stops reading, and says what it costs when asked."""
    server = LinkServer(address, limits=NARROW)
    say(server.address)
    receive_one(server)
    before = resident_bytes()
    sys.stdin.readline()
    say(resident_bytes() - before)
    os._exit(0)


def echo(address: str, name: str) -> None:
    """A client that answers what it receives, and never closes its link."""
    client = LinkClient(address, name=name, heartbeat=0.1, peer_timeout=1)
    while True:
        client.send(client.recv(timeout=60).obj)


def serve(address: str) -> None:
    """A server that answers what it receives."""
    server = LinkServer(address)
    say(server.address)
    while True:
        delivery = receive_one(server)
        server.send(delivery.peer, delivery.obj)


def leave(address: str) -> None:
    """Makes links with work undone and ends without closing them."""
    server = LinkServer()
    LinkClient(address)
    other = LinkClient(server.address)
    other.send(np.zeros(10_000_000))
    time.sleep(0.2)
    say("leaving")


ROLES: dict[str, Callable[..., None]] = {role.__name__: role for role in (flood, stall, echo, serve, leave)}

if __name__ == "__main__":
    ROLES[sys.argv[1]](*sys.argv[2:])
