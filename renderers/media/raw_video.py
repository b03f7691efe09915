"""The source form of videos that were given as frames, not as a file: a 24-byte header, then the frames.

Layout: magic `mmpv` (4 bytes), frames, width and height (uint32 little-endian each), frames per second (float64
little-endian, 0.0 where unknown), then frames * height * width * 3 bytes RGB, frame by frame, row by row.
The form describes itself, so a digest of it covers size, pixels and speed.
"""

from __future__ import annotations

import math
import struct

import numpy as np

from renderers.errors import MediaDecodeError
from renderers.media.source import VIDEO_MAGIC

_HEADER = struct.Struct("<4sIIId")


def is_raw_video(data: bytes | memoryview) -> bool:
    return bytes(data[:4]) == VIDEO_MAGIC


def frames_to_raw(frames: np.ndarray, fps: float | None = None) -> bytes:
    """Copy uint8 frames of shape (time, height, width, 3) with `fps` frames per second (None: unknown)."""
    if frames.dtype != np.uint8 or frames.ndim != 4 or frames.shape[3] != 3 or 0 in frames.shape:
        raise MediaDecodeError(
            f"video frames are uint8 (time, height, width, 3) and at least one pixel, not {frames.dtype} {frames.shape}"
        )
    if fps is not None and not (math.isfinite(fps) and fps > 0):
        raise MediaDecodeError(f"fps={fps!r} is not a positive number of frames per second")
    count, height, width, _ = frames.shape
    header = _HEADER.pack(VIDEO_MAGIC, count, width, height, fps or 0.0)
    return b"".join((header, np.ascontiguousarray(frames).data.cast("B")))


def raw_video_size(data: bytes | memoryview) -> tuple[int, int, int, float | None]:
    """(frames, width, height, fps) of raw source bytes, checked against their length."""
    if len(data) < _HEADER.size:
        raise MediaDecodeError("raw video ends inside its header")
    _, count, width, height, fps = _HEADER.unpack_from(data)
    held, expected = len(data) - _HEADER.size, count * width * height * 3
    if not expected or held != expected:
        raise MediaDecodeError(f"raw video of {count} frames of {width}x{height} holds {held} bytes, not {expected}")
    if not (fps == 0 or 1e-6 <= fps <= 1e6):
        raise MediaDecodeError(f"raw video announces {fps} frames per second")
    return count, width, height, fps or None


def raw_video_frames(data: bytes | memoryview) -> tuple[np.ndarray, float | None]:
    """Frames (time, height, width, 3), a read-only view of the bytes, and frames per second (None: unknown)."""
    count, width, height, fps = raw_video_size(data)
    frames = np.frombuffer(data, dtype=np.uint8, offset=_HEADER.size).reshape(count, height, width, 3)
    frames.flags.writeable = False
    return frames, fps
