"""A file that stands under its name once it is complete, and not before."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollouts.cli.errors import TrajectoryFileError


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A path beside `path` to write to, which becomes `path` at the end; nothing is left if the block raises.

    Raises `TrajectoryFileError` if `path` exists: it is never replaced.
    """
    if os.path.lexists(path):
        raise TrajectoryFileError(path, "it is there already and was left alone; name another file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        directory = tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise TrajectoryFileError(path, f"cannot be written: {error.strerror or error}") from error
    with directory:
        beside = Path(directory.name) / path.name
        try:
            yield beside
        except OSError as error:
            if error.filename is None:  # as when the disk is full
                error.filename = str(path)
            raise
        try:
            os.link(beside, path)  # unlike a rename, this never takes the place of another file
        except OSError as error:
            raise TrajectoryFileError(path, f"cannot be written: {error.strerror or error}") from error
