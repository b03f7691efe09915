"""A new file that appears under its name only when it is complete."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rollouts.cli.errors import CommandFileError
from rollouts.replaced_file import errors_name


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary path in the same directory, which becomes `path` at the end; it is removed if the block raises.

    Raises `CommandFileError` if `path` exists: it is never replaced.
    """
    if os.path.lexists(path):
        raise CommandFileError(path, "it exists and was not changed; name another file")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        directory = tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise CommandFileError(path, f"cannot be written: {error.strerror or error}") from error
    with directory:
        temporary = Path(directory.name) / path.name
        with errors_name(path, temporary):
            yield temporary
        try:
            os.link(temporary, path)  # unlike a rename, a link never replaces another file
        except OSError as error:
            raise CommandFileError(path, f"cannot be written: {error.strerror or error}") from error
