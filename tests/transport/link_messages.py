"""Payloads, greetings and peers without sockets, for the tests of the link protocol."""

from __future__ import annotations

from typing import Any

from renderers.media.source import MediaSource
from transport import DecodeLimits
from transport.link.application_types import LinkStats
from transport.link.limits import Credit, LinkLimits
from transport.link.message_streams import MediaCache, Payload
from transport.link.messages import (
    NO_SESSION,
    Greeting,
    LinkMessage,
)
from transport.link.peer import Peer

SOURCES = [MediaSource.of(bytes([letter]) * 300) for letter in range(6)]
LIMITS = LinkLimits(
    send_messages=8, send_bytes=1 << 20, known_blobs=4, decode=DecodeLimits(max_frames=16, max_total_bytes=1 << 16)
)
WINDOW = Credit(4, 6000)


def payload(number: int, media: list[int]) -> Payload:
    return Payload.of([number.to_bytes(4, "big")], [SOURCES[index] for index in media])


def greeting(session: bytes = b"s" * 16, **changes: Any) -> Greeting:
    return Greeting(session, 1, NO_SESSION, 0, 0, Credit(10, 10_000), 1 << 20)._replace(**changes)


def open_peer() -> Peer:
    peer = Peer("worker", LIMITS, WINDOW, MediaCache(2000), LinkStats())
    peer.greet(greeting())
    sent_by(peer)  # what its credit is, among others
    return peer


def sent_by(peer: Peer) -> list[LinkMessage]:
    sent: list[LinkMessage] = []
    while (due := peer.next_to_send()) is not None:
        sent.append(due)
        peer.mark_sent(due)
    return sent
