"""The files of `rollouts render`: conversations and tools as JSON."""

from __future__ import annotations

import io
import json
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from renderers.process.files import open_readable
from rollouts.errors import CommandFileError


class Conversation(NamedTuple):
    """Messages and, if the file has any, tools."""

    messages: list[Any]
    tools: list[Any] | None


def read_conversation(path: Path, *, row: int | None = None) -> Conversation:
    """Read a JSON list of messages, or an object with `messages` and optionally `tools`.

    In a .jsonl file, and in any file if `row` is given, each line is a conversation, and `row` (from 0; 0 if None)
    selects one. Messages are not checked. Raises `CommandFileError`.
    """
    whole_file = row is None and path.suffix.lower() not in (".jsonl", ".ndjson")
    line = None if whole_file else (row or 0) + 1
    found = _parse(path, _read(path, line), line or 1)
    messages = found.get("messages") if isinstance(found, dict) else found
    tools = found.get("tools") if isinstance(found, dict) else None
    if not isinstance(messages, list):
        raise CommandFileError(
            path, 'holds no conversation; write a list of messages, or {"messages": [...], "tools": [...]}', line=line
        )
    if not messages:
        raise CommandFileError(path, "the conversation has no messages", line=line)
    return Conversation(messages, _tool_list(path, tools))


def read_tools(path: Path) -> list[Any] | None:
    """Read a JSON list of tools, or an object with `tools`. Raises `CommandFileError`."""
    found = _parse(path, _read(path))
    return _tool_list(path, found.get("tools") if isinstance(found, dict) else found)


def _tool_list(path: Path, tools: Any) -> list[Any] | None:
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise CommandFileError(path, 'tools must be a list of {"type": "function", "function": {...}}')
    return tools


def _read(path: Path, line: int | None = None) -> str:
    """The whole file, or its line `line` (from 1)."""
    try:
        with io.TextIOWrapper(open_readable(path), encoding="utf-8-sig") as file:
            text = file.read() if line is None else next(islice(file, line - 1, None), None)
    except UnicodeDecodeError as error:
        place = f", at byte {error.start}" if line is None else ""
        raise CommandFileError(path, f"is not UTF-8 text{place}") from error
    if text is None:
        raise CommandFileError(path, f"has no row {(line or 0) - 1}; rows count from 0")
    return text if line is None else text.rstrip()


def _parse(path: Path, text: str, first_line: int = 1) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        line = first_line + error.lineno - 1
        cure = ". For one conversation a line, name it .jsonl or pass --row" if error.msg == "Extra data" else ""
        raise CommandFileError(path, f"not JSON: {error.msg}, column {error.colno}{cure}", line=line) from error
    except (RecursionError, ValueError) as error:  # ValueError: an integer of more than 4,300 digits
        reason = f"not readable as JSON: {error}; nest less deep, and write long numbers as text"
        raise CommandFileError(path, reason) from error
