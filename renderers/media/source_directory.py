"""A directory of media sources, each a file named by its digest, shared by threads, processes and runs.

    <directory>/ab/abcdef...      64 hex digits: the sha256 of the file's bytes
    <directory>/ab/.x81_q0.tmp    being written, or left by a writer that was killed

Other files are neither read nor removed.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from renderers.errors import MediaError
from renderers.media.item import MediaSource
from renderers.process.fork_reset import register_fork_reset

_log = logging.getLogger("renderers")

_DIGEST = re.compile(r"[0-9a-f]{64}")
_SHARD = re.compile(r"[0-9a-f]{2}")
_TEMPORARY = ".tmp"
# Longer than any write of a living process takes.
_LEFTOVER_SECONDS = 3600.0
_RESCAN_SECONDS = 600.0


class SourceFile(NamedTuple):
    """A file of the directory with the name and place of a source; its contents were not checked."""

    digest: str
    path: Path
    nbytes: int
    mtime_ns: int


class SourceDirectory:
    """Sources by digest, one file each. Safe for threads and for any number of processes without a lock.

    A file appears whole or not at all (temporary file, then rename), and its bytes are hashed when it is read, so a
    partial, damaged or foreign file is never returned: it is removed and logged, and counts as absent.

    Nothing is synced to the disk. A file that a power cut damages fails its digest and is written again with the next
    use of its source; waiting for the disk would take longer than processing the image. File system errors (full,
    read-only, missing) are counted in `errors` and logged once; they never raise after construction.

    `max_bytes` bounds the files: when this process knows of more bytes, the least recently read or written files are
    removed, down to nine tenths. Each process counts its own writes and scans all files every ten minutes, so n
    processes together may exceed the bound by n tenths until one of them scans.

    Raises `MediaError` for a directory that cannot be created.
    """

    def __init__(self, path: str | os.PathLike[str], max_bytes: int | None = None) -> None:
        self.path = Path(path).absolute()  # so that a change of the working directory has no effect
        self.max_bytes = max_bytes
        self.errors = 0
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
        except (OSError, ValueError) as error:  # ValueError: a name that no file system allows
            reason = error.strerror if isinstance(error, OSError) else error
            raise MediaError(
                f"{self.path} cannot be the directory of a media store: {reason}. Pass a directory that this "
                "user may write to, or one that can be created"
            ) from error
        self._failed_before = False
        self._swept: set[Path] = set()
        self._known_bytes = 0
        self._next_scan = 0.0
        self.reset_after_fork()
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        self._lock = threading.Lock()
        self._scanning = threading.Lock()

    def read(self, digest: str) -> MediaSource | None:
        """The source, verified; None if it is absent, unreadable or damaged, or if `digest` is not a digest."""
        path = self._path_of(digest)
        if path is None:
            return None
        try:
            with path.open("rb") as file:
                data = file.read()
                opened = os.fstat(file.fileno())
        except FileNotFoundError:
            return None
        except OSError as error:
            self._failed("read", error)
            return None
        if hashlib.sha256(data).hexdigest() != digest:
            self._remove_damaged(path, opened)
            return None
        self._touch(path)
        return MediaSource(digest, data)

    def write(self, source: MediaSource) -> None:
        """Write a source, unless a file of its name and size exists.

        Raises `MediaError` if its digest is not a sha256, because the digest becomes a path.
        """
        path = self._path_of(source.digest)
        if path is None:
            raise MediaError(
                f"{source.digest!r:.80} is not the sha256 of a source; make sources with MediaSource.of(data)"
            )
        if self.max_bytes is not None and source.nbytes > self.max_bytes:
            return
        try:
            with contextlib.suppress(FileNotFoundError):
                if path.stat().st_size == source.nbytes:
                    self._touch(path)
                    return
            path.parent.mkdir(mode=0o700, exist_ok=True)
            if path.parent not in self._swept:  # the first write of this process to this folder
                self._swept.add(path.parent)
                _remove_leftovers(path.parent)
            _write_atomically(path, source.data)
            self._count_bytes(source.nbytes)
        except OSError as error:
            self._failed("write", error)

    def _path_of(self, digest: str) -> Path | None:
        """The path of a source; None for a text that is not a digest and might lead outside."""
        return self.path / digest[:2] / digest if _DIGEST.fullmatch(digest) else None

    def _touch(self, path: Path) -> None:
        """Mark as used. In a read-only directory the order of use stays as it is."""
        with contextlib.suppress(OSError):
            os.utime(path)

    def _remove_damaged(self, path: Path, opened: os.stat_result) -> None:
        with self._lock:
            self.errors += 1
        _log.warning("%s (%d bytes) does not match its digest and was removed", path, opened.st_size)
        with contextlib.suppress(OSError):
            # Another process may have replaced it by an intact file since.
            if os.path.samestat(opened, os.stat(path)):
                path.unlink()

    def _failed(self, verb: str, error: OSError) -> None:
        with self._lock:
            self.errors += 1
            first, self._failed_before = not self._failed_before, True
        if first:
            _log.warning(
                "the media store cannot %s in %s: %s. It continues from memory; further errors are only counted",
                verb,
                self.path,
                error.strerror or error,
            )

    def _count_bytes(self, nbytes: int) -> None:
        if self.max_bytes is None:
            return
        with self._lock:
            self._known_bytes += nbytes
            due = self._known_bytes > self.max_bytes or time.monotonic() >= self._next_scan
        if due and self._scanning.acquire(blocking=False):
            try:
                self._evict(self.max_bytes)
            finally:
                self._scanning.release()

    def _evict(self, max_bytes: int) -> None:
        for shard in _shards(self.path):
            _remove_leftovers(shard)
        files = list(source_files(self.path))
        held = sum(file.nbytes for file in files)
        if held > max_bytes:
            # Down to nine tenths, so that the next write does not need another scan.
            for file in sorted(files, key=lambda file: file.mtime_ns):
                file.path.unlink(missing_ok=True)
                held -= file.nbytes
                if held <= max_bytes * 9 // 10:
                    break
        with self._lock:
            self._known_bytes = held
            self._next_scan = time.monotonic() + _RESCAN_SECONDS


def source_files(directory: Path) -> Iterator[SourceFile]:
    """Every file below `directory` with the name and place of a source, in the order of digests. Raises `OSError`."""
    for shard in _shards(directory):
        with os.scandir(shard) as entries:
            names = sorted(entry.name for entry in entries)
        for name in names:
            if _DIGEST.fullmatch(name) and name.startswith(shard.name):
                with contextlib.suppress(FileNotFoundError):  # removed by another process meanwhile
                    stat = os.stat(shard / name)
                    yield SourceFile(name, shard / name, stat.st_size, stat.st_mtime_ns)


def _shards(directory: Path) -> list[Path]:
    with os.scandir(directory) as entries:
        return sorted(Path(entry) for entry in entries if _SHARD.fullmatch(entry.name) and entry.is_dir())


def _remove_leftovers(shard: Path) -> None:
    """Remove the files of killed writers."""
    with os.scandir(shard) as entries:
        for entry in entries:
            if entry.name.endswith(_TEMPORARY):
                with contextlib.suppress(FileNotFoundError):  # its writer has just finished
                    if entry.stat().st_mtime < time.time() - _LEFTOVER_SECONDS:
                        os.unlink(entry)


def _write_atomically(path: Path, data: bytes | memoryview) -> None:
    """Write `data` to `path`, readable by this user only; no reader ever sees a part of it."""
    descriptor, temporary = tempfile.mkstemp(prefix=".", suffix=_TEMPORARY, dir=path.parent)
    try:
        with open(descriptor, "wb") as file:
            file.write(data)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
