"""The point in time by which a fetch, or the decoding of an image or video, has to end."""

from __future__ import annotations

import io
import time


class Deadline:
    """`seconds` from now. `remaining()` gives the seconds that are left and raises `TimeoutError` after the end."""

    def __init__(self, seconds: float) -> None:
        self._end = time.monotonic() + seconds

    @property
    def passed(self) -> bool:
        return time.monotonic() >= self._end

    def remaining(self) -> float:
        left = self._end - time.monotonic()
        if left <= 0:
            raise TimeoutError
        return left


class TimedBytes(io.BytesIO):
    """A file in memory whose `read` raises `TimeoutError` after a deadline.

    Pillow reads a file in small pieces between the steps of its decoders, so this bounds the time for files of very
    many parts (chunks of a PNG, frames of a GIF, comments, runs) as well as for slow decoders.
    """

    def __init__(self, data: bytes | memoryview, deadline: Deadline) -> None:
        super().__init__(data)
        self._deadline = deadline

    def read(self, size: int | None = -1, /) -> bytes:
        self._deadline.remaining()
        return super().read(size)
