"""Files that appear whole or not at all."""

import errno
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from rollouts.errors import CommandFileError


@contextmanager
def replaced_file(path: Path) -> Iterator[IO[bytes]]:
    """A file that takes the place of `path` when complete, removed after an error, which names `path`."""
    with replaced_path(path) as partial, open(partial, "xb") as out:
        yield out


@contextmanager
def replaced_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path at which the block writes a file, or a directory with files, that takes the place of `path` at its end.

    A file is replaced at once, so that a process that is killed leaves the old one or the new one; a
    directory that has files is not replaced (an `OSError`), nor is a device or a pipe. Each process writes at a
    path of its own, `.NAME.PID.partial`, which one that is killed leaves. After an error nothing is left of what
    the block wrote. Errors of the system name `path`.
    """
    target = Path(os.path.abspath(path))
    partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
    if target.exists() and not (target.is_file() or target.is_dir()):
        raise OSError(errno.EINVAL, "it is a device or a pipe, which a file would replace", os.fspath(path))
    with errors_name(path, partial):
        _remove(partial)  # of a killed process: in a container, the next one may have its number
        try:
            yield partial
            os.replace(partial, target)
        finally:
            _remove(partial)


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


@contextmanager
def errors_name(path: str | os.PathLike[str], temporary: str | os.PathLike[str] = "") -> Iterator[None]:
    """Let an error of the system name `path` where it names `temporary`, or no file, as when the disk is full."""
    try:
        yield
    except OSError as error:
        if error.filename is None or os.fsdecode(error.filename) == os.fspath(temporary):
            error.filename = os.fspath(path)
        if error.filename2 is not None and os.fsdecode(error.filename2) == os.fspath(temporary):  # of a copy
            error.filename2 = os.fspath(path)
        raise


@contextmanager
def made_directory(directory: Path, *, of: Path | None = None) -> Iterator[list[Path]]:
    """A directory, made with its parents where they are missing, and a list for the files that the block writes.

    After an error these files are removed, and the directories that were made, unless another program wrote
    into them. Where the directory cannot be made, the error names `of`.
    """
    written: list[Path] = []
    missing: list[Path] = []
    try:
        try:
            missing += (path for path in (directory, *directory.parents) if not path.exists())
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            error.filename = error.filename if of is None else os.fspath(of)
            raise
        yield written
    except BaseException:
        for path in written:
            path.unlink(missing_ok=True)
        for path in missing:
            with suppress(OSError):
                path.rmdir()
        raise


@contextmanager
def new_file(path: Path) -> Iterator[Path]:
    """A temporary path that becomes `path` unless the block raises. `CommandFileError` if it exists."""
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
