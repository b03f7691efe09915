"""What a record file is made of, and finding the records in one.

    offset 0     file header, 64 bytes: magic, format version, zeros
    64           records, each a header of 64 bytes and its payload, padded with zeros to a multiple of 64

A record is an object (what `encode` gives, its media left out) or a blob (the bytes of one media source, written before
the first object that refers to it). Each header carries its own checksum and the number of objects before it, so that
a reader can step over a damaged header and still number the records behind it.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from transport.container import ALIGNMENT, aligned
from transport.errors import ChecksumError, MalformedError
from transport.unpacking import check_version
from transport.wire import FORMAT_VERSION, Buffer

_FILE_MAGIC: Final = b"MMRRECS\n"
_FILE: Final = struct.Struct("<8sH54x")
_MARK: Final = b"\x89REC"
_RECORD: Final = struct.Struct("<4sB3xQQI32s")  # mark, kind, payload length, objects before it, payload CRC-32, digest
_CRC: Final = struct.Struct("<I")
HEADER_BYTES: Final = ALIGNMENT
_OBJECT: Final = 1
_BLOB: Final = 2

FILE_HEADER: Final = _FILE.pack(_FILE_MAGIC, FORMAT_VERSION)


@dataclass(frozen=True, slots=True)
class Record:
    """Where one record lies. `start` is the offset of its header, `digest` is empty for an object."""

    start: int
    length: int
    objects_before: int
    checksum: int
    digest: str

    @property
    def end(self) -> int:
        return self.start + HEADER_BYTES + aligned(self.length)

    def payload(self, view: memoryview) -> memoryview:
        """The payload, once it is known to be what was written. Raises `ChecksumError`."""
        start = self.start + HEADER_BYTES
        data = view[start : start + self.length]
        actual = zlib.crc32(data)
        if actual != self.checksum:
            number = self.objects_before
            name = f"media sha256 {self.digest}, first used by record {number}," if self.digest else f"record {number}"
            raise ChecksumError(
                f"{name} at offset {self.start}",
                f"{self.checksum:08x}",
                f"{actual:08x}",
                index=number,
                offset=self.start,
            )
        return data

    def is_whole(self, view: memoryview) -> bool:
        """Whether the payload is what was written."""
        try:
            self.payload(view)
        except ChecksumError:
            return False
        return True


@dataclass(slots=True)
class Index:
    """The records of a file. An object whose header is damaged is None in `objects`; `gaps` says where it was."""

    objects: list[Record | None] = field(default_factory=list)
    blobs: dict[str, Record] = field(default_factory=dict)
    gaps: dict[int, int] = field(default_factory=dict)
    end: int = 0  # where the next record goes: behind the last whole one


def frame_record(payload: Buffer, objects_before: int, digest: str = "") -> list[Buffer]:
    """The parts of a record: header, payload, padding. With a digest (sha256, hex) it is a blob."""
    length = memoryview(payload).nbytes
    fields = (_BLOB if digest else _OBJECT, length, objects_before, zlib.crc32(payload), bytes.fromhex(digest))
    header = _RECORD.pack(_MARK, *fields)
    return [header, _CRC.pack(zlib.crc32(header)), payload, bytes(aligned(length) - length)]


def scan(view: memoryview) -> Index:
    """Find the records. Raises `MalformedError` if this is no record file, `VersionError` if it is a newer one."""
    if not _check_file_header(view):
        return Index()
    records, gaps = _walk(view)
    # A crash can leave the last record at full length with part of its bytes never written.
    while records and not records[-1].is_whole(view):
        records.pop()
    index = Index(end=records[-1].end if records else HEADER_BYTES)
    for record in records:
        # Blobs first, so the object count also moves where only blobs follow a damaged header.
        lost = range(len(index.objects), record.objects_before)
        index.gaps.update(dict.fromkeys(lost, gaps.get(record.start, record.start)))
        index.objects.extend(None for _ in lost)
        if record.digest:
            index.blobs[record.digest] = record
        else:
            index.objects.append(record)
    return index


def _check_file_header(view: memoryview) -> bool:
    """False for a file whose writer was killed before its header was complete."""
    if view.nbytes < HEADER_BYTES and FILE_HEADER.startswith(view.tobytes()):
        return False
    if view.nbytes < HEADER_BYTES or bytes(view[: len(_FILE_MAGIC)]) != _FILE_MAGIC:
        raise MalformedError("file does not start like a record file", "Pass a file that RecordWriter made.")
    check_version("record file", _FILE.unpack_from(view)[1])
    return True


def _walk(view: memoryview) -> tuple[list[Record], dict[int, int]]:
    """The records in order, and for each that follows damage, where the damage began."""
    records: list[Record] = []
    gaps: dict[int, int] = {}
    position: int | None = HEADER_BYTES
    while position is not None and position < view.nbytes:
        least = _objects_after(records)
        record = _read_header(view, position, least)
        if record is None:
            damage, position = position, _next_header(view, position, least)
            if position is not None:
                gaps[position] = damage
            continue
        if record.start + HEADER_BYTES + record.length > view.nbytes or record.end > view.nbytes:
            break  # cut off while it was being written
        records.append(record)
        position = record.end
    return records, gaps


def _objects_after(records: list[Record]) -> int:
    return records[-1].objects_before + (not records[-1].digest) if records else 0


def _read_header(view: memoryview, start: int, least: int) -> Record | None:
    """The record whose header is at `start`, or None if there is none with at least `least` objects before it."""
    if start + HEADER_BYTES > view.nbytes:
        return None
    mark, kind, length, before, checksum, digest = _RECORD.unpack_from(view, start)
    (expected,) = _CRC.unpack_from(view, start + _RECORD.size)
    header = view[start : start + _RECORD.size]
    # No file can hold more records than it has room for; a larger number is damage that happens to check out.
    if mark != _MARK or zlib.crc32(header) != expected or not least <= before <= view.nbytes // HEADER_BYTES:
        return None
    return Record(start, length, before, checksum, digest.hex() if kind == _BLOB else "")


def _next_header(view: memoryview, damage: int, least: int) -> int | None:
    """The first intact header behind `damage`; headers lie at multiples of 64 bytes."""
    first = damage + ALIGNMENT
    rows = (view.nbytes - first) // ALIGNMENT
    if rows <= 0:
        return None
    marks = np.frombuffer(view, "<u4", rows * ALIGNMENT // 4, first)[:: ALIGNMENT // 4]
    for row in np.flatnonzero(marks == int.from_bytes(_MARK, "little")).tolist():
        if _read_header(view, first + row * ALIGNMENT, least) is not None:
            return int(first + row * ALIGNMENT)
    return None
