"""Appending to record files: one writer at a time, and nothing that was appended is ever taken away."""

from __future__ import annotations

import contextlib
import functools
import os
import threading
from types import TracebackType
from typing import Literal, Self
from weakref import WeakSet

from renderers.media.source import MediaSource
from transport.errors import FileChangedError, FileDeletedError, WriterBusyError, WriterClosedError
from transport.records.compression import find_compressor
from transport.records.file_lock import open_locked, this_process, unlock
from transport.records.layout import (
    COMPRESSED_VERSION,
    PLAIN_VERSION,
    FileBytes,
    file_header,
    find_whole,
    frame_record,
    scan,
)
from transport.wire import codec
from transport.wire.joining import join_buffers
from transport.wire.wire_format import Buffer


class RecordWriter:
    """Appends objects to the record file at `path`, which is created, or continued behind its last whole record.

        with RecordWriter("episodes.mmr") as out:
            index = out.append(episode)

    A file has one writer at a time: it is locked while the writer is open, for other processes, for this one, and under
    each of its names (symbolic and hard links). The system gives the lock back when the process dies. In a process that
    is forked meanwhile the writer is closed. Threads may share a writer.

    With `compression="zstd"` (the extra `zstd`, or Python 3.14) each record that becomes smaller by it is compressed;
    the file then has version 2, which older readers refuse. Arrays of such a record are copies, not views on the file.

    Raises `FileLockedError`, which names the process that has the file open; `LockingUnavailableError` on a file system
    without locks; `MalformedError` if `path` is another kind of file, and leaves it alone; `MissingExtraError`.
    """

    def __init__(self, path: str | os.PathLike[str], *, compression: Literal["zstd"] | None = None) -> None:
        self._compress = find_compressor(compression)
        self._path = os.path.abspath(path)
        self._turn = threading.RLock()  # a signal handler may close a writer that is appending
        self._appending = False
        self._file = open_locked(self._path, "a+")
        try:
            source = FileBytes(self._file)
            index = scan(source)
            version = PLAIN_VERSION if self._compress is None else COMPRESSED_VERSION
            self._version = max(index.version, version)
            # Where the next record goes and its index: one value, so that no interrupt can leave them apart.
            self._tail = (index.end, len(index.objects))
            self._stored: set[str] = set()
            self._found = index.blobs  # here before; not yet known to be whole
            self._torn = source.size > index.end
            self._reach = source.size  # how far an interrupted write can have come
            if index.end == 0:
                self._write([file_header(self._version)], 0)
            elif index.version < self._version:
                self._write_header(file_header(self._version))
            # Only the words of another writer's error depend on it.
            with contextlib.suppress(OSError, FileChangedError):
                self._write_header(file_header(self._version, this_process()))
        except BaseException:
            unlock(self._file)
            self._file.close()
            raise
        _watch_forks()
        _open_writers.add(self)

    def append(self, obj: object) -> int:
        """Store `obj` and return its index in the file.

        Media sources that the file already holds whole are referred to, not stored again. The record is with the
        operating system when this returns. If this raises, KeyboardInterrupt included, the file holds the record whole
        or not at all, and the next `append` goes on behind it. Raises `EncodeError`, `OSError`, `WriterClosedError`,
        `FileChangedError` if something else wrote to the file, `FileDeletedError`.
        """
        with self._turn:
            self._check_open()
            if self._appending:
                raise WriterBusyError(self._path)
            self._appending = True
            try:
                return self._append(obj)
            finally:
                self._appending = False

    def flush(self) -> None:
        """Wait until everything appended is on the disk, so that it also survives the machine."""
        self._check_open()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file and let another writer have it. Closing twice is allowed."""
        with self._turn:
            if self._file.closed:
                return
            try:
                self._settle_tail()
            finally:
                with contextlib.suppress(OSError, FileChangedError):  # as when it was opened
                    self._write_header(file_header(self._version))
                unlock(self._file)
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _append(self, obj: object) -> int:
        self._settle_tail()
        index = self._tail[1]
        fresh: dict[str, MediaSource] = {}

        def keep_aside(source: MediaSource) -> bool:
            if not self._holds(source.digest):
                fresh[source.digest] = source
            return True

        payload = codec.encode(obj, omit_media=keep_aside)
        parts: list[Buffer] = []
        for digest, source in fresh.items():
            parts += self._frame(source.data, index, digest)
        parts += self._frame(payload, index)
        self._write(parts, index + 1)
        self._stored.update(fresh)
        return index

    def _check_open(self) -> None:
        if self._file.closed:
            raise WriterClosedError(self._path, "is closed, or belongs to the process that this one was forked from")

    def _holds(self, digest: str) -> bool:
        """Whether the file has this medium; one from before this writer is read when first asked for."""
        record = self._found.pop(digest, None)
        if record is not None and record.is_whole(FileBytes(self._file)):
            self._stored.add(digest)
        return digest in self._stored

    def _frame(self, payload: Buffer, index: int, digest: str = "") -> list[Buffer]:
        if self._compress is not None:
            compressed = self._compress(payload)
            if len(compressed) < memoryview(payload).nbytes:
                return frame_record(compressed, index, digest, compressed=True)
        return frame_record(payload, index, digest)

    def _write(self, parts: list[Buffer], count: int) -> None:
        self._settle_tail()
        # One write call: a process killed between two would more often leave half a record.
        data = memoryview(join_buffers(parts))
        self._reach = self._tail[0] + data.nbytes
        self._torn = True
        written = 0
        while written < data.nbytes:  # the system may take less than it was given
            written += self._file.write(data[written:])
        self._tail = (self._reach, count)
        self._torn = False

    def _settle_tail(self) -> None:
        """Keep the records that an interrupted write completed, and cut off what it did not.

        A reader may hold arrays of any record that is whole, and cutting one off would end the reader's process. What
        anyone else wrote is left alone.
        """
        status = os.fstat(self._file.fileno())
        if status.st_nlink == 0:
            raise FileDeletedError(self._path)
        end, count = self._tail
        if not end <= status.st_size <= (self._reach if self._torn else end):
            raise FileChangedError(self._path, end, status.st_size)
        if self._torn:
            # Without a file header there is no record yet.
            records = find_whole(FileBytes(self._file), end, count)[0] if end else []
            for record in records:
                end, count = record.end, record.objects_before + (not record.digest)
                self._found.update({record.digest: record} if record.digest else {})
            self._file.truncate(end)
            self._tail = (end, count)
            self._torn = False

    def _write_header(self, header: bytes) -> None:
        """Replace the file's header. A file that is open for appending takes bytes at its end only."""
        with open(self._path, "r+b", buffering=0) as file:
            if not os.path.samestat(os.fstat(file.fileno()), os.fstat(self._file.fileno())):
                raise FileChangedError(self._path, self._tail[0], os.fstat(file.fileno()).st_size)
            file.write(header)


_open_writers: WeakSet[RecordWriter] = WeakSet()


@functools.cache
def _watch_forks() -> None:
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=_close_inherited)


def _close_inherited() -> None:
    """In a forked process: close the files of the parent's writers, and neither unlock nor change them.

    Two processes that append to one file would each miscount it. An inherited descriptor would also keep the file
    locked after the parent is gone.
    """
    for writer in list(_open_writers):
        writer._file.close()
        writer._turn = threading.RLock()  # a thread that is not in this process may have held it
