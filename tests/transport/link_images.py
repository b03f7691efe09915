"""Two media sources, each larger than the other messages of a test, for the tests of links."""

from __future__ import annotations

from renderers.media.item import MediaSource

IMAGE = MediaSource.of(b"\x89PNG" + bytes(200_000))
OTHER = MediaSource.of(b"\xff\xd8" + bytes(150_000))
