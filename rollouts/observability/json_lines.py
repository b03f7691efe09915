"""Reads files of JSON lines that another process may be writing, or that a killed one has left."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final, NamedTuple

#: A longer line is no line of metrics, and is not read into memory as a whole.
MAX_LINE_BYTES: Final = 16 << 20


class Line(NamedTuple):
    """A complete line; the first one has the number 1."""

    number: int
    text: str


def complete_lines(path: Path, problems: list[str]) -> Iterator[Line]:
    """The complete lines of a file, none if there is no file.

    `problems` gets a line for what is not read: a file that cannot be opened or read, lines longer than 16 MiB, and a
    last line without a line feed, which is being written or was cut off.
    """
    try:
        with open(path, "rb") as file:
            number = 0
            while data := file.readline(MAX_LINE_BYTES):
                number += 1
                if data.endswith(b"\n"):
                    yield Line(number, data.decode("utf-8", "replace"))
                elif len(data) < MAX_LINE_BYTES:
                    reason = "it has no line feed, so it is being written or was cut off"
                    problems.append(f"{path.name}, line {number}: the last {len(data)} bytes are incomplete: {reason}")
                else:
                    problems.append(f"{path.name}, line {number}: it is longer than {MAX_LINE_BYTES >> 20} MiB")
                    while data and not data.endswith(b"\n"):
                        data = file.readline(MAX_LINE_BYTES)
    except FileNotFoundError:
        return
    except OSError as error:
        problems.append(f"{path.name}: it cannot be read: {error.strerror or error}")


def read_json_lines(path: Path, problems: list[str]) -> Iterator[dict[str, Any]]:
    """The lines of a file that `JsonLinesSink` wrote or writes, none if there is no file.

    `problems` gets a line for each one that cannot be read, also for an incomplete last one. Of the metrics of a line
    those that are no numbers are left out.
    """
    for number, line in complete_lines(path, problems):
        try:
            row = json.loads(line)
            step, at = int(row["step"]), float(row["time"])
            float(step)  # a step that no float can hold has no place on an axis
            metrics = {str(name): float(value) for name, value in row["metrics"].items() if _is_number(value)}
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            problems.append(f"{path.name}, line {number}: no object with step, time and metrics")
            continue
        if not math.isfinite(at):
            problems.append(f"{path.name}, line {number}: its time {at} is no finite number")
            continue
        yield {"step": step, "time": at, "metrics": metrics}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) or value in ("NaN", "Infinity", "-Infinity")
