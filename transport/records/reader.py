"""Reading record files: append-only files of encoded objects, in which each media source is stored once.

If a writer is killed, all records that it appended before stay readable; the next writer cuts off an
incomplete last record. A reader sees the records that were complete when it opened the file, and later ones
after `refresh()`. No action of a writer removes a record that a reader has seen.
"""

import io
import mmap
import os
import threading
from collections.abc import Iterator
from typing import Any, Self

from renderers.media.item import MediaSource
from transport.errors import ChecksumError, FileChangedError, MissingMediaError
from transport.records.layout import FileBytes, Index, Record, add_appended, open_regular
from transport.wire import codec, container
from transport.wire.decoding import build_media, omitted_digests
from transport.wire.limits import DEFAULT_LIMITS, DecodeLimits


class RecordReader:
    """The records of a file, mapped into memory: `len(reader)`, `reader[i]`, `for obj in reader`.

    Opening reads the record headers and the last record. A record is checked and decoded when it is read;
    its large arrays are views on the file that stay valid after `close`. `truncated_bytes` is the size of
    an incomplete record that a killed writer left at the end; it is 0 for an undamaged file, and the
    incomplete record is not counted.

    Raises `MalformedError` if `path` is not a record file. Reading a damaged record raises `ChecksumError`,
    which carries the record's `index` and `offset`; the other records stay readable. Reading raises
    `FileChangedError` if the file was truncated. If a file is truncated while arrays are views on it, the
    system ends this process when it reads such an array: replace a file by another one, as
    `repair_record_file` does, and do not overwrite it.

    Threads may share a reader, and so may a process and the processes forked from it.
    """

    def __init__(self, path: str | os.PathLike[str], *, limits: DecodeLimits = DEFAULT_LIMITS) -> None:
        self._limits = limits
        self._path = os.fspath(path)
        self._file = open_regular(self._path, "r")
        self._mapping = _Mapping(self._file, 0)
        # Two threads that refresh at once would add the same records twice.
        self._refresh_lock = threading.Lock()
        self._index = Index()
        self.truncated_bytes = 0
        try:
            self.refresh()
        except BaseException:
            self.close()
            raise
        self._media: dict[str, MediaSource] = {}  # views on the file, verified, by digest

    def refresh(self) -> int:
        """Add the records that were appended since, without reading earlier ones again; return their number.

        Raises `FileChangedError` if the file was truncated.
        """
        with self._refresh_lock:
            source = FileBytes(self._file)
            self._check_size()
            known = len(self)
            add_appended(source, self._index)
            self.truncated_bytes = source.size - self._index.end
            return len(self) - known

    def __len__(self) -> int:
        return len(self._index.objects)

    def __getitem__(self, index: int) -> Any:
        """Record `index`; negative counts from the end. Raises `IndexError` past either end."""
        record = self._record(index)
        try:
            return codec.decode(self._payload(record), limits=self._limits, find_media=self._find_media)
        except MissingMediaError as error:
            raise self._media_lost(record, error.digest) from error

    def without_media(self, index: int) -> Any:
        """Record `index`, whose media have their digests and no bytes: these are not read, and not verified.

        For ids and figures of records; do not store the object again. Raises the other errors of reading
        the record.
        """
        return codec.decode(
            self._payload(self._record(index)), limits=self._limits, find_media=lambda digest: MediaSource(digest, b"")
        )

    def __iter__(self) -> Iterator[Any]:
        for number in range(len(self)):
            yield self[number]

    def close(self) -> None:
        """Close the file. The mapping lasts as long as arrays and media that were read from it."""
        self._mapping.close()
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def stored(self, index: int) -> tuple[memoryview, tuple[str, ...]]:
        """The bytes of record `index` as stored in the file, checked but not decoded, and the digests of its media.

        Raises the errors of reading the record; needs none of its types.
        """
        record = self._record(index)
        payload = self._payload(record)
        digests = tuple(dict.fromkeys(omitted_digests(container.split(payload, self._limits)[0])))
        for digest in digests:
            if self._find_media(digest) is None:
                raise self._media_lost(record, digest)
        return payload, digests

    def stored_media(self, digest: str) -> memoryview:
        """The bytes of a media source."""
        return self._payload(self._index.blobs[digest])

    def _record(self, index: int) -> Record:
        try:
            number = range(len(self))[index]
        except IndexError:
            raise IndexError(f"{self._path} has {len(self)} records and no record {index}.") from None
        self._check_size()
        record = self._index.objects[number]
        if record is None:
            offset = self._index.gaps[number]
            raise ChecksumError(
                f"header of record {number} at offset {offset} of {self._path}", index=number, offset=offset
            )
        return record

    def _payload(self, record: Record) -> memoryview:
        """The payload as stored, from the mapping, which grows with the file.

        Access to mapped bytes beyond the end of the file would end the process. Arrays that are views on an
        earlier mapping keep it.
        """
        mapping = self._mapping
        if record.end > mapping.size:
            # Up to the last known record: reading in order then maps the file once, not once a record.
            end = max(record.end, self._index.end)
            self._check_size(end)
            try:
                mapping = self._mapping = _Mapping(self._file, end)
            except ValueError as error:  # the file was truncated after the check
                raise FileChangedError(self._path, end, FileBytes(self._file).size) from error
        return record.payload(mapping.view, self._path)

    def _check_size(self, end: int | None = None) -> None:
        end = self._index.end if end is None else end
        size = FileBytes(self._file).size
        if size < end:
            raise FileChangedError(self._path, end, size)

    def _media_lost(self, record: Record, digest: str) -> ChecksumError:
        """The error for a media source without an intact header: the writer always stores the source."""
        place = f"record {record.objects_before} at offset {record.start} of {self._path}"
        where = f"header of media sha256 {digest}, used by {place},"
        return ChecksumError(where, index=record.objects_before, offset=record.start)

    def _find_media(self, digest: str) -> MediaSource | None:
        """The source, verified when it is read first; the same object for every record that refers to it."""
        source, record = self._media.get(digest), self._index.blobs.get(digest)
        if source is None and record is not None:
            source = self._media[digest] = build_media(digest, self._payload(record))
        return source


def read_records(path: str | os.PathLike[str], *, limits: DecodeLimits = DEFAULT_LIMITS) -> Iterator[Any]:
    """The objects in a record file, in order; see `RecordReader`. An incomplete last record is left out."""
    with RecordReader(path, limits=limits) as reader:
        yield from reader


class _Mapping:
    """The first `size` bytes of a file as a read-only view; `size` may be 0, which mmap does not support."""

    def __init__(self, file: io.FileIO, size: int) -> None:
        self.size = size
        self._map = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ) if size else None
        self.view = memoryview(self._map) if self._map is not None else memoryview(b"")

    def close(self) -> None:
        """Unmap the file; if arrays are views on it, it is unmapped when the last of them is freed."""
        self.view.release()
        if self._map is not None:
            try:
                self._map.close()
            except BufferError:  # the views own the mapping now
                self._map = None
