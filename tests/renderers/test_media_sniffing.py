"""The media type of bytes."""

from __future__ import annotations

import contextlib
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from media_parts import NOISE, data_url, encoded, image, pixels, video, video_file

from renderers.errors import MediaDecodeError
from renderers.media.sniffing import sniff


@pytest.mark.parametrize(
    ("format", "expected"),
    [
        ("PNG", "image/png"),
        ("JPEG", "image/jpeg"),
        ("WEBP", "image/webp"),
        ("GIF", "image/gif"),
        ("BMP", "image/bmp"),
        ("TIFF", "image/tiff"),
        ("PPM", "image/x-portable-anymap"),
        ("ICO", "image/x-icon"),
        ("JPEG2000", "image/jp2"),
        ("AVIF", "image/avif"),
        ("PDF", "application/pdf"),
        ("EPS", "application/postscript"),
        ("TGA", None),
    ],
)
def test_what_pillow_writes_is_recognised(format: str, expected: str | None) -> None:
    assert sniff(encoded(NOISE, format)) == expected


@pytest.mark.parametrize(
    ("format", "codec", "expected"),
    [
        ("mp4", "mpeg4", "video/mp4"),
        ("mov", "mpeg4", "video/quicktime"),
        ("webm", "libvpx", "video/webm"),
        ("matroska", "mpeg4", "video/x-matroska"),
        ("avi", "mpeg4", "video/x-msvideo"),
        ("mpegts", "mpeg2video", "video/mp2t"),
        ("mpeg", "mpeg2video", "video/mpeg"),
        ("flv", "flv1", "video/x-flv"),
        ("asf", "mpeg4", "video/x-ms-asf"),
    ],
)
def test_what_ffmpeg_writes_is_recognised(format: str, codec: str, expected: str) -> None:
    data = video_file(format, codec)
    assert sniff(data) == expected
    assert video(data).data == data


@pytest.mark.parametrize(
    "data", [b"", b"hello", bytes(2000), b"RIFF", b"\0\0\0\x20ftyp", b"{picture}", b"P7\n", b"BM!"]
)
def test_what_is_not_known_has_no_name(data: bytes) -> None:
    assert sniff(data) in (None, "video/mp4" if b"ftyp" in data else None)


@pytest.mark.parametrize(
    "format", ["PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "PPM", "ICO", "JPEG2000", "AVIF", "TGA"]
)
def test_whatever_the_decoder_reads_passes(format: str) -> None:
    small = encoded(NOISE[:16, :16], format)
    assert pixels(small).shape == (16, 16, 3)
    assert pixels(data_url(small, "text/html")).shape == (16, 16, 3)


def branded(brand: bytes, *others: bytes) -> bytes:
    """The first box of an ISO base media file."""
    body = b"ftyp" + brand + bytes(4) + b"".join(others)
    return struct.pack(">I", 4 + len(body)) + body


def test_images_that_no_decoder_here_reads_are_named() -> None:
    assert sniff(branded(b"mif1", b"miaf", b"avif")) == "image/avif"
    for data, name in ((branded(b"heic", b"mif1", b"heic"), "heic"), (b"<svg>", "svg"), (b"\xff\x0a", "jxl")):
        with pytest.raises(MediaDecodeError, match=f"image/{name}.*convert it to PNG"):
            image(data)


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
]


@given(st.binary(max_size=64), st.sampled_from([*STARTS, b"RIFF\0\0\0\0WEBPVP8X", b"\x89PNG\r\n\x1a\n"]))
def test_any_bytes_can_be_looked_at(data: bytes, start: bytes) -> None:
    named = sniff(start + data)
    assert named is None or named.count("/") == 1
    assert sniff(memoryview(start + data)) == named
    for kind in (image, video):
        with contextlib.suppress(MediaDecodeError):  # whatever else is raised fails the test
            assert kind(start + data).data == start + data
