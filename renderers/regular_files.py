"""Opening files that a person names: one that would never end, or never open, is refused."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


def open_finite(path: Path) -> BinaryIO:
    """A file, or a pipe that someone writes to (`<(command)` in a shell), from its first byte.

    A named pipe without a writer reads as empty instead of waiting for one. Raises `OSError` with its `filename`, also
    for a device: `/dev/zero` has no end.
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        mode = os.fstat(descriptor).st_mode
        if stat.S_ISDIR(mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or os.isatty(descriptor)):
            raise OSError(errno.EINVAL, "Is a device, and no file", str(path))
        if hasattr(os, "set_blocking"):
            os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return open(descriptor, "rb")


def read_finite(path: Path) -> bytes:
    """All of a file. Raises as `open_finite`."""
    with open_finite(path) as file:
        return file.read()
