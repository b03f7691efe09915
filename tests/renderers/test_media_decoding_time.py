"""The time that decoding takes is bounded."""

import io
import struct
import time
import zlib
from collections.abc import Callable

import numpy as np
import pytest
from media_parts import encoded
from PIL import Image

from renderers import MediaPolicy, MediaSource
from renderers.errors import MediaError, MediaLimitError
from renderers.media.decoding import decode_image
from renderers.media.policy import Deadline, TimedBytes
from renderers.media.video_decoding import decode_video

NOISE = Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), dtype=np.uint8))


def jpeg_of_scans(image: Image.Image, more: int) -> bytes:
    """A progressive JPEG whose last scan (and the Huffman table before it) is there `more` times more."""
    data = encoded(image, "JPEG", progressive=True)
    last = data.rindex(b"\xff\xda")
    table = data.rindex(b"\xff\xc4", 0, last)
    return data[:-2] + data[table:-2] * more + data[-2:]


def test_a_progressive_jpeg_of_400_scans_is_refused_where_scans_times_pixels_are_too_many() -> None:
    source = MediaSource.of(jpeg_of_scans(NOISE, 390))
    assert decode_image(source, MediaPolicy()).size == (64, 64)
    with pytest.raises(MediaLimitError, match=r"400 scans.*re-encode it as a baseline JPEG or PNG"):
        decode_image(source, MediaPolicy(max_pixels=64 * 64))


@pytest.mark.parametrize("hiding", [b"\xff\x01", b"\xff\x02", b"\xff\xbf", b"\xff\xd0", b"\xff\0"])
def test_no_marker_hides_scans_from_the_check_that_the_decoder_finds(hiding: bytes) -> None:
    """Before a length only where the decoder reads one: behind others 64 KiB would be passed over."""
    data = jpeg_of_scans(NOISE, 390)
    first = data.index(b"\xff\xc4", data.index(b"\xff\xda"))
    hidden = MediaSource.of(data[:first] + hiding + b"\xfe\xfe" + data[first:])
    with pytest.raises(MediaLimitError, match="400 scans"):
        decode_image(hidden, MediaPolicy(max_pixels=64 * 64))


@pytest.mark.parametrize("progressive", [False, True])
def test_what_looks_like_scans_outside_of_the_picture_is_none(progressive: bool) -> None:
    """A video behind a photo, a preview in its Exif data, a profile: bytes of any values."""
    photo = encoded(NOISE, "JPEG", progressive=progressive, comment=b"\xff\xda\0\x02" * 1000)
    source = MediaSource.of(photo + b"\xff\xda\0\x02" * 1000)
    assert decode_image(source, MediaPolicy(max_pixels=64 * 64)).size == (64, 64)


# Time.


def png_of_chunks(count: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    data = encoded(NOISE, "PNG")
    return data[:33] + chunk(b"prIv", b"") * count + data[33:]


def gif_of_frames(count: int) -> bytes:
    data = encoded(NOISE.convert("L").resize((1, 1)), "GIF")
    start = data.index(b",")
    return data[:start] + data[start:-1] * count + data[-1:]


def gif_of_comments(count: int) -> bytes:
    data = encoded(NOISE, "GIF")
    start = data.index(b",")
    return data[:start] + b"!\xfe" + (b"\xff" + bytes([65]) * 255) * count + b"\0" + data[start:]


def bmp_of_runs(count: int) -> bytes:
    head = struct.pack("<IiiHHIIiiII", 40, 4096, 4096, 1, 8, 1, 2 * count, 0, 0, 256, 0)
    return b"BM" + struct.pack("<IHHI", 0, 0, 0, 14 + 40 + 1024) + head + bytes(1024) + b"\x01\x00" * count


SLOW: dict[str, Callable[[int], bytes]] = {
    "chunks of a PNG": png_of_chunks,
    "frames of a GIF": gif_of_frames,
    "comments of a GIF": gif_of_comments,
    "runs of a BMP": bmp_of_runs,
}


@pytest.mark.parametrize("form", SLOW)
def test_a_file_of_very_many_parts_is_refused_when_its_time_is_over(form: str) -> None:
    source = MediaSource.of(SLOW[form](200_000))
    started = time.monotonic()
    with pytest.raises(MediaLimitError, match=r"timeout=0\.05"):
        decode_image(source, MediaPolicy(timeout=0.05))
    assert time.monotonic() - started < 5
    with pytest.raises(MediaError):  # neither is it a video
        decode_video(source, MediaPolicy(timeout=0.05))
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("format", ["PNG", "JPEG", "GIF", "BMP", "PPM", "JPEG2000", "TGA"])
def test_time_that_is_over_while_the_decoder_reads_is_a_limit_error(
    format: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a corrupt file, whichever read it is and whatever the decoder makes of a read that fails."""
    image = Image.fromarray(np.random.default_rng(1).integers(0, 256, (300, 300, 3), dtype=np.uint8))
    source = MediaSource.of(encoded(image, format))
    reads = 0
    fatal: int | None = None

    def counted(self: TimedBytes, size: int | None = -1, /) -> bytes:
        nonlocal reads
        reads += 1
        if reads == fatal:
            self._deadline = Deadline(0)
            monkeypatch.setattr(Deadline, "passed", True)
        self._deadline.remaining()
        return io.BytesIO.read(self, size)

    monkeypatch.setattr(TimedBytes, "read", counted)
    decode_image(source, MediaPolicy())
    total = reads
    for number in {1, total // 2, total - 1, total}:
        reads, fatal = 0, number
        with pytest.raises(MediaLimitError, match="timeout"):
            decode_image(source, MediaPolicy())
