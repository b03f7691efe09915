"""Links whose other end is killed, stopped, cut off or hostile."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from link_processes import PATIENCE, Process, lines, rows, until, values

from renderers.media.source import MediaSource
from transport import encode_frames
from transport.link import (
    Delivery,
    LinkClient,
    LinkLimits,
    LinkServer,
    LinkTimeoutError,
    PeerChange,
    PeerLostError,
    UndecodableMessageError,
)
from transport.link.limits import Credit
from transport.link.messages import NO_SESSION, Ack, Blob, Data, Greeting, Hello, LinkMessage, Pull, Welcome

pytest.importorskip("zmq", reason="links need the extra `zmq`")

import zmq
from link_strangers import Stranger

QUICK = {"heartbeat": 0.1, "peer_timeout": 1.0}
MEGABYTES = 1 << 20

ROUNDS = [pytest.param(10, id="10 kills"), pytest.param(100, id="100 kills", marks=pytest.mark.slow)]

SERVER_ROUNDS = [
    pytest.param(10, "no resume", id="10 kills"),
    pytest.param(3, "resume", id="3 kills, told where to resume"),
    pytest.param(100, "no resume", id="100 kills", marks=pytest.mark.slow),
    pytest.param(100, "resume", id="100 kills, told where to resume", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("kills", "resume"), SERVER_ROUNDS)
def test_killing_the_server_loses_nothing_and_doubles_nothing_acknowledged(
    kills: int, resume: str, tmp_path: Path
) -> None:
    address, log = f"ipc://{tmp_path}/link", tmp_path / "log"
    moments = random.Random(kills)
    stop = threading.Event()
    sent = 0
    settled: list[tuple[int, int]] = []  # lines in the log after a kill; how many messages were acknowledged by then

    with LinkClient(address, limits=LinkLimits(send_messages=64), peer_timeout=PATIENCE) as client:

        def produce() -> None:
            nonlocal sent
            while not stop.is_set():
                client.send({"value": sent}, timeout=PATIENCE)
                sent += 1

        producer = threading.Thread(target=produce)
        producer.start()
        for _ in range(kills):
            before = lines(log)
            with Process("store", address, log, resume) as server:
                assert server.line() == "ready"
                until(lambda before=before: lines(log) > before, server)
                time.sleep(moments.uniform(0, 0.1))
                server.kill()
            time.sleep(0.02)  # most acknowledgements that left the server have arrived
            settled.append((lines(log), client.stats().acknowledged))
        stop.set()
        with Process("store", address, log, resume) as server:
            producer.join()
            client.flush(PATIENCE)
    got = values(log)
    assert set(got) == set(range(sent))
    assert all(session == client.session and sequence == value + 1 for session, sequence, value in rows(log))
    for end, acknowledged in settled:
        assert min(got[end:], default=acknowledged) >= acknowledged
    if resume == "resume":
        assert got == list(range(sent))
    assert client.stats().connections == kills + 1


@pytest.mark.parametrize("kills", ROUNDS)
def test_killing_a_worker_that_sends_loses_nothing_acknowledged_and_doubles_nothing(kills: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    moments = random.Random(kills)
    got: dict[str, list[int]] = {}
    stop = threading.Event()

    with LinkServer(limits=LinkLimits(receive_messages=16)) as server:

        def collect() -> None:
            while not stop.is_set():
                with contextlib.suppress(LinkTimeoutError):
                    delivery = server.recv(timeout=0.1)
                    assert delivery.sequence == delivery.obj["value"] + 1
                    assert (delivery.obj["array"] == delivery.obj["value"]).all()
                    got.setdefault(delivery.session, []).append(delivery.obj["value"])

        collector = threading.Thread(target=collect)
        collector.start()
        for _ in range(kills):
            before = lines(log)
            with Process("produce", server.address, "worker", log) as worker:
                until(lambda before=before: lines(log) > before, worker)
                time.sleep(moments.uniform(0, 0.1))
        acknowledged = {session: sequence for session, sequence, _ in rows(log)}
        until(lambda: all(len(got.get(session, ())) >= sequence for session, sequence in acknowledged.items()))
        stop.set()
        collector.join()
    assert len(got) == kills
    for numbers in got.values():
        assert numbers == list(range(len(numbers)))


@pytest.mark.parametrize("kills", ROUNDS)
def test_killing_a_worker_that_receives_brings_its_jobs_to_the_next(kills: int, tmp_path: Path) -> None:
    log = tmp_path / "log"
    moments = random.Random(kills)
    sent = 0
    settled: list[tuple[int, int]] = []
    with LinkServer(limits=LinkLimits(send_messages=64)) as server:
        for _ in range(kills):
            before = lines(log)
            with Process("consume", server.address, "worker", log) as worker:
                assert worker.line() == "ready"
                until(lambda: server.peers().get("worker") is PeerChange.CONNECTED, worker)
                end = time.monotonic() + moments.uniform(0.05, 0.15)
                while time.monotonic() < end or lines(log) == before:
                    assert worker.running
                    with contextlib.suppress(LinkTimeoutError):
                        server.send("worker", sent, timeout=0.01)
                        sent += 1
                worker.kill()
            time.sleep(0.02)
            settled.append((lines(log), next(iter(server.unacknowledged("worker")), sent + 1) - 1))
        with Process("consume", server.address, "worker", log):
            server.flush(PATIENCE)
    got = values(log)
    assert set(got) == set(range(sent))
    for end_of_life, acknowledged in settled:
        assert min(got[end_of_life:], default=acknowledged) >= acknowledged
    for start, stop in zip([0, *(end for end, _ in settled)], [*(end for end, _ in settled), len(got)], strict=True):
        assert got[start:stop] == sorted(set(got[start:stop]))


class Proxy:
    """Between client and server over TCP: counts bytes, and cuts connections when told."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._live: list[socket.socket] = []
        self.bytes = {"up": 0, "down": 0}
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._live += [client, server]
                for source, sink, way in ((client, server, "up"), (server, client, "down")):
                    threading.Thread(target=self._copy, args=(source, sink, way), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.bytes[way] += len(data)
                sink.sendall(data)
        for end in (source, sink):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        live, self._live = self._live, []
        for end in live:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._listener.close()
        self.cut()


@contextlib.contextmanager
def through_proxy(**options: Any) -> Iterator[tuple[LinkServer, LinkClient, Proxy]]:
    with LinkServer(**options) as server:
        proxy = Proxy(server.address)
        try:
            with LinkClient(proxy.address, name="worker", **options) as client:
                yield server, client, proxy
        finally:
            proxy.close()


def test_cut_connections_lose_nothing_and_double_nothing_in_either_direction() -> None:
    moments = random.Random(0)
    images = [MediaSource.of(bytes([index]) * 20_000) for index in range(8)]
    count = 600
    limits = LinkLimits(receive_messages=20, blob_bytes=3 * 20_600)
    with through_proxy(limits=limits) as (server, client, proxy):
        client.send("hello")
        server.recv(timeout=PATIENCE)

        def send(to: Callable[[object], object]) -> None:
            for number in range(count):
                to([number, images[number % 8], bytes(2000)])

        def receive(link: LinkServer | LinkClient, got: list[Any]) -> None:
            for _ in range(count):
                delivery = link.recv(timeout=30, acknowledge=False)
                got.append((delivery.obj[0], delivery.obj[1].digest))
                link.acknowledge(delivery)

        got: dict[str, list[Any]] = {"up": [], "down": []}
        threads = [
            threading.Thread(target=send, args=(client.send,)),
            threading.Thread(target=send, args=(lambda obj: server.send("worker", obj),)),
            threading.Thread(target=receive, args=(server, got["up"])),
            threading.Thread(target=receive, args=(client, got["down"])),
        ]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(moments.uniform(0.05, 0.15))
            proxy.cut()
        client.flush(PATIENCE)
        server.flush(PATIENCE)
        expected = [(number, images[number % 8].digest) for number in range(count)]
        assert got == {"up": expected, "down": expected}
        assert client.stats().connections > 1
        assert client.stats().acknowledged == count + 1


def test_an_image_is_on_the_wire_once_in_each_connection() -> None:
    image = MediaSource.of(os.urandom(500_000))
    with through_proxy() as (server, client, proxy):
        for number in range(20):
            client.send({"turn": number, "images": [image] * 3})
        for _ in range(20):
            server.send("worker", server.recv(timeout=PATIENCE).obj)
        for _ in range(20):
            assert client.recv(timeout=PATIENCE).obj["images"][2] == image
        client.flush(PATIENCE)
        assert 500_000 < proxy.bytes["up"] < 530_000
        assert proxy.bytes["down"] < 30_000


def test_a_stopped_reader_holds_the_writer_and_the_memory_of_both_stays_bounded() -> None:
    with Process("stall", "tcp://127.0.0.1:*") as reader, Process("flood", reader.line()) as writer:
        sent, writer_grew = map(int, writer.line().split())
        reader_grew = int(reader.ask())
    assert 10 <= sent <= 16  # messages of 1 MiB and a little, in a queue of 16 MiB
    # What libzmq and the kernel hold on the way comes on top; unbounded, it would be 300 MB.
    assert writer_grew < 64 * MEGABYTES
    assert reader_grew < 64 * MEGABYTES


def test_heartbeats_notice_a_stopped_process_and_its_return(tmp_path: Path) -> None:
    with LinkServer(f"ipc://{tmp_path}/link", **QUICK) as server, Process("idle", server.address, "worker") as worker:
        assert server.next_event(PATIENCE).change is PeerChange.CONNECTED
        server.send("worker", "before")
        assert server.recv(timeout=PATIENCE).obj == "before"
        server.flush(PATIENCE)
        stopped = time.monotonic()
        os.kill(worker.pid, signal.SIGSTOP)
        server.send("worker", "while stopped")
        event = server.next_event(PATIENCE)
        assert (event.change, event.peer, event.unacknowledged) == (PeerChange.LOST, "worker", (2,))
        assert time.monotonic() - stopped > 0.8
        with pytest.raises(PeerLostError) as caught:
            server.send("worker", "refused")
        assert caught.value.unacknowledged == (2,)
        os.kill(worker.pid, signal.SIGCONT)
        assert server.next_event(PATIENCE).change is PeerChange.CONNECTED
        assert server.recv(timeout=PATIENCE).obj == "while stopped"
        server.flush(PATIENCE)


def test_a_killed_worker_is_noticed(tmp_path: Path) -> None:
    with LinkServer(f"ipc://{tmp_path}/link", **QUICK) as server, Process("idle", server.address, "worker") as worker:
        assert server.next_event(PATIENCE).change is PeerChange.CONNECTED
        worker.kill()
        assert server.next_event(PATIENCE).change is PeerChange.LOST


def test_a_quiet_link_is_not_taken_for_a_lost_one() -> None:
    with LinkServer(**QUICK) as server, LinkClient(server.address, name="worker", **QUICK) as client:
        assert server.next_event(PATIENCE).change is PeerChange.CONNECTED
        time.sleep(1.5)
        with pytest.raises(LinkTimeoutError):
            server.next_event(0)
        assert client.connected


def test_a_connection_on_which_nobody_answers_is_opened_anew() -> None:
    """A greeting may be swallowed by a connection that is dead and does not know it."""
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        with LinkClient(f"tcp://127.0.0.1:{port}", heartbeat=0.1, peer_timeout=0.3):
            routes = set()
            while len(routes) < 3:
                assert router.poll(1000 * PATIENCE)
                route, hello = router.recv_multipart()
                assert hello[5] == 1
                routes.add(route)


def test_a_process_that_forgets_to_close_its_links_still_ends(tmp_path: Path) -> None:
    with Process("leave", f"ipc://{tmp_path}/nobody") as process:
        assert process.line() == "leaving"
        assert process.ended(10) == 0


GREETING = Greeting(b"y" * 16, 1, NO_SESSION, 0, 0, Credit(1, 1), 1)
SMALL = LinkLimits(receive_messages=4, receive_bytes=1 << 16)
HOSTILE: dict[str, list[LinkMessage | tuple[bytes, ...]]] = {
    "nothing": [(b"",)],
    "another protocol": [(b"GET / HTTP/1.1",)],
    "a request envelope": [(b"", b"MMRL\x01\x07")],
    "a newer version": [(b"MMRL\x02\x07",)],
    "an unknown kind": [(b"MMRL\x01\xff",)],
    "a ping with a load": [(b"MMRL\x01\x07" + bytes(100),)],
    "an acknowledgement cut short": [(b"MMRL\x01\x04\x00",)],
    "a second greeting": [Hello(GREETING, "other")],
    "a server's greeting": [Welcome(GREETING)],
    "a gap": [Data(5, (), [b"x"])],
    "more messages than its credit": [Data(number, (), [b"x"]) for number in range(1, 8)],
    "more bytes than its credit": [Data(number, (), [bytes(40_000)]) for number in range(1, 4)],
    "a blob that is not what it says": [Blob("ab" * 32, b"something else")],
    "media of an exabyte": [Data(1, (("ab" * 32, 1 << 60),), [b"x"])],
    "one source twice": [Data(1, (("ab" * 32, 3), ("ab" * 32, 3)), [b"x"])],
    "half a digest": [(b"MMRL\x01\x06" + bytes(16),)],
}


def next_from(server: LinkServer, name: str) -> Delivery:
    """The next message of one peer; what came of others before they were dropped is passed over."""
    while True:
        with contextlib.suppress(UndecodableMessageError):
            delivery = server.recv(timeout=PATIENCE)
            if delivery.peer == name:
                return delivery


@pytest.mark.parametrize("what", HOSTILE)
def test_a_peer_that_says_what_it_must_not_is_dropped_and_the_others_go_on(what: str) -> None:
    with LinkServer(limits=SMALL) as server, LinkClient(server.address, name="honest") as client:
        stranger = Stranger(server.address)
        try:
            stranger.greet()
            until(lambda: "stranger" in server.peers())
            for message in HOSTILE[what]:
                if type(message) is tuple:
                    stranger.say(*message)
                else:
                    stranger.message(message)
            for number in range(20):
                client.send(number, timeout=PATIENCE)
                assert next_from(server, "honest").obj == number
            assert stranger.refusal()
            assert server.stats().refused == 1
            assert "stranger" not in server.peers()
            stranger.message(Data(1, (), [b"x"]))
            until(lambda: server.stats().ignored > 0)
        finally:
            stranger.close()
        assert server.peers() == {"honest": PeerChange.CONNECTED}


def test_acknowledging_what_was_never_sent_is_refused() -> None:
    with LinkServer() as server:
        stranger = Stranger(server.address)
        stranger.greet()
        session = stranger.hear()[6:22]
        stranger.message(Ack(session, 3, Credit(1, 1)))
        assert "acknowledges message 3" in stranger.refusal()
        stranger.close()


def test_a_stranger_without_a_greeting_is_asked_for_one_and_makes_no_peer() -> None:
    with LinkServer() as server:
        stranger = Stranger(server.address)
        stranger.message(Pull(("ab" * 32,)))
        assert stranger.hear() == b"MMRL\x01\x0a"
        assert server.peers() == {}
        stranger.close()


def test_pulling_what_the_server_never_sent_gets_nothing() -> None:
    with LinkServer() as server, LinkClient(server.address) as client:
        secret = MediaSource.of(b"another worker's image" * 100)
        client.send(secret)
        server.recv(timeout=PATIENCE)
        stranger = Stranger(server.address)
        stranger.greet()
        stranger.hear()
        stranger.message(Pull((secret.digest,)))
        stranger.message(Data(1, (), encode_frames("after")))
        assert server.recv(timeout=PATIENCE).obj == "after"
        assert server.stats().blobs_sent == 0
        stranger.close()


def test_a_flood_of_blobs_does_not_grow_the_store_beyond_its_bound() -> None:
    with LinkServer(limits=LinkLimits(blob_bytes=100_000)) as server:
        stranger = Stranger(server.address)
        stranger.greet()
        for number in range(200):
            source = MediaSource.of(number.to_bytes(4, "big") * 2500)
            stranger.message(Blob(source.digest, source.data))
        until(lambda: server.stats().blobs_received == 200)
        assert server._state.store.nbytes <= 100_000
        stranger.close()
