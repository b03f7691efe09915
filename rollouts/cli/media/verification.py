"""Compares each medium with its digest and decodes it."""

from __future__ import annotations

from importlib.util import find_spec
from typing import NamedTuple

from renderers.errors import MediaDigestError, MediaError
from rollouts.cli.media.description import check_decodes, describe
from rollouts.cli.media.inventory import Medium

# Videos that are read without PyAV.
_WITHOUT_PYAV = ("raw video", "gif", "webp", "png", "tiff")


class Problem(NamedTuple):
    """A problem of one medium; `fatal` is False if it could not be decoded here because a package is missing."""

    reason: str
    fatal: bool = True


def find_problem(medium: Medium) -> Problem | None:
    """The problem of a medium; None if it matches its digest and decodes completely."""
    try:
        source = medium.read()
        source.verify()
        described = describe(medium)
    except OSError as error:
        return Problem(f"cannot be read: {error.strerror or error}")
    except MediaDigestError as error:
        return Problem(f"damaged: its {medium.nbytes} bytes hash to {error.actual}")
    if described.is_video and described.format not in _WITHOUT_PYAV and find_spec("av") is None:
        return Problem(f"{described.format} video, not decoded: PyAV is not installed", fatal=False)
    try:
        check_decodes(source, described)
    except MediaError as error:
        return Problem(f"undecodable: {error.reason}")
    return None
