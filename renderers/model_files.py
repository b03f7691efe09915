"""Reading the text and JSON files of a model directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from renderers.errors import InvalidFileError
from renderers.regular_files import read_finite


def read_json(path: Path) -> dict[str, Any]:
    """The object that a file holds, empty where there is no such file. Raises `InvalidFileError`."""
    text = _text_of(path)
    if text is None:
        return {}
    try:
        content = json.loads(text)
    except ValueError as error:
        raise InvalidFileError(str(path), f"not readable as JSON: {error}") from error
    except RecursionError as error:
        raise InvalidFileError(str(path), "nested too deeply to be read as JSON; write it again, flatter") from error
    if not isinstance(content, dict):
        raise InvalidFileError(str(path), "holds no JSON object")
    return content


def read_text(path: Path) -> str:
    """The text of a file. Raises `InvalidFileError`, also where there is none (any more)."""
    text = _text_of(path)
    if text is None:
        raise InvalidFileError(str(path), "there is no such file; another process may have removed it just now")
    return text


def _text_of(path: Path) -> str | None:
    """The text of a file, None where there is none: asked by opening it, for between two questions it may vanish."""
    try:
        return read_finite(path).decode("utf-8").replace("\r\n", "\n").replace("\r", "\n")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, OSError) as error:  # ValueError: not UTF-8, or a path that no file system can hold
        raise InvalidFileError(str(path), f"not readable as UTF-8 text: {error}") from error
