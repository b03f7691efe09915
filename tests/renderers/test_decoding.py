"""Videos: real files made here and read back, and what is refused of them."""

import contextlib
import io
import re
import struct
import sys
from typing import Any

import av
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
from renderers.installation import install_command
from renderers.media.decoding import frames_to_raw
from renderers.media.video_decoding import FramePlan, VideoInfo, decode_video, sample_video

POLICY = MediaPolicy()
# (container, encoder): what FFmpeg builds have without and with further libraries.
CODINGS = [
    ("mp4", "mpeg4"),
    ("mov", "mjpeg"),
    ("avi", "mpeg4"),
    ("avi", "ffv1"),
    ("matroska", "mpeg4"),
    ("mp4", "libx264"),
    ("webm", "libvpx"),
    ("webm", "libvpx-vp9"),
]
CODINGS = [coding for coding in CODINGS if coding[1] in av.codecs_available]


def moving_square(count: int, width: int = 64, height: int = 48) -> np.ndarray:
    frames = np.zeros((count, height, width, 3), dtype=np.uint8)
    for index, frame in enumerate(frames):
        frame[..., 2] = np.linspace(0, 255, width)
        frame[8:24, 2 * index : 2 * index + 16] = (255 - 8 * index, 200, 8 * index)
    return frames


def video_file(
    frames: np.ndarray, container: str = "mp4", encoder: str = "mpeg4", rate: int = 10, **tags: Any
) -> bytes:
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as output:
        stream: Any = output.add_stream(encoder, rate=10)
        stream.height, stream.width = frames.shape[1:3]
        stream.pix_fmt = "yuvj420p" if encoder == "mjpeg" else "yuv420p"
        for name, value in tags.items():
            setattr(stream, name, value)
        for frame in frames:
            output.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        output.mux(stream.encode())
    return buffer.getvalue()


def directly(data: bytes) -> np.ndarray:
    with av.open(io.BytesIO(data)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def decoded(data: bytes, policy: MediaPolicy = POLICY) -> tuple[np.ndarray, float | None]:
    return decode_video(MediaSource.of(data), policy)


# Video files.


@pytest.mark.parametrize(("container", "encoder"), CODINGS)
@pytest.mark.parametrize("indices", [[0], [11], [0, 3, 3, 7], list(range(12))], ids=str)
def test_only_the_frames_that_are_asked_for_are_kept(container: str, encoder: str, indices: list[int]) -> None:
    data = video_file(moving_square(12), container, encoder)
    seen: list[VideoInfo] = []
    converted: list[int] = []

    def plan(info: VideoInfo) -> FramePlan:
        seen.append(info)

        def halve(planes: np.ndarray) -> np.ndarray:
            converted.append(1)
            return planes[:, ::2, ::2]

        return FramePlan(indices, halve)

    video = sample_video(MediaSource.of(data), POLICY, plan)
    assert seen == [VideoInfo(12, 64, 48, pytest.approx(10))]
    assert video.indices == indices
    assert len(converted) == len(set(indices))
    np.testing.assert_array_equal(video.frames, directly(data)[indices][:, ::2, ::2].transpose(0, 3, 1, 2))


@pytest.mark.parametrize(
    ("turn", "matrix"), [(0, (1, 0, 0, 1)), (1, (0, 1, -1, 0)), (2, (-1, 0, 0, -1)), (3, (0, -1, 1, 0))]
)
def test_a_film_of_a_turned_camera_is_turned_upright(turn: int, matrix: tuple[int, ...]) -> None:
    """The display matrix of ISO/IEC 14496-12, 8.3.2: (0, 1, -1, 0) turns the stored image a quarter clockwise."""
    data = video_file(moving_square(3))
    header = data.index(b"tkhd")
    at = data.index(struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30), header)
    a, b, c, d = (value << 16 for value in matrix)
    turned = data[:at] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[at + 36 :]
    expected = np.rot90(directly(data), -turn, axes=(1, 2))
    np.testing.assert_array_equal(decoded(turned)[0], expected)


def test_an_announced_number_of_frames_that_is_wrong_is_corrected(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some codecs put what is no image of its own into packets of its own; frames count as they are decoded."""
    from renderers.media import video_decoding

    data = video_file(moving_square(6))
    real = video_decoding._VideoFile.read_info
    monkeypatch.setattr(video_decoding._VideoFile, "read_info", lambda video: real(video)._replace(frames=9))
    seen: list[int] = []

    def plan(info: VideoInfo) -> FramePlan:
        seen.append(info.frames)
        return FramePlan([0, info.frames - 1], lambda planes: planes)

    video = sample_video(MediaSource.of(data), POLICY, plan)
    assert seen == [9, 6]
    assert video.info.frames == 6
    np.testing.assert_array_equal(video.frames, directly(data)[[0, 5]].transpose(0, 3, 1, 2))


# Animated images and raw frames.


@pytest.mark.parametrize(("format", "options"), [("GIF", {}), ("WEBP", {"lossless": True}), ("PNG", {}), ("TIFF", {})])
def test_an_animated_image_is_a_video(format: str, options: dict[str, Any]) -> None:
    film = [Image.fromarray(frame).quantize(16).convert("RGB") for frame in moving_square(5)]
    buffer = io.BytesIO()
    film[0].save(buffer, format, save_all=True, append_images=film[1:], duration=[100, 200, 50, 50, 100], **options)
    frames, fps = decoded(buffer.getvalue())
    np.testing.assert_array_equal(frames, np.stack([np.asarray(frame) for frame in film]))
    assert fps == (None if format == "TIFF" else pytest.approx(10))  # 5 frames in half a second


# Refusals.


def files() -> dict[str, bytes]:
    film = moving_square(6)
    buffer = io.BytesIO()
    Image.fromarray(film[0]).save(
        buffer, "GIF", save_all=True, append_images=[Image.fromarray(frame) for frame in film[1:]], duration=100
    )
    return {
        "raw": frames_to_raw(film, 10.0),
        "gif": buffer.getvalue(),
        **{f"{container}-{encoder}": video_file(film, container, encoder) for container, encoder in CODINGS},
    }


FILES = files()


def refused(data: bytes, policy: MediaPolicy, error: type[MediaError], word: str) -> None:
    source = MediaSource.of(data)
    converted: list[np.ndarray] = []

    def plan(info: VideoInfo) -> FramePlan:
        return FramePlan([0], lambda planes: converted.append(planes) or planes)

    with pytest.raises(error, match=word) as caught:
        sample_video(source, policy, plan)
    assert caught.value.digest == source.digest
    assert not converted


@pytest.mark.parametrize("name", FILES)
def test_limits_hold_before_a_frame_is_converted(name: str) -> None:
    refused(FILES[name], MediaPolicy(max_frames=5), MediaLimitError, "max_frames=5")
    refused(FILES[name], MediaPolicy(max_pixels=64 * 48 - 1), MediaLimitError, "64x48")
    refused(FILES[name], MediaPolicy(max_aspect_ratio=1.2), MediaLimitError, "max_aspect_ratio=1.2")
    exact = MediaPolicy(max_frames=6, max_pixels=64 * 48, max_aspect_ratio=64 / 48, max_video_pixels=6 * 64 * 48)
    assert len(decoded(FILES[name], exact)[0]) == 6
    with pytest.raises(MediaLimitError, match="max_video_pixels"):
        decoded(FILES[name], MediaPolicy(max_video_pixels=6 * 64 * 48 - 1))


@pytest.mark.parametrize("name", [name for name in FILES if name != "raw"])
def test_decoding_is_bounded_in_time(name: str) -> None:
    refused(FILES[name], MediaPolicy(timeout=0.0), MediaLimitError, "timeout=0.0")


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_breaks_off_is_a_decode_error(name: str) -> None:
    data = FILES[name]
    for length in range(24, len(data) - 16, max(1, len(data) // 12)):
        with pytest.raises(MediaError) as caught:
            decoded(data[:length])
        assert caught.value.digest == MediaSource.of(data[:length]).digest


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@settings(max_examples=120, deadline=None)
@given(
    name=st.sampled_from(list(FILES)),
    changes=st.lists(st.tuples(st.integers(0, 4000), st.integers(0, 255)), max_size=6),
    length=st.none() | st.integers(0, 4000),
)
def test_broken_files_raise_media_errors_and_nothing_else(
    name: str, changes: list[tuple[int, int]], length: int | None
) -> None:
    broken = bytearray(FILES[name])
    for position, byte in changes:
        broken[position % len(broken)] = byte
    with contextlib.suppress(MediaError):  # whatever else is raised fails the test
        decoded(bytes(broken[:length]), MediaPolicy(max_pixels=10**6, timeout=5))


def test_a_playlist_under_the_name_of_a_video_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """FFmpeg would follow what a playlist names; under a container's own name it only finds no video there."""
    opened: list[Any] = []
    real = av.open

    def spy(*args: Any, **options: Any) -> Any:
        opened.append(options)
        return real(*args, **options)

    monkeypatch.setattr(av, "open", spy)
    playlist = b"\0\0\0\x18ftypisom\0\0\2\0isomiso2#EXTM3U\nfile:///etc/passwd\n"
    refused(playlist, POLICY, MediaError, "corrupt")
    decoded(FILES["mp4-mpeg4"])
    assert {options["format"] for options in opened} == {"mov"}
    assert {options["options"]["protocol_whitelist"] for options in opened} == {"none"}


def test_a_codec_that_is_not_known_to_be_harmless_is_refused() -> None:
    data = video_file(moving_square(3), "avi", "zlib" if "zlib" in av.codecs_available else "flashsv", pix_fmt="bgr24")
    refused(data, POLICY, MediaError, "convert it to H.264")


def test_without_pyav_a_video_file_names_the_extra_and_an_animation_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "av", None)
    refused(FILES["mp4-mpeg4"], POLICY, MediaError, re.escape(install_command("video")))
    assert decoded(FILES["gif"])[0].shape == (6, 48, 64, 3)
