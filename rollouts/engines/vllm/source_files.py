"""Encodes images and videos as files that a server decodes to the same pixels.

Decoders disagree about images that EXIF rotates and about transparent, paletted and 16-bit ones, and each JPEG decoder
rounds in its own way (libjpeg of another version, the decoder of vLLM's Rust frontend): those become PNG. Raw frames
become an AVI of PNG images (codec `MPNG`), which OpenCV, vLLM's decoder of videos, reads without loss. Uncompressed AVI
is not safe: frames with rows that are no multiple of its alignment corrupt the memory of the server (OpenCV of vLLM
0.32).
"""

from __future__ import annotations

import base64
import io
import struct
from fractions import Fraction
from typing import NamedTuple

from PIL import Image

from renderers import MediaSource
from renderers.media.decoding import decode_image, is_raw_video, raw_video_frames
from renderers.media.policy import MediaPolicy
from renderers.media.sniffing import sniff
from renderers.process.caches import ByteLRU

#: OpenCV reads no frame from a file with one frame: it seeks to the end of the file first and does not seek back.
MIN_VIDEO_FRAMES = 2

#: Bytes of PNG files that are kept for the next server, in all.
_KEPT_PNG_BYTES = 256 * 2**20

# Where the first chunk of a PNG has the bits of a sample.
_PNG_BIT_DEPTH = 24

# EXIF tag of the camera's orientation.
_ORIENTATION = 0x0112

#: The frame rate that transformers assumes for frames without one.
_DEFAULT_FPS = 24.0
_KEY_FRAME = 0x10
_CODEC = b"MPNG"


class SourceFile(NamedTuple):
    """The bytes of a file, and its media type."""

    data: bytes | memoryview
    media_type: str

    def data_url(self) -> list[bytes]:
        """The file as a data URL, in segments."""
        return [f"data:{self.media_type};base64,".encode(), base64.b64encode(self.data)]


# By digest of the source.
_pngs: ByteLRU[str, SourceFile] = ByteLRU(_KEPT_PNG_BYTES)


def source_file(source: MediaSource, modality: str, *, jpeg_as_file: bool = False) -> SourceFile:
    """The file of an image or a video whose source has passed `media_payload.select_mode`.

    PNG images that are made here are kept in memory, so that an image is encoded once for all servers.
    """
    if modality == "image":
        file = _pngs.get(source.digest)
        if file is None or jpeg_as_file:
            # The source passed a policy before, whose limits may be wider than those of the default policy.
            file = image_file(source, MediaPolicy(max_pixels=2**40, max_aspect_ratio=2**40), jpeg_as_file=jpeg_as_file)
            if file.data is not source.data and not jpeg_as_file:
                _pngs.put(source.digest, file, memoryview(file.data).nbytes)
        return file
    if is_raw_video(source.data):
        return SourceFile(encode_avi(source), "video/x-msvideo")
    return SourceFile(source.data, str(sniff(source.data)))


def image_file(source: MediaSource, policy: MediaPolicy, *, jpeg_as_file: bool = False) -> SourceFile:
    """The bytes of a PNG about which all decoders agree, else a PNG of the pixels as decoded here.

    With `jpeg_as_file` also the bytes of a JPEG, whose pixels then are those of the server's decoder. Every image is
    decoded first: raises `MediaLimitError` or `MediaDecodeError`.
    """
    image = decode_image(source, policy)
    media_type = sniff(source.data)
    of_eight_bits = media_type == "image/png" and source.data[_PNG_BIT_DEPTH] == 8
    if of_eight_bits or (jpeg_as_file and media_type == "image/jpeg"):
        with Image.open(io.BytesIO(source.data)) as file:
            upright = file.getexif().get(_ORIENTATION, 1) == 1
            if file.mode in ("RGB", "L") and upright and "transparency" not in file.info:
                return SourceFile(source.data, str(media_type))
    return SourceFile(_png(image), "image/png")


def encode_avi(source: MediaSource) -> bytes:
    """An AVI of the frames of a raw video source, at its frame rate, or 24 frames a second if it has none.

    The rate is written as a fraction of two 32-bit numbers, so that a server reads the same float64. Raises
    `MediaDecodeError` for a damaged source.
    """
    frames, fps = raw_video_frames(source.data)
    count, height, width, _ = frames.shape
    images = [_png(Image.fromarray(frame)) for frame in frames]
    rate = Fraction(fps or _DEFAULT_FPS).limit_denominator(1_000_000)
    largest = max(map(len, images))
    # AVIMAINHEADER, AVISTREAMHEADER and BITMAPINFOHEADER of Microsoft's AVI RIFF file reference.
    main = struct.pack(
        "<14I", round(1_000_000 / rate), 0, 0, _KEY_FRAME, count, 0, 1, largest, width, height, 0, 0, 0, 0
    )
    stream = struct.pack(
        "<4s4sIHHIIIIIIIIhhhh",
        *(b"vids", _CODEC, 0, 0, 0, 0, rate.denominator, rate.numerator, 0, count, largest, 2**32 - 1, 0),
        *(0, 0, width, height),
    )
    bitmap = struct.pack("<IiiHH4sIiiII", 40, width, height, 1, 24, _CODEC, 3 * width * height, 0, 0, 0, 0)
    description = _list(b"strl", _chunk(b"strh", stream) + _chunk(b"strf", bitmap))
    header = _list(b"hdrl", _chunk(b"avih", main) + description)
    chunks = [_chunk(b"00dc", image) for image in images]
    index, position = [], 4
    for image, chunk in zip(images, chunks, strict=True):
        index.append(struct.pack("<4sIII", b"00dc", _KEY_FRAME, position, len(image)))
        position += len(chunk)
    body = header + _list(b"movi", b"".join(chunks)) + _chunk(b"idx1", b"".join(index))
    return _chunk(b"RIFF", b"AVI " + body)


def _png(image: Image.Image) -> memoryview:
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=1)
    return file.getbuffer()


def _chunk(name: bytes, data: bytes | memoryview) -> bytes:
    return name + struct.pack("<I", len(data)) + data + b"\0" * (len(data) % 2)


def _list(kind: bytes, data: bytes) -> bytes:
    return _chunk(b"LIST", kind + data)
