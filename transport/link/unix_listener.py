"""The Unix socket of a server's `ipc` address.

It is bound here because ZeroMQ deletes any file or socket of another server at the path.
"""

from __future__ import annotations

import contextlib
import os
import socket as system_sockets
import stat
import struct
import time
from collections.abc import Iterator

from transport.link.errors import LinkAddressError

_BACKLOG = 100
_LOCK_TIMEOUT = 10.0  # seconds; other processes hold the lock for a few system calls
_LOCK_RETRY = 0.01

_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a directory",
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


class UnixListener:
    """A Unix socket that listens at the path of `ipc://path`, for its owner only; `ipc://@name` is an abstract name.

    The socket of a dead server is replaced. Raises `LinkAddressError` if a live server listens, and if the path is not
    a socket; the path is then left unchanged.
    """

    def __init__(self, address: str) -> None:
        if not hasattr(system_sockets, "AF_UNIX"):
            raise LinkAddressError(address, "needs Unix sockets, which this system lacks", "Use tcp://127.0.0.1:*.")
        self._address = address
        self._path = address.removeprefix("ipc://")
        self._absolute = os.path.abspath(self._path)  # the process may change its directory
        self._bound: os.stat_result | None = None  # of the path; an abstract name has none
        self._socket = system_sockets.socket(system_sockets.AF_UNIX, system_sockets.SOCK_STREAM)
        try:
            if self._path.startswith("@"):
                self._socket.bind("\0" + self._path[1:])
            else:
                self._take_path()
            self._socket.listen(_BACKLOG)
        except BaseException as error:
            self._socket.close()
            # The path may be too long, contain a NUL, or not be writable.
            if isinstance(error, OSError | ValueError) and not isinstance(error, LinkAddressError):
                raise LinkAddressError(address, f"cannot be bound: {error}", "Choose another address.") from error
            raise

    def detach(self) -> int:
        """Return the file descriptor; the caller closes it."""
        return self._socket.detach()

    def remove_path(self) -> None:
        """Remove the path if it still is this socket. While this socket listens, no server replaces it."""
        with contextlib.suppress(OSError):
            if self._bound is not None and os.path.samestat(os.lstat(self._absolute), self._bound):
                os.unlink(self._absolute)

    def _take_path(self) -> None:
        # Without the lock, of two servers that find the same dead socket, the second would delete the new socket of the
        # first.
        with _lock_of_directory(self._address, os.path.dirname(self._path) or "."):
            self._clear_path()
            self._socket.bind(self._path)
            os.chmod(self._path, 0o600)  # before it listens, so that other users can never connect
            self._bound = os.lstat(self._path)
            self._socket.listen(_BACKLOG)

    def _clear_path(self) -> None:
        """Remove the socket of a dead server. Raises `LinkAddressError` if the path is anything else."""
        try:
            mode = os.lstat(self._path).st_mode
        except FileNotFoundError:
            return
        if not stat.S_ISSOCK(mode):
            kind = _KINDS.get(stat.S_IFMT(mode), "no socket")
            raise LinkAddressError(
                self._address,
                f"is {kind} that exists; it was left unchanged",
                "Choose a path that does not exist, or remove it yourself.",
            )
        holder = _listening(self._path)
        if holder is not None:
            raise LinkAddressError(
                self._address,
                f"belongs to a live server ({holder})",
                "Close that server first, or choose another address.",
            )
        os.unlink(self._path)


def _listening(path: str) -> str | None:
    """Return a description of the process that listens at this path; None if no process does."""
    with system_sockets.socket(system_sockets.AF_UNIX, system_sockets.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            return None
        except BlockingIOError:
            return "its queue of connections is full"
        if not hasattr(system_sockets, "SO_PEERCRED"):
            return "process unknown"
        credentials = probe.getsockopt(system_sockets.SOL_SOCKET, system_sockets.SO_PEERCRED, struct.calcsize("3i"))
        return f"process {struct.unpack('3i', credentials)[0]}"


@contextlib.contextmanager
def _lock_of_directory(address: str, directory: str) -> Iterator[None]:
    """Hold the lock of a directory. It creates no file."""
    import fcntl  # not available on every system on which this module is imported

    descriptor = os.open(directory, os.O_RDONLY)
    try:
        end = time.monotonic() + _LOCK_TIMEOUT
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError as error:
                if time.monotonic() > end:
                    raise LinkAddressError(
                        address,
                        f"cannot be bound: another process holds the lock of {directory}",
                        "Choose a directory of your own.",
                    ) from error
                time.sleep(_LOCK_RETRY)
        yield
    finally:
        os.close(descriptor)
