"""One writer a file: a lock of the operating system on the file, which ends when its holder closes it or dies.

The lock is `flock`'s and not that of POSIX records (`fcntl.lockf`): those belong to a process, so they do not keep two
writers of one process apart, and they are dropped when any descriptor of the file is closed, a reader's too. It is on
the file and not on a name, so that symbolic and hard links lead to the same lock. It is advisory: readers need none.
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

from transport.errors import FileLockedError, LockingUnavailableError
from transport.records.layout import Holder, open_regular, read_holder

if sys.platform == "win32":
    import msvcrt

    # A locked byte cannot be read by others on Windows: this one is where no file reaches.
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
        return True  # nothing in the standard library asks this on Windows
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
        except (OSError, OverflowError):  # another user's process; a number that no process has
            return True
        return True


def this_process() -> Holder:
    """What a writer leaves in the header of its file, for the error of a second one."""
    return Holder(os.getpid(), socket.gethostname())


def open_locked(path: str, mode: Literal["a+", "r+", "r"]) -> io.FileIO:
    """The file at `path`, locked; `unlock` it before closing it.

    Raises `FileLockedError` if someone holds the lock, `LockingUnavailableError`, `MalformedError` for what is no
    regular file, `OSError`.
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
        # What was locked is no longer at the path: `repair` put another file there, or someone deleted it.
        file.close()


def unlock(file: io.FileIO) -> None:
    """Give the lock back at once, also where a process that was forked still has the file open."""
    with contextlib.suppress(OSError):  # closing the file gives it back, too
        _unlock(file)


@contextlib.contextmanager
def locked(path: str | os.PathLike[str]) -> Iterator[io.FileIO]:
    """Keep writers from the file at `path`, which is there. Raises as `open_locked`."""
    name = os.fspath(path)
    try:
        file = open_locked(name, "r+")
    except PermissionError:  # it can be locked by whoever may read it
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
        raise FileLockedError(path, *_words(read_holder(file))) from error
    except OSError as error:
        raise LockingUnavailableError(path, error.strerror or str(error)) from error


def _words(holder: Holder | None) -> tuple[int | None, str | None]:
    """The process and host of a holder. One that is not running is a writer that was killed, and not who holds it."""
    if holder is None or (holder.host == socket.gethostname() and not _is_alive(holder.pid)):
        return None, None
    return holder.pid, holder.host


def _is_at(file: io.FileIO, path: str) -> bool:
    try:
        there = os.stat(path)
    except FileNotFoundError:
        return False
    return os.path.samestat(os.fstat(file.fileno()), there) and stat.S_ISREG(there.st_mode)
