"""Sources and items of chosen sizes, and threads that must not fail."""

from __future__ import annotations

import threading
from collections.abc import Callable

import numpy as np

from renderers import MediaItem, MediaSource
from renderers.media.item import PixelScale

KB = 1024


def source(name: str, nbytes: int = 0) -> MediaSource:
    return MediaSource.of(name.encode().ljust(nbytes, b"."))


def item(name: str, of: MediaSource, nbytes: int) -> MediaItem:
    return MediaItem("image", name, of, {"pixel_values": np.zeros(nbytes, dtype=np.uint8)}, 1, PixelScale())


def image(name: str, nbytes: int) -> MediaItem:
    """An item whose arrays and source together hold `nbytes`."""
    return item(name, source(name, 10), nbytes - 10)


def in_threads(count: int, work: Callable[[int], None]) -> None:
    """Run `work(0)` to `work(count - 1)` at once; what one of them raises is raised."""
    errors: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
