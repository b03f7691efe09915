"""What a message may refer to, and how large it may be."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MediaPolicy:
    """Limits for every medium. Nothing is ever read from the network or the file system.

    `max_bytes` bounds the encoded file, `max_pixels` width times height (checked from the header, before the picture
    is decompressed).
    """

    max_bytes: int = 32 * 2**20
    max_pixels: int = 64 * 2**20
