"""Links between real sockets: delivery in order, acknowledgement, back-pressure, message sizes, async calls."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from link_images import IMAGE
from link_processes import PATIENCE

from transport import DecodeLimits
from transport.link import (
    LinkClient,
    LinkLimits,
    LinkServer,
    LinkTimeoutError,
    MessageTooLargeError,
)

pytest.importorskip("zmq", reason="links need the extra `zmq`")


@pytest.fixture(params=["tcp", "ipc"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LinkServer]:
    address = "tcp://127.0.0.1:*" if request.param == "tcp" else f"ipc://{tmp_path}/link"
    with LinkServer(address) as link:
        yield link


def test_objects_arrive_in_order_in_both_directions(server: LinkServer) -> None:
    with LinkClient(server.address, name="worker") as client:
        for number in range(50):
            assert client.send({"n": number, "pixels": np.full((64, 64), number, np.float32)}) == number + 1
        for number in range(50):
            delivery = server.recv(timeout=PATIENCE)
            assert (delivery.peer, delivery.sequence, delivery.obj["n"]) == ("worker", number + 1, number)
            assert (delivery.obj["pixels"] == number).all()
            assert delivery.session == client.session
            server.send("worker", number)
        assert [client.recv(timeout=PATIENCE).obj for _ in range(50)] == list(range(50))
        client.flush(PATIENCE)
        assert client.unacknowledged() == ()


def test_a_client_may_send_before_the_server_starts(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/later"
    with LinkClient(address) as client:
        client.send("early")
        time.sleep(0.2)
        with LinkServer(address) as server:
            assert server.recv(timeout=PATIENCE).obj == "early"
            client.flush(PATIENCE)


def test_messages_of_each_of_many_peers_arrive_in_order() -> None:
    with LinkServer(limits=LinkLimits(receive_messages=40)) as server:
        clients = [LinkClient(server.address, name=f"worker-{index}") for index in range(8)]
        for client in clients:
            for number in range(30):
                client.send(number)
        seen: dict[str, list[int]] = {client.name: [] for client in clients}
        for _ in range(240):
            delivery = server.recv(timeout=PATIENCE)
            seen[delivery.peer].append(delivery.obj)
        assert all(numbers == list(range(30)) for numbers in seen.values())
        for client in clients:
            client.close()


def test_many_threads_may_send_and_receive_at_once(pair: tuple[LinkServer, LinkClient]) -> None:
    server, client = pair
    got: list[int] = []

    def send(first: int) -> None:
        for number in range(first, first + 100):
            client.send(number)

    def receive() -> None:
        got.extend(server.recv(timeout=PATIENCE).obj for _ in range(100))

    threads = [threading.Thread(target=send, args=(first,)) for first in (0, 100, 200, 300)]
    threads += [threading.Thread(target=receive) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(got) == list(range(400))


def test_the_sender_keeps_messages_until_they_are_acknowledged(pair: tuple[LinkServer, LinkClient]) -> None:
    server, client = pair
    for number in range(3):
        client.send(number)
    deliveries = [server.recv(timeout=PATIENCE, acknowledge=False) for _ in range(3)]
    with pytest.raises(LinkTimeoutError):
        client.flush(0.2)
    server.acknowledge(deliveries[2])
    with pytest.raises(LinkTimeoutError):
        client.flush(0.2)
    assert client.unacknowledged() == (1, 2, 3)
    server.acknowledge(deliveries[0])
    server.acknowledge(deliveries[1])
    client.flush(PATIENCE)


def test_send_blocks_while_the_receiver_does_not_read() -> None:
    limits = LinkLimits(send_messages=5, receive_messages=3)
    with LinkServer(limits=limits) as server, LinkClient(server.address, limits=limits) as client:
        for number in range(5):
            client.send(number)
        with pytest.raises(LinkTimeoutError, match="room in the queue"):
            client.send(5, timeout=0.2)
        assert server.recv(timeout=PATIENCE).obj == 0
        client.send(5, timeout=PATIENCE)
        assert [server.recv(timeout=PATIENCE).obj for _ in range(5)] == [1, 2, 3, 4, 5]


def test_a_receiver_that_does_not_read_for_longer_than_the_peer_timeout_stays_connected() -> None:
    limits, times = LinkLimits(send_messages=5, receive_messages=3), {"heartbeat": 0.05, "peer_timeout": 0.4}
    with LinkServer(limits=limits, **times) as server, LinkClient(server.address, limits=limits, **times) as client:
        for number in range(5):
            client.send(number)
        with pytest.raises(LinkTimeoutError, match="room in the queue"):
            client.send(5, timeout=1.2)
        assert client.connected
        assert (client.stats().connections, client.stats().lost, server.stats().lost) == (1, 0, 0)
        assert [server.recv(timeout=PATIENCE).obj for _ in range(5)] == [0, 1, 2, 3, 4]


def test_send_refuses_a_message_larger_than_the_receiver_allows() -> None:
    small = LinkLimits(decode=DecodeLimits(max_total_bytes=100_000))
    with LinkServer(limits=small) as server, LinkClient(server.address) as client:
        client.send("small")
        server.recv(timeout=PATIENCE)
        client.flush(PATIENCE)
        with pytest.raises(MessageTooLargeError) as caught:
            client.send(IMAGE)
        assert caught.value.allowed == 100_000
        client.send("still connected")
        assert server.recv(timeout=PATIENCE).obj == "still connected"


def test_messages_too_large_that_were_queued_before_the_greeting_are_dropped_and_the_others_arrive(
    tmp_path: Path,
) -> None:
    address = f"ipc://{tmp_path}/later"
    client = LinkClient(address)
    for obj in ("first", IMAGE, "third", [IMAGE, IMAGE], "fifth"):
        client.send(obj)
    small = LinkLimits(decode=DecodeLimits(max_total_bytes=100_000))
    with LinkServer(address, limits=small) as server:
        with pytest.raises(MessageTooLargeError, match=r"largest of the messages 2, 4 has \d+ bytes") as caught:
            client.flush(PATIENCE)
        assert (caught.value.allowed, caught.value.sequences) == (100_000, (2, 4))
        assert [server.recv(timeout=PATIENCE).obj for _ in range(3)] == ["first", "third", "fifth"]
        client.flush(PATIENCE)  # reported once
        assert client.send("sixth") == 6
        assert server.recv(timeout=PATIENCE).sequence == 6
        client.flush(PATIENCE)
        assert (client.stats().acknowledged, server.stats().received) == (4, 4)
        client.close()


def test_a_client_that_restarts_with_a_smaller_limit_gets_the_messages_that_it_accepts() -> None:
    with LinkServer() as server:
        with LinkClient(server.address, name="worker") as first:
            first.send("hello")
            server.recv(timeout=PATIENCE)
            server.send("worker", IMAGE)
            server.send("worker", "small")
            first.recv(timeout=PATIENCE, acknowledge=False)
        small = LinkLimits(decode=DecodeLimits(max_total_bytes=100_000))
        with LinkClient(server.address, name="worker", limits=small) as second:
            assert second.recv(timeout=PATIENCE).obj == "small"
            with pytest.raises(MessageTooLargeError, match="message 1 has"):
                server.flush(PATIENCE)
            server.flush(PATIENCE)


async def test_async_calls_deliver_and_a_cancelled_receive_loses_no_message() -> None:
    with LinkServer() as server, LinkClient(server.address, name="worker") as client:
        for number in range(40):
            await client.send_async({"n": number, "image": IMAGE})
        got = []
        while len(got) < 40:
            try:
                async with asyncio.timeout(0.001 * (len(got) % 3)):
                    got.append((await server.recv_async()).obj["n"])
            except TimeoutError:
                await asyncio.sleep(0.001)
                got.append((await asyncio.wait_for(server.recv_async(), PATIENCE)).obj["n"])
        assert got == list(range(40))
        await client.flush_async()
        await server.send_async("worker", "done")
        assert (await client.recv_async()).obj == "done"


async def test_an_async_receive_does_not_block_the_event_loop() -> None:
    with LinkServer() as server, LinkClient(server.address) as client:
        receiving = asyncio.create_task(server.recv_async())
        for _ in range(10):
            await asyncio.sleep(0.01)
        assert not receiving.done()
        client.send("now")
        assert (await asyncio.wait_for(receiving, PATIENCE)).obj == "now"
