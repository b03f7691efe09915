"""What an image may be, how it becomes upright RGB, and what is refused."""

import base64
import contextlib
import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from renderers import MediaPolicy, MediaSource
from renderers.errors import (
    MediaError,
    MediaLimitError,
)
from renderers.media.decoding import decode_image, image_to_raw
from renderers.media.reference import source_of_part

POLICY = MediaPolicy()
NOISE = np.random.default_rng(0).integers(0, 256, (20, 30, 3), dtype=np.uint8)


def encoded(image: Image.Image, format: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def pixels(value: Any, policy: MediaPolicy = POLICY) -> np.ndarray:
    """The RGB pixels that a part with this value shows."""
    image = decode_image(source_of_part({"type": "image", "image": value}, policy), policy)
    assert image.mode == "RGB"
    return np.asarray(image)


def data_url(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


# Forms.


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((2, 2, 3), dtype=np.float32),
        np.zeros((2, 2, 2), dtype=np.uint8),
        np.zeros((0, 2, 3), dtype=np.uint8),
        np.zeros((), dtype=np.uint8),
    ],
    ids=lambda array: f"{array.dtype}{array.shape}",
)
def test_an_array_that_is_no_image_is_refused(array: np.ndarray) -> None:
    with pytest.raises(MediaError, match="image array"):
        pixels(array)


# Modes, orientation, transparency.


@pytest.mark.parametrize("format", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_is_turned_upright(format: str, orientation: int) -> None:
    exif = Image.Exif()
    exif[0x0112] = orientation
    # Four quadrants: a b above c d.
    levels = {"a": 0, "b": 80, "c": 160, "d": 240}
    quadrants = np.array([[levels["a"], levels["b"]], [levels["c"], levels["d"]]], dtype=np.uint8)
    stored = Image.fromarray(np.repeat(np.repeat(quadrants, 20, 0), 30, 1)).convert("RGB")
    data = encoded(stored, format, exif=exif, **({"lossless": True} if format == "WEBP" else {}))
    shown = pixels(data)
    # EXIF 2.3, tag 274, says on which side of the upright image the stored first row and first column are.
    upright = ["abcd", "badc", "dcba", "cdab", "acbd", "cadb", "dbca", "bdac"][orientation - 1]
    height, width = (40, 60) if orientation < 5 else (60, 40)
    assert shown.shape == (height, width, 3)
    centres = shown[height // 4 :: height // 2, width // 4 :: width // 2, 0]
    np.testing.assert_allclose(centres.ravel(), [levels[letter] for letter in upright], atol=4)
    np.testing.assert_array_equal(pixels(Image.open(io.BytesIO(data))), shown)


# Refusals.


@pytest.mark.parametrize(
    "url", ["data:image/png;base64", "data:;base64,@@@", "data:;base64,AAA", "data:;base64,é", "data:,", "data:,hello"]
)
def test_a_broken_data_url_is_a_decode_error(url: str) -> None:
    with pytest.raises(MediaError):
        pixels(url)


def bomb(width: int, height: int) -> bytes:
    """A small PNG whose header announces an image of this size."""

    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = zlib.compress(bytes(1000))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", body) + chunk(b"IEND", b"")


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [9_000, 12_000, 60_000])
def test_a_decompression_bomb_is_a_limit_error_before_anything_is_decompressed(side: int) -> None:
    with pytest.raises(MediaLimitError):
        pixels(bomb(side, side))


def test_bytes_are_bounded_by_the_policy_in_every_form() -> None:
    data = encoded(Image.fromarray(NOISE))
    for value in (data, data_url(data), MediaSource.of(data), data_url(data + bytes(10 * len(data)))):
        with pytest.raises(MediaLimitError, match="max_bytes"):
            pixels(value, MediaPolicy(max_bytes=len(data) - 1))
    for value in (data, data_url(data), MediaSource.of(data)):
        assert pixels(value, MediaPolicy(max_bytes=len(data))).shape == (20, 30, 3)


def animation(format: str) -> bytes:
    frames = [Image.new("RGB", (8, 8), (50 * i, 0, 0)) for i in range(3)]
    return encoded(frames[0], format, save_all=True, append_images=frames[1:])


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP", "TIFF"])
def test_an_animation_is_refused_and_says_how_many_frames_it_has(format: str) -> None:
    with pytest.raises(MediaError, match="3 frames"):
        pixels(animation(format))


def test_a_photo_with_a_preview_behind_it_is_an_image() -> None:
    assert pixels(animation("MPO")).shape == (8, 8, 3)


EXIF_SEGMENT = b"\xff\xe1\0\x16Exif\0\0II*\0\x08" + bytes(9)


@pytest.mark.parametrize(
    "before", [b"", b"\xff\xd0", b"\xff\xfe\0\x04\xff\xda", b"\xff\xff", b"\xff\0junk", b"\xff\xfe\0\0"]
)
def test_segments_of_exif_data_are_counted_up_to_the_first_scan(before: bytes) -> None:
    one = encoded(Image.fromarray(NOISE), "JPEG")
    few = one[:2] + EXIF_SEGMENT + one[2:]
    assert pixels(few * 70).shape == (20, 30, 3)
    frame = Image.open(io.BytesIO(few))
    assert pixels(encoded(frame, "MPO", save_all=True, append_images=[frame] * 69, exif=EXIF_SEGMENT[4:])).any()
    assert pixels(one[:2] + before + EXIF_SEGMENT * 64 + one[2:]).any()
    with pytest.raises(MediaLimitError, match="more than 64 segments of Exif data"):
        pixels(one[:2] + before + EXIF_SEGMENT * 65 + one[2:])


def test_segments_of_a_picture_are_bounded_wherever_they_stand() -> None:
    one, comment = encoded(Image.fromarray(NOISE), "JPEG"), b"\xff\xfe\0\2"
    for place in (2, len(one) - 2):
        assert pixels(one[:place] + comment * 9000 + one[place:]).any()
        with pytest.raises(MediaLimitError, match="more than 10000 segments; re-encode it"):
            pixels(one[:place] + comment * 11_000 + one[place:])


def test_postscript_is_not_handed_to_an_interpreter() -> None:
    with pytest.raises(MediaError, match="not an image"):
        pixels(encoded(Image.new("RGB", (8, 8)), "EPS"))


FILES = [
    encoded(Image.fromarray(NOISE), format) for format in ("PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP", "ICO", "AVIF")
]


@pytest.mark.filterwarnings("ignore")
@settings(max_examples=150)
@given(
    data=st.sampled_from(FILES),
    changes=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=6),
    length=st.none() | st.integers(0, 600),
)
def test_broken_files_raise_media_errors_and_nothing_else(
    data: bytes, changes: list[tuple[int, int]], length: int | None
) -> None:
    broken = bytearray(data)
    for position, byte in changes:
        broken[position % len(broken)] = byte
    with contextlib.suppress(MediaError):  # whatever else is raised fails the test
        pixels(bytes(broken[:length]), MediaPolicy(max_pixels=10**6))


# The store.


def test_a_tiff_whose_tile_is_larger_than_the_image_is_refused_by_its_size() -> None:
    side = 4096
    body = zlib.compress(bytes(side * side), 9)
    tags = [
        (256, 4, 1),
        (257, 4, 1),
        (258, 3, 8),
        (259, 3, 8),
        (262, 3, 1),
        (277, 3, 1),
        (322, 4, side),
        (323, 4, side),
    ]
    tags += [(324, 4, 0), (325, 4, len(body))]
    at = 8 + 2 + 12 * len(tags) + 4
    entries = b"".join(struct.pack("<HHII", tag, kind, 1, at if tag == 324 else value) for tag, kind, value in tags)
    tiff = b"II*\0" + struct.pack("<IH", 8, len(tags)) + entries + bytes(4) + body
    with pytest.raises(MediaLimitError):
        decode_image(MediaSource.of(tiff), MediaPolicy(max_pixels=2**20))


@pytest.mark.parametrize(
    "data", [b"", b"\x89PNG\r\n\x1a\n", b"hello", b"<svg/>", b"%PDF-1.4", bytes(100), b"mmpx", b"mmpxRGB\0" + bytes(8)]
)
def test_what_is_no_image_is_a_decode_error(data: bytes) -> None:
    with pytest.raises(MediaError):
        pixels(data)


def test_sixteen_bits_of_grey_are_scaled_in_every_format() -> None:
    ramp = (np.arange(256, dtype=np.uint16) * 257).astype(">u2")
    pgm = b"P5 16 16 65535\n" + ramp.tobytes()
    buffer = io.BytesIO()
    Image.fromarray((np.arange(256, dtype=np.uint16) * 257).reshape(16, 16)).save(buffer, "PNG")
    for data in (pgm, buffer.getvalue()):
        for content in (data, image_to_raw(Image.open(io.BytesIO(data)))):
            grey = np.asarray(decode_image(MediaSource.of(content), MediaPolicy()))[..., 0]
            assert grey.ravel().tolist() == list(range(256))
