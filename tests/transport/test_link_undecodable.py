"""Messages that the receiver cannot decode: an error at both ends, the end of the message and of nothing else."""

from __future__ import annotations

import asyncio
import logging
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from link_processes import PATIENCE, TREE, until

from transport import MalformedError, UnknownTypeError, encode_frames, wire_type
from transport.link import (
    LinkClient,
    LinkLimits,
    LinkServer,
    MessageRejectedError,
    PeerChange,
    UndecodableMessageError,
)
from transport.link.limits import Credit
from transport.link.message_streams import Payload
from transport.link.messages import Ack, Data, Reject, from_frames
from transport.link.peer import Peer
from transport.link.shared_state import SharedState
from transport.wire import registry
from transport.wire.limits import DecodeLimits

pytest.importorskip("zmq", reason="links need the extra `zmq`")

from link_strangers import Stranger


@dataclass
class Job:
    prompt: str


@pytest.fixture(autouse=True)
def _own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_by_name", dict(registry._by_name))
    monkeypatch.setattr(registry, "_by_class", dict(registry._by_class))


@pytest.fixture
def pair() -> Iterator[tuple[LinkServer, LinkClient]]:
    with LinkServer() as server, LinkClient(server.address, name="worker") as client:
        client.send("hello")
        server.recv(timeout=PATIENCE)
        server.send("worker", "hello")
        client.recv(timeout=PATIENCE)
        yield server, client


def unknown_at_the_receiver() -> Job:
    """A job that can be encoded; its type is unknown from then on."""
    wire_type("acme.Job")(Job)
    return Job("go")


def forget_the_type() -> None:
    registry._by_name.pop("acme.Job", None)


def test_a_server_that_does_not_know_a_type_says_so_at_both_ends_and_the_link_goes_on(
    pair: tuple[LinkServer, LinkClient], caplog: pytest.LogCaptureFixture
) -> None:
    server, client = pair
    job = unknown_at_the_receiver()
    client.send("before", timeout=PATIENCE)
    number = client.send(job, timeout=PATIENCE)
    client.send("after", timeout=PATIENCE)
    forget_the_type()
    assert server.recv(timeout=PATIENCE).obj == "before"
    with pytest.raises(UndecodableMessageError, match=r"'acme.Job'.*import test_link_undecodable") as at_the_server:
        server.recv(timeout=PATIENCE)
    assert isinstance(at_the_server.value.__cause__, UnknownTypeError)
    assert (at_the_server.value.peer, at_the_server.value.sequence) == ("worker", number)
    assert at_the_server.value.session == client.session
    assert server.recv(timeout=PATIENCE).obj == "after"
    with pytest.raises(MessageRejectedError, match=r"'acme.Job'.*import test_link_undecodable") as at_the_worker:
        client.recv(timeout=PATIENCE)  # the answer to its job would never come
    assert list(at_the_worker.value.rejected) == [number]
    client.send("later", timeout=PATIENCE)  # said once
    assert server.recv(timeout=PATIENCE).obj == "later"
    client.flush(PATIENCE)
    assert server.peers() == {"worker": PeerChange.CONNECTED}
    assert (server.stats().undecodable, client.stats().rejected, server.stats().refused) == (1, 1, 0)
    logged = [record for record in caplog.records if record.name == "transport.link"]
    assert [record.levelno for record in logged] == [logging.ERROR] * 2  # one for each end
    assert all("acme.Job" in record.getMessage() for record in logged)


def test_a_worker_that_does_not_know_a_type_says_so_at_both_ends_and_the_link_goes_on(
    pair: tuple[LinkServer, LinkClient],
) -> None:
    server, client = pair
    number = server.send("worker", unknown_at_the_receiver())
    forget_the_type()
    with pytest.raises(UndecodableMessageError, match=r"acme\.Job"):
        client.recv(timeout=PATIENCE)
    until(lambda: server.stats().rejected)
    with pytest.raises(MessageRejectedError, match=r"acme\.Job") as caught:
        server.send("worker", "next")
    assert (caught.value.peer, list(caught.value.rejected)) == ("worker", [number])
    server.send("worker", "next")
    assert client.recv(timeout=PATIENCE).obj == "next"
    changes = []
    while PeerChange.REJECTED not in changes:
        changes.append(server.next_event(PATIENCE).change)
    assert server.peers() == {"worker": PeerChange.CONNECTED}


def test_flushing_says_what_was_rejected(pair: tuple[LinkServer, LinkClient]) -> None:
    server, client = pair
    client.send(unknown_at_the_receiver())
    forget_the_type()
    with pytest.raises(UndecodableMessageError):
        server.recv(timeout=PATIENCE)
    with pytest.raises(MessageRejectedError):
        client.flush(PATIENCE)
    client.flush(PATIENCE)


def test_closing_says_what_was_rejected_and_was_not_said_before() -> None:
    with LinkServer() as server:
        client = LinkClient(server.address)
        client.send(unknown_at_the_receiver())
        forget_the_type()
        with pytest.raises(UndecodableMessageError):
            server.recv(timeout=PATIENCE)
        with pytest.raises(MessageRejectedError, match=r"acme\.Job"):
            client.close()


async def test_event_loops_are_told_as_threads_are(pair: tuple[LinkServer, LinkClient]) -> None:
    server, client = pair
    client.send(unknown_at_the_receiver())
    forget_the_type()
    async with asyncio.timeout(PATIENCE):
        with pytest.raises(UndecodableMessageError):
            await server.recv_async()
        with pytest.raises(MessageRejectedError):
            await client.recv_async()
        await client.send_async("more")
        assert (await server.recv_async()).obj == "more"


def test_messages_that_no_encoder_writes_cost_their_sender_that_message_alone() -> None:
    with LinkServer() as server, LinkClient(server.address, name="honest") as client:
        stranger = Stranger(server.address)
        stranger.greet()
        stranger.hear()
        for number in range(1, 4):
            stranger.message(Data(number, (), [b"this is no header"]))
        stranger.message(Data(4, (), encode_frames("good")))
        for _ in range(3):
            with pytest.raises(UndecodableMessageError) as caught:
                server.recv(timeout=PATIENCE)
            assert isinstance(caught.value.__cause__, MalformedError)
        assert server.recv(timeout=PATIENCE).obj == "good"
        rejected, acknowledged = [], 0
        while acknowledged < 4:
            heard = from_frames([stranger.hear()], DecodeLimits())
            if isinstance(heard, Reject):
                rejected.append(heard.sequence)
            elif isinstance(heard, Ack):
                assert heard.acknowledged < 4 or rejected == [1, 2, 3]  # REJECT goes before the ACK
                acknowledged = heard.acknowledged
        client.send(1)
        assert server.recv(timeout=PATIENCE).obj == 1
        stranger.close()


def test_many_rejected_messages_take_no_credit(pair: tuple[LinkServer, LinkClient]) -> None:
    job, told = unknown_at_the_receiver(), 0
    with LinkServer(limits=LinkLimits(receive_messages=4)) as server, LinkClient(server.address) as client:
        client.send("first")
        server.recv(timeout=PATIENCE)
        forget_the_type()
        for _ in range(50):
            while True:
                try:
                    client.send(job, timeout=PATIENCE)
                    break
                except MessageRejectedError as error:
                    told += len(error.rejected)
            with pytest.raises(UndecodableMessageError):
                server.recv(timeout=PATIENCE)
        until(lambda: client.stats().rejected == 50)
        with pytest.raises(MessageRejectedError) as caught:
            client.send("last")
        assert told + len(caught.value.rejected) == 50


# -- rejections and connections that break, without any socket


def peer_pair() -> tuple[Peer, Peer]:
    limits = LinkLimits()
    states = [SharedState("nowhere", limits, 1.0, 10.0, wake=lambda: None) for _ in range(2)]
    one, other = (Peer("peer", limits, Credit(100, 1 << 20), state.store, state.stats) for state in states)
    return one, other


def connect(sender: Peer, receiver: Peer) -> None:
    """A new connection: both greetings arrive."""
    for peer in (sender, receiver):
        peer.disconnect()
    hello, welcome = sender._position(), receiver._position()
    sender.route = receiver.route = b"route"
    receiver.greet(hello)
    sender.greet(welcome)


def carry(sender: Peer, receiver: Peer, most: int | None = None) -> None:
    """Let what the one has to say arrive at the other, up to so many messages."""
    while (most is None or most > 0) and (due := sender.next_to_send()) is not None:
        sender.mark_sent(due)
        receiver.receive(due)
        most = None if most is None else most - 1


@pytest.mark.parametrize("seed", range(30))
def test_a_rejection_is_said_once_however_often_the_connection_breaks(seed: int) -> None:
    moments = random.Random(seed)
    sender, receiver = peer_pair()
    connect(sender, receiver)
    undecodable = {number for number in range(1, 41) if moments.random() < 0.3}
    told: list[int] = []
    accepted: list[int] = []
    sent = 0

    def break_connection() -> None:
        """What was on its way is lost: said, and not heard."""
        for peer in (sender, receiver):
            for _ in range(moments.randint(0, 5)):
                due = peer.next_to_send()
                if due is not None:
                    peer.mark_sent(due)
        connect(sender, receiver)

    def drain() -> None:
        while receiver.inbox.ready:
            incoming = receiver.inbox.pop_ready()
            if incoming.sequence in undecodable:
                receiver.inbox.reject(incoming.session, incoming.sequence, "because")
            else:
                accepted.append(incoming.sequence)
                receiver.inbox.acknowledge(incoming.session, incoming.sequence)
            receiver.ack_needed = True

    while sent < 40 or sender.outbox.unacknowledged:
        if sent < 40:
            sent = sender.put(Payload.of([b"x"], ()))
        carry(sender, receiver, moments.randint(0, 3))
        drain()
        carry(receiver, sender, moments.randint(0, 3))
        told += sender.rejected
        sender.rejected = {}
        if moments.random() < 0.3:
            break_connection()
    assert told == sorted(undecodable)
    assert accepted == [number for number in range(1, 41) if number not in undecodable]


def test_rejecting_what_was_never_sent_is_malformed() -> None:
    sender, receiver = peer_pair()
    connect(sender, receiver)
    with pytest.raises(MalformedError, match="rejects message 1"):
        sender.receive(Reject(sender.session, 1, "because"))


# -- types that the receiver did not import


def test_a_process_that_imports_links_alone_receives_trajectories(tmp_path: Path) -> None:
    """The orchestrator of the defect: it never imports `rollouts` itself."""
    code = """
import sys
from transport.link import LinkServer
assert not any(name.split(".")[0] == "rollouts" for name in sys.modules)
with LinkServer(sys.argv[1]) as server:
    print("ready", flush=True)
    trajectory = server.recv(timeout=60).obj
    print(type(trajectory).__module__, trajectory.episode_id, trajectory.nodes[0].token_ids.tolist(), flush=True)
    assert "torch" not in sys.modules
"""
    address = f"ipc://{tmp_path}/link"
    command = [sys.executable, "-c", code, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=TREE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        from renderers import RenderedTokens
        from rollouts import Completion, FinishReason, Trajectory

        trajectory = Trajectory("episode-7")
        prompt = RenderedTokens([5, 6, 7])
        completion = Completion(0, [8, 9], [-0.5, -0.25], FinishReason.STOP, None, ())
        trajectory.add_turn(prompt, completion, {"role": "assistant", "content": "x"})
        with LinkClient(address) as client:
            client.send(trajectory)
            client.flush(PATIENCE)
        assert process.stdout.read() == "rollouts.trajectory.tree episode-7 [5, 6, 7]\n"
    assert process.returncode == 0


def test_the_error_lists_five_rejected_messages_and_the_number_of_the_others() -> None:
    error = MessageRejectedError("worker", {number: f"cause {number}." for number in range(1, 8)})
    assert "message 1: cause 1; message 2: cause 2; " in str(error)
    assert "message 5: cause 5; and 2 more. Correct the cause" in str(error)
