"""Closing a link: acknowledgements reach the other end; waiting calls and unacknowledged messages raise errors."""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from link_processes import PATIENCE, Process, until

from transport import encode_frames
from transport.link import (
    LinkClient,
    LinkClosedError,
    LinkLimits,
    LinkServer,
    LinkTimeoutError,
    PeerChange,
    PeerLostError,
    UnacknowledgedError,
)
from transport.link.limits import Credit
from transport.link.message_streams import Payload
from transport.link.messages import Ack, Data, Greeting, LinkMessage, Signal, Welcome, from_frames, to_frames
from transport.link.shared_state import SharedState
from transport.wire.limits import DecodeLimits
from transport.wire.wire_format import Buffer

pytest.importorskip("zmq", reason="links need the extra `zmq`")

from link_strangers import Stranger

from transport.link.client_connection import ClientConnection
from transport.link.io_thread import IoThread
from transport.link.zmq_sockets import Change, ReceivedFrames, Sent

LIVES = [pytest.param(30, id="30 lives"), pytest.param(300, id="300 lives", marks=pytest.mark.slow)]


def address_of(scheme: str, folder: Path) -> str:
    if scheme == "ipc":
        return f"ipc://{folder}/link"
    with LinkServer() as server:  # a port that is free now
        return server.address


@pytest.mark.parametrize("scheme", ["tcp", "ipc"])
@pytest.mark.parametrize("lives", LIVES)
def test_a_message_acknowledged_before_the_server_closed_is_not_delivered_by_a_later_server(
    lives: int, scheme: str, tmp_path: Path
) -> None:
    address = address_of(scheme, tmp_path)
    counts = random.Random(lives)
    got: Counter[tuple[str, int]] = Counter()
    highest: dict[str, int] = {}
    with Process("produce", address, "one", tmp_path / "1"), Process("produce", address, "two", tmp_path / "2"):
        for _ in range(lives):
            with LinkServer(address) as server:
                for _ in range(counts.randint(1, 100)):
                    delivery = server.recv(timeout=PATIENCE)
                    got[delivery.peer, delivery.obj["value"]] += 1
                    highest[delivery.peer] = delivery.obj["value"]
    assert [each for each, times in got.items() if times > 1] == []
    assert set(got) == {(name, value) for name, last in highest.items() for value in range(last + 1)}


@pytest.mark.parametrize("lives", LIVES)
def test_a_message_acknowledged_before_the_client_closed_is_not_delivered_to_a_later_client(
    lives: int, tmp_path: Path
) -> None:
    counts = random.Random(lives)
    got: list[int] = []
    stop = threading.Event()
    with LinkServer(f"ipc://{tmp_path}/link", limits=LinkLimits(send_messages=64)) as server:

        def produce() -> None:
            until(lambda: "worker" in server.peers())
            value = 0
            while not stop.is_set():
                with contextlib.suppress(LinkTimeoutError, PeerLostError):
                    server.send("worker", value, timeout=0.01)
                    value += 1

        producer = threading.Thread(target=produce)
        producer.start()
        try:
            for _ in range(lives):
                with LinkClient(server.address, name="worker") as client:
                    got += [client.recv(timeout=PATIENCE).obj for _ in range(counts.randint(1, 100))]
        finally:
            stop.set()
            producer.join()
        server.drop_peer("worker")
    assert got == list(range(len(got)))


def greet(stranger: Stranger) -> None:
    stranger.greet()
    stranger.hear()  # the server's greeting


def test_closing_waits_until_the_peer_has_received_the_acknowledgements() -> None:
    server = LinkServer(linger=PATIENCE)
    stranger = Stranger(server.address)
    greet(stranger)
    stranger.message(Data(1, (), encode_frames("mine")))
    assert server.recv(timeout=PATIENCE).obj == "mine"
    closing = threading.Thread(target=server.close)
    closing.start()
    heard: list[LinkMessage] = []
    while Signal.BYE not in heard:
        heard.append(from_frames([stranger.hear()], DecodeLimits()))
    assert [each.acknowledged for each in heard if isinstance(each, Ack)][-1] == 1
    closing.join(0.5)
    assert closing.is_alive()  # the stranger has not said yet that it heard
    stranger.message(Signal.BYE)
    closing.join(PATIENCE)
    assert not closing.is_alive()
    stranger.close()


def test_closing_stops_waiting_for_a_silent_peer_after_the_linger_time() -> None:
    server = LinkServer(linger=0.3)
    stranger = Stranger(server.address)
    greet(stranger)
    start = time.monotonic()
    server.close()
    assert time.monotonic() - start < 5  # and not the minute after which the connection is given up
    stranger.close()


def test_a_server_answers_a_closing_client_before_it_drops_the_connection() -> None:
    with LinkServer() as server:
        stranger = Stranger(server.address)
        greet(stranger)
        stranger.message(Signal.BYE)
        while stranger.hear() != to_frames(Signal.BYE)[0]:
            pass
        until(lambda: server.peers() == {"stranger": PeerChange.LEFT})
        stranger.close()


def test_two_ends_that_close_at_once_do_not_wait_for_each_other() -> None:
    for _ in range(10):
        server = LinkServer(linger=PATIENCE)
        client = LinkClient(server.address, linger=PATIENCE)
        client.send(1)
        server.recv(timeout=PATIENCE)
        with ThreadPoolExecutor(2) as pool:
            for closing in [pool.submit(end.close) for end in (server, client)]:
                closing.result(PATIENCE / 4)


def test_acknowledging_a_message_of_a_closed_link_is_an_error() -> None:
    server = LinkServer()
    with LinkClient(server.address) as client:
        client.send("first")
        delivery = server.recv(timeout=PATIENCE, acknowledge=False)
        server.close()
        with pytest.raises(LinkClosedError):
            server.acknowledge(delivery)
        assert client.unacknowledged() == (1,)
        with LinkServer(server.address) as later:
            assert later.recv(timeout=PATIENCE).obj == "first"


class BrokenSocket:
    """A client's socket whose connection broke with messages unread. Has the calls of a `DealerSocket`."""

    address = "tcp://127.0.0.1:1"

    def __init__(self, unread: list[LinkMessage]) -> None:
        self.unread = unread
        self.pending = [Change.OPENED]
        self.said: list[LinkMessage] = []
        self.unread_when_reopened: list[int] = []

    def changes(self) -> list[Change]:
        changes, self.pending = self.pending, []
        return changes

    def receive(self) -> ReceivedFrames | None:
        return ReceivedFrames(b"", "", to_frames(self.unread.pop(0))) if self.unread else None

    def send(self, route: bytes, frames: list[Buffer]) -> Sent:
        self.said.append(from_frames(frames, DecodeLimits()))
        return Sent.YES

    def reopen(self, poller: Any) -> None:
        self.unread_when_reopened.append(len(self.unread))


class QuietWake:
    def clear(self) -> None: ...


def test_a_client_reads_everything_received_on_a_broken_connection_before_it_reconnects() -> None:
    """More than is read in one turn; the acknowledgement that matters comes last."""
    state = SharedState(BrokenSocket.address, LinkLimits(), 1.0, 10.0, wake=lambda: None)
    dealer = BrokenSocket([])
    connection = ClientConnection(state, dealer, "worker")  # type: ignore[arg-type]
    thread = IoThread(state, dealer, connection, QuietWake())  # type: ignore[arg-type]
    welcome = Greeting(b"s" * 16, 1, connection.server.session, 0, 0, Credit(10, 1 << 20), 1 << 30)
    thread._run_once(None)  # greets
    dealer.unread.append(Welcome(welcome))
    thread._run_once(None)
    frames = encode_frames("object")
    for _ in range(3):
        connection.server.put(Payload.of(frames, ()))
    thread._run_once(None)
    dealer.unread += [Signal.PING] * 600
    dealer.unread += [Data(1, (), frames), Ack(connection.server.session, 3, Credit(10, 1 << 20)), Signal.BYE]
    dealer.pending, said = [Change.BROKEN], len(dealer.said)
    for _ in range(10):
        thread._run_once(None)
    assert connection.server.outbox.unacknowledged == ()
    assert connection.server.inbox.received == 1
    assert dealer.unread_when_reopened == [0]
    assert dealer.said[said:] == []  # nothing goes out over what may be another connection by now


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


def test_closing_ends_a_waiting_receive_with_an_error() -> None:
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


def test_an_acknowledgement_right_before_closing_reaches_the_other_end() -> None:
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


def test_an_error_inside_a_with_block_is_raised_and_not_replaced_by_the_closing_error(tmp_path: Path) -> None:
    def fail() -> None:
        with LinkClient(f"ipc://{tmp_path}/nobody") as client:
            client.send(1)
            raise KeyError("mine")

    with pytest.raises(KeyError):
        fail()
