"""Files that hold one object."""

from __future__ import annotations

import contextlib
import os

from rollouts.errors import ArgumentError
from rollouts.replaced_file import errors_name
from transport import RecordReader, RecordWriter


def write_object(path: str | os.PathLike[str], value: object) -> None:
    """Write a record file of `value` at `path`, in place of a file that is there. A failure leaves nothing behind.

    Raises `ArgumentError` for the path of a directory.
    """
    if os.path.isdir(path):
        raise ArgumentError("path", os.fspath(path), "this is a directory; pass the path of a file")
    unfinished = f"{os.fspath(path)}.unfinished"
    _remove(unfinished)
    try:
        with errors_name(path, unfinished):
            with RecordWriter(unfinished) as file:
                file.append(value)
            os.replace(unfinished, path)
    finally:
        _remove(unfinished)


def read_object(path: str | os.PathLike[str]) -> object:
    """The object in a record file; None unless it holds exactly one. Raises the errors of `transport.RecordReader`."""
    with RecordReader(path) as reader:
        return reader[0] if len(reader) == 1 else None


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.remove(path)
