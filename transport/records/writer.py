"""Appending to record files; a file has one writer at a time, and a complete record is never removed."""

import contextlib
import errno
import os
import shutil
import threading
from collections.abc import Iterator
from typing import Self

from renderers.media.item import MediaSource
from renderers.process.fork_reset import register_fork_reset
from transport.errors import FileChangedError, TransportError
from transport.records.file_lock import open_locked, unlock
from transport.records.layout import (
    FILE_HEADER,
    FileBytes,
    Index,
    add_appended,
    find_complete,
    frame_record,
)
from transport.records.reader import RecordReader
from transport.wire import codec
from transport.wire.wire_format import Buffer


class RecordWriter:
    """Appends objects to the record file at `path`: a new file, or an existing one after its last complete record.

        with RecordWriter("episodes.mmr") as out:
            index = out.append(episode)

    A file has one writer at a time: while the writer is open, the file is locked for other processes and
    for this one, under each of its names (symbolic and hard links). The system releases the lock when the
    process dies. In a process that is forked meanwhile the writer is closed. Threads may share a writer.

    Raises `FileLockedError` for a file that a writer has open; `TransportError` on a file system without
    locks; `MalformedError` if `path` is another kind of file, which is not changed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = os.path.abspath(path)
        self._lock = threading.RLock()  # reentrant: a signal handler may close a writer that is appending
        self._appending = False
        # Append mode: a write cannot land on an earlier record, wherever the file position is.
        self._file = open_locked(self.path, "a+")
        try:
            source = FileBytes(self._file)
            index = Index()
            add_appended(source, index)
            # The offset and the index of the next record; one value, so that an interrupt cannot change only one of
            # them.
            self._tail = (index.end, len(index.objects))
            self._stored: set[str] = set()
            self._unchecked = index.blobs  # stored before this writer; not yet checked
            self._incomplete = source.size > index.end  # whether the file may end in an incomplete record
            self._largest_size = source.size  # of the file, after an interrupted write
            self._is_listed = index.end > 0  # whether the directory is known to have the file after a power cut
            if index.end == 0:
                self._write_records([FILE_HEADER], 0)
        except BaseException:
            unlock(self._file)
            self._file.close()
            raise
        register_fork_reset(self)

    def reset_after_fork(self) -> None:
        """Close the file, without unlocking or changing it.

        If two processes appended to one file, each would number its records wrongly. An open descriptor
        would also keep the file locked after the parent has ended.
        """
        self._file.close()
        self._lock = threading.RLock()  # a thread of the parent may have locked it

    def append(self, obj: object) -> int:
        """Store `obj` and return its index in the file.

        Media sources that the file already has are not stored again. The operating system has the whole
        record when this returns. If this raises, KeyboardInterrupt included, the file has the complete
        record or nothing of it, and the next `append` continues there. Raises `EncodeError`, `OSError`,
        `TransportError`, `FileChangedError` if another program wrote to the file.
        """
        new: dict[str, MediaSource] = {}

        def omit(source: MediaSource) -> bool:
            if not self._has_media(source.digest):
                new[source.digest] = source
            return True

        with self._appends():
            index = self._tail[1]
            payload = codec.encode(obj, omit_media=omit)
            parts: list[Buffer] = []
            # Media first: a record that is complete then never refers to bytes that a kill has kept out.
            for digest, source in new.items():
                parts += frame_record(source.data, index, digest)
            parts += frame_record(payload, index)
            self._write_records(parts, index + 1)
            self._stored.update(new)
            return index

    def copy(self, reader: RecordReader, index: int) -> int:
        """Append record `index` of another file as it is stored there, with its media; returns its index here.

        It is checked and not decoded: its types are not needed. Raises the errors of reading it, and as
        `append`.
        """
        payload, digests = reader.stored(index)
        with self._appends():
            index = self._tail[1]
            new = [digest for digest in digests if not self._has_media(digest)]
            parts: list[Buffer] = []
            for digest in new:
                parts += frame_record(reader.stored_media(digest), index, digest)
            parts += frame_record(payload, index)
            self._write_records(parts, index + 1)
            self._stored.update(new)
            return index

    @property
    def size(self) -> int:
        """The bytes of the file, up to the end of its last record."""
        return self._tail[0]

    def flush(self) -> None:
        """Wait until all records are on the disk, so that they survive a crash of the machine."""
        self._check_open()
        os.fsync(self._file.fileno())
        if not self._is_listed:
            self._sync_directory()

    def link(self, path: str | os.PathLike[str]) -> None:
        """Wait as `flush`, and give the file a second name, which is new: this never replaces a file."""
        self.flush()
        os.link(self.path, path)
        self._sync_directory()

    def replace(self, path: str | os.PathLike[str]) -> None:
        """Wait as `flush`, and let the file take the place of the one at `path`, with its mode; go on with it there."""
        # `mkstemp` lets the owner alone read the new file.
        shutil.copymode(path, self.path)
        self.flush()
        os.replace(self.path, path)
        self.path = os.path.abspath(path)
        self._sync_directory()  # otherwise a power cut could bring the replaced file back

    def close(self) -> None:
        """Close the file and release its lock. Closing twice is allowed."""
        with self._lock:
            if self._file.closed:
                return
            try:
                self._cut_incomplete_record()
            finally:
                unlock(self._file)
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @contextlib.contextmanager
    def _appends(self) -> Iterator[None]:
        """The block appends a record: one thread at a time, after what an interrupted call has left is cut off."""
        with self._lock:
            self._check_open()
            if self._appending:
                raise TransportError(
                    f"the writer of {self.path} is appending already. Set a flag in the signal handler, and "
                    "append after the interrupted call."
                )
            self._appending = True
            try:
                self._cut_incomplete_record()
                yield
            finally:
                self._appending = False

    def _sync_directory(self) -> None:
        directory = os.open(os.path.dirname(self.path), os.O_RDONLY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)
        self._is_listed = True

    def _check_open(self) -> None:
        if self._file.closed:
            raise TransportError(
                f"the writer of {self.path} is closed, or belongs to the process that this one was forked "
                "from. Open a writer on a file of its own."
            )

    def _has_media(self, digest: str) -> bool:
        """Whether the file has this media source; one that was stored before this writer is checked first."""
        record = self._unchecked.pop(digest, None)
        if record is not None and record.is_complete(FileBytes(self._file)):
            self._stored.add(digest)
        return digest in self._stored

    def _write_records(self, parts: list[Buffer], objects: int) -> None:
        """Append media and object; `objects`: how many the file then has, media not counted.

        If it raises, the next call keeps the complete records and cuts the incomplete one off.
        """
        self._cut_incomplete_record()
        # One write call: a process is less likely to be killed inside it than between two.
        # The view lets the rest of a partial write be written without copying it.
        data = memoryview(b"".join(parts))
        self._largest_size = self._tail[0] + data.nbytes
        # Before the write: an interrupt may come at any time after it began.
        self._incomplete = True
        written = 0
        while written < data.nbytes:  # the system may write only a part
            written += self._file.write(data[written:])
        self._tail = (self._largest_size, objects)
        self._incomplete = False

    def _cut_incomplete_record(self) -> None:
        """Keep the complete records of an interrupted write, and cut off an incomplete one.

        A reader may have arrays that are views on a complete record, and cutting that record off would end
        the reader's process. Bytes that another program wrote are not changed.
        """
        status = os.fstat(self._file.fileno())
        # Appending to a deleted file succeeds, and all is lost when it is closed.
        if status.st_nlink == 0:
            reason = "it was deleted while it was being written; open a new writer"
            raise FileNotFoundError(errno.ENOENT, reason, self.path)
        end, count = self._tail
        if not end <= status.st_size <= (self._largest_size if self._incomplete else end):
            raise FileChangedError(self.path, end, status.st_size)
        if self._incomplete:
            # A file without a file header has no record.
            records = find_complete(FileBytes(self._file), end, count)[0] if end else []
            for record in records:
                end, count = record.end, record.objects_before + (not record.digest)
                self._unchecked.update({record.digest: record} if record.digest else {})
            self._file.truncate(end)
            self._tail = (end, count)
            self._incomplete = False
