"""The lock that allows one writer per file; the operating system releases it when its process closes the file or dies.

The lock is `flock` and not a POSIX record lock (`fcntl.lockf`). A record lock belongs to the process: two writers in
one process could both have it, and it is released when any descriptor of the file is closed, also a reader's. `flock`
locks the file and not a name, so that symbolic and hard links lead to the same lock. Readers need no lock.
"""

from __future__ import annotations

import contextlib
import io
import os
import socket
import stat
import sys
from collections.abc import Iterator
from typing import Final, Literal

from transport.errors import FileLockedError, TransportError
from transport.records.layout import open_regular, read_holder

if sys.platform == "win32":
    import msvcrt

    # On Windows other processes cannot read a locked byte, so this byte is beyond the end of any file.
    _LOCKED_BYTE: Final = 1 << 62

    def _lock(file: io.FileIO) -> None:
        os.lseek(file.fileno(), _LOCKED_BYTE, os.SEEK_SET)
        try:
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        except PermissionError as error:
            raise BlockingIOError(error.errno, error.strerror) from error

    def _unlock(file: io.FileIO) -> None:
        os.lseek(file.fileno(), _LOCKED_BYTE, os.SEEK_SET)
        msvcrt.locking(file.fileno(), msvcrt.LK_UNLCK, 1)

    def _is_alive(pid: int) -> bool:
        return True  # the standard library cannot find out on Windows
else:
    import fcntl

    def _lock(file: io.FileIO) -> None:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def _unlock(file: io.FileIO) -> None:
        fcntl.flock(file, fcntl.LOCK_UN)

    def _is_alive(pid: int) -> bool:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except (OSError, OverflowError):  # a process of another user; a number out of range
            return True
        return True


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
        _unlock(file)


@contextlib.contextmanager
def locked(path: str | os.PathLike[str]) -> Iterator[io.FileIO]:
    """Lock the existing file at `path`, so that no writer can open it. Raises as `open_locked`."""
    name = os.fspath(path)
    try:
        file = open_locked(name, "r+")
    except PermissionError:  # a file that can only be read can be locked, too
        file = open_locked(name, "r")
    try:
        yield file
    finally:
        unlock(file)
        file.close()


def check_unlocked(path: str | os.PathLike[str]) -> None:
    """Raise `FileLockedError` if a writer has the file at `path` open now."""
    with locked(path):
        pass


def _acquire(file: io.FileIO, path: str) -> None:
    try:
        _lock(file)
    except BlockingIOError as error:
        holder = read_holder(file)
        if holder is not None and holder[1] == socket.gethostname() and not _is_alive(holder[0]):
            holder = None  # a writer that was killed
        raise FileLockedError(path, *(holder or ())) from error
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
