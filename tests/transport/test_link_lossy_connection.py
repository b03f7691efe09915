"""The link protocol over a simulated connection that breaks at any moment: order, acknowledgement, credit."""

from __future__ import annotations

from collections import deque
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from link_messages import LIMITS, WINDOW, payload

from renderers.media.source import MediaSource
from transport.link.application_types import LinkStats
from transport.link.limits import Credit
from transport.link.message_streams import Incoming, MediaCache
from transport.link.messages import (
    Ack,
    Blob,
    Data,
    Hello,
    LinkMessage,
    Pull,
    Welcome,
    from_frames,
    to_frames,
)
from transport.link.peer import Peer


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
        return [int.from_bytes(outbox._kept[number].frames[0], "big") for number in outbox.unacknowledged]

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
            self.ends[1 - sender].queue.append(to_frames(due))
            self.ends[sender].peer.mark_sent(due)

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
    def messages_are_delivered_once_and_in_order(self) -> None:
        for end in self.ends:
            for numbers in end.seen.values():
                assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))

    @invariant()
    def memory_stays_within_the_window(self) -> None:
        for end in self.ends:
            inbox = end.peer.inbox
            assert len(inbox._unacknowledged) + len(inbox._previous_unacknowledged) <= 2 * WINDOW.messages
            assert len(end.peer.outbox) <= LIMITS.send_messages
            assert end.peer.outbox.bytes == sum(each.size for each in end.peer.outbox._kept.values())

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
        self.messages_are_delivered_once_and_in_order()


TestLossyLink = LossyLink.TestCase
TestLossyLink.settings = settings(
    max_examples=200, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
