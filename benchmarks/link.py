"""The cost of a link compared with plain pyzmq: pixel frames between two processes over TCP.

    python benchmarks/link.py [--check]

A message is 20 float32 arrays of 1024x1536 (126 MB). The raw side sends the same buffers with pyzmq, `copy=False` both
ways, with two messages in flight like the link. Both receivers send one response after the last message; only the link
decodes. Rounds alternate so that drift affects both sides equally; best and median are printed. `--check` fails
below 1 GB/s and below 80 % of raw.
"""

from __future__ import annotations

import argparse
import multiprocessing
import socket as socket_module
import sys
import time
from collections.abc import Callable
from statistics import median

import numpy as np
import zmq
from rich.console import Console
from rich.table import Table

from transport.link import Delivery, LinkClient, LinkLimits, LinkServer

SHAPE = (1024, 1536)
ARRAYS = 20
IN_FLIGHT = 2
LIMITS = LinkLimits(send_bytes=1 << 30, receive_bytes=IN_FLIGHT * 128 << 20)


def receive(server: LinkServer) -> Delivery:
    while not isinstance(received := server.recv(timeout=60), Delivery):
        pass
    return received


def serve_link(address: str, rounds: int, messages: int) -> None:
    with LinkServer(address, limits=LIMITS) as server:
        for _ in range(rounds):
            for _ in range(messages):
                delivery = receive(server)
                assert len(delivery.obj) == ARRAYS
                assert delivery.obj[-1][0, 0] == ARRAYS - 1
            server.send(delivery.peer, "all here")


def serve_raw(address: str, rounds: int, messages: int) -> None:
    context = zmq.Context()
    with context.socket(zmq.ROUTER) as socket:
        socket.bind(address)
        for _ in range(rounds):
            for _ in range(messages):
                route, *frames = socket.recv_multipart(copy=False)
                assert len(frames) == ARRAYS
                assert np.frombuffer(frames[-1].buffer, np.float32)[0] == ARRAYS - 1
                socket.send_multipart([route.bytes, b"one"])
    context.term()


def time_link(client: LinkClient, arrays: list[np.ndarray], messages: int) -> float:
    start = time.perf_counter()
    for _ in range(messages):
        client.send(arrays, timeout=60)
    client.recv(timeout=60)
    return time.perf_counter() - start


def time_raw(socket: zmq.Socket[bytes], arrays: list[np.ndarray], messages: int) -> float:
    start = time.perf_counter()
    for number in range(messages):
        if number >= IN_FLIGHT:
            socket.recv()
        socket.send_multipart(arrays, copy=False)
    for _ in range(min(IN_FLIGHT, messages)):
        socket.recv()
    return time.perf_counter() - start


def free_address() -> str:
    with socket_module.create_server(("127.0.0.1", 0)) as listener:
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


def measure(rounds: int, messages: int) -> dict[str, list[float]]:
    """GB/s of each round, by side."""
    arrays = [np.full(SHAPE, number, np.float32) for number in range(ARRAYS)]
    gigabytes = messages * sum(array.nbytes for array in arrays) / 1e9
    spawn = multiprocessing.get_context("spawn")
    speeds: dict[str, list[float]] = {"link": [], "raw": []}
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        addresses = {side: free_address() for side in speeds}
        servers = [
            spawn.Process(target=target, args=(addresses[side], rounds + 1, messages))
            for side, target in (("link", serve_link), ("raw", serve_raw))
        ]
        for server in servers:
            server.start()
        socket.connect(addresses["raw"])
        with LinkClient(addresses["link"], limits=LIMITS, peer_timeout=60) as client:
            sides: dict[str, Callable[[], float]] = {
                "link": lambda: time_link(client, arrays, messages),
                "raw": lambda: time_raw(socket, arrays, messages),
            }
            for turn in range(rounds + 1):
                for side, run in sides.items():
                    seconds = run()
                    if turn:  # the first round starts the processes
                        speeds[side].append(gigabytes / seconds)
        for server in servers:
            server.join()
    return speeds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if the link is slower than it must be")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--messages", type=int, default=8, help="per round")
    options = parser.parse_args()
    speeds = measure(options.rounds, options.messages)
    table = Table(
        "GB/s over TCP", "median", "best", title=f"{ARRAYS} float32 arrays of {SHAPE[0]}x{SHAPE[1]} a message"
    )
    for side, values in speeds.items():
        table.add_row(side, f"{median(values):.2f}", f"{max(values):.2f}")
    share = median(speeds["link"]) / median(speeds["raw"])
    Console().print(table, f"link / raw: {share:.0%}")
    if options.check and median(speeds["link"]) < 1 and share < 0.8:
        sys.exit("the link is slower than 1 GB/s and than 80 % of raw pyzmq")


if __name__ == "__main__":
    main()
