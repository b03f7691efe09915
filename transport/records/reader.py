"""Reading append-only files of encoded objects, in which each image is stored once (`transport.records.writer`).

A file survives the death of its writer: what was appended before is readable, and a torn last record is cut off when
the file is next written. One writer at a time; readers see what was whole when they opened the file, and what has come
since when they `refresh()`. Nothing that a writer does takes a record from under a reader.
"""

from __future__ import annotations

import io
import mmap
import os
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self
from weakref import WeakValueDictionary

from renderers.media.source import MediaSource
from transport.errors import ChecksumError, FileChangedError, MissingMediaError
from transport.records.compression import Decompression
from transport.records.layout import FileBytes, Record, find_more, open_regular, scan, take_in
from transport.wire import codec, container
from transport.wire.limits import DecodeLimits, require_limits
from transport.wire.unpacking import build_media, omitted_digests

_DEFAULT_LIMITS = DecodeLimits()


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """One record's bytes in a file, compressed or not, and the digests of the media it refers to."""

    payload: memoryview
    compressed: bool
    digests: tuple[str, ...]


class RecordReader:
    """The records of a file, mapped into memory: `len(reader)`, `reader[i]`, `for obj in reader`.

    Opening reads the record headers and the last record; a record is checked and decoded when it is asked for, and its
    large arrays are views on the file that stay valid after `close`. `truncated_bytes` counts what a killed writer left
    unfinished at the end; it is 0 for a sound file, and those bytes are no record.

    What a record and its media decompress to counts against `limits.max_total_bytes` as long as anything of it is in
    use, together with what earlier records did: reading one after the other costs what the largest two take.

    Raises `MalformedError` if `path` is no record file. Reading a damaged record raises `ChecksumError`, which carries
    the record's `index` and `offset`; the others stay readable. Reading raises `FileChangedError` once something has
    cut off records that were there. To cut off those that arrays still look at is the end of this process: replace a
    file by another (as `repair` does) rather than write over it.

    Threads may share a reader, and so may a process and those that are forked from it.
    """

    def __init__(self, path: str | os.PathLike[str], *, limits: DecodeLimits = _DEFAULT_LIMITS) -> None:
        self._limits = require_limits(limits)
        self._path = os.fspath(path)
        self._file = open_regular(self._path, "r")
        self._decompression = Decompression(limits)
        self._mapping = _Mapping(self._file, 0)
        self._refreshing = threading.Lock()
        try:
            source = FileBytes(self._file)
            self._index = scan(source)
            self._mapping = self._map(self._index.end)
        except BaseException:
            self.close()
            raise
        self._media: dict[str, MediaSource] = {}  # views on the file
        self._verified: set[str] = set()  # digests of compressed media that were right when they were last read
        self._unpacked: WeakValueDictionary[str, MediaSource] = WeakValueDictionary()  # copies, as long as used
        self.truncated_bytes = source.size - self._index.end

    def refresh(self) -> int:
        """Take in what was appended since, without reading again what came before; return how many records that is.

        Raises `FileChangedError` if the file has lost records that were there.
        """
        with self._refreshing:
            source = FileBytes(self._file)
            self._check_size()
            found = find_more(source, self._index)
            known = len(self)
            if found.end > self._index.end:
                # The mapping first: another thread may ask for a record as soon as the index has it. What looks at the
                # mapping of before keeps it.
                self._mapping = self._map(found.end)
            take_in(self._index, found)
            self.truncated_bytes = source.size - found.end
            return len(self) - known

    def __len__(self) -> int:
        return len(self._index.objects)

    def __getitem__(self, index: int) -> Any:
        """Record `index`; negative counts from the end. Raises `IndexError` past either end."""
        return self._decode(self._record(index))

    def __iter__(self) -> Iterator[Any]:
        for number in range(len(self)):
            yield self[number]

    def close(self) -> None:
        """Let go of the file. The mapping itself lasts as long as arrays and media that were read from it."""
        self._mapping.close()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _decode(self, record: Record) -> Any:
        try:
            return codec.decode(self._contents(record), limits=self._limits, find_media=self._find_media)
        except MissingMediaError as error:
            raise self._lost_media(record, error.digest) from error

    def stored(self, index: int) -> StoredRecord:
        """Record `index` as it lies in the file, checked but not decoded, and the media it refers to.

        Raises as reading the record does; needs none of the types in it.
        """
        record = self._record(index)
        contents = self._contents(record)
        digests = tuple(dict.fromkeys(omitted_digests(container.split(contents, self._limits)[0])))
        for digest in digests:
            if digest not in self._verified and self._find_media(digest) is None:
                raise self._lost_media(record, digest)
        payload = record.payload(self._mapping.view)
        return StoredRecord(payload, record.compressed, digests)

    def media(self, digest: str) -> MediaSource:
        """A medium that records of this file refer to, verified. Raises `DecodeError`."""
        self._check_size()
        source = self._find_media(digest)
        if source is None:
            raise MissingMediaError(digest)
        return source

    def stored_media(self, digest: str) -> tuple[memoryview, bool]:
        """The bytes of a medium of this file as they lie in it, and whether they are compressed."""
        record = self._index.blobs[digest]
        return record.payload(self._mapping.view), record.compressed

    def _record(self, index: int) -> Record:
        number = range(len(self))[index]
        self._check_size()
        record = self._index.objects[number]
        if record is None:
            offset = self._index.gaps[number]
            raise ChecksumError(f"header of record {number} at offset {offset}", index=number, offset=offset)
        return record

    def _map(self, end: int) -> _Mapping:
        """The file up to `end`. Bytes that are no longer in the file would end the process that touches them."""
        self._check_size(end)
        try:
            return _Mapping(self._file, end)
        except ValueError as error:  # it became shorter just now
            raise FileChangedError(self._path, end, FileBytes(self._file).size) from error

    def _check_size(self, end: int | None = None) -> None:
        end = self._index.end if end is None else end
        size = FileBytes(self._file).size
        if size < end:
            raise FileChangedError(self._path, end, size)

    def _lost_media(self, record: Record, digest: str) -> ChecksumError:
        """The writer stored it, so its header must be what was lost."""
        where = f"header of media sha256 {digest}, used by record {record.objects_before} at {record.start},"
        return ChecksumError(where, index=record.objects_before, offset=record.start)

    def _find_media(self, digest: str) -> MediaSource | None:
        """One source per digest for the whole file, verified when it is read."""
        source = self._media.get(digest) or self._unpacked.get(digest)
        record = self._index.blobs.get(digest)
        if source is None and record is not None:
            source = build_media(digest, self._contents(record))
            held = self._unpacked if record.compressed else self._media
            held[digest] = source
            self._verified.add(digest)
        return source

    def _contents(self, record: Record) -> memoryview:
        payload = record.payload(self._mapping.view)
        return self._decompression.decompress(payload) if record.compressed else payload


def read_records(path: str | os.PathLike[str], *, limits: DecodeLimits = _DEFAULT_LIMITS) -> Iterator[Any]:
    """The objects in a record file, in order; see `RecordReader`. A torn last record is left out."""
    with RecordReader(path, limits=limits) as reader:
        yield from reader


class _Mapping:
    """The first `size` bytes of a file as a read-only view; also none, which cannot be mapped."""

    def __init__(self, file: io.FileIO, size: int) -> None:
        self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else None
        self.view = memoryview(self._map) if self._map is not None else memoryview(b"")

    def close(self) -> None:
        """Unmap, or leave that to the last array that still looks at the file."""
        self.view.release()
        if self._map is not None:
            try:
                self._map.close()
            except BufferError:  # views are out; they own the mapping now
                self._map = None
