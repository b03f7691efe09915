"""Link messages to frames and back: equal after decoding, damaged frames are decode errors."""

from __future__ import annotations

import contextlib
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport import DecodeError, DecodeLimits, MalformedError
from transport.link import LinkLimits
from transport.link.limits import Window
from transport.link.messages import Ack, Bye, Data, Hello, LinkMessage, Ping, Refused, Welcome, from_frames, to_frames

LIMITS = LinkLimits(media_bytes=1 << 20, decode=DecodeLimits(max_frames=16, max_total_bytes=1 << 16))
WINDOW = Window(4, 6000, 1000, 1 << 20)
MESSAGES: list[tuple[LinkMessage, list[bytes]]] = [
    (Hello("worker-é", WINDOW), []),
    (Welcome(WINDOW), []),
    (Data(("ab" * 32,), ("cd" * 32,), ("ab" * 32, "ef" * 32)), [b"media", b"frame", b""]),
    (Ack(5), []),
    (Ping(), []),
    (Bye(), []),
    (Refused("because é"), []),
]


@pytest.mark.parametrize(("message", "following"), MESSAGES, ids=[type(each).__name__ for each, _ in MESSAGES])
def test_every_link_message_is_equal_after_encoding_and_decoding(message: LinkMessage, following: list[bytes]) -> None:
    assert from_frames(to_frames(message, following), LIMITS) == (message, following)


@given(st.lists(st.binary(max_size=120), max_size=4))
def test_arbitrary_frames_are_a_decode_error_or_a_message(frames: list[bytes]) -> None:
    for each in (frames, [b"MMRL\x02" + frames[0], *frames[1:]] if frames else []):
        with contextlib.suppress(DecodeError):
            from_frames(each, LIMITS)


@given(st.data())
def test_damaged_link_messages_are_a_decode_error_or_a_message(data: st.DataObject) -> None:
    message, following = data.draw(st.sampled_from(MESSAGES))
    head = bytearray(to_frames(message)[0])
    head[data.draw(st.integers(0, len(head) - 1))] = data.draw(st.integers(0, 255))
    try:
        from_frames([bytes(head[: data.draw(st.integers(0, len(head)))]), *following], LIMITS)
    except DecodeError:
        return


@pytest.mark.parametrize("version", [1, 3])
def test_another_version_of_the_protocol_is_named_in_the_error(version: int) -> None:
    header = bytearray(to_frames(Ping())[0])
    header[4] = version
    with pytest.raises(DecodeError, match=f"{version}"):
        from_frames([bytes(header)], LIMITS)


def test_a_header_of_40_mib_is_refused_before_it_is_parsed() -> None:
    header = b"MMRL\x02" + bytes(40 << 20)
    tracemalloc.start()
    with pytest.raises(MalformedError, match="link header of"):
        from_frames([header], LIMITS)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
