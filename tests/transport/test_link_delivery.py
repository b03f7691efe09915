"""Objects over a link: order, events, limits, media, calls of threads and of event loops."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from link_images import IMAGE, OTHER
from link_processes import PATIENCE, until

import transport.link.endpoints
from renderers.media.item import MediaSource
from transport import DecodeLimits, EncodeError
from transport.link import (
    Delivery,
    LinkClient,
    LinkClosedError,
    LinkLimits,
    LinkRefusedError,
    LinkServer,
    LinkTimeoutError,
    MessageTooLargeError,
    PeerConnected,
    PeerLost,
    PeerLostError,
    UndecodableMessageError,
)

Pair = tuple[LinkServer, LinkClient]


def receive_objects(link: LinkServer | LinkClient, count: int) -> list[Any]:
    got: list[Any] = []
    while len(got) < count:
        received = link.recv(timeout=PATIENCE)
        if isinstance(received, Delivery):
            got.append(received.obj)
    return got


def test_objects_arrive_in_order_in_both_directions(pair: Pair) -> None:
    server, client = pair
    for number in range(200):
        client.send({"n": number, "array": np.full(500, number)})
        server.send("worker", number)
    got = [client.recv(timeout=PATIENCE) for _ in range(200)]
    assert got == [Delivery(server.address, number) for number in range(200)]
    assert [each["n"] for each in receive_objects(server, 200)] == list(range(200))


def test_received_arrays_are_views_of_the_received_frames(pair: Pair) -> None:
    server, client = pair
    client.send(np.arange(100_000))
    array = receive_objects(server, 1)[0]
    assert (array == np.arange(100_000)).all()
    assert not array.flags.owndata
    assert not array.flags.writeable


def test_a_server_receives_connected_then_the_objects_then_lost(pair: Pair) -> None:
    server, client = pair  # the fixture received PeerConnected
    client.send(1)
    client.send(2)
    client.close()
    with LinkClient(server.address, name="next") as second:
        second.send(3)
        received = [server.recv(timeout=PATIENCE) for _ in range(5)]
    assert received == [
        Delivery("worker", 1),
        Delivery("worker", 2),
        PeerLost("worker", "closed its link", 0),
        PeerConnected("next"),
        Delivery("next", 3),
    ]
    until(lambda: server.peers() == [])


def test_messages_of_each_of_many_peers_arrive_in_order() -> None:
    with LinkServer() as server, ThreadPoolExecutor(8) as pool:

        def work(name: str) -> None:
            with LinkClient(server.address, name=name, linger=PATIENCE) as client:
                for number in range(50):
                    client.send(number)

        done = [pool.submit(work, f"worker-{number}") for number in range(8)]
        got: dict[str, list[Any]] = defaultdict(list)
        lost = 0
        while lost < 8:
            received = server.recv(timeout=PATIENCE)
            if isinstance(received, Delivery):
                got[received.peer].append(received.obj)
            lost += isinstance(received, PeerLost)
        for each in done:
            each.result(PATIENCE)
    assert list(got.values()) == [list(range(50))] * 8


def test_many_threads_may_send_and_receive_at_once(pair: Pair) -> None:
    server, client = pair
    with ThreadPoolExecutor(12) as pool:
        receiving = [pool.submit(receive_objects, server, 50) for _ in range(4)]
        sending = [pool.submit(lambda base: [client.send(base + n) for n in range(25)], 25 * n) for n in range(8)]
        for each in sending:
            each.result(PATIENCE)
        got = [number for each in receiving for number in each.result(PATIENCE)]
    assert sorted(got) == list(range(200))


@pytest.mark.slow
def test_send_waits_while_the_receiver_does_not_read() -> None:
    limits, times = LinkLimits(send_messages=5, receive_messages=3), {"heartbeat": 0.05, "peer_timeout": 0.4}
    with LinkServer(limits=limits, **times) as server, LinkClient(server.address, limits=limits, **times) as client:
        for number in range(5):
            client.send(number)
        with pytest.raises(LinkTimeoutError, match="did not get room"):
            client.send(5, timeout=1.2)  # three times the peer timeout: the connection stays
        assert receive_objects(server, 1) == [0]
        client.send(5, timeout=PATIENCE)
        assert receive_objects(server, 5) == [1, 2, 3, 4, 5]
        assert (client.stats().connections, client.stats().lost, server.stats().lost) == (1, 0, 0)


def test_send_refuses_a_message_larger_than_the_receiver_accepts_and_the_link_stays_usable() -> None:
    small = LinkLimits(decode=DecodeLimits(max_total_bytes=100_000))
    with LinkServer(limits=small) as server, LinkClient(server.address) as client:
        with pytest.raises(MessageTooLargeError) as caught:
            client.send(IMAGE)
        assert caught.value.allowed == 100_000
        client.send("still connected")
        assert receive_objects(server, 1) == ["still connected"]


def test_an_object_that_cannot_be_encoded_raises_before_anything_is_sent(pair: Pair) -> None:
    server, client = pair
    with pytest.raises(EncodeError):
        client.send(object())
    client.send("next")
    assert receive_objects(server, 1) == ["next"]


def test_a_medium_is_sent_over_a_connection_once_in_each_direction(pair: Pair) -> None:
    server, client = pair
    for number in range(20):
        client.send({"turn": number, "images": [IMAGE] * 3, "other": OTHER})
    for each in receive_objects(server, 20):
        assert each["images"][2] == IMAGE
        server.send("worker", each)
    assert all(each["other"] == OTHER for each in receive_objects(client, 20))
    for stats in (server.stats(), client.stats()):
        assert (stats.media_sent, stats.media_received) == (2, 2)
        assert IMAGE.nbytes + OTHER.nbytes < stats.bytes_sent < 1.1 * (IMAGE.nbytes + OTHER.nbytes)


def test_the_media_of_several_peers_are_stored_once() -> None:
    image = MediaSource.of(os.urandom(100_000))
    with LinkServer() as server, LinkClient(server.address) as one, LinkClient(server.address) as two:
        got = []
        for client in (one, two):
            client.send(image)
            got += receive_objects(server, 1)
        assert got[0] is got[1]


def test_media_beyond_the_store_of_the_receiver_are_sent_again() -> None:
    images = [MediaSource.of(os.urandom(20_000)) for _ in range(8)]
    limits = LinkLimits(media_bytes=3 * 20_600)
    with LinkServer(limits=limits) as server, LinkClient(server.address) as client:
        for number in range(32):
            client.send(images[number % 8])
        assert receive_objects(server, 32) == images * 4
        assert client.stats().media_sent == 32


def test_an_undecodable_message_raises_at_the_receiver_and_the_next_one_arrives(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = pair
    client.send([IMAGE, np.zeros(3)])
    client.send([IMAGE, "good"])
    until(lambda: server.stats().received == 2)
    with monkeypatch.context() as patched:
        patched.setattr(server._state, "limits", LinkLimits(decode=DecodeLimits(max_header_bytes=1)))
        with pytest.raises(UndecodableMessageError, match="max_header_bytes") as caught:
            server.recv(timeout=PATIENCE)
    assert caught.value.peer == "worker"
    assert receive_objects(server, 1) == [[IMAGE, "good"]]
    assert server.stats().undecodable == 1


def test_a_second_client_of_one_name_replaces_the_first_and_the_first_is_told(pair: Pair) -> None:
    server, first = pair
    with LinkClient(server.address, name="worker") as second:
        with pytest.raises(LinkRefusedError, match="took over this name"):
            first.recv(timeout=PATIENCE)
        lost = server.recv(timeout=PATIENCE)
        assert isinstance(lost, PeerLost)
        assert "took over" in lost.reason
        assert server.recv(timeout=PATIENCE) == PeerConnected("worker")
        server.send("worker", "to the second")
        assert second.recv(timeout=PATIENCE).obj == "to the second"


def test_a_refused_peer_gets_the_reason_and_its_place_is_free(pair: Pair) -> None:
    server, client = pair
    server.refuse_peer("worker", "your version is 1.0 and this server has 2.0")
    with pytest.raises(LinkRefusedError, match=r"your version is 1\.0"):
        client.recv(timeout=PATIENCE)
    lost = server.recv(timeout=PATIENCE)
    assert isinstance(lost, PeerLost)
    assert "your version" in lost.reason
    server.refuse_peer("worker", "again")  # no effect
    with pytest.raises(PeerLostError, match=r"'worker' is not connected \(connected: none\)"):
        server.send("worker", 1)


def test_a_server_at_its_limit_of_peers_refuses_further_ones_until_unread_messages_are_read() -> None:
    with LinkServer(limits=LinkLimits(peers=2)) as server, LinkClient(server.address, name="stays") as first:
        first.send("stays")
        with LinkClient(server.address, name="leaves") as second:
            second.send("unread")
        with pytest.raises(LinkRefusedError, match="2 peers, which is its limit"):
            LinkClient(server.address).recv(timeout=PATIENCE)
        assert sorted(receive_objects(server, 2)) == ["stays", "unread"]
        assert isinstance(server.recv(timeout=PATIENCE), PeerLost)
        with LinkClient(server.address, name="third"):
            assert server.recv(timeout=PATIENCE) == PeerConnected("third")


def test_a_timeout_of_zero_does_not_wait_and_a_nan_is_an_error(pair: Pair) -> None:
    server, _ = pair
    start = time.monotonic()
    with pytest.raises(LinkTimeoutError, match="within 0 s"):
        server.recv(timeout=0)
    assert time.monotonic() - start < 1
    with pytest.raises(ValueError, match="timeout is nan"):
        server.recv(timeout=float("nan"))


async def test_calls_of_an_event_loop_deliver_and_a_cancelled_receive_loses_no_message(pair: Pair) -> None:
    server, client = pair
    for number in range(40):
        await client.send_async({"n": number, "image": IMAGE})
    got: list[int] = []
    while len(got) < 40:
        try:
            async with asyncio.timeout(0.001 * (len(got) % 3)):
                received = await server.recv_async()
        except TimeoutError:
            received = await asyncio.wait_for(server.recv_async(), PATIENCE)
        assert isinstance(received, Delivery)
        got.append(received.obj["n"])
    assert got == list(range(40))
    await server.send_async("worker", "done")
    assert (await client.recv_async()).obj == "done"


async def test_a_receive_that_is_cancelled_while_it_decodes_returns_the_message_to_the_front(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    server, client = pair
    started, finish = threading.Event(), threading.Event()
    decode: Callable[..., Any] = transport.link.endpoints.decode_frames

    def decode_slowly(*arguments: Any, **options: Any) -> Any:
        started.set()
        assert finish.wait(PATIENCE)
        return decode(*arguments, **options)

    client.send("first")
    client.send("second")
    monkeypatch.setattr(transport.link.endpoints, "decode_frames", decode_slowly)
    receiving = asyncio.create_task(server.recv_async())
    await asyncio.to_thread(started.wait, PATIENCE)
    receiving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await receiving
    finish.set()
    got = [await server.recv_async(), await server.recv_async()]
    assert got == [Delivery("worker", "first"), Delivery("worker", "second")]


async def test_a_receive_does_not_block_the_event_loop_and_ends_when_the_link_closes(pair: Pair) -> None:
    server, client = pair
    receiving = asyncio.create_task(server.recv_async())
    await asyncio.sleep(0)
    assert not receiving.done()
    client.send("now")
    assert (await asyncio.wait_for(receiving, PATIENCE)) == Delivery("worker", "now")
    receiving = asyncio.create_task(server.recv_async())
    await asyncio.sleep(0)
    await asyncio.to_thread(server.close)
    with pytest.raises(LinkClosedError):
        await asyncio.wait_for(receiving, PATIENCE)
