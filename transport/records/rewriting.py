"""Record files made whole again, and several made one; records are copied as they are, without their types."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from transport.errors import ChecksumError, DecodeError, FileChangedError, MalformedError, TruncatedError
from transport.records.file_lock import check_unlocked, locked
from transport.records.layout import COMPRESSED_VERSION, file_header, frame_record
from transport.records.reader import RecordReader
from transport.wire.limits import DecodeLimits

_DEFAULT_LIMITS = DecodeLimits()

# What makes a record unreadable for everybody. A newer version, a limit of this reader's or a missing library does not.
_DAMAGE = (ChecksumError, MalformedError, TruncatedError)


@dataclass(frozen=True, slots=True)
class DroppedRecord:
    """A record that could not be kept: its index in the damaged file, and why."""

    index: int
    reason: DecodeError


@dataclass(frozen=True, slots=True)
class RepairReport:
    """What `repair_record_file` did: records kept, records dropped, and unfinished bytes cut off the end."""

    kept: int
    dropped: tuple[DroppedRecord, ...]
    truncated_bytes: int


def repair_record_file(path: str | os.PathLike[str], *, limits: DecodeLimits = _DEFAULT_LIMITS) -> RepairReport:
    """Drop every record of the file that cannot be read, keep the others in their order, each image once.

    A record is dropped if it or an image it refers to is damaged. The file (where `path` is a link, what it leads to)
    is replaced in one step by one written beside it; a sound file is left alone. No writer can open it meanwhile.

    Raises `FileLockedError` if a writer has it open, `FileChangedError` if something else wrote to it, `MalformedError`
    if it is no record file, `OSError`, and what is no damage but keeps a record from being read here: `LimitError`,
    `VersionError`, `MissingExtraError`, `MemoryLimitError`.
    """
    path = Path(path).resolve()
    with locked(path), _named(path):
        return _repair(path, limits)


def _repair(path: Path, limits: DecodeLimits) -> RepairReport:
    dropped = []
    with RecordReader(path, limits=limits) as reader:
        size = path.stat().st_size
        for index in range(len(reader)):
            try:
                reader.stored(index)
            except _DAMAGE as error:
                dropped.append(DroppedRecord(index, error))
        report = RepairReport(len(reader) - len(dropped), tuple(dropped), reader.truncated_bytes)
        if not dropped and not report.truncated_bytes:
            return report
        lost = {drop.index for drop in dropped}
        with _new_file(path, replace=True) as file:
            copying = _Copying(file)
            for index in range(len(reader)):
                if index not in lost:
                    copying.take(reader, index)
            if (now := path.stat().st_size) != size:
                raise FileChangedError(str(path), size, now)
    return report


def merge_record_files(
    paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], *, limits: DecodeLimits = _DEFAULT_LIMITS
) -> int:
    """Write the records of `paths`, one file after the other, to the new file `out`, each image once; return how many.

    Raises `FileExistsError` if `out` exists, `FileLockedError` if a writer has one of `paths` open, `FileChangedError`
    if a writer changed one of them during the merge, and the reader's `DecodeError` for a damaged record: call
    `repair_record_file` on that file first. After an error nothing is left at `out`.
    """
    with _new_file(Path(out), replace=False) as file:
        copying = _Copying(file)
        for path in paths:
            check_unlocked(path)  # and not locked: reading a file must not keep a writer from it
            size = os.stat(path).st_size
            with _named(path), RecordReader(path, limits=limits) as reader:
                for index in range(len(reader)):
                    copying.take(reader, index)
            if (now := os.stat(path).st_size) != size:
                raise FileChangedError(os.fspath(path), size, now)
    return copying.objects


@contextlib.contextmanager
def _named(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the file to what went wrong with it."""
    try:
        yield
    except DecodeError as error:
        error.add_note(f"this is about {os.fspath(path)}")
        raise


class _Copying:
    """A record file being written from the records of others."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._stored: set[str] = set()
        self.objects = 0
        file.write(file_header(COMPRESSED_VERSION))

    def take(self, reader: RecordReader, index: int) -> None:
        record = reader.stored(index)
        for digest in record.digests:
            if digest not in self._stored:
                payload, compressed = reader.stored_media(digest)
                self._file.writelines(frame_record(payload, self.objects, digest, compressed=compressed))
                self._stored.add(digest)
        self._file.writelines(frame_record(record.payload, self.objects, compressed=record.compressed))
        self.objects += 1


@contextlib.contextmanager
def _new_file(path: Path, *, replace: bool) -> Iterator[BinaryIO]:
    """A file that stands at `path` once it is complete, and not before."""
    if not replace and path.exists():
        raise FileExistsError(f"{path} exists. Name a file that does not.")
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        error.filename = str(path)  # whose name the caller knows
        raise
    beside = Path(name)
    try:
        with open(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if replace:
            shutil.copymode(path, beside)
            beside.replace(path)
        else:
            os.link(beside, path)  # unlike a rename, this never takes the place of another file
    except OSError as error:
        if error.filename in (None, name):  # as when the disk is full
            error.filename = str(path)
        raise
    finally:
        beside.unlink(missing_ok=True)
