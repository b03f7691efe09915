"""Writes media to files that other programs can open."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
from PIL import Image

from renderers import MediaSource
from renderers.errors import MediaDigestError, MediaError
from renderers.file_reading import read_bytes
from renderers.media.raw import PILLOW_ERRORS, is_raw, is_raw_video, raw_to_image, raw_video_frames
from rollouts.cli.errors import ExportError
from rollouts.cli.media.description import describe
from rollouts.cli.media.inventory import Medium
from rollouts.cli.new_file import new_file

_DIGITS = 16
# For raw video without a known frame rate: the rate at which vision-language models usually sample, slow enough to see
# each frame.
_DEFAULT_FPS = 2


def export_medium(medium: Medium, directory: Path) -> Path:
    """Write a medium as `<first 16 digits of its digest>.<suffix>`; the file's path.

    Files are written unchanged. Pixels that were never in a file become a PNG of the same pixels, raw video an animated
    PNG. An existing file is never changed. Raises `ExportError` if it has other contents or the medium is damaged,
    `CommandFileError` and `OSError` if the directory cannot be written to.
    """
    try:
        source = medium.read()
        source.verify()
        suffix, data = _as_file(source, medium)
        path = directory / f"{medium.digest[:_DIGITS]}.{suffix}"
        if not _write_new(path, data) and not _has_contents(path, data):
            raise ExportError(
                medium.digest, f"{path} exists with other contents and was not changed; choose another --out"
            )
    except MediaDigestError as error:
        raise ExportError(medium.digest, f"damaged, not exported: it hashes to {error.actual}; restore it") from error
    except MediaError as error:
        raise ExportError(medium.digest, f"not exported: {error.reason}") from error
    return path


def _as_file(source: MediaSource, medium: Medium) -> tuple[str, bytes | memoryview]:
    if is_raw(source.data):
        return "png", _png([raw_to_image(source.data)], None)
    if is_raw_video(source.data):
        frames, fps = raw_video_frames(source.data)
        return "png", _png([Image.fromarray(frame) for frame in frames], fps)
    return describe(medium).suffix, source.data


def _png(frames: list[Image.Image], fps: float | None) -> bytes:
    file = io.BytesIO()
    if len(frames) == 1:
        frames[0].save(file, "PNG")
    else:
        # Pillow merges equal successive frames unless their blend modes differ, which makes no difference for opaque
        # frames.
        blend = [number % 2 for number in range(len(frames))]
        duration = 1000 / (fps or _DEFAULT_FPS)  # milliseconds a frame
        frames[0].save(file, "PNG", save_all=True, append_images=frames[1:], duration=duration, blend=blend, disposal=0)
    return file.getvalue()


def _write_new(path: Path, data: bytes | memoryview) -> bool:
    """Write a new file; returns False if the path exists."""
    if os.path.lexists(path):
        return False
    with new_file(path) as temporary:
        temporary.write_bytes(data)
    return True


def _has_contents(path: Path, data: bytes | memoryview) -> bool:
    """Equal bytes, or PNGs of equal pixels: another Pillow may have compressed them differently."""
    contents = read_bytes(path)
    if contents == data:
        return True
    try:
        return path.suffix == ".png" and _pixels(contents) == _pixels(bytes(data))
    except PILLOW_ERRORS:
        return False


def _pixels(data: bytes) -> list[tuple[str, tuple[int, int], bytes]]:
    found = []
    with Image.open(io.BytesIO(data), formats=["PNG"]) as image:
        for number in range(getattr(image, "n_frames", 1)):
            image.seek(number)
            found.append((image.mode, image.size, np.asarray(image).tobytes()))
    return found
