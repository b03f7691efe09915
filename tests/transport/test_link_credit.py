"""Credit of the link protocol: what a peer may send, and the errors for a peer that sends more."""

from __future__ import annotations

import pytest
from link_messages import LIMITS, WINDOW, greeting, open_peer, sent_by

from transport import DecodeError, MalformedError
from transport.link.application_types import LinkStats
from transport.link.limits import Credit
from transport.link.message_streams import Inbox, MediaCache, Outbox, Payload
from transport.link.messages import (
    Ack,
    Data,
)
from transport.link.peer import Peer


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
def test_messages_that_violate_the_protocol_are_decode_errors(message: Data | Ack) -> None:
    peer = open_peer()
    if isinstance(message, Ack):
        message = message._replace(session=peer.session)
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


def test_a_peer_that_starts_many_sessions_gets_the_credit_of_one_window() -> None:
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


def test_data_received_before_credit_was_granted_are_malformed() -> None:
    peer = Peer("worker", LIMITS, WINDOW, MediaCache(2000), LinkStats())
    peer.greet(greeting())
    with pytest.raises(MalformedError, match="credit"):
        peer.receive(Data(1, (), [b"x"]))


def test_a_reduced_credit_applies_from_the_next_connection() -> None:
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


def test_a_message_larger_than_the_window_is_sent_when_it_is_the_only_one() -> None:
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
