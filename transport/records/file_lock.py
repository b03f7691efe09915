"""The lock that allows one writer per file; the operating system releases it when its process closes the file or dies.

The lock is `flock` and not a POSIX record lock (`fcntl.lockf`). A record lock belongs to the process: two
writers in one process could both have it, and it is released when any descriptor of the file is closed,
also a reader's. `flock` locks the file and not a name, so that symbolic and hard links lead to the same
lock. Readers need no lock.
"""

import contextlib
import fcntl
import io
import os
import stat
from collections.abc import Iterator
from typing import Literal

from transport.errors import FileLockedError, TransportError
from transport.records.layout import open_regular


def open_locked(path: str, mode: Literal["a+", "r+", "r"]) -> io.FileIO:
    """The file at `path`, locked; `unlock` it before closing it.

    Raises `FileLockedError` if the file is locked, `TransportError`, `MalformedError` if it is not a regular
    file, `OSError`.
    """
    while True:
        file = open_regular(path, mode)
        try:
            _acquire(file, path)
            if _is_at(file, path):
                return file
        except BaseException:
            file.close()
            raise
        # The locked file is no longer at the path: it was replaced by repair_record_file(), or deleted.
        file.close()


def unlock(file: io.FileIO) -> None:
    """Release the lock at once, also if a forked process still has the file open."""
    with contextlib.suppress(OSError):  # closing the file releases it, too
        fcntl.flock(file, fcntl.LOCK_UN)


@contextlib.contextmanager
def locked(path: str | os.PathLike[str], *, make: bool = False) -> Iterator[io.FileIO]:
    """Lock the existing file at `path`, so that no writer can open it; with `make`, it is made where it is missing.

    Raises as `open_locked`.
    """
    name = os.fspath(path)
    try:
        file = open_locked(name, "a+" if make else "r+")
    except PermissionError:  # a file that can only be read can be locked, too
        file = open_locked(name, "r")
    try:
        yield file
    finally:
        unlock(file)
        file.close()


def _acquire(file: io.FileIO, path: str) -> None:
    try:
        # LOCK_NB: the caller is told who has the file, instead of waiting for it without an end.
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise FileLockedError(path) from error
    except OSError as error:
        raise TransportError(
            f"{path} cannot be locked: {error.strerror or str(error)}. Write to a file system with flock "
            "(Lustre has it as a mount option) and move the file when it is complete."
        ) from error


def _is_at(file: io.FileIO, path: str) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(file.fileno()), there) and stat.S_ISREG(there.st_mode)
