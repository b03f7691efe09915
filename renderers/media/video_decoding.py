"""Source bytes -> the frames of a video: raw frames, animated images (Pillow), and video files (PyAV, extra `video`).

A video is never held in memory as a whole: `sample_video` asks its `plan` which frames are wanted once their
number is known, and converts each wanted frame when it is decoded.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from importlib import metadata
from typing import Any, NamedTuple

import numpy as np
from PIL import Image, UnidentifiedImageError

from renderers.errors import MediaError
from renderers.media.containers import Container, container_of, corrupt, open_stream
from renderers.media.decoding import (
    check_tiles,
    count_frames,
    decode_errors,
    decoder_versions,
    image_planes,
    raw_video_frames,
    to_rgb,
)
from renderers.media.item import MediaSource
from renderers.media.policy import Deadline, MediaPolicy, TimedBytes

_CODECS = {"h264", "hevc", "av1", "vp8", "vp9", "mpeg4", "mpeg2video", "mpeg1video", "h263", "msmpeg4v3", "theora"}
_STILL_CODECS = {"mjpeg", "prores", "ffv1", "png", "rawvideo"}  # each frame is coded by itself


class VideoInfo(NamedTuple):
    """Properties of a video before its frames are read. `fps` is None where unknown."""

    frames: int
    width: int
    height: int
    fps: float | None


class FramePlan(NamedTuple):
    """The indices of the wanted frames (ascending, may repeat), and the conversion of each frame: uint8
    planes (3, height, width) -> uint8 planes of one size for all."""

    indices: Sequence[int]
    convert: Callable[[np.ndarray], np.ndarray]


class SampledVideo(NamedTuple):
    """`frames` is uint8 (len(indices), 3, height, width)."""

    frames: np.ndarray
    indices: list[int]
    info: VideoInfo


def decode_video(source: MediaSource, policy: MediaPolicy) -> tuple[np.ndarray, float | None]:
    """All frames, uint8 (frames, height, width, 3), upright, and their rate. Errors as `sample_video`."""

    def plan_all_frames(info: VideoInfo) -> FramePlan:
        policy.check_frames(info.frames, info.width, info.height, digest=source.digest)
        return FramePlan(range(info.frames), lambda planes: planes)

    video = sample_video(source, policy, plan_all_frames)
    return np.ascontiguousarray(video.frames.transpose(0, 2, 3, 1)), video.info.fps


def sample_video(source: MediaSource, policy: MediaPolicy, plan: Callable[[VideoInfo], FramePlan]) -> SampledVideo:
    """The frames that `plan` wants of a video, decoded within `policy.timeout` seconds.

    Limits on frames and pixels are checked before anything is decoded. `plan` is called again if the decoder
    gives another number of frames than the file declares. Raises `MediaLimitError`, `MediaError` for
    other data, an unsupported format, a corrupt video or a missing PyAV.
    """
    deadline = Deadline(policy.timeout)
    with ExitStack() as stack:
        with decode_errors(source, policy, deadline, kind="video"):
            video = stack.enter_context(_open_video(source, policy, deadline))
        info = video.info
        for _ in range(2):
            if info.frames < 1:
                raise corrupt(source, "video", "it holds no frames")
            frame_plan = plan(info)
            indices = [int(index) for index in frame_plan.indices]
            converted: dict[int, np.ndarray] = {}
            count = 0
            for frame in _read_frames(video, frozenset(indices), source, policy, deadline):
                if frame is not None:
                    converted[count] = frame_plan.convert(frame)
                count += 1
                policy.check_frames(count, digest=source.digest)
            if count == info.frames:
                return SampledVideo(np.stack([converted[index] for index in indices]), indices, info)
            # Some codecs need several packets for a frame. The number of decoded frames is the right one.
            info = info._replace(frames=count)
    raise corrupt(source, "video", "each decoding gives another number of frames")


def video_decoder_versions() -> dict[str, str | None]:
    """The versions of the decoders. The version of PyAV implies that of the FFmpeg in its wheels."""
    return {**decoder_versions(), "av": package_version("av")}


def package_version(package: str) -> str | None:
    """The version of an installed distribution, None where it is missing."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


class _Video(NamedTuple):
    """An open video. `read(wanted)` gives each frame: uint8 (3, height, width), None if unwanted."""

    info: VideoInfo
    read: Callable[[frozenset[int]], Iterator[np.ndarray | None]]


def _read_frames(
    video: _Video, wanted: frozenset[int], source: MediaSource, policy: MediaPolicy, deadline: Deadline
) -> Iterator[np.ndarray | None]:
    """`video.read`, whose own errors alone are raised as `MediaError`s, not those of the caller's loop."""
    with decode_errors(source, policy, deadline, kind="video"):
        yield from video.read(wanted)


def _open_video(source: MediaSource, policy: MediaPolicy, deadline: Deadline) -> AbstractContextManager[_Video]:
    if source.raw_modality == "video":
        return nullcontext(_raw_video(source, policy))
    container = container_of(source, "video")
    if container is not None:
        file = _VideoFile(source, policy, deadline, container)
        return nullcontext(_Video(file.read_info(), file.read))
    return _animation(source, policy, deadline)


# Raw frames.


def _raw_video(source: MediaSource, policy: MediaPolicy) -> _Video:
    frames, fps = raw_video_frames(source.data, digest=source.digest)

    def read(wanted: frozenset[int]) -> Iterator[np.ndarray | None]:
        for index, frame in enumerate(frames):
            yield np.ascontiguousarray(frame.transpose(2, 0, 1)) if index in wanted else None

    count, height, width, _ = frames.shape
    policy.check_frames(count, digest=source.digest)
    policy.check_size(width, height, digest=source.digest)
    return _Video(VideoInfo(count, width, height, fps), read)


# Animated images, not turned by an EXIF orientation.


@contextmanager
def _animation(source: MediaSource, policy: MediaPolicy, deadline: Deadline) -> Iterator[_Video]:
    try:
        image = Image.open(TimedBytes(source.data, deadline), formats=("GIF", "WEBP", "PNG", "TIFF"))
    except UnidentifiedImageError as error:
        raise MediaError(
            f"{source.nbytes} bytes ({source.digest[:12]}) are neither an MP4, MOV, WebM, MKV or AVI video "
            "nor an animated GIF, WebP, PNG or TIFF image",
            digest=source.digest,
        ) from error
    with image:
        size = image.size
        policy.check_size(*size, digest=source.digest)
        count = count_frames(image, policy.max_frames)
        policy.check_frames(count, digest=source.digest)

        def read(wanted: frozenset[int]) -> Iterator[np.ndarray | None]:
            for index in range(count):
                deadline.remaining()
                image.seek(index)
                check_tiles(image, source, policy)
                if image.size != size:  # pages of a TIFF
                    raise corrupt(source, "video", f"frame {index} is of another size than the first")
                yield image_planes(to_rgb(image)) if index in wanted else None

        yield _Video(VideoInfo(count, *size, _animation_fps(image, count, deadline)), read)


def _animation_fps(image: Image.Image, count: int, deadline: Deadline) -> float | None:
    """Frames per second: the number of frames over the sum of their declared durations (milliseconds)."""
    total = 0.0
    for index in range(count):
        deadline.remaining()
        size = image.size
        image.seek(index)
        if (
            image.size != size
        ):  # Pillow enlarges a GIF for a frame beyond its edge, and would decode it at the next seek
            raise ValueError(f"frame {index} is of another size than the first")
        if image.format == "WEBP":  # Pillow knows its durations only after decoding
            image.load()
        duration = image.info.get("duration", 0)
        if isinstance(duration, (int, float)) and math.isfinite(duration):
            total += duration
    image.seek(0)
    return 1000 * count / total if total > 0 else None


# Video files.


@dataclass(frozen=True)
class _VideoFile:
    source: MediaSource
    policy: MediaPolicy
    deadline: Deadline
    container: Container

    def read(self, wanted: frozenset[int]) -> Iterator[np.ndarray | None]:
        for index, frame in enumerate(self._decoded()):
            if index not in wanted:
                yield None
                continue
            planes = frame.to_ndarray(format="rgb24").transpose(2, 0, 1)
            yield np.ascontiguousarray(np.rot90(planes, _quarter_turns(frame), axes=(1, 2)))

    def read_info(self) -> VideoInfo:
        """Size, rate and number of frames; packets are counted, as headers lack the number or are wrong."""
        with self._stream() as (container, stream):
            size = (stream.codec_context.width, stream.codec_context.height)
            rate = stream.average_rate or stream.guessed_rate
            fps = float(rate) if rate else None
            self.policy.check_frames(stream.frames, digest=self.source.digest)
            self.policy.check_size(*size, digest=self.source.digest)
            frames = 0
            for packet in container.demux(stream):
                self.deadline.remaining()
                if packet.is_corrupt:
                    raise corrupt(self.source, "video", f"it ends early, after {frames} frames")
                frames += bool(packet.size) and not packet.is_discard
                self.policy.check_frames(frames, digest=self.source.digest)
        first = next(self._decoded(), None)
        if first is None:
            raise corrupt(self.source, "video", "it holds no frames")
        width, height = (first.height, first.width) if _quarter_turns(first) % 2 else (first.width, first.height)
        return VideoInfo(frames, width, height, fps)

    def _decoded(self) -> Iterator[Any]:
        with self._stream() as (container, stream):
            size = None
            for frame in container.decode(stream):
                self.deadline.remaining()
                size = size or (frame.width, frame.height)
                if frame.is_corrupt or (frame.width, frame.height) != size:
                    raise corrupt(self.source, "video", "a frame is broken or of another size than the first")
                self.policy.check_size(*size, digest=self.source.digest)
                yield frame

    def _stream(self) -> AbstractContextManager[tuple[Any, Any]]:
        return open_stream(self.source, self.policy, self.container, "video", _CODECS | _STILL_CODECS)


def _quarter_turns(frame: Any) -> int:
    """Quarter turns counter-clockwise, from the display matrix that phones write."""
    turns: int = round(frame.rotation / 90) % 4
    return turns
