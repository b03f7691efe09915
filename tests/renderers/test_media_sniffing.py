"""The media type of bytes."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st
from media_parts import image, video, video_file
from sounds import sound

from renderers.errors import MediaError
from renderers.media.sniffing import sniff


@pytest.mark.parametrize(
    ("format", "codec", "expected"),
    [
        ("mp4", "mpeg4", "video/mp4"),
        ("webm", "libvpx", "video/webm"),
        ("matroska", "mpeg4", "video/x-matroska"),
        ("avi", "mpeg4", "video/x-msvideo"),
        ("mpegts", "mpeg2video", "video/mp2t"),
        ("asf", "mpeg4", "video/x-ms-asf"),
    ],
)
def test_what_ffmpeg_writes_is_recognised(format: str, codec: str, expected: str) -> None:
    data = video_file(format, codec)
    assert sniff(data) == expected
    assert video(data).data == data


@pytest.mark.parametrize(
    ("start", "expected"),
    [
        (b"RIFX\0\0\0\0WAVE", "audio/wav"),
        (b"\xff\xfb\x90\x64", "audio/mpeg"),  # MPEG-1 layer III
        (b"\xff\xf9\x50\x80", "audio/aac"),
        (b"\xff\xeb\x90\x64", None),  # a reserved version
        (b"\xff\xfb\xf0\x64", None),  # a bitrate that no table has
        (b"\xff\xf1\x7c\x80", None),
        ("text".encode("utf-16"), None),
    ],
)
def test_frames_without_a_header_are_recognised_by_their_fields(start: bytes, expected: str | None) -> None:
    assert sniff(start) == expected
    assert sniff(start + bytes(2000)) == expected


STARTS = [
    b"",
    b"RIFF",
    b"\0\0\0\x18ftyp",
    b"<?xml",
    b"BM",
    b"G" * 20,
    b"{",
    b"\x1aE\xdf\xa3",
    b"GIF89a",
    b"mmpx",
    b"mmpv",
    b"mmpa",
    b"\xff\xfb",
    b"ID3",
]


@given(st.binary(max_size=64), st.sampled_from([*STARTS, b"RIFF\0\0\0\0WEBPVP8X", b"\x89PNG\r\n\x1a\n"]))
def test_any_bytes_can_be_looked_at(data: bytes, start: bytes) -> None:
    named = sniff(start + data)
    assert named is None or named.count("/") == 1
    assert sniff(memoryview(start + data)) == named
    for kind in (image, video, sound):
        with contextlib.suppress(MediaError):  # whatever else is raised fails the test
            assert kind(start + data).data == start + data
