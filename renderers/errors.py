"""Every exception of `renderers`, under one root.

Each one carries what went wrong as attributes, says where (message, part, token) and ends with the cure.
"""

from __future__ import annotations


class RendererError(Exception):
    """Root of every error that `renderers` raises on purpose."""


class MediaError(RendererError):
    """A picture or a video could not be accepted."""


class MediaDigestError(MediaError):
    """Source bytes do not hash to the digest they travel under."""

    def __init__(self, expected: str, actual: str) -> None:
        self.expected = expected
        self.actual = actual
        super().__init__(
            f"media source announced as sha256 {expected} hashes to {actual}: the bytes changed on the way. "
            "Ship the source again."
        )
