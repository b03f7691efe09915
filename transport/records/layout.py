"""The layout of a record file, and finding the records in one.

    offset 0     file header, 64 bytes: magic, format version, zeros
    64           records, each a header of 64 bytes and its payload, padded with zeros to a multiple of 64

A record is an object (a message of `encode` with its media omitted) or a blob (the bytes of one media
source, written before the first object that refers to it). Each header has its own checksum and the number of
objects before it, so that a reader can skip a damaged header and still number the records after it.
"""

import io
import os
import stat
import struct
import zlib
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from transport.errors import ChecksumError, DecodeError, MalformedError
from transport.wire.container import ALIGNMENT, aligned
from transport.wire.wire_format import Buffer

FILE_VERSION: Final = 2
_FILE_MAGIC: Final = b"MMRRECS\n"
FILE_HEADER: Final = struct.pack("<8sH54x", _FILE_MAGIC, FILE_VERSION)
_MARK: Final = b"\x89REC"
_RECORD: Final = struct.Struct("<4sB3xQQI32s")  # mark, kind, payload length, objects before it, payload CRC-32, digest
_CRC: Final = struct.Struct("<I")
HEADER_BYTES: Final = ALIGNMENT
_OBJECT, _BLOB = 1, 2
_READ_BYTES: Final = 1 << 20


def open_regular(path: str, mode: Literal["r", "r+", "a+"]) -> io.FileIO:
    """The file at `path`, unbuffered.

    Raises `MalformedError` for a pipe or a device, which could block for ever or have no end.
    """
    # O_NONBLOCK: opening a pipe that nobody writes to would wait for a writer.
    file = io.FileIO(path, mode, opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK, 0o666))
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise MalformedError(f"{path} is a pipe or a device and not a file", "Pass a file that RecordWriter made.")
    return file


class FileBytes:
    """The bytes of an open, unbuffered file; `size` is its size when this was made.

    Records are found by reading and not in mapped memory, and only complete records are mapped: a writer
    may cut off an incomplete record at any time, and access to mapped memory beyond the end of the file
    ends the process.
    """

    def __init__(self, file: io.FileIO) -> None:
        self._file = file
        self.size = os.fstat(file.fileno()).st_size

    def read(self, start: int, length: int) -> bytes:
        """`length` bytes; fewer at the end of the file, which may have become shorter."""
        # pread() does not move the file position, which threads and forked processes share.
        data = os.pread(self._file.fileno(), length, start)
        while len(data) < length and (more := os.pread(self._file.fileno(), length - len(data), start + len(data))):
            data += more
        return data


@dataclass(frozen=True, slots=True)
class Record:
    """The position of one record. `start` is the offset of its header, `digest` is "" for an object."""

    start: int
    length: int
    objects_before: int
    checksum: int
    digest: str

    @property
    def end(self) -> int:
        return self.start + HEADER_BYTES + aligned(self.length)

    def payload(self, view: memoryview, path: str) -> memoryview:
        """The payload as stored in the file at `path`, after a check of its checksum. Raises `ChecksumError`."""
        start = self.start + HEADER_BYTES
        data = view[start : start + self.length]
        actual = zlib.crc32(data)
        if actual != self.checksum:
            number = self.objects_before
            name = f"media sha256 {self.digest}, first used by record {number}," if self.digest else f"record {number}"
            raise ChecksumError(
                f"{name} at offset {self.start} of {path}",
                f"{self.checksum:08x}",
                f"{actual:08x}",
                index=number,
                offset=self.start,
            )
        return data

    def is_complete(self, source: FileBytes) -> bool:
        """Whether the payload is complete and has the right checksum."""
        position, end = self.start + HEADER_BYTES, self.start + HEADER_BYTES + self.length
        actual = 0
        # In pieces, so that a record of gigabytes is checked in the memory of one piece.
        while position < end and (piece := source.read(position, min(_READ_BYTES, end - position))):
            actual = zlib.crc32(piece, actual)
            position += len(piece)
        return position == end and actual == self.checksum


@dataclass(slots=True)
class Index:
    """The records of a file. An object with a damaged header is None in `objects`; `gaps` has its offset."""

    objects: list[Record | None] = field(default_factory=list)
    blobs: dict[str, Record] = field(default_factory=dict)
    gaps: dict[int, int] = field(default_factory=dict)
    end: int = 0  # offset of the next record, after the last complete one


def frame_record(payload: Buffer, objects_before: int, digest: str = "") -> list[Buffer]:
    """The parts of a record: header, checksum, payload, padding. A record with a digest (sha256, hex) is a blob."""
    length = memoryview(payload).nbytes
    header = _RECORD.pack(
        _MARK, _BLOB if digest else _OBJECT, length, objects_before, zlib.crc32(payload), bytes.fromhex(digest)
    )
    return [header, _CRC.pack(zlib.crc32(header)), payload, bytes(aligned(length) - length)]


def add_appended(source: FileBytes, index: Index) -> None:
    """Add the records after those of the `index` to it; an empty index gets all.

    Raises `MalformedError` if it is no record file, `DecodeError` if its version is another.
    """
    if not index.end and not _has_file_header(source):
        return
    start = index.end or HEADER_BYTES
    records, gaps = find_complete(source, start, len(index.objects))
    for record in records:
        # Before the record itself: after a damaged header of an object the next record may be a blob.
        lost = range(len(index.objects), record.objects_before)
        index.gaps.update(dict.fromkeys(lost, gaps.get(record.start, record.start)))
        index.objects.extend(None for _ in lost)
        if record.digest:
            index.blobs[record.digest] = record
        else:
            index.objects.append(record)
    index.end = records[-1].end if records else start


def find_complete(source: FileBytes, start: int, objects: int) -> tuple[list[Record], dict[int, int]]:
    """The records from `start` to the last complete one, and the offset of the damage before each that follows damage.

    `objects` is the number of objects before `start`.
    """
    records: list[Record] = []
    gaps: dict[int, int] = {}
    position: int | None = start
    while position is not None and position < source.size:
        least = records[-1].objects_before + (not records[-1].digest) if records else objects
        record = _read_header(source, position, least)
        if record is None:
            damage, position = position, _find_next_header(source, position, least)
            if position is not None:
                gaps[position] = damage
            continue
        if record.end > source.size:
            break  # incomplete: its writer was killed, or is writing it
        records.append(record)
        position = record.end
    # A crash can leave the last record with its full length and bytes that were never written.
    while records and not records[-1].is_complete(source):
        records.pop()
    return records, gaps


def _has_file_header(source: FileBytes) -> bool:
    """Whether the file has a header of this version; not so if its writer was killed before it was complete."""
    header = source.read(0, HEADER_BYTES)
    if len(header) < HEADER_BYTES and FILE_HEADER.startswith(header):
        return False
    if len(header) < HEADER_BYTES or not header.startswith(_FILE_MAGIC):
        raise MalformedError(
            "file does not start with the header of a record file", "Pass a file that RecordWriter made."
        )
    version = int.from_bytes(header[len(_FILE_MAGIC) :][:2], "little")
    if version != FILE_VERSION:
        raise DecodeError(
            f"record file has version {version} and this installation reads {FILE_VERSION}. "
            "Read it with the version of mmrollouts that wrote it, or restore it from another copy."
        )
    return True


def _read_header(source: FileBytes, start: int, least: int) -> Record | None:
    """The record with the header at `start`; None if there is none, or fewer than `least` objects are before it."""
    data = source.read(start, HEADER_BYTES)
    if len(data) < HEADER_BYTES:
        return None
    mark, kind, length, before, checksum, digest = _RECORD.unpack_from(data)
    (expected,) = _CRC.unpack_from(data, _RECORD.size)
    # A number of objects that cannot fit into the file is damage, even if the checksum is right.
    most = source.size // HEADER_BYTES
    is_intact = mark == _MARK and kind in (_OBJECT, _BLOB) and zlib.crc32(data[: _RECORD.size]) == expected
    if not is_intact or not least <= before <= most:
        return None
    return Record(start, length, before, checksum, digest.hex() if kind == _BLOB else "")


def _find_next_header(source: FileBytes, damage: int, least: int) -> int | None:
    """The offset of the first intact header after `damage`; headers are at multiples of 64 bytes.

    Reads few bytes first, because a file may have damage between any two of its records.
    """
    start, length = damage + ALIGNMENT, 1 << 10
    while start < source.size:
        data = source.read(start, length)
        # The first word of every 64 bytes at once: behind damage there may be gigabytes.
        integers = np.frombuffer(data, "<u4", len(data) // ALIGNMENT * (ALIGNMENT // 4))
        for row in np.flatnonzero(integers[:: ALIGNMENT // 4] == int.from_bytes(_MARK, "little")).tolist():
            if _read_header(source, start + row * ALIGNMENT, least) is not None:
                return int(start + row * ALIGNMENT)
        start, length = start + length, min(2 * length, _READ_BYTES)
    return None
