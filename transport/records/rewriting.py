"""Repairing a record file, and merging several; records are copied as stored, and their types are not needed."""

import contextlib
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from transport.errors import ChecksumError, DecodeError, FileChangedError, MalformedError
from transport.records.file_lock import locked
from transport.records.reader import RecordReader
from transport.records.writer import RecordWriter
from transport.wire.limits import DEFAULT_LIMITS, DecodeLimits


@dataclass(frozen=True, slots=True)
class DroppedRecord:
    """A record that was not kept: its index in the damaged file, and the error of reading it."""

    index: int
    reason: DecodeError


@dataclass(frozen=True, slots=True)
class RepairReport:
    """The result of `repair_record_file`: records kept, records dropped, and bytes of an incomplete last record."""

    kept: int
    dropped: tuple[DroppedRecord, ...]
    truncated_bytes: int


def repair_record_file(
    path: str | os.PathLike[str],
    out: str | os.PathLike[str] | None = None,
    *,
    limits: DecodeLimits = DEFAULT_LIMITS,
) -> RepairReport:
    """Drop every damaged record of the file, and keep the others in their order, each media source once.

    A record is damaged if its own bytes or a media source it refers to are, or if the file ends inside it.
    A new file is written beside the file (of a link, beside its target) and replaces it in one step; an
    undamaged file is not changed.
    With `out` the records are written to this new file, and `path` is not changed. No writer can open the
    file meanwhile.

    Raises `FileExistsError` if `out` exists, `FileLockedError` if a writer has it open, `FileChangedError`
    if another program wrote to it, `MalformedError` if it is not a record file, `OSError`, and the errors
    of a record that is not damaged but cannot be read here: `LimitError`, `DecodeError`.
    """
    path = Path(path).resolve()
    new = None if out is None else _new_path(out)
    dropped = []
    with locked(path), _add_path_to_errors(path), RecordReader(path, limits=limits) as reader:
        size = os.stat(path).st_size
        for index in range(len(reader)):
            try:
                # Every record is read before anything is written: a file without damage is left as it is.
                reader.stored(index)
            # The errors of records that no reader can read, unlike a newer version or a limit of this reader.
            except (ChecksumError, MalformedError) as error:
                dropped.append(DroppedRecord(index, error))
        report = RepairReport(len(reader) - len(dropped), tuple(dropped), reader.truncated_bytes)
        if new is None and not dropped and not report.truncated_bytes:
            return report
        lost = {drop.index for drop in dropped}
        with writer_beside(new or path) as writer:
            for index in range(len(reader)):
                if index not in lost:
                    writer.copy(reader, index)
            _check_size(path, size)
            if new is None:
                writer.replace(path)
            else:
                writer.link(new)
    return report


def merge_record_files(
    paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str], *, limits: DecodeLimits = DEFAULT_LIMITS
) -> int:
    """Write the records of all `paths`, in order, to the new file `out`, each media source once; return their number.

    Raises `FileExistsError` if `out` exists, `FileLockedError` if a writer has one of `paths` open,
    `FileChangedError` if a writer changed one of them during the merge, and the reader's `DecodeError` for
    a damaged record: call `repair_record_file` on that file first. After an error nothing is left at `out`.
    """
    new, copied = _new_path(out), 0
    with writer_beside(new) as writer:
        for path in paths:
            with locked(path):  # for a moment: merging must not keep a writer from the file
                pass
            size = os.stat(path).st_size
            with _add_path_to_errors(path), RecordReader(path, limits=limits) as reader:
                for index in range(len(reader)):
                    copied = writer.copy(reader, index) + 1
            _check_size(path, size)
        writer.link(new)
    return copied


def _check_size(path: str | os.PathLike[str], size: int) -> None:
    # `flock` binds only programs that ask for the lock; another one may have written meanwhile.
    if (now := os.stat(path).st_size) != size:
        raise FileChangedError(os.fspath(path), size, now)


def _new_path(path: str | os.PathLike[str]) -> Path:
    if os.path.lexists(path):
        raise FileExistsError(f"{os.fspath(path)} exists. Name a file that does not.")
    return Path(path)


@contextlib.contextmanager
def _add_path_to_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    try:
        yield
    except DecodeError as error:
        error.add_note(f"in the file {os.fspath(path)}")
        raise


@contextlib.contextmanager
def writer_beside(path: Path) -> Iterator[RecordWriter]:
    """A writer of a temporary file beside `path`, which is removed at the end. Errors of the system name `path`."""
    name = ""
    try:
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        os.close(descriptor)
        with RecordWriter(name) as writer:
            yield writer
    except OSError as error:
        # The caller does not know the name of the temporary file; a full disk names none.
        if error.filename is None or not name or error.filename == name:
            error.filename = str(path)
        raise
    finally:
        if name:
            Path(name).unlink(missing_ok=True)
