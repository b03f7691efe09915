"""The files of `rollouts render`: conversations and tools as JSON."""

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

    In a .jsonl file, and in any file if `row` is given, each line is a conversation, and `row` (from 0; 0 if
    None) selects one. Messages are not checked. Raises `CommandFileError`.
    """
    whole_file = row is None and path.suffix.lower() not in (".jsonl", ".ndjson")
    line = None if whole_file else (row or 0) + 1
    found = _parsed(path, line)
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
    found = _parsed(path)
    return _tool_list(path, found.get("tools") if isinstance(found, dict) else found)


def _tool_list(path: Path, tools: Any) -> list[Any] | None:
    if tools is not None and not (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)):
        raise CommandFileError(path, 'tools must be a list of {"type": "function", "function": {...}}')
    return tools


def _parsed(path: Path, line: int | None = None) -> Any:
    """The value of the whole file, or of its line `line` (from 1)."""
    try:
        with io.TextIOWrapper(open_readable(path), encoding="utf-8-sig") as file:
            text = file.read() if line is None else next(islice(file, line - 1, None), None)
        if text is None:
            raise CommandFileError(path, f"has no row {(line or 0) - 1}; rows count from 0")
        return json.loads(text if line is None else text.rstrip())  # its end is no line of it
    except (ValueError, RecursionError) as error:
        reason = str(error)
        if isinstance(error, json.JSONDecodeError):
            reason, line = f"{error.msg}, column {error.colno}", (line or 1) + error.lineno - 1
        cure = "; for one conversation a line, name it .jsonl or pass --row" if "Extra data" in reason else ""
        raise CommandFileError(path, f"not JSON in UTF-8: {reason}{cure}", line=line) from error
