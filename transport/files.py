"""Append-only files of encoded objects, in which each image is stored once.

A file survives the death of its writer: what was appended before is readable, and a torn last record is cut off when
the file is next written. One writer at a time; readers see what was whole when they opened the file.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

from renderers.media.source import MediaSource
from transport import codec
from transport.errors import ChecksumError, FileChangedError, MissingMediaError
from transport.limits import DecodeLimits
from transport.record_layout import FILE_HEADER, Record, frame_record, scan
from transport.unpacking import build_media
from transport.wire import Buffer

_DEFAULT_LIMITS = DecodeLimits()


class RecordWriter:
    """Appends objects to the record file at `path`, which is created, or continued behind its last whole record.

        with RecordWriter("episodes.mmr") as out:
            index = out.append(episode)

    Raises `MalformedError` if `path` is another kind of file, and leaves it alone.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._file = open(path, "a+b", buffering=0)  # noqa: SIM115 - closed by close()
        try:
            with _Mapping(self._file.fileno()) as mapping:
                index = scan(mapping.view)
            # Where the next record goes and its index: one value, so that no interrupt can leave them apart.
            self._tail = (index.end, len(index.objects))
            self._stored = set(index.blobs)
            self._torn = True  # there may be something behind the last whole record
            if index.end == 0:
                self._write([FILE_HEADER], 0)
        except BaseException:
            self._file.close()
            raise

    def append(self, obj: object) -> int:
        """Store `obj` and return its index in the file.

        Media sources that the file already holds are referred to, not stored again. The record is with the operating
        system when this returns; if this raises, KeyboardInterrupt included, the file holds the record whole or not at
        all, and the next `append` goes on from there. Raises `EncodeError`, `OSError`, and `FileChangedError` if
        something else wrote to the file.
        """
        index = self._tail[1]
        fresh: dict[str, MediaSource] = {}

        def keep_aside(source: MediaSource) -> bool:
            if source.digest not in self._stored:
                fresh[source.digest] = source
            return True

        payload = codec.encode(obj, held=keep_aside)
        parts: list[Buffer] = []
        for digest, source in fresh.items():
            parts += frame_record(source.data, index, digest)
        parts += frame_record(payload, index)
        self._write(parts, index + 1)
        self._stored.update(fresh)
        return index

    def flush(self) -> None:
        """Wait until everything appended is on the disk, so that it also survives the machine."""
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file. Closing twice is allowed."""
        if not self._file.closed:
            try:
                self._drop_torn_tail()
            finally:
                self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, parts: list[Buffer], count: int) -> None:
        self._drop_torn_tail()
        # One write call: a process killed between two would more often leave half a record.
        data = memoryview(b"".join(parts))
        self._torn = True
        written = 0
        while written < data.nbytes:  # the system may take less than it was given
            written += self._file.write(data[written:])
        self._tail = (self._tail[0] + data.nbytes, count)
        self._torn = False

    def _drop_torn_tail(self) -> None:
        """Cut off what an interrupted write left, and nothing that anyone else wrote."""
        end = self._tail[0]
        if self._torn:
            self._file.truncate(end)
            self._torn = False
        size = os.fstat(self._file.fileno()).st_size
        if size != end:
            raise FileChangedError(self._path, end, size)


class RecordReader:
    """The records of a file, mapped into memory: `len(reader)`, `reader[i]`, `for obj in reader`.

    Opening reads the record headers and the last record; a record is checked and decoded when it is asked for, and its
    large arrays are views on the file that stay valid after `close`. `truncated_bytes` counts what a killed writer left
    unfinished at the end; it is 0 for a sound file, and those bytes are no record.

    Raises `MalformedError` if `path` is no record file. Reading a damaged record raises `ChecksumError`, which carries
    the record's `index` and `offset`; the others stay readable.
    """

    def __init__(self, path: str | os.PathLike[str], *, limits: DecodeLimits = _DEFAULT_LIMITS) -> None:
        self._limits = limits
        with open(path, "rb") as file:
            self._mapping = _Mapping(file.fileno())
        self._view = self._mapping.view
        try:
            self._index = scan(self._view)
        except BaseException:
            self.close()
            raise
        self._media: dict[str, MediaSource] = {}
        self.truncated_bytes = self._view.nbytes - self._index.end

    def __len__(self) -> int:
        return len(self._index.objects)

    def __getitem__(self, index: int) -> Any:
        """Record `index`; negative counts from the end. Raises `IndexError` past either end."""
        number = range(len(self))[index]
        record = self._index.objects[number]
        if record is None:
            offset = self._index.gaps[number]
            raise ChecksumError(f"header of record {number} at offset {offset}", index=number, offset=offset)
        return self._decode(record)

    def __iter__(self) -> Iterator[Any]:
        for number in range(len(self)):
            yield self[number]

    def close(self) -> None:
        """Let go of the file. The mapping itself lasts as long as arrays and media that were read from it."""
        self._view.release()
        self._mapping.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _decode(self, record: Record) -> Any:
        payload = record.payload(self._view)
        try:
            return codec.decode(payload, limits=self._limits, find_media=self._find_media)
        except MissingMediaError as error:  # the writer stored it, so its header must be what was lost
            where = f"header of media sha256 {error.digest}, used by record {record.objects_before} at {record.start},"
            raise ChecksumError(where, index=record.objects_before, offset=record.start) from error

    def _find_media(self, digest: str) -> MediaSource | None:
        """One source per digest for the whole file, verified when it is first read."""
        if digest not in self._media and digest in self._index.blobs:
            self._media[digest] = build_media(digest, self._index.blobs[digest].payload(self._view))
        return self._media.get(digest)


def read_records(path: str | os.PathLike[str], *, limits: DecodeLimits = _DEFAULT_LIMITS) -> Iterator[Any]:
    """The objects in a record file, in order; see `RecordReader`. A torn last record is left out."""
    with RecordReader(path, limits=limits) as reader:
        yield from reader


class _Mapping:
    """A whole file as a read-only view; also for an empty file, which cannot be mapped."""

    def __init__(self, descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        self._map = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ) if size else None
        self.view = memoryview(self._map) if self._map is not None else memoryview(b"")

    def close(self) -> None:
        """Unmap, or leave that to the last array that still looks at the file."""
        self.view.release()
        if self._map is not None:
            try:
                self._map.close()
            except BufferError:  # views are out; they own the mapping now
                self._map = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
