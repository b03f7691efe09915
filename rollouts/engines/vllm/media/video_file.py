"""Frames that never were a file, as a file that a server decodes to the same pixels: an AVI of PNG images.

OpenCV, which vLLM decodes videos with, reads PNG in AVI (codec `MPNG`) without loss. Uncompressed AVI it does not:
frames whose rows are no multiple of its alignment corrupt the memory of the server (OpenCV of vLLM 0.32).
"""

from __future__ import annotations

import io
import struct
from fractions import Fraction

from PIL import Image

from renderers import MediaSource
from renderers.media.raw_video import raw_video_frames

MEDIA_TYPE = "video/x-msvideo"
#: With one frame OpenCV finds none: it looks for the end of the file first and does not come back.
FEWEST_FRAMES = 2

#: What transformers takes for the speed of frames whose speed nobody knows.
_ASSUMED_FPS = 24.0
_KEY_FRAME = 0x10
_CODEC = b"MPNG"


def frames_file(source: MediaSource) -> bytes:
    """An AVI of the frames of a raw video source, as many a second as it says; 24 where it does not say.

    The speed is written as a fraction of two 32-bit numbers, so that a server reads the same float64. Raises
    `MediaDecodeError` for a broken source.
    """
    frames, fps = raw_video_frames(source.data)
    count, height, width, _ = frames.shape
    pictures = [_png(Image.fromarray(frame)) for frame in frames]
    speed = Fraction(fps or _ASSUMED_FPS).limit_denominator(1_000_000)
    largest = max(map(len, pictures))
    # AVIMAINHEADER, AVISTREAMHEADER and BITMAPINFOHEADER of Microsoft's AVI RIFF file reference.
    main = struct.pack(
        "<14I", round(1_000_000 / speed), 0, 0, _KEY_FRAME, count, 0, 1, largest, width, height, 0, 0, 0, 0
    )
    stream = struct.pack(
        "<4s4sIHHIIIIIIIIhhhh",
        *(b"vids", _CODEC, 0, 0, 0, 0, speed.denominator, speed.numerator, 0, count, largest, 2**32 - 1, 0),
        *(0, 0, width, height),
    )
    bitmap = struct.pack("<IiiHH4sIiiII", 40, width, height, 1, 24, _CODEC, 3 * width * height, 0, 0, 0, 0)
    description = _list(b"strl", _chunk(b"strh", stream) + _chunk(b"strf", bitmap))
    header = _list(b"hdrl", _chunk(b"avih", main) + description)
    chunks = [_chunk(b"00dc", picture) for picture in pictures]
    index, position = [], 4
    for picture, chunk in zip(pictures, chunks, strict=True):
        index.append(struct.pack("<4sIII", b"00dc", _KEY_FRAME, position, len(picture)))
        position += len(chunk)
    body = header + _list(b"movi", b"".join(chunks)) + _chunk(b"idx1", b"".join(index))
    return _chunk(b"RIFF", b"AVI " + body)


def _png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getvalue()


def _chunk(name: bytes, data: bytes) -> bytes:
    return name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def _list(kind: bytes, data: bytes) -> bytes:
    return _chunk(b"LIST", kind + data)
