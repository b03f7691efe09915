"""The values that a content part may hold, and the sources that they give."""

import base64
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hostile_server import answer, serving
from hypothesis import given
from hypothesis import strategies as st
from media_parts import FRAMES, NOISE, PNG, POLICY, data_url, encoded, frames, image, pixels, video, video_file
from PIL import Image

from renderers import MediaPolicy, MediaSource, MediaStore
from renderers.errors import MediaError, MediaLimitError, MediaPolicyError
from renderers.media.decoding import array_to_raw, raw_video_frames
from renderers.media.reference import cached_source, load_source

# Images.


def test_the_same_pixels_come_out_of_every_form(tmp_path: Path) -> None:
    path = tmp_path / "a b%.png"
    path.write_bytes(PNG)
    tensor = torch.from_numpy(NOISE).permute(2, 0, 1)
    with serving() as server:
        url = server.on("/a.png", answer(PNG))
        policy = MediaPolicy(
            allowed_directories=(tmp_path,),
            allowed_schemes=frozenset({"http"}),
            allowed_hosts=("127.0.0.1",),
            allowed_networks=("127.0.0.1/32",),
        )
        files = [PNG, bytearray(PNG), memoryview(PNG), data_url(PNG), f" {data_url(PNG)}\n", MediaSource.of(PNG)]
        files += [path, str(path), path.as_uri(), f"file://localhost{path.as_uri()[7:]}", url, {"url": url}]
        for value in files:
            assert image(value, policy) == MediaSource.of(PNG)
        for value in (*files, Image.open(path), NOISE, tensor, tensor.contiguous(), np.asfortranarray(NOISE)):
            np.testing.assert_array_equal(pixels(value, policy), NOISE)
        raw = [image(value, policy) for value in (Image.open(path), NOISE, tensor, tensor.contiguous())]
        assert len({source.digest for source in raw}) == 1


@pytest.mark.parametrize(
    ("tensor", "word"),
    [
        (torch.zeros(3, 4, 4), "cast to torch.uint8"),
        (torch.zeros(3, 4, 4, dtype=torch.bfloat16), "cast to torch.uint8"),
        (torch.zeros(5, 6, 3, dtype=torch.uint8), "channels last"),
        (torch.zeros(2, 4, 4, dtype=torch.uint8), "permute"),
        (torch.zeros(4, 4, dtype=torch.uint8), "permute"),
        (torch.zeros(1, 3, 4, 4, dtype=torch.uint8), "permute"),
        (torch.zeros(3, 0, 4, dtype=torch.uint8), "image array"),
    ],
    ids=["float", "bfloat16", "last", "two", "flat", "batch", "empty"],
)
def test_a_tensor_that_is_no_image_is_refused_with_the_cure(tensor: torch.Tensor, word: str) -> None:
    with pytest.raises(MediaError, match=word):
        image(tensor)


class Unreadable(np.ndarray):
    """An array that must not be copied."""

    def tobytes(self, *args: Any, **options: Any) -> bytes:
        raise AssertionError("copied")


def test_sizes_are_checked_before_anything_is_copied_or_decoded() -> None:
    huge = np.broadcast_to(np.zeros((), dtype=np.uint8), (2**20, 2**20, 3)).view(Unreadable)
    for value in (huge, torch.zeros(1, dtype=torch.uint8).expand(3, 2**20, 2**20)):
        with pytest.raises(MediaLimitError, match="max_pixels"):
            image(value)
    with pytest.raises(MediaLimitError, match="max_pixels"):
        video([huge])
    with pytest.raises(MediaLimitError, match="max_frames=4096"):
        video(np.broadcast_to(np.zeros((), dtype=np.uint8), (5000, 4, 4, 3)).view(Unreadable))
    with pytest.raises(MediaLimitError, match="max_video_pixels"):
        video(torch.zeros(1, dtype=torch.uint8).expand(4000, 3, 4000, 4000))
    with pytest.raises(MediaLimitError, match="max_video_pixels"):
        video([huge[:8000, :8000]] * 17)
    with pytest.raises(MediaLimitError, match="max_frames=2"):
        video(["not read"] * 3, MediaPolicy(max_frames=2))
    with pytest.raises(MediaLimitError, match="max_bytes"):
        image("data:;base64," + "@" * 100, MediaPolicy(max_bytes=9))  # not even looked at
    with pytest.raises(MediaLimitError, match="max_aspect_ratio=200 of"):
        image(np.zeros((1, 201, 3), dtype=np.uint8))
    assert pixels(np.zeros((1, 200, 3), dtype=np.uint8)).shape == (1, 200, 3)


@given(st.binary(min_size=1, max_size=40), st.integers(1, 50), st.booleans(), st.booleans())
def test_a_data_url_is_read_exactly_when_its_bytes_are_within_the_limit(
    data: bytes, limit: int, wrapped: bool, quoted: bool
) -> None:
    picture = b"P6 " + data  # a type that is not mistaken for another
    payload = base64.encodebytes(picture).decode() if wrapped else base64.b64encode(picture).decode()
    if quoted:
        payload = payload.replace("+", "%2B").replace("=", "%3D")
    url = "data:image/x;base64," + payload
    policy = MediaPolicy(max_bytes=limit)
    if len(picture) <= limit:
        assert image(url, policy).data == picture
    else:
        with pytest.raises(MediaLimitError):
            image(url, policy)


# Videos.


def test_frames_come_out_as_they_went_in_whatever_form_they_have() -> None:
    forms: list[Any] = [
        FRAMES,
        list(FRAMES),
        tuple(FRAMES),
        torch.from_numpy(FRAMES).permute(0, 3, 1, 2),
        [torch.from_numpy(frame).permute(2, 0, 1) for frame in FRAMES],
        [Image.fromarray(frame) for frame in FRAMES],
        [encoded(frame) for frame in FRAMES],
        [data_url(encoded(frame)) for frame in FRAMES],
        [{"url": data_url(encoded(frame))} for frame in FRAMES],
        [MediaSource.of(encoded(frame)) for frame in FRAMES],
        [MediaSource.of(array_to_raw(frame)) for frame in FRAMES],
        [FRAMES[0], Image.fromarray(FRAMES[1]), encoded(FRAMES[2])],
    ]
    for value in forms:
        np.testing.assert_array_equal(frames(value), FRAMES)
    assert len({video(value).digest for value in forms}) == 1


def test_the_rate_of_frames_is_part_of_the_source() -> None:
    assert raw_video_frames(video(FRAMES, fps=2).data)[1] == 2.0
    assert raw_video_frames(video(list(FRAMES), fps=np.float32(0.5)).data)[1] == 0.5
    assert raw_video_frames(video(FRAMES).data)[1] is None
    assert len({video(FRAMES).digest, video(FRAMES, fps=2).digest, video(FRAMES, fps=3).digest}) == 3
    for fps in (0, -1, math.nan, math.inf, "2", True, [2]):
        with pytest.raises(MediaError, match="fps"):
            video(FRAMES, fps=fps)


MP4 = video_file("mp4", "mpeg4")


@pytest.mark.parametrize(
    "value",
    [
        PNG,
        encoded(NOISE, "JPEG"),
        encoded(NOISE, "WEBP"),
        encoded(NOISE, "WEBP", lossless=True),
        encoded(NOISE, "BMP"),
        Image.fromarray(NOISE),
        MediaSource.of(array_to_raw(NOISE)),
        data_url(PNG),
    ],
    ids=["PNG", "JPEG", "WEBP", "lossless", "BMP", "PIL", "raw", "data"],
)
def test_one_image_is_no_video(value: Any) -> None:
    with pytest.raises(MediaError, match="one image"):
        video(value)


@pytest.mark.parametrize(
    ("value", "error", "word"),
    [
        ([], MediaError, "without frames"),
        ((), MediaError, "without frames"),
        ([FRAMES[0], b"\x89PNG\r\n\x1a\n"], MediaError, "^frame 1: "),
        ([FRAMES[0], b"%PDF-1.7"], MediaError, "^frame 1: this is application/pdf"),
        ([FRAMES[0], MP4], MediaError, "^frame 1: "),
        ([FRAMES[0], "/etc/passwd"], MediaPolicyError, "^frame 1: "),
        ([FRAMES[0], FRAMES[0].astype(np.float32)], MediaError, "^frame 1: .*uint8"),
        ([None], MediaError, "^frame 0: "),
        (NOISE, MediaError, "uint8 .time, height, width, 3"),
        (FRAMES.astype(np.float32), MediaError, "uint8"),
        (FRAMES[..., :2], MediaError, "uint8"),
        (FRAMES[:0], MediaError, "uint8"),
        (torch.zeros(2, 3, 4, 4), MediaError, "cast to torch.uint8"),
        (torch.zeros(2, 4, 4, 3, dtype=torch.uint8), MediaError, "permute"),
        (torch.zeros(3, 4, 4, dtype=torch.uint8), MediaError, "permute"),
        (None, MediaError, "a video is"),
        ({"url": None}, MediaError, "a video is"),
        (7, MediaError, "a video is"),
        (b"", MediaError, "zero bytes"),
        (b"<html>", MediaError, "text/html.*not a video"),
    ],
)
def test_what_is_no_video_is_refused_and_says_why(value: Any, error: type[Exception], word: str) -> None:
    with pytest.raises(error, match=word):
        video(value)


# What was loaded before, from a part of another type.


@pytest.mark.parametrize("value", [PNG, data_url(PNG)], ids=["bytes", "data URL"])
@pytest.mark.parametrize("wrong", [{"type": "video"}, {"type": "video", "fps": 2.0}], ids=["video", "with fps"])
def test_an_image_that_was_loaded_before_is_no_video(value: Any, wrong: dict[str, Any]) -> None:
    store = MediaStore()
    load_source({"type": "image", "image": value}, POLICY, store)
    with pytest.raises((MediaError, MediaError), match=r"not a video|fps is the frame rate"):
        load_source({**wrong, "video": value}, POLICY, store)
    with pytest.raises((MediaError, MediaError), match=r"not a video|fps is the frame rate"):
        cached_source({**wrong, "video": value}, POLICY, store)


def test_frames_of_different_sizes_are_refused_by_number() -> None:
    with pytest.raises(MediaError, match=r"^frame 2: 30x10 pixels, but frame 0 has 30x20"):
        video([FRAMES[0], FRAMES[1], FRAMES[2][:10]])
