"""Links between real sockets: what arrives, in what order, how often, and what the application is told."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from link_processes import PATIENCE

from renderers.media.source import MediaSource
from transport import DecodeLimits, MissingExtraError
from transport.link import (
    ClientKeys,
    LinkAddressError,
    LinkClient,
    LinkClosedError,
    LinkLimits,
    LinkRefusedError,
    LinkServer,
    LinkTimeoutError,
    MessageTooLargeError,
    PeerChange,
    PeerLostError,
    ServerKeys,
    UnacknowledgedError,
    generate_keypair,
)

pytest.importorskip("zmq", reason="links need the extra `zmq`")

QUICK = {"heartbeat": 0.1, "peer_timeout": 1.0}
IMAGE = MediaSource.of(b"\x89PNG" + bytes(200_000))
OTHER = MediaSource.of(b"\xff\xd8" + bytes(150_000))


@pytest.fixture(params=["tcp", "ipc"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[LinkServer]:
    address = "tcp://127.0.0.1:*" if request.param == "tcp" else f"ipc://{tmp_path}/link"
    with LinkServer(address) as link:
        yield link


@pytest.fixture
def pair() -> Iterator[tuple[LinkServer, LinkClient]]:
    with LinkServer() as server, LinkClient(server.address, name="worker") as client:
        yield server, client


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


def test_a_client_may_send_before_the_server_is_there(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/later"
    with LinkClient(address) as client:
        client.send("early")
        time.sleep(0.2)
        with LinkServer(address) as server:
            assert server.recv(timeout=PATIENCE).obj == "early"
            client.flush(PATIENCE)


def test_each_of_many_peers_keeps_its_own_order_and_gets_its_turn() -> None:
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


def test_what_is_not_acknowledged_stays_with_the_sender(pair: tuple[LinkServer, LinkClient]) -> None:
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


def test_a_stopped_reader_stops_the_writer_until_it_reads_again() -> None:
    limits = LinkLimits(send_messages=5, receive_messages=3)
    with LinkServer(limits=limits) as server, LinkClient(server.address, limits=limits) as client:
        for number in range(5):
            client.send(number)
        with pytest.raises(LinkTimeoutError, match="room in the queue"):
            client.send(5, timeout=0.2)
        assert server.recv(timeout=PATIENCE).obj == 0
        client.send(5, timeout=PATIENCE)
        assert [server.recv(timeout=PATIENCE).obj for _ in range(5)] == [1, 2, 3, 4, 5]


def test_a_reader_that_stops_for_longer_than_the_peer_timeout_is_not_taken_for_lost() -> None:
    limits, times = LinkLimits(send_messages=5, receive_messages=3), {"heartbeat": 0.05, "peer_timeout": 0.4}
    with LinkServer(limits=limits, **times) as server, LinkClient(server.address, limits=limits, **times) as client:
        for number in range(5):
            client.send(number)
        with pytest.raises(LinkTimeoutError, match="room in the queue"):
            client.send(5, timeout=1.2)
        assert client.connected
        assert (client.stats().connections, client.stats().lost, server.stats().lost) == (1, 0, 0)
        assert [server.recv(timeout=PATIENCE).obj for _ in range(5)] == [0, 1, 2, 3, 4]


def test_a_media_source_crosses_a_connection_once_whoever_refers_to_it(pair: tuple[LinkServer, LinkClient]) -> None:
    server, client = pair
    for number in range(10):
        client.send([number, IMAGE, {"again": IMAGE}])
    for number in range(10):
        got = server.recv(timeout=PATIENCE).obj
        assert got[0] == number
        assert bytes(got[1].data) == bytes(IMAGE.data)
    server.send("worker", [IMAGE, OTHER])
    assert [bytes(source.data) for source in client.recv(timeout=PATIENCE).obj] == [
        bytes(IMAGE.data),
        bytes(OTHER.data),
    ]
    assert IMAGE.nbytes < client.stats().bytes_sent < IMAGE.nbytes + 5000
    assert OTHER.nbytes < server.stats().bytes_sent < OTHER.nbytes + 5000


def test_media_no_longer_held_are_pulled_and_the_message_keeps_its_place() -> None:
    room_for_one = LinkLimits(blob_bytes=IMAGE.nbytes + 512)
    with LinkServer(limits=room_for_one) as server, LinkClient(server.address) as client:
        sent = [IMAGE, OTHER, IMAGE, OTHER, IMAGE]
        for number, source in enumerate(sent):
            client.send([number, source])
            client.send([number, None])
        for number, source in enumerate(sent):
            got = server.recv(timeout=PATIENCE).obj
            assert (got[0], got[1].digest, bytes(got[1].data)) == (number, source.digest, bytes(source.data))
            assert server.recv(timeout=PATIENCE).obj == [number, None]
        assert server.stats().blobs_pulled >= 1


def test_media_that_alone_exceed_the_store_still_arrive() -> None:
    with LinkServer(limits=LinkLimits(blob_bytes=1000)) as server, LinkClient(server.address) as client:
        client.send([IMAGE, OTHER])
        assert [source.digest for source in server.recv(timeout=PATIENCE).obj] == [IMAGE.digest, OTHER.digest]


def test_a_message_larger_than_the_receiver_takes_is_refused_where_it_is_sent() -> None:
    small = LinkLimits(decode=DecodeLimits(max_total_bytes=100_000))
    with LinkServer(limits=small) as server, LinkClient(server.address) as client:
        client.send("small")
        server.recv(timeout=PATIENCE)
        client.flush(PATIENCE)
        with pytest.raises(MessageTooLargeError) as caught:
            client.send(IMAGE)
        assert caught.value.allowed == 100_000
        client.send("the link goes on")
        assert server.recv(timeout=PATIENCE).obj == "the link goes on"


def test_a_message_too_large_that_was_queued_before_the_greeting_fails_the_link(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/later"
    client = LinkClient(address)
    client.send(IMAGE)
    small = LinkLimits(decode=DecodeLimits(max_total_bytes=100_000))
    with LinkServer(address, limits=small), pytest.raises(LinkRefusedError, match="100000"):
        client.flush(PATIENCE)
    with pytest.raises(UnacknowledgedError):
        client.close()


async def test_the_async_calls_work_and_a_cancelled_receive_loses_nothing() -> None:
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


async def test_waiting_for_a_message_leaves_the_event_loop_free() -> None:
    with LinkServer() as server, LinkClient(server.address) as client:
        receiving = asyncio.create_task(server.recv_async())
        for _ in range(10):
            await asyncio.sleep(0.01)
        assert not receiving.done()
        client.send("now")
        assert (await asyncio.wait_for(receiving, PATIENCE)).obj == "now"


def test_the_server_hears_who_comes_and_who_leaves() -> None:
    with LinkServer() as server:
        with LinkClient(server.address, name="worker") as client:
            client.send(1)
            server.recv(timeout=PATIENCE)
        events = [server.next_event(PATIENCE), server.next_event(PATIENCE)]
        assert [(event.change, event.peer) for event in events] == [
            (PeerChange.CONNECTED, "worker"),
            (PeerChange.LEFT, "worker"),
        ]
        assert server.peers() == {"worker": PeerChange.LEFT}
        with pytest.raises(PeerLostError, match="has left"):
            server.send("worker", "too late")
        with pytest.raises(PeerLostError, match="not known"):
            server.send("nobody", 1)


def test_what_a_worker_did_not_acknowledge_goes_to_the_next_of_its_name() -> None:
    with LinkServer() as server:
        first = LinkClient(server.address, name="worker")
        first.send("hello")
        server.recv(timeout=PATIENCE)
        for number in range(4):
            server.send("worker", number)
        assert first.recv(timeout=PATIENCE).obj == 0
        assert first.recv(timeout=PATIENCE, acknowledge=False).obj == 1
        while server.unacknowledged("worker") != (2, 3, 4):
            time.sleep(0.01)
        first.close()
        with LinkClient(server.address, name="worker") as second:
            assert [second.recv(timeout=PATIENCE).obj for _ in range(3)] == [1, 2, 3]
            server.flush(PATIENCE)


def test_a_second_client_of_one_name_takes_over_and_the_first_is_told() -> None:
    with LinkServer() as server, LinkClient(server.address, name="worker", **QUICK) as first:
        first.send(1)
        server.recv(timeout=PATIENCE)
        first.flush(PATIENCE)
        with LinkClient(server.address, name="worker") as second:
            second.send(2)
            assert server.recv(timeout=PATIENCE).obj == 2
            with pytest.raises(LinkRefusedError, match="another process took over"):
                first.recv(timeout=PATIENCE)


def test_a_dropped_peer_may_come_back_and_sends_again_what_was_not_acknowledged() -> None:
    with LinkServer() as server, LinkClient(server.address, name="worker") as client:
        client.send("a")
        assert server.recv(timeout=PATIENCE, acknowledge=False).obj == "a"
        server.send("worker", "never acknowledged")
        client.recv(timeout=PATIENCE, acknowledge=False)
        assert server.drop_peer("worker") == (1,)
        assert server.recv(timeout=PATIENCE).obj == "a"
        client.flush(PATIENCE)
        server.send("worker", "after")
        assert client.recv(timeout=PATIENCE).obj == "after"


def test_peers_that_are_gone_make_room_and_peers_that_are_there_do_not() -> None:
    with LinkServer(limits=LinkLimits(peers=2)) as server:
        for name in ("a", "b", "c"):
            with LinkClient(server.address, name=name) as client:
                client.send(name)
                server.recv(timeout=PATIENCE)
            while server.peers()[name] is not PeerChange.LEFT:
                time.sleep(0.01)
        assert set(server.peers()) == {"b", "c"}
        with LinkClient(server.address) as first, LinkClient(server.address) as second:
            for client in (first, second):
                client.send(1)
                server.recv(timeout=PATIENCE)
                client.flush(PATIENCE)
            with LinkClient(server.address) as third, pytest.raises(LinkRefusedError, match="2 peers"):
                third.recv(timeout=PATIENCE)


def test_a_silent_server_fails_a_call_that_waits_and_the_call_may_be_repeated(tmp_path: Path) -> None:
    address = f"ipc://{tmp_path}/link"
    with LinkClient(address, **QUICK) as client:
        start = time.monotonic()
        with pytest.raises(PeerLostError, match="silent for 1 s"):
            client.recv()
        assert time.monotonic() - start > 0.9
        client.send("kept")
        with LinkServer(address, **QUICK) as server:
            assert server.recv(timeout=PATIENCE).obj == "kept"
            client.flush(PATIENCE)


def test_closing_with_unsent_data_raises_and_does_not_hang(tmp_path: Path) -> None:
    client = LinkClient(f"ipc://{tmp_path}/nobody", linger=0.3)
    for _ in range(3):
        client.send(np.zeros(1_000_000))
    start = time.monotonic()
    with pytest.raises(UnacknowledgedError) as caught:
        client.close()
    assert time.monotonic() - start < 30
    assert list(caught.value.counts.values()) == [3]
    client.close()
    with pytest.raises(LinkClosedError):
        client.send(1)


def test_closing_while_the_peer_does_not_read_does_not_hang() -> None:
    with LinkServer(limits=LinkLimits(receive_messages=1)) as server:
        client = LinkClient(server.address, linger=0.3)
        for _ in range(20):
            client.send(np.zeros(1_000_000))
        start = time.monotonic()
        with pytest.raises(UnacknowledgedError):
            client.close()
        assert time.monotonic() - start < 30


def test_closing_wakes_whoever_waits() -> None:
    server = LinkServer()
    outcome: list[type[BaseException]] = []

    def wait() -> None:
        try:
            server.recv()
        except LinkClosedError as error:
            outcome.append(type(error))

    thread = threading.Thread(target=wait)
    thread.start()
    time.sleep(0.1)
    server.close()
    thread.join(PATIENCE)
    assert outcome == [LinkClosedError]


def test_what_was_acknowledged_right_before_closing_is_known_to_the_other_side() -> None:
    for _ in range(20):
        with LinkServer() as server:
            client = LinkClient(server.address, name="worker")
            client.send("hello")
            server.recv(timeout=PATIENCE)
            server.send("worker", "job")
            client.recv(timeout=PATIENCE)
            client.close()
            while server.peers()["worker"] is not PeerChange.LEFT:
                time.sleep(0.001)
            assert server.unacknowledged("worker") == ()


def test_leaving_a_with_block_by_an_error_shows_that_error(tmp_path: Path) -> None:
    def fail() -> None:
        with LinkClient(f"ipc://{tmp_path}/nobody") as client:
            client.send(1)
            raise KeyError("mine")

    with pytest.raises(KeyError):
        fail()


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("tcp://0.0.0.0:*", "other machines"),
        ("tcp://*:5555", "other machines"),
        ("tcp://10.0.0.1:*", "other machines"),
        ("tcp://eth0:5555", "other machines"),
        ("udp://127.0.0.1:1", "neither"),
        ("127.0.0.1:5555", "neither"),
        ("ipc:///no/such/folder/link", "cannot be bound"),
        ("tcp://127.0.0.1:65536", "port larger than 65535"),
        ("tcp://127.0.0.1:" + "9" * 5000, "port larger than 65535"),
        (5555, "neither"),
    ],
)
def test_a_server_binds_to_nothing_but_this_machine_unless_asked(address: str, reason: str) -> None:
    with pytest.raises(LinkAddressError, match=reason):
        LinkServer(address)


@pytest.mark.parametrize("address", ["udp://127.0.0.1:1", "127.0.0.1:5555", "tcp://127.0.0.1:99999", "ipc://", 5555])
def test_a_client_refuses_an_address_that_is_none(address: str) -> None:
    with pytest.raises(LinkAddressError, match=r"neither|port larger"):
        LinkClient(address)


def test_a_server_for_other_machines_needs_keys() -> None:
    with pytest.raises(LinkAddressError, match="keys=ServerKeys"):
        LinkServer("tcp://0.0.0.0:*", allow_remote=True)
    public, secret = generate_keypair()
    LinkServer("tcp://0.0.0.0:*", allow_remote=True, keys=ServerKeys(public, secret, [])).close()


def test_an_ipc_socket_is_for_its_owner_alone(tmp_path: Path) -> None:
    with LinkServer(f"ipc://{tmp_path}/link"):
        assert (tmp_path / "link").stat().st_mode & 0o077 == 0


def test_with_keys_only_those_get_in_who_are_listed_and_know_the_server() -> None:
    public, secret = generate_keypair()
    (mine, my_secret), (theirs, their_secret) = generate_keypair(), generate_keypair()
    with LinkServer(keys=ServerKeys(public, secret, [mine])) as server:
        with LinkClient(server.address, name="worker", keys=ClientKeys(mine, my_secret, public)) as client:
            client.send("hello")
            assert server.recv(timeout=PATIENCE).obj == "hello"
            client.flush(PATIENCE)
            server.send("worker", IMAGE)
            assert client.recv(timeout=PATIENCE).obj == IMAGE
        stranger = LinkClient(server.address, keys=ClientKeys(theirs, their_secret, public))
        with stranger, pytest.raises(LinkRefusedError, match="does not accept this client's key"):
            stranger.recv(timeout=PATIENCE)
        for keys in (None, ClientKeys(mine, my_secret, theirs)):
            with (
                LinkClient(server.address, keys=keys, heartbeat=0.1, peer_timeout=0.4) as lost,
                pytest.raises(PeerLostError),
            ):
                lost.recv(timeout=PATIENCE)
        assert set(server.peers()) == {"worker"}


def test_a_name_belongs_to_the_key_that_used_it_first() -> None:
    public, secret = generate_keypair()
    (mine, my_secret), (theirs, their_secret) = generate_keypair(), generate_keypair()
    my_keys, their_keys = ClientKeys(mine, my_secret, public), ClientKeys(theirs, their_secret, public)
    with (
        LinkServer(keys=ServerKeys(public, secret, [mine, theirs])) as server,
        LinkClient(server.address, name="worker", keys=my_keys) as client,
    ):
        client.send(1)
        server.recv(timeout=PATIENCE)
        client.flush(PATIENCE)
        thief = LinkClient(server.address, name="worker", keys=their_keys)
        with thief, pytest.raises(LinkRefusedError, match="belongs to another key"):
            thief.recv(timeout=PATIENCE)
        client.send(2)
        assert server.recv(timeout=PATIENCE).obj == 2
        client.flush(PATIENCE)


def test_nothing_that_is_logged_holds_a_secret_key(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(0)
    (public, secret), (mine, my_secret), (theirs, their_secret) = (generate_keypair() for _ in range(3))
    with LinkServer(keys=ServerKeys(public, secret, [mine])) as server:
        with LinkClient(server.address, keys=ClientKeys(mine, my_secret, public)) as client:
            client.send("hello")
            server.recv(timeout=PATIENCE)
        stranger = LinkClient(server.address, keys=ClientKeys(theirs, their_secret, public))
        with stranger, pytest.raises(LinkRefusedError) as caught:
            stranger.recv(timeout=PATIENCE)
    for each in (secret, my_secret, their_secret):
        assert each not in caplog.text + str(caught.value)
    assert theirs in caplog.text  # it was listening


def test_secret_keys_are_not_shown() -> None:
    public, secret = generate_keypair()
    assert secret not in repr(ServerKeys(public, secret, [])) + repr(ClientKeys(public, secret, public))


def test_without_pyzmq_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    for make in (LinkServer, lambda: LinkClient("tcp://127.0.0.1:1"), generate_keypair):
        with pytest.raises(MissingExtraError, match=r"mmrollouts\[zmq\]"):
            make()


def test_importing_links_loads_no_zmq() -> None:
    code = "import sys, transport.link; assert 'zmq' not in sys.modules and 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE)


@pytest.mark.parametrize("times", [(0, 10), (-1, 10), (6, 10)])
def test_times_that_would_lose_every_peer_are_refused(times: tuple[float, float]) -> None:
    with pytest.raises(ValueError, match="at least twice"):
        LinkServer(heartbeat=times[0], peer_timeout=times[1])


def test_limits_and_names_that_make_no_sense_are_refused() -> None:
    with pytest.raises(ValueError, match="send_bytes is 0"):
        LinkLimits(send_bytes=0)
    with pytest.raises(ValueError, match="receive_messages is 4294967296"):
        LinkLimits(receive_messages=1 << 32)
    for name in ("", "x" * 201, "two\nlines"):
        with pytest.raises(ValueError, match="link name"):
            LinkClient("tcp://127.0.0.1:1", name=name)
    with pytest.raises(ValueError, match="40 characters"):
        ServerKeys("short", "short", [])
    secret = "no Z85 knows this ~ but it has 40 signs."
    with pytest.raises(ValueError, match="Z85") as caught:
        ServerKeys(generate_keypair()[0], secret, [])
    assert secret not in str(caught.value)
