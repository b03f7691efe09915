"""Links whose processes, connections or peers fail, and links that close."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from link_processes import PATIENCE, Process, until
from link_strangers import Stranger
from reserved_ports import reserved_address

from renderers.media.item import MediaSource
from transport import encode_frames
from transport.link import (
    Delivery,
    LinkClient,
    LinkClosedError,
    LinkLimits,
    LinkRefusedError,
    LinkServer,
    PeerConnected,
    PeerLost,
    PeerLostError,
    UnacknowledgedError,
    UndecodableMessageError,
)
from transport.link.limits import Window
from transport.link.messages import Ack, Bye, Data, Hello, LinkMessage, Welcome
from transport.wire.wire_format import Buffer

QUICK = {"heartbeat": 0.1, "peer_timeout": 1.0}
MEGABYTES = 1 << 20
NO_MEDIA = Data((), (), ())


class Proxy:
    """Between client and server: forwards bytes, until it is told to hold or cut the connections."""

    def __init__(self, address: str) -> None:
        host, _, port = address.removeprefix("tcp://").rpartition(":")
        self._target = (host, int(port))
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._live: list[socket.socket] = []
        self._forwarding = threading.Event()
        self._forwarding.set()
        self.address = f"tcp://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                server = socket.create_connection(self._target)
                self._live += [client, server]
                for source, sink in ((client, server), (server, client)):
                    threading.Thread(target=self._copy, args=(source, sink), daemon=True).start()

    def _copy(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self._forwarding.wait()
                sink.sendall(data)

    def hold(self) -> None:
        self._forwarding.clear()

    def cut(self) -> None:
        for end in self._live:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._listener.close()
        self._forwarding.set()
        self.cut()


@contextlib.contextmanager
def through_proxy() -> Iterator[tuple[LinkServer, LinkClient, Proxy]]:
    with LinkServer(**QUICK) as server:
        proxy = Proxy(server.address)
        client = LinkClient(proxy.address, name="worker", **QUICK)
        try:
            assert server.recv(timeout=PATIENCE) == PeerConnected("worker")
            client.send("first")
            assert server.recv(timeout=PATIENCE) == Delivery("worker", "first")
            until(lambda: not client._state.peers[proxy.address].unacknowledged)
            yield server, client, proxy
        finally:
            proxy.close()


def receive_lost(server: LinkServer) -> PeerLost:
    while not isinstance(received := server.recv(timeout=PATIENCE), PeerLost):
        pass
    return received


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["hold", "cut"])
def test_a_broken_connection_is_told_to_both_sides_and_a_new_client_connects(fault: str) -> None:
    with through_proxy() as (server, client, proxy):
        getattr(proxy, fault)()
        for number in range(3):
            with contextlib.suppress(PeerLostError):
                server.send("worker", number)
        with pytest.raises(PeerLostError, match=r"has been silent for 1 s|closed its connection"):
            client.recv(timeout=PATIENCE)
        lost = receive_lost(server)
        assert lost.peer == "worker"
        assert "silent" in lost.reason or "closed its connection" in lost.reason
        assert lost.unacknowledged <= 3
        with pytest.raises(PeerLostError):
            client.send("again")
        assert not client.connected
        client.close()  # the loss was raised above
        with LinkClient(server.address, name="worker", **QUICK) as second:
            second.send("from the next")
            assert server.recv(timeout=PATIENCE) == PeerConnected("worker")
            assert server.recv(timeout=PATIENCE) == Delivery("worker", "from the next")


@pytest.mark.slow
def test_closing_a_client_whose_messages_were_lost_raises_once_if_no_call_did() -> None:
    with through_proxy() as (server, client, proxy):
        proxy.hold()
        client.send("lost")
        until(lambda: not client.connected)
        with pytest.raises(UnacknowledgedError, match="1 to tcp"):
            client.close()
        client.close()
        assert receive_lost(server).reason == "has been silent for 1 s"


def test_messages_received_before_the_connection_broke_are_returned_before_the_error() -> None:
    with Process("serve", "tcp://127.0.0.1:*") as process, LinkClient(process.line()) as client:
        for number in range(5):
            client.send(number)
        until(lambda: client.stats().received == 5)
        process.kill()
        until(lambda: not client.connected)
        assert [client.recv(timeout=PATIENCE).obj for _ in range(5)] == list(range(5))
        with pytest.raises(PeerLostError, match="closed its connection, or its process ended"):
            client.recv(timeout=PATIENCE)


@pytest.mark.slow
def test_a_killed_worker_is_noticed_and_its_unacknowledged_messages_are_counted() -> None:
    with LinkServer(**QUICK) as server, Process("echo", server.address, "worker") as worker:
        assert server.recv(timeout=PATIENCE) == PeerConnected("worker")
        os.kill(worker.pid, signal.SIGSTOP)
        server.send("worker", 1)
        server.send("worker", 2)
        worker.kill()
        lost = server.recv(timeout=PATIENCE)
        assert isinstance(lost, PeerLost)
        assert lost.unacknowledged == 2
        assert server.peers() == []


@pytest.mark.slow
def test_a_stopped_worker_is_lost_within_the_peer_timeout_and_learns_it_when_it_continues() -> None:
    with LinkServer(**QUICK) as server, Process("echo", server.address, "worker") as worker:
        assert server.recv(timeout=PATIENCE) == PeerConnected("worker")
        stopped = time.monotonic()
        os.kill(worker.pid, signal.SIGSTOP)
        assert receive_lost(server).reason == "has been silent for 1 s"
        assert time.monotonic() - stopped > 0.8
        os.kill(worker.pid, signal.SIGCONT)
        assert worker.ended(PATIENCE) == 1  # PeerLostError, which nobody catches


@pytest.mark.slow
def test_a_quiet_link_is_not_taken_for_a_lost_one() -> None:
    with LinkServer(**QUICK) as server, LinkClient(server.address, **QUICK) as client:
        client.send("first")
        until(lambda: server._state.active_seconds > 2.5)
        client.send("second")
        got = [server.recv(timeout=PATIENCE) for _ in range(3)]
        assert [each.obj for each in got if isinstance(each, Delivery)] == ["first", "second"]


def test_a_server_that_cannot_be_reached_is_a_lost_peer_after_the_peer_timeout() -> None:
    client = LinkClient(reserved_address(), heartbeat=0.05, peer_timeout=0.3)
    start = time.monotonic()
    with pytest.raises(PeerLostError, match=r"did not answer within 0\.3 s"):
        client.send("job")
    assert time.monotonic() - start < PATIENCE / 2


def test_a_client_may_start_before_its_server() -> None:
    address = reserved_address()
    with LinkClient(address) as client, ThreadPoolExecutor(1) as pool:
        sending = pool.submit(client.send, "early", PATIENCE)
        with LinkServer(address) as server:
            sending.result(PATIENCE)
            assert isinstance(server.recv(timeout=PATIENCE), PeerConnected)
            assert server.recv(timeout=PATIENCE) == Delivery(client.name, "early")
            client.close()


@pytest.mark.slow
def test_a_stopped_reader_holds_the_writer_and_the_memory_of_both_stays_bounded() -> None:
    with Process("stall", "tcp://127.0.0.1:*") as reader, Process("flood", reader.line()) as writer:
        sent, writer_grew = map(int, writer.line().split())
        reader_grew = int(reader.ask())
    assert 10 <= sent <= 16  # messages of 1 MiB and a little, in a queue of 16 MiB
    # What libzmq and the kernel hold on the way comes on top; unbounded, it would be 300 MB.
    assert writer_grew < 64 * MEGABYTES
    assert reader_grew < 64 * MEGABYTES


# -- closing


def test_closing_delivers_everything_that_was_sent() -> None:
    for _ in range(10):
        with LinkServer() as server:
            with LinkClient(server.address, name="worker") as client:
                for number in range(20):
                    client.send(np.full(10_000, number))
            received = [server.recv(timeout=PATIENCE) for _ in range(22)]
            assert [each.obj[0] for each in received if isinstance(each, Delivery)] == list(range(20))
            assert received[-1] == PeerLost("worker", "closed its link", 0)


def test_the_client_of_a_closed_server_raises(pair: tuple[LinkServer, LinkClient]) -> None:
    server, client = pair
    server.send("worker", "last")
    server.close()
    assert client.recv(timeout=PATIENCE).obj == "last"
    with pytest.raises(PeerLostError, match="closed its link"):
        client.recv(timeout=PATIENCE)


def test_two_ends_that_close_at_once_do_not_wait_for_each_other() -> None:
    for _ in range(10):
        server = LinkServer(linger=PATIENCE)
        client = LinkClient(server.address, linger=PATIENCE)
        assert isinstance(server.recv(timeout=PATIENCE), PeerConnected)
        with ThreadPoolExecutor(2) as pool:
            for closing in [pool.submit(end.close) for end in (server, client)]:
                closing.result(PATIENCE / 4)


def test_closing_waits_for_the_confirmation_of_the_peer_and_not_longer_than_linger() -> None:
    for answers in (True, False):
        server = LinkServer(linger=PATIENCE if answers else 0.3)
        with Stranger(server.address) as stranger:
            stranger.greet()
            assert isinstance(stranger.hear(), Welcome)
            closing = threading.Thread(target=server.close)
            closing.start()
            while not isinstance(stranger.hear(), Bye):
                pass
            if answers:
                assert closing.is_alive()
                stranger.message(Bye())
            closing.join(PATIENCE / 4)
            assert not closing.is_alive()


def test_closing_while_the_peer_does_not_read_raises_and_does_not_hang() -> None:
    with LinkServer(limits=LinkLimits(receive_messages=1)) as server:
        client = LinkClient(server.address, linger=0.3)
        for _ in range(20):
            client.send(np.zeros(1_000_000))
        with pytest.raises(UnacknowledgedError) as caught:
            client.close()
        assert list(caught.value.counts.values()) == [20]
        client.close()
        for call in (client.recv, lambda: client.send(1)):
            with pytest.raises(LinkClosedError):
                call()


def test_closing_ends_waiting_calls_with_an_error() -> None:
    server = LinkServer()
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(server.recv)
        until(lambda: waiting.running())
        server.close()
        with pytest.raises(LinkClosedError):
            waiting.result(PATIENCE)


def test_an_error_inside_a_with_block_is_raised_and_not_replaced_by_the_closing_error() -> None:
    def fail(address: str) -> None:
        with LinkClient(address, linger=0) as client:
            for number in range(3):
                client.send(number)
            raise KeyError("mine")

    with LinkServer(limits=LinkLimits(receive_messages=1)) as server, pytest.raises(KeyError):
        fail(server.address)


@pytest.mark.slow
def test_a_process_that_forgets_to_close_its_links_still_ends() -> None:
    with Process("leave", reserved_address()) as process:
        assert process.line() == "leaving"
        assert process.ended(10) == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_link_raises_in_a_forked_child_even_if_its_lock_was_held(pair: tuple[LinkServer, LinkClient]) -> None:
    server, client = pair
    with server._state.lock, client._state.lock:
        child = os.fork()
        if child == 0:
            code = 0
            for call in (lambda: server.recv(timeout=1), lambda: client.send(1, timeout=1), client.close):
                try:
                    call()
                    code = 1
                except LinkClosedError:
                    pass
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    client.send("the parent's link works")
    assert server.recv(timeout=PATIENCE) == Delivery("worker", "the parent's link works")


# -- peers that violate the protocol

SMALL = LinkLimits(receive_messages=4, receive_bytes=1 << 16)
HOSTILE: dict[str, list[tuple[LinkMessage, list[Buffer]] | tuple[bytes, ...]]] = {
    "nothing": [(b"",)],
    "another protocol": [(b"GET / HTTP/1.1",)],
    "a request envelope": [(b"", b"MMRL\x02")],
    "another version": [(b"MMRL\x01\x91\xa4ping",)],
    "an unknown kind": [(b"MMRL\x02\x91\xa5other",)],
    "a ping with a frame": [(b"MMRL\x02\x91\xa4ping", b"x")],
    "a second greeting": [(Hello("other", SMALL.window), [])],
    "a server's greeting": [(Welcome(SMALL.window), [])],
    "more messages than its window": [(NO_MEDIA, [b"x"])] * 7,
    "more bytes than its window": [(NO_MEDIA, [bytes(40_000)])] * 3,
    "media that are not what they say": [(Data(("ab" * 32,), (), ()), [b"something else", b"x"])],
    "media that it never sent": [(Data((), ("ab" * 32,), ()), [b"x"])],
    "one source twice": [(Data((), ("ab" * 32, "ab" * 32), ()), [b"x"])],
    "half a digest": [(Data(("ab" * 16,), (), ()), [b"", b"x"])],
    "an acknowledgement of what was not sent": [(Ack(3), [])],
}


@pytest.mark.parametrize("what", HOSTILE)
def test_a_peer_that_violates_the_protocol_is_refused_and_the_others_go_on(what: str) -> None:
    with (
        LinkServer(limits=SMALL) as server,
        LinkClient(server.address, name="honest") as client,
        Stranger(server.address) as stranger,
    ):
        stranger.greet()
        for message in HOSTILE[what]:
            if isinstance(message[0], bytes):
                stranger.say(*message)  # type: ignore[arg-type]
            else:
                stranger.message(message[0], *message[1])
        assert stranger.refusal()
        until(lambda: server.peers() == ["honest"])
        stranger.message(NO_MEDIA, b"x")
        until(lambda: server.stats().ignored > 0)
        client.send("honest")
        received = None
        while received != Delivery("honest", "honest"):
            with contextlib.suppress(UndecodableMessageError):  # the first ones of the stranger were accepted
                received = server.recv(timeout=PATIENCE)


def test_messages_before_a_greeting_are_ignored() -> None:
    with LinkServer() as server, Stranger(server.address) as stranger:
        stranger.message(NO_MEDIA, *encode_frames("before"))
        stranger.greet()
        stranger.message(NO_MEDIA, *encode_frames("after"))
        assert server.recv(timeout=PATIENCE) == PeerConnected("stranger")
        assert server.recv(timeout=PATIENCE) == Delivery("stranger", "after")
        assert server.stats().ignored == 1


def test_a_client_refuses_a_server_that_violates_the_protocol() -> None:
    import zmq

    with zmq.Context() as context, context.socket(zmq.ROUTER) as router:
        router.linger = 0
        port = router.bind_to_random_port("tcp://127.0.0.1")
        client = LinkClient(f"tcp://127.0.0.1:{port}")
        route, _ = router.recv_multipart()
        router.send_multipart([route, b"MMRL\x02\x91\xa4ping"])
        with pytest.raises(LinkRefusedError, match="is not WELCOME"):
            client.recv(timeout=PATIENCE)


@pytest.mark.slow
def test_a_peer_that_reads_nothing_is_dropped_and_takes_no_memory_beyond_its_window() -> None:
    with LinkServer(limits=LinkLimits(send_messages=10)) as server, Stranger(server.address) as stranger:
        stranger.greet(window=Window(2, 1 << 20, 1 << 20, 1 << 30))
        assert server.recv(timeout=PATIENCE) == PeerConnected("stranger")
        image = MediaSource.of(bytes(1000))
        for _ in range(5):
            server.send("stranger", image)
        until(lambda: server.stats().sent == 2)
        server.send("stranger", image)
        assert server.stats().sent == 2
        stranger.message(Ack(2))
        until(lambda: server.stats().sent == 4)
