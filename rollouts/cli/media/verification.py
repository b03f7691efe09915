"""Compares each medium with its digest and decodes it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

from renderers import MediaPolicy
from renderers.errors import MediaDigestError, MediaError
from renderers.media.decoding import decode_image
from renderers.media.video_decoding import FramePlan, VideoInfo, sample_video
from rollouts.cli.media.description import describe
from rollouts.cli.media.inventory import Medium

# The program that stored the media has applied its own policy; these limits only protect this machine.
_PERMISSIVE = MediaPolicy(
    max_bytes=2**40,
    max_pixels=2**28,
    max_frames=2**20,
    max_aspect_ratio=float("inf"),
    max_video_pixels=2**40,
    timeout=600,
)
# Videos that are read without PyAV.
_WITHOUT_PYAV = ("raw video", "gif", "webp", "png", "tiff")


class Problem(NamedTuple):
    """A problem of one medium; `fatal` is False if it could not be decoded here because a package is missing."""

    reason: str
    fatal: bool = True


def find_problem(medium: Medium) -> Problem | None:
    """The problem of a medium; None if it matches its digest and decodes completely, every frame of a video."""
    try:
        source = medium.read()
        source.verify()
        described = describe(medium)
        if not described.is_video:
            decode_image(source, _PERMISSIVE)
        elif described.format in _WITHOUT_PYAV or find_spec("av") is not None:
            sample_video(source, _PERMISSIVE, _every_frame)
        else:
            return Problem(f"{described.format} video, not decoded: PyAV is not installed", fatal=False)
    except OSError as error:
        return Problem(f"cannot be read: {error.strerror or error}")
    except MediaDigestError as error:
        return Problem(f"damaged: its {medium.nbytes} bytes hash to {error.actual}")
    except MediaError as error:
        return Problem(f"undecodable: {error.reason}")
    return None


def _every_frame(info: VideoInfo) -> FramePlan:
    """A plan that decodes all frames and keeps one pixel of each."""
    return FramePlan(range(info.frames), lambda planes: planes[:, :1, :1].copy())
