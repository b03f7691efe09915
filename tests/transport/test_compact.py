"""On one connection every media source is sent once."""

from __future__ import annotations

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from renderers import MediaSource, Message, PlaceholderRange
from rollouts import MediaReference, TokenNode, Trajectory, Turn
from rollouts.engines.protocol import FinishReason, WeightSpan
from transport import (
    ChecksumError,
    CompactDecoder,
    CompactEncoder,
    DecodeError,
    EncodeError,
    MalformedError,
    MessageOrderError,
    TruncatedError,
)

# Connections.

SOURCES = [MediaSource.of(bytes([number]) * 1000) for number in range(6)]


def test_a_source_travels_once_a_connection() -> None:
    sender, receiver = CompactEncoder(), CompactDecoder()
    first, second = sender.encode([SOURCES[0], SOURCES[0]]), sender.encode({"again": SOURCES[0], "new": SOURCES[1]})
    assert first.count(SOURCES[0].data) == 1
    assert SOURCES[0].data not in second
    assert receiver.decode(first) == [SOURCES[0], SOURCES[0]]
    got = receiver.decode(second)
    assert bytes(got["again"].data) == SOURCES[0].data
    assert bytes(got["new"].data) == SOURCES[1].data


@settings(max_examples=80, deadline=None)
@given(st.lists(st.lists(st.integers(0, 5), max_size=4), max_size=12), st.integers(0, 6), st.booleans())
def test_any_messages_arrive_within_the_bound(messages: list[list[int]], room: int, framed: bool) -> None:
    sender, receiver = CompactEncoder(1000 * room), CompactDecoder(1000 * room)
    for message in messages:
        obj = [[SOURCES[number] for number in message], np.arange(500)]
        got = receiver.decode_frames(sender.encode_frames(obj)) if framed else receiver.decode(sender.encode(obj))
        assert [bytes(source.data) for source in got[0]] == [SOURCES[number].data for number in message]
        stored = receiver._stored
        assert sum(source.nbytes for source in stored.values()) <= 1000 * room
        assert len(stored) == len(sender._stored)
        assert all(digest in sender._stored for digest in stored)


def test_the_least_recently_used_source_is_sent_again() -> None:
    sender = CompactEncoder(2000)
    for number in (0, 1, 0, 2):
        sender.encode(SOURCES[number])
    assert SOURCES[0].data not in sender.encode(SOURCES[0])
    assert SOURCES[1].data in sender.encode(SOURCES[1])


def test_what_a_decoder_holds_keeps_no_message_alive() -> None:
    sender, receiver = CompactEncoder(), CompactDecoder()
    message = bytearray(sender.encode([SOURCES[0], np.arange(5000)]))
    got = receiver.decode(message)
    del got
    message.clear()  # raises BufferError while anything looks at it


def test_a_lost_message_is_noticed_and_a_restart_recovers() -> None:
    sender, receiver = CompactEncoder(), CompactDecoder()
    receiver.decode(sender.encode(SOURCES[0]))
    sender.encode(SOURCES[1])
    with pytest.raises(MessageOrderError) as caught:
        receiver.decode(sender.encode([SOURCES[1]]))
    assert (caught.value.expected, caught.value.actual) == (1, 2)
    sender.restart()
    assert receiver.decode(sender.encode([SOURCES[0], SOURCES[1]])) == SOURCES[:2]


def test_a_first_message_that_is_lost_after_a_restart_is_noticed() -> None:
    """The second one's number is the very one that the receiver waits for, on the old connection."""
    sender, receiver = CompactEncoder(), CompactDecoder()
    receiver.decode(sender.encode(SOURCES[0]))
    sender.restart()
    sender.encode("lost")
    for attempt in (sender, CompactEncoder()):
        if attempt is not sender:
            attempt.encode("lost, too")
        with pytest.raises(MessageOrderError, match="another connection") as caught:
            receiver.decode(attempt.encode(SOURCES[0]))
        assert (caught.value.expected, caught.value.actual) == (1, 1)
    sender.restart()
    assert receiver.decode(sender.encode(SOURCES[0])) == SOURCES[0]


def test_sources_of_a_few_bytes_count_as_what_they_take() -> None:
    room = 200
    sender, receiver = CompactEncoder(512 * room), CompactDecoder(512 * room)
    for start in range(0, 1000, 100):
        receiver.decode(sender.encode([MediaSource.of(b"%d" % number) for number in range(start, start + 100)]))
        assert len(receiver._stored) <= room
    with pytest.raises(MalformedError, match="max_bytes"):
        CompactDecoder(512 * room).decode(
            CompactEncoder().encode([MediaSource.of(b"%d" % number) for number in range(room + 1)])
        )


def test_a_restart_makes_the_receiver_forget() -> None:
    sender, receiver = CompactEncoder(), CompactDecoder()
    receiver.decode(sender.encode(SOURCES[0]))
    sender.restart()
    receiver.decode(sender.encode(SOURCES[1]))
    assert set(receiver._stored) == {SOURCES[1].digest}


def test_a_message_that_fails_late_leaves_the_receiver_as_it_was() -> None:
    sender, receiver = CompactEncoder(), CompactDecoder()
    receiver.decode(sender.encode(SOURCES[0]))
    frames = sender.encode_frames([SOURCES[1]])
    with pytest.raises(DecodeError):
        receiver.decode_frames([*frames[:-1], b"no header"])
    assert set(receiver._stored) == {SOURCES[0].digest}
    assert receiver.decode_frames(frames) == [SOURCES[1]]


def test_an_object_that_cannot_be_encoded_changes_nothing() -> None:
    sender, receiver = CompactEncoder(), CompactDecoder()
    with pytest.raises(EncodeError):
        sender.encode([SOURCES[0], object()])
    assert receiver.decode(sender.encode(SOURCES[0])) == SOURCES[0]


def test_a_damaged_source_is_refused_and_the_message_can_be_given_again() -> None:
    sender, receiver = CompactEncoder(), CompactDecoder()
    frames = sender.encode_frames([SOURCES[0]])
    damaged = [bytes(frame) for frame in frames]
    damaged[1] = damaged[1][:-1] + b"!"
    with pytest.raises(ChecksumError):
        receiver.decode_frames(damaged)
    assert receiver.decode_frames(frames) == [SOURCES[0]]


def test_a_sender_cannot_make_a_receiver_hold_more_than_it_allows() -> None:
    with pytest.raises(MalformedError, match="max_bytes is 1500"):
        CompactDecoder(1500).decode(CompactEncoder(5000).encode(SOURCES[:2]))


def test_every_truncation_and_flipped_bit_is_an_error_of_ours_or_harmless() -> None:
    frames = [bytes(frame) for frame in CompactEncoder().encode_frames([SOURCES[0], 1])]
    for size in range(len(frames[0])):
        with pytest.raises((TruncatedError, MalformedError)):
            CompactDecoder().decode_frames([frames[0][:size], *frames[1:]])
    for place in range(len(frames[0])):
        for bit in range(8):
            changed = bytearray(frames[0])
            changed[place] ^= 1 << bit
            try:
                CompactDecoder().decode_frames([bytes(changed), *frames[1:]])
            except DecodeError:
                continue
            assert place in (4, *range(6, 16)), "only padding, an older version, and a connection's name may pass"
    for count in range(len(frames)):
        with pytest.raises(DecodeError):
            CompactDecoder().decode_frames(frames[:count])


# What an episode weighs.


def photograph(seed: int, format: str) -> bytes:
    """512 x 512: smooth shapes under noise, so that it weighs what photographs do."""
    random = np.random.default_rng(seed)
    coarse = Image.fromarray(random.integers(0, 256, (16, 16, 3), dtype=np.uint8)).resize(
        (512, 512), Image.Resampling.BICUBIC
    )
    noisy = np.asarray(coarse, np.int16) + random.integers(-12, 13, (512, 512, 3))
    file = io.BytesIO()
    Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(file, format)
    return file.getvalue()


def episode(format: str, seed: int = 0, calls: int = 20, tokens: int = 1000, sampled: int = 300) -> Trajectory:
    random = np.random.default_rng(seed)
    nodes: list[TokenNode] = []
    turns: list[Turn] = []
    for number in range(calls):
        source = MediaSource.of(photograph(100 * seed + number, format))
        reference = MediaReference("image", f"{source.digest}-fp", source, PlaceholderRange(20, 256))
        asked = tokens - sampled
        nodes.append(
            TokenNode(
                len(nodes) - 1,
                random.integers(0, 150_000, asked, dtype=np.int32),
                np.zeros(asked, bool),
                np.empty(0, np.float32),
                media=(reference,),
            )
        )
        nodes.append(
            TokenNode(
                len(nodes) - 1,
                random.integers(0, 150_000, sampled, dtype=np.int32),
                np.ones(sampled, bool),
                -random.random(sampled, np.float32),
                (WeightSpan("step-12", 0, sampled),),
            )
        )
        message: Message = {"role": "assistant", "content": "x" * 400}
        turns.append(Turn(len(nodes) - 1, FinishReason.STOP, message, 0.1))
    return Trajectory(f"e{seed}", nodes=nodes, turns=turns)


@pytest.mark.slow
@pytest.mark.parametrize("format", ["JPEG", "PNG"])
def test_an_episode_weighs_its_images_and_at_most_14_bytes_a_token(format: str) -> None:
    trajectory = episode(format)
    media = sum(reference.source.nbytes for reference in trajectory.all_media())
    tokens = sum(map(len, trajectory.nodes))
    assert tokens == 20_000
    message = CompactEncoder().encode(trajectory)
    print(f"{format}: {len(message):,} bytes, media {media:,}, {(len(message) - media) / tokens:.2f} bytes a token")
    assert len(message) <= 1.02 * media + 14 * tokens
    assert len(message) - media <= 14 * tokens, "nor more than that without the 2 %"
    got = CompactDecoder().decode(message)
    assert [bytes(reference.source.data) for reference in got.all_media()] == [
        bytes(reference.source.data) for reference in trajectory.all_media()
    ]
