"""Acknowledgement, resending and pulled media of the link protocol, message by message, without sockets."""

from __future__ import annotations

import pytest
from link_messages import LIMITS, SOURCES, WINDOW, greeting, open_peer, payload, sent_by

from renderers.media.source import MediaSource
from transport import MalformedError
from transport.link.application_types import LinkStats
from transport.link.limits import Credit
from transport.link.message_streams import Inbox, MediaCache
from transport.link.messages import (
    Ack,
    Blob,
    Data,
    Pull,
)
from transport.link.peer import Peer


def test_acknowledgements_out_of_order_count_up_to_the_first_gap() -> None:
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


def test_a_message_is_not_delivered_before_an_earlier_one_that_waits_for_media() -> None:
    peer = open_peer()
    peer.receive(Data(1, ((SOURCES[0].digest, 300),), [b"first"]))
    peer.receive(Data(2, (), [b"second"]))
    assert not peer.inbox.ready
    due = peer.next_to_send()
    while due is not None and due != Pull((SOURCES[0].digest,)):
        peer.mark_sent(due)
        due = peer.next_to_send()
    assert due is not None
    peer.receive(SOURCES[0])
    assert [bytes(peer.inbox.pop_ready().frames[0]) for _ in range(2)] == [b"first", b"second"]


def test_the_media_cache_stays_within_its_byte_limit_and_evicts_the_least_recently_used() -> None:
    store = MediaCache(3 * (300 + 512))
    for source in SOURCES[:3]:
        store.keep(source)
    assert store.get(SOURCES[0].digest) is SOURCES[0]
    store.keep(SOURCES[3])
    assert store.nbytes <= 3 * (300 + 512)
    assert [store.get(source.digest) is not None for source in SOURCES[:4]] == [True, False, True, True]
    store.keep(MediaSource.of(bytes(5000)))
    assert len(store) == 3


def test_a_message_received_twice_is_delivered_once() -> None:
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


def test_after_a_lost_connection_only_messages_that_did_not_arrive_are_resent() -> None:
    peer, stats = sending_peer(4, media=[])
    peer.greet(greeting(receiving_session=peer.session, received=3, acknowledged=1))
    assert [message.sequence for message in sent_by(peer) if isinstance(message, Data)] == [4]
    assert (stats.sent, stats.resent, stats.acknowledged) == (4, 1, 1)
    assert peer.outbox.unacknowledged == (2, 3, 4)


def test_media_are_resent_to_a_restarted_receiver_without_a_pull() -> None:
    peer, stats = sending_peer(2, media=[0])
    assert stats.blobs_sent == 1
    peer.greet(greeting(session=b"t" * 16))
    assert [type(message) for message in sent_by(peer)] == [Ack, Blob, Data, Data]


def test_a_pull_is_repeated_after_a_lost_connection() -> None:
    peer = open_peer()
    peer.receive(Data(1, ((SOURCES[0].digest, 300),), [b"x"]))
    assert Pull((SOURCES[0].digest,)) in sent_by(peer)
    assert sent_by(peer) == []
    peer.disconnect()
    peer.greet(greeting())
    assert Pull((SOURCES[0].digest,)) in sent_by(peer)


def test_media_missing_from_an_ended_session_are_pulled_from_the_next_session() -> None:
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


def test_complete_messages_of_an_ended_session_are_delivered_and_count_against_the_credit() -> None:
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
