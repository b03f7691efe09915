"""Reading files: bytes of any regular file or pipe, text and JSON of a model directory."""

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any, BinaryIO

from renderers.errors import LoadError


def open_readable(path: Path) -> BinaryIO:
    """Open a regular file, or a pipe (`<(command)` in a shell), for reading bytes.

    A named pipe without a writer reads as empty; opening it does not block. Raises `OSError` with its `filename`, also
    for a device, which may have no end (`/dev/zero`).
    """
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    try:
        # Of the open file: another one may have been put in its place since a check of the path.
        mode = os.fstat(descriptor).st_mode
        if not (stat.S_ISREG(mode) or stat.S_ISFIFO(mode) or os.isatty(descriptor)):
            code, kind = (errno.EISDIR, "directory") if stat.S_ISDIR(mode) else (errno.EINVAL, "device, not a file")
            raise OSError(code, f"Is a {kind}", str(path))
        if hasattr(os, "set_blocking"):
            os.set_blocking(descriptor, True)
    except BaseException:
        os.close(descriptor)
        raise
    return open(descriptor, "rb")


def read_bytes(path: Path) -> bytes:
    """The content of a file. Raises the errors of `open_readable`."""
    with open_readable(path) as file:
        return file.read()


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file, empty if there is no such file. Raises `LoadError`."""
    text = _text_or_none(path)
    if text is None:
        return {}
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LoadError(f"{path!s}: not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise LoadError(f"{path!s}: holds no JSON object")
    return content


def read_text(path: Path) -> str:
    """The text of a file. Raises `LoadError`, also if there is no such file."""
    text = _text_or_none(path)
    if text is None:
        raise LoadError(f"{path!s}: there is no such file; another process may have removed it")
    return text


def _text_or_none(path: Path) -> str | None:
    """The text of a file, None if there is none; opened without a check, as it may be removed after one."""
    try:
        return read_bytes(path).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, OSError) as error:  # ValueError: not UTF-8, or a path that no file system can hold
        raise LoadError(f"{path!s}: not readable as UTF-8 text: {error}") from error
