"""Link messages to frames and back: equal after decoding, damaged frames are decode errors."""

from __future__ import annotations

import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st
from link_messages import LIMITS, WINDOW, greeting

from transport import DecodeError, MalformedError
from transport.link.limits import Credit
from transport.link.messages import (
    Ack,
    Blob,
    Data,
    Hello,
    LinkMessage,
    Pull,
    Refused,
    Signal,
    Welcome,
    from_frames,
    to_frames,
)


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
def test_every_link_message_is_equal_after_encoding_and_decoding(message: LinkMessage) -> None:
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


def test_a_header_of_40_mib_is_refused_before_it_is_parsed() -> None:
    digests = bytes(40 << 20)
    header = b"MMRL\x01\x03" + bytes(8) + digests
    tracemalloc.start()
    with pytest.raises(MalformedError, match="link header of"):
        from_frames([header], LIMITS.decode)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
