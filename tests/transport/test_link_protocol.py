"""Sequence numbers, acknowledgement, credit, resending and media, over a simulated link that breaks at any moment."""

from __future__ import annotations

import dataclasses
import tracemalloc
from collections import deque
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from renderers.media.source import MediaSource
from transport import DecodeError, DecodeLimits, MalformedError
from transport.link.application_types import LinkStats
from transport.link.limits import Credit, LinkLimits
from transport.link.media_cache import MediaCache
from transport.link.message_streams import Inbox, Incoming, Outbox, Payload
from transport.link.messages import (
    NO_SESSION,
    Ack,
    Blob,
    Data,
    Greeting,
    Hello,
    LinkMessage,
    Pull,
    Refused,
    Signal,
    Welcome,
    from_frames,
    to_frames,
)
from transport.link.peer import Peer

SOURCES = [MediaSource.of(bytes([letter]) * 300) for letter in range(6)]
LIMITS = LinkLimits(
    send_messages=8, send_bytes=1 << 20, known_blobs=4, decode=DecodeLimits(max_frames=16, max_total_bytes=1 << 16)
)
WINDOW = Credit(4, 6000)


def payload(number: int, media: list[int]) -> Payload:
    return Payload.of([number.to_bytes(4, "big")], [SOURCES[index] for index in media])


def number_of(incoming: Incoming) -> int:
    return int.from_bytes(incoming.frames[0], "big")


class End:
    """One process: what it sends, what it was handed, and what it acknowledged."""

    def __init__(self, name: str, blob_bytes: int) -> None:
        self.stats = LinkStats()
        self.peer = Peer(name, LIMITS, WINDOW, MediaCache(blob_bytes), self.stats)
        self.handed: list[Incoming] = []
        self.seen: dict[bytes, list[int]] = {}  # by the sender's session: sequence numbers in the order handed out
        self.values: list[int] = []  # what the messages handed out said
        self.queue: deque[list[Any]] = deque()  # what is on its way to this end

    def hand_out(self) -> Incoming:
        incoming = self.peer.inbox.pop_ready()
        self.handed.append(incoming)
        self.seen.setdefault(incoming.session, []).append(incoming.sequence)
        self.values.append(number_of(incoming))
        return incoming

    def arrive(self, message: LinkMessage, *, server: bool) -> None:
        match message:
            case Hello(greeting, _):
                assert server
                self.peer.greet(greeting)
                self.peer.greeting = Welcome
            case Welcome(greeting):
                assert not server
                self.peer.greet(greeting)
            case Blob(digest, data):
                source = MediaSource(digest, bytes(data))
                source.verify()
                self.peer.receive(source)
            case Data() | Ack() | Pull():
                self.peer.receive(message)


class LossyLink(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ends = [End("client", 2000), End("server", 700)]
        self.connected = False
        self.sent = 0
        self.forbidden: tuple[set[int], set[int]] = (set(), set())  # by receiver: values acknowledged to the sender

    def values(self, sender: int) -> list[int]:
        outbox = self.ends[sender].peer.outbox
        return [int.from_bytes(outbox._kept[number].payload.frames[0], "big") for number in outbox.unacknowledged]

    @rule(sender=st.sampled_from([0, 1]), media=st.lists(st.integers(0, 5), max_size=3, unique=True))
    def send(self, sender: int, media: list[int]) -> None:
        peer = self.ends[sender].peer
        message = payload(self.sent, media)
        if peer.outbox.has_room(message.size):
            peer.put(message)
            self.sent += 1

    @precondition(lambda self: not self.connected)
    @rule()
    def connect(self) -> None:
        self.connected = True
        client, server = (end.peer for end in self.ends)
        client.route = server.route = b"route"
        client.greeting = lambda greeting: Hello(greeting, "client")

    @precondition(lambda self: self.connected)
    @rule()
    def disconnect(self) -> None:
        self.connected = False
        for end in self.ends:
            end.queue.clear()
            end.peer.disconnect()

    @precondition(lambda self: self.connected)
    @rule(sender=st.sampled_from([0, 1]), count=st.integers(1, 6))
    def transmit(self, sender: int, count: int) -> None:
        for _ in range(count):
            due = self.ends[sender].peer.next_to_send()
            if due is None:
                return
            self.ends[1 - sender].queue.append(to_frames(due.message))
            due.done()

    @rule(receiver=st.sampled_from([0, 1]), count=st.integers(1, 6))
    def arrive(self, receiver: int, count: int) -> None:
        end = self.ends[receiver]
        for _ in range(min(count, len(end.queue))):
            end.arrive(from_frames(end.queue.popleft(), LIMITS.decode), server=receiver == 1)

    @rule(turns=st.integers(1, 4), count=st.integers(1, 3))
    def exchange(self, turns: int, count: int) -> None:
        """What two I/O threads do while nothing breaks; the greetings alone take two turns."""
        if not self.connected:
            self.connect()
        for which in (0, 1) * turns:
            self.transmit(which, count)
            self.arrive(1 - which, count)

    @rule(receiver=st.sampled_from([0, 1]))
    def hand_out(self, receiver: int) -> None:
        end = self.ends[receiver]
        if end.peer.inbox.ready:
            incoming = end.hand_out()
            assert not incoming.missing
            for digest, source in incoming.media.items():
                assert source.digest == digest
            assert number_of(incoming) not in self.forbidden[receiver]

    @rule(receiver=st.sampled_from([0, 1]), data=st.data())
    def acknowledge(self, receiver: int, data: st.DataObject) -> None:
        end = self.ends[receiver]
        if end.handed:
            incoming = end.handed.pop(data.draw(st.integers(0, len(end.handed) - 1)))
            if end.peer.inbox.acknowledge(incoming.session, incoming.sequence):
                end.peer.ack_needed = True

    @rule(receiver=st.sampled_from([0, 1]), messages=st.integers(1, 4), size=st.integers(1, 6000))
    def change_window(self, receiver: int, messages: int, size: int) -> None:
        peer = self.ends[receiver].peer
        if peer.inbox.grant(Credit(messages, size)):
            peer.ack_needed = True

    @rule(receiver=st.sampled_from([0, 1]))
    def forget_media(self, receiver: int) -> None:
        self.ends[receiver].peer._store = MediaCache(700)

    @rule(which=st.sampled_from([0, 1]))
    def restart(self, which: int) -> None:
        if self.connected:
            self.disconnect()
        # What was acknowledged to the survivor must not come out of the new process; the rest may, again.
        old = self.ends[which].peer
        survivor = 1 - which
        kept = set(self.values(survivor))
        self.forbidden[which].update(set(range(self.sent)) - kept)
        self.ends[which] = End(old.name, 700)

    @invariant()
    def what_is_handed_out_comes_in_order_and_once(self) -> None:
        for end in self.ends:
            for numbers in end.seen.values():
                assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))

    @invariant()
    def memory_stays_within_the_window(self) -> None:
        for end in self.ends:
            inbox = end.peer.inbox
            assert len(inbox._unacknowledged) + len(inbox._previous_unacknowledged) <= 2 * WINDOW.messages
            assert len(end.peer.outbox) <= LIMITS.send_messages
            assert end.peer.outbox.bytes == sum(each.payload.size for each in end.peer.outbox._kept.values())

    def teardown(self) -> None:
        """A connection that holds brings everything over that is not acknowledged, in order."""
        if self.connected:
            self.disconnect()
        self.connect()
        due = [self.values(0), self.values(1)]
        for end in self.ends:
            end.peer.inbox.grant(WINDOW)
            for incoming in end.handed:
                end.peer.inbox.acknowledge(incoming.session, incoming.sequence)
        for _ in range(1000):
            for which, end in enumerate(self.ends):
                end.peer.ack_needed = end.peer.open
                self.transmit(which, 10)
                self.arrive(which, 10)
                while end.peer.inbox.ready:
                    incoming = end.hand_out()
                    end.peer.inbox.acknowledge(incoming.session, incoming.sequence)
            if not any(len(end.peer.outbox) for end in self.ends):
                break
        for sender, receiver in ((0, 1), (1, 0)):
            assert not len(self.ends[sender].peer.outbox)
            assert [value for value in self.ends[receiver].values if value in due[sender]] == due[sender]
        self.what_is_handed_out_comes_in_order_and_once()


TestLossyLink = LossyLink.TestCase
TestLossyLink.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)


def greeting(session: bytes = b"s" * 16, **changes: Any) -> Greeting:
    return dataclasses.replace(Greeting(session, 1, NO_SESSION, 0, 0, Credit(10, 10_000), 1 << 20), **changes)


def open_peer() -> Peer:
    peer = Peer("worker", LIMITS, WINDOW, MediaCache(2000), LinkStats())
    peer.greet(greeting())
    sent_by(peer)  # what its credit is, among others
    return peer


@pytest.mark.parametrize(
    "message",
    [
        Hello(greeting(), "worker-é"),
        Welcome(greeting(received=9, acknowledged=3)),
        Data(7, (("ab" * 32, 12), ("cd" * 32, 0)), [b"frame", b""]),
        Ack(b"t" * 16, 5, Credit(1, 2)),
        Blob("ef" * 32, b"bytes"),
        Pull(("ab" * 32, "cd" * 32)),
        Refused("because é"),
        Signal.PING,
        Signal.BYE,
        Signal.RECONNECT,
    ],
    ids=lambda message: type(message).__name__,
)
def test_every_link_message_survives_its_frames(message: LinkMessage) -> None:
    assert from_frames(to_frames(message), LIMITS.decode) == message


@given(st.lists(st.binary(max_size=120), max_size=4))
def test_arbitrary_frames_are_a_decode_error_or_a_message(frames: list[bytes]) -> None:
    try:
        from_frames([b"MMRL\x01" + frames[0], *frames[1:]] if frames else [], LIMITS.decode)
    except DecodeError:
        return


@given(st.data())
def test_damaged_link_messages_are_a_decode_error_or_a_message(data: st.DataObject) -> None:
    messages = [
        Hello(greeting(), "w"),
        Data(1, (("ab" * 32, 1),), [b"x"]),
        Ack(b"t" * 16, 1, WINDOW),
        Pull(("ab" * 32,)),
    ]
    head = bytearray(to_frames(data.draw(st.sampled_from(messages)))[0])
    head[data.draw(st.integers(0, len(head) - 1))] = data.draw(st.integers(0, 255))
    try:
        from_frames([bytes(head[: data.draw(st.integers(0, len(head)))]), b"x"], LIMITS.decode)
    except DecodeError:
        return


def test_a_reason_too_long_for_its_message_is_cut_at_a_character() -> None:
    message = from_frames(to_frames(Refused("é" * 2000)), LIMITS.decode)
    assert message == Refused("é" * 500)


@pytest.mark.parametrize(
    "message",
    [
        Data(2, (), [b"a gap"]),
        Data(1, (), [bytes(1 << 17)]),
        Data(1, (), [b""] * 17),
        Data(1, (("ab" * 32, 1 << 60),), []),
        Ack(b"s" * 16, 1, WINDOW),
    ],
    ids=["gap", "too large", "too many frames", "too large with its media", "acknowledges what was not sent"],
)
def test_what_no_honest_peer_sends_is_a_decode_error(message: Data | Ack) -> None:
    peer = open_peer()
    if isinstance(message, Ack):
        message = dataclasses.replace(message, session=peer.session)
    with pytest.raises(DecodeError):
        peer.receive(message)


def test_more_than_the_credit_is_malformed_in_messages_and_in_bytes() -> None:
    peer = open_peer()
    for sequence in range(1, 5):
        peer.receive(Data(sequence, (), [b"small"]))
    with pytest.raises(MalformedError, match="credit"):
        peer.receive(Data(5, (), [b"small"]))
    peer = open_peer()
    peer.receive(Data(1, (), [bytes(4000)]))
    with pytest.raises(MalformedError, match="credit"):
        peer.receive(Data(2, (), [bytes(4000)]))


def test_a_peer_that_keeps_beginning_new_sessions_fills_no_more_than_its_window() -> None:
    peer = Peer("worker", LIMITS, WINDOW, MediaCache(2000), LinkStats())
    taken = 0
    for session in range(1, 50):
        peer.disconnect()
        peer.greet(greeting(session=bytes([session]) * 16))
        sent_by(peer)
        for sequence in range(1, 20):
            try:
                peer.receive(Data(sequence, (), [bytes(1000)]))
            except MalformedError:
                break
            taken += 1
    assert taken == WINDOW.messages


def test_data_that_come_before_the_credit_was_told_are_malformed() -> None:
    peer = Peer("worker", LIMITS, WINDOW, MediaCache(2000), LinkStats())
    peer.greet(greeting())
    with pytest.raises(MalformedError, match="credit"):
        peer.receive(Data(1, (), [b"x"]))


def test_a_credit_that_shrinks_holds_for_what_is_on_its_way_and_not_for_the_next_connection() -> None:
    peer = open_peer()
    peer.inbox.grant(Credit(1, 1000))
    sent_by(peer)
    for sequence in (1, 2):
        peer.receive(Data(sequence, (), [b"x"]))
    peer.disconnect()
    peer.greet(greeting())
    sent_by(peer)
    with pytest.raises(MalformedError, match="credit"):
        peer.receive(Data(3, (), [b"x"]))


def test_a_giant_header_is_refused_before_it_is_read() -> None:
    digests = bytes(40 << 20)
    header = b"MMRL\x01\x03" + bytes(8) + digests
    tracemalloc.start()
    with pytest.raises(MalformedError, match="link header of"):
        from_frames([header], LIMITS.decode)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20


def test_a_message_larger_than_the_window_goes_through_alone() -> None:
    outbox = Outbox(Credit(10, 100), known_blobs=1)
    big = Payload.of([bytes(9000)], [])
    assert outbox.has_room(big.size)
    outbox.put(big)
    assert not outbox.has_room(1)
    outbox.resume(None, 0, Credit(4, 50))
    assert outbox.next() is not None
    inbox = Inbox(Credit(4, 50))
    inbox.start(b"s" * 16, 1)
    inbox.grant_credit()
    assert inbox.receive(1, [bytes(9000)], (), MediaCache(1))


def test_without_credit_nothing_is_sent() -> None:
    outbox = Outbox(Credit(10, 10_000), known_blobs=1)
    outbox.put(Payload.of([b"x"], []))
    outbox.resume(None, 0, Credit(0, 0))
    assert outbox.next() is None
    outbox.acknowledge(0, Credit(1, 1))
    assert outbox.next() is not None


def test_acknowledging_out_of_order_settles_what_is_contiguous() -> None:
    inbox = Inbox(Credit(9, 90_000))
    inbox.start(b"s" * 16, 1)
    inbox.grant_credit()
    for sequence in (1, 2, 3):
        inbox.receive(sequence, [b"x"], (), MediaCache(1))
        inbox.pop_ready()
    reached = []
    for sequence in (2, 3, 1):
        inbox.acknowledge(b"s" * 16, sequence)
        reached.append(inbox.acknowledged)
    assert reached == [0, 0, 3]


def test_a_blob_of_another_size_than_announced_is_malformed() -> None:
    peer = open_peer()
    peer.receive(Data(1, ((SOURCES[0].digest, 299),), [b"x"]))
    with pytest.raises(MalformedError, match="announced"):
        peer.receive(SOURCES[0])


def test_a_message_behind_one_that_waits_for_media_waits_too() -> None:
    peer = open_peer()
    peer.receive(Data(1, ((SOURCES[0].digest, 300),), [b"first"]))
    peer.receive(Data(2, (), [b"second"]))
    assert not peer.inbox.ready
    due = peer.next_to_send()
    while due is not None and due.message != Pull((SOURCES[0].digest,)):
        due.done()
        due = peer.next_to_send()
    assert due is not None
    peer.receive(SOURCES[0])
    assert [bytes(peer.inbox.pop_ready().frames[0]) for _ in range(2)] == [b"first", b"second"]


def test_the_blob_store_stays_within_its_bytes_and_drops_the_least_recently_used() -> None:
    store = MediaCache(3 * (300 + 512))
    for source in SOURCES[:3]:
        store.keep(source)
    assert store.find(SOURCES[0].digest) is SOURCES[0]
    store.keep(SOURCES[3])
    assert store.bytes <= 3 * (300 + 512)
    assert [store.find(source.digest) is not None for source in SOURCES[:4]] == [True, False, True, True]
    store.keep(MediaSource.of(bytes(5000)))
    assert len(store) == 3


def test_a_message_that_comes_twice_is_dropped_the_second_time() -> None:
    peer = open_peer()
    for _ in range(2):
        peer.receive(Data(1, (), [b"x"]))
    peer.inbox.pop_ready()
    assert not peer.inbox.ready
    peer.receive(Data(1, (), [b"x"]))
    assert not peer.inbox.ready


def sending_peer(count: int, media: list[int]) -> tuple[Peer, LinkStats]:
    """A peer that has been sent `count` messages over a connection that then broke."""
    stats = LinkStats()
    peer = Peer("worker", LIMITS, WINDOW, MediaCache(2000), stats)
    for number in range(count):
        peer.put(payload(number, media))
    peer.greet(greeting())
    sent_by(peer)
    peer.disconnect()
    return peer, stats


def sent_by(peer: Peer) -> list[LinkMessage]:
    sent: list[LinkMessage] = []
    while (due := peer.next_to_send()) is not None:
        sent.append(due.message)
        due.done()
    return sent


def test_after_a_lost_connection_only_what_did_not_arrive_is_sent_again() -> None:
    peer, stats = sending_peer(4, media=[])
    peer.greet(greeting(receiving_session=peer.session, received=3, acknowledged=1))
    assert [message.sequence for message in sent_by(peer) if isinstance(message, Data)] == [4]
    assert (stats.sent, stats.resent, stats.acknowledged) == (4, 1, 1)
    assert peer.outbox.unacknowledged == (2, 3, 4)


def test_a_restarted_receiver_gets_the_media_again_without_asking() -> None:
    peer, stats = sending_peer(2, media=[0])
    assert stats.blobs_sent == 1
    peer.greet(greeting(session=b"t" * 16))
    assert [type(message) for message in sent_by(peer)] == [Ack, Blob, Data, Data]


def test_a_pull_that_a_lost_connection_swallowed_is_repeated() -> None:
    peer = open_peer()
    peer.receive(Data(1, ((SOURCES[0].digest, 300),), [b"x"]))
    assert Pull((SOURCES[0].digest,)) in sent_by(peer)
    assert sent_by(peer) == []
    peer.disconnect()
    peer.greet(greeting())
    assert Pull((SOURCES[0].digest,)) in sent_by(peer)


def test_media_that_a_dead_session_still_owed_are_pulled_from_the_next() -> None:
    peer = open_peer()
    peer.receive(Data(1, ((SOURCES[0].digest, 300),), [b"never complete"]))
    sent_by(peer)
    peer.disconnect()
    peer.greet(greeting(session=b"t" * 16))
    assert Pull((SOURCES[0].digest,)) not in sent_by(peer)
    peer.receive(Data(1, ((SOURCES[0].digest, 300),), [b"whole"]))
    assert Pull((SOURCES[0].digest,)) in sent_by(peer)
    peer.receive(SOURCES[0])
    assert bytes(peer.inbox.pop_ready().frames[0]) == b"whole"
    assert not peer.inbox.ready


def test_what_came_whole_from_a_dead_session_is_still_handed_out_and_counts_against_the_credit() -> None:
    peer = open_peer()
    for sequence in (1, 2, 3):
        peer.receive(Data(sequence, (), [b"old"]))
    peer.disconnect()
    peer.greet(greeting(session=b"t" * 16))
    assert peer.inbox.credit.messages == WINDOW.messages - 3
    sent_by(peer)
    peer.receive(Data(1, (), [b"new"]))
    handed = [peer.inbox.pop_ready() for _ in range(4)]
    assert [bytes(incoming.frames[0]) for incoming in handed] == [b"old", b"old", b"old", b"new"]
    for incoming in handed:
        peer.inbox.acknowledge(incoming.session, incoming.sequence)
    assert peer.inbox.credit == WINDOW
    assert peer.inbox.idle
