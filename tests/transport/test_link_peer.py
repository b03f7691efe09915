"""One connection without sockets: windows, acknowledgements, and media that are sent once."""

from __future__ import annotations

from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from renderers.media.item import MediaSource
from transport import DecodeError, DecodeLimits, LimitError, MalformedError
from transport.link import LinkLimits, LinkStats, MessageTooLargeError
from transport.link.limits import FRAME_COST
from transport.link.messages import Ack, Bye, Data, from_frames
from transport.link.peer import Incoming, Payload, Peer
from transport.wire.decoding import build_media
from transport.wire.wire_format import Buffer

SOURCES = [MediaSource.of(bytes([number]) * 300) for number in range(6)]
MEDIA_BYTES = 3 * (300 + FRAME_COST)
LIMITS = LinkLimits(
    send_messages=8,
    receive_messages=4,
    receive_bytes=8000,
    media_bytes=MEDIA_BYTES,
    decode=DecodeLimits(max_frames=16, max_total_bytes=1 << 16),
)


def make_peer(limits: LinkLimits = LIMITS) -> Peer:
    return Peer("peer", b"", "", LIMITS.window, limits, LinkStats(), 0.0)


def payload(number: int, media: list[int] = []) -> Payload:  # noqa: B006  # read only
    return Payload.of([number.to_bytes(4, "big")], [SOURCES[index] for index in media])


def receive(peer: Peer, frames: list[Buffer]) -> Incoming:
    message, following = from_frames(frames, LIMITS)
    assert isinstance(message, Data)
    sources = [build_media(*each) for each in zip(message.sent, map(memoryview, following), strict=False)]
    return peer.receive(message, sources, following[len(sources) :])


@given(st.lists(st.tuples(st.lists(st.integers(0, 5), max_size=5, unique=True), st.booleans()), max_size=40))
def test_every_message_arrives_once_in_order_with_its_media_and_both_sides_store_the_same(
    steps: list[tuple[list[int], bool]],
) -> None:
    sender, receiver = make_peer(), make_peer()
    wire: deque[list[Buffer]] = deque()
    unread: deque[Incoming] = deque()
    sent: list[tuple[bytes, set[str]]] = []
    read: list[tuple[bytes, set[str]]] = []

    def read_one() -> None:
        incoming = unread.popleft()
        read.append((bytes(incoming.frames[0]), set(incoming.media)))
        assert all(source == SOURCES[source.data[0]] for source in incoming.media.values())
        receiver.mark_read(incoming)
        acknowledgement = receiver.next_to_send()
        assert acknowledgement is not None
        message, _ = from_frames(acknowledgement, LIMITS)
        assert isinstance(message, Ack)
        sender.receive_ack(message)

    def transfer() -> None:
        while (frames := sender.next_to_send()) is not None:
            wire.append(frames)
        while wire:
            unread.append(receive(receiver, wire.popleft()))
        assert set(receiver._stored) == {key for key in receiver._stored if key in sender._known}
        assert len(receiver._stored) == len(sender._known)
        assert receiver._stored_bytes <= MEDIA_BYTES

    for number, (media, reads) in enumerate(steps):
        each = payload(number, media)
        if sender.put(each):
            sent.append((bytes(each.frames[0]), {source.digest for source in each.sources}))
        transfer()
        if reads and unread:
            read_one()
    while unread or sender.unacknowledged:
        transfer()
        read_one()
    assert read == sent


def test_a_source_that_is_stored_is_not_sent_again_and_one_beyond_the_store_is() -> None:
    sender = make_peer()
    counts = []
    for media in ([0, 1], [0, 1, 2], [3], [0], [1, 2, 3], [4, 5, 0, 1]):
        assert sender.put(payload(0, media))
        frames = sender.next_to_send()
        assert frames is not None
        message, _ = from_frames(frames, LIMITS)
        assert isinstance(message, Data)
        counts.append((len(message.sent), len(message.evicted)))
        sender.receive_ack(Ack(len(counts)))
    assert counts == [(2, 0), (1, 0), (1, 1), (1, 1), (1, 1), (3, 3)]


def test_without_room_in_the_window_of_the_receiver_nothing_is_sent_until_it_reads() -> None:
    sender = make_peer()
    for number in range(6):
        assert sender.put(payload(number))
    assert sum(sender.next_to_send() is not None for _ in range(6)) == LIMITS.receive_messages
    sender.receive_ack(Ack(2))
    assert sum(sender.next_to_send() is not None for _ in range(6)) == 2


def test_a_message_larger_than_the_window_is_sent_when_it_is_the_only_one() -> None:
    sender, receiver = make_peer(), make_peer()
    large = Payload.of([bytes(20_000)], [])
    assert sender.put(large)
    assert sender.put(large)
    frames = sender.next_to_send()
    assert frames is not None
    incoming = receive(receiver, frames)
    assert sender.next_to_send() is None
    receiver.mark_read(incoming)
    sender.receive_ack(Ack(1))
    assert sender.next_to_send() is not None


def test_the_queue_of_a_sender_is_limited_in_messages_and_in_bytes() -> None:
    sender = make_peer(LinkLimits(send_messages=3))
    assert [sender.put(payload(number)) for number in range(4)] == [True, True, True, False]
    narrow = make_peer(LinkLimits(send_bytes=10_000))
    large = Payload.of([bytes(6000)], [])
    assert [narrow.put(large) for _ in range(2)] == [True, False]


def test_a_message_larger_than_the_receiver_accepts_is_an_error_with_both_sizes() -> None:
    with pytest.raises(MessageTooLargeError) as caught:
        make_peer().put(Payload.of([bytes(1 << 16)], []))
    assert (caught.value.size, caught.value.allowed) == ((1 << 16) + FRAME_COST, 1 << 16)


def test_a_leaving_link_sends_bye_once_after_all_messages() -> None:
    sender = make_peer()
    assert sender.put(payload(0))
    first, second = sender.next_to_send(leaving=True), sender.next_to_send(leaving=True)
    assert first is not None
    assert second is not None
    assert isinstance(from_frames(first, LIMITS)[0], Data)
    assert from_frames(second, LIMITS) == (Bye(), [])
    assert sender.next_to_send(leaving=True) is None


def data(sent: list[int] = [], stored: list[int] = [], evicted: list[int] = []) -> Data:  # noqa: B006
    return Data(*(tuple(SOURCES[index].digest for index in indexes) for indexes in (sent, stored, evicted)))


VIOLATIONS = {
    "media that are not stored": [(data(stored=[0]), [])],
    "an eviction of media that are not stored": [(data(evicted=[0]), [])],
    "media that are stored already": [(data(sent=[0]), [0]), (data(sent=[0]), [0])],
    "more media than are stored": [(data(sent=[0, 1, 2, 3]), [0, 1, 2, 3])],
}


@pytest.mark.parametrize("what", VIOLATIONS)
def test_a_message_that_contradicts_the_stored_media_is_malformed(what: str) -> None:
    receiver = make_peer()
    *good, (message, sources) = VIOLATIONS[what]
    for each, media in good:
        receiver.receive(each, [SOURCES[index] for index in media], [b"x"])
    with pytest.raises(MalformedError, match="media"):
        receiver.receive(message, [SOURCES[index] for index in sources], [b"x"])


def test_more_than_the_window_is_malformed_in_messages_and_in_bytes() -> None:
    for size in (1, 4000):
        receiver = make_peer()
        accepted = LIMITS.receive_messages if size == 1 else 1
        for _ in range(accepted):
            receiver.receive(data(), [], [bytes(size)])
        with pytest.raises(MalformedError, match="beyond"):
            receiver.receive(data(), [], [bytes(size)])


def test_a_message_of_too_many_frames_or_bytes_is_a_limit_error() -> None:
    for frames in ([b""] * 17, [bytes(1 << 16)]):
        with pytest.raises(LimitError):
            make_peer().receive(data(), [], frames)


@pytest.mark.parametrize("received", [2, -1])
def test_an_acknowledgement_of_what_was_not_sent_is_malformed(received: int) -> None:
    sender = make_peer()
    assert sender.put(payload(0))
    sender.next_to_send()
    with pytest.raises(DecodeError):
        sender.receive_ack(Ack(received))
