"""Log records and events of a runner as JSON lines."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Self, TextIO

import numpy as np

from rollouts.errors import short_repr
from rollouts.runner.events import (
    EpisodeEnded,
    EpisodeRetried,
    EpisodeStarted,
    EpisodeWaiting,
    GroupStale,
    RunnerEvent,
    TurnFinished,
    WeightUpdateFailed,
)


@dataclass(frozen=True, slots=True)
class EpisodePosition:
    """An episode, its place in its group, and its turn. `index`, `attempt` and `turn` count from 0."""

    episode_id: str
    task_id: str
    index: int
    attempt: int
    turn: int


_position: ContextVar[EpisodePosition | None] = ContextVar("rollouts_episode_position", default=None)


def current_episode() -> EpisodePosition | None:
    """The episode that the calling code belongs to; None outside of episodes.

    It is known in an environment, an engine or a renderer that an episode of a runner calls, also on the threads of
    `ThreadedEnvironment` and `RendererPool`, while the runner has an `EpisodeLogContext` (or `JsonLogs`) as a listener.
    """
    return _position.get()


class EpisodeLogContext:
    """A listener of a runner that keeps `current_episode`, in the task of each episode."""

    def __call__(self, event: RunnerEvent) -> None:
        if isinstance(event, EpisodeWaiting):
            position = _position.get()
            if position is not None and position.turn != event.turn and position.episode_id == event.episode_id:
                _position.set(
                    EpisodePosition(position.episode_id, position.task_id, position.index, position.attempt, event.turn)
                )
        elif isinstance(event, EpisodeStarted):
            _position.set(EpisodePosition(event.episode_id, event.task_id, event.index, event.attempt, 0))
        elif isinstance(event, EpisodeEnded):
            position = _position.get()
            if position is not None and position.episode_id == event.episode_id:
                _position.set(None)


class EpisodeLogFilter(logging.Filter):
    """Gives each log record the attributes `episode_id`, `task_id`, `episode_index`, `attempt` and `turn`.

    They are empty texts outside of episodes, so that a format such as "%(episode_id)s %(message)s" always works. A
    record that has an attribute of the name already keeps it.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        position = _position.get()
        values: tuple[object, ...] = ("", "", "", "", "")
        if position is not None:
            values = (position.episode_id, position.task_id, position.index, position.attempt, position.turn)
        for name, value in zip(POSITION_ATTRIBUTES, values, strict=True):
            if not hasattr(record, name):
                setattr(record, name, value)
        return True


#: What `EpisodeLogFilter` adds to a record.
POSITION_ATTRIBUTES = ("episode_id", "task_id", "episode_index", "attempt", "turn")

event_log = logging.getLogger("rollouts.events")

#: The attributes of every record; others were passed as `extra`.
_OF_EVERY_RECORD = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonLinesFormatter(logging.Formatter):
    """A log record as one line of JSON.

    Keys: `time` (ISO 8601, UTC), `level`, `logger`, `message`; inside an episode those of `EpisodeLogFilter`; inside a
    span of OpenTelemetry `trace_id` and `span_id`, in hexadecimal; `exception` (the traceback) if there is one; and
    what was passed as `extra`. A value that JSON has no type for becomes text; NaN and infinity too.
    """

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="microseconds"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        line |= {name: value for name in POSITION_ATTRIBUTES if (value := getattr(record, name, "")) != ""}
        line |= _span_ids()
        for name, value in vars(record).items():
            if name not in _OF_EVERY_RECORD and name not in POSITION_ATTRIBUTES:
                line[name] = value
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        text = json.dumps(_plain(line), ensure_ascii=False)
        # A surrogate, which UTF-8 has no bytes for, becomes the escape that JSON has for it.
        return text.encode("utf-8", "backslashreplace").decode()


class JsonLogs:
    """Writes log records, and the events of a runner of which it is a listener, as JSON lines (`JsonLinesFormatter`).

        with JsonLogs("run.log.jsonl") as logs:
            async with Runner(..., listeners=[logs]) as runner:
                ...

    Inside the `with` block it has a handler on the root logger, so that the file also has the records of environments
    and libraries, those of an episode with its id, task and turn (`current_episode`). `output` is a path, which is
    appended to, or an open text file. Records below `level` are left out; the level of the root logger is lowered to it
    for the block, in which its other handlers, such as that of a terminal, go on receiving what they received before.
    Events are records of the logger "rollouts.events" with the fields of the event, and no other handler receives them:
    DEBUG for `EpisodeWaiting` and `TurnFinished`, WARNING for failures, INFO for the others. Raises `OSError` if the
    file cannot be opened.
    """

    def __init__(self, output: str | Path | TextIO, *, level: int = logging.INFO) -> None:
        self._output = output
        self._level = level
        self._context = EpisodeLogContext()
        self._handler: logging.Handler | None = None
        self._former_level = logging.NOTSET
        self._limited: list[tuple[logging.Handler, _FormerLevel]] = []

    def __call__(self, event: RunnerEvent) -> None:
        if isinstance(event, EpisodeEnded):  # inside the episode, whose position ends with the event
            self._write(event)
            self._context(event)
        else:
            self._context(event)
            self._write(event)

    def _write(self, event: RunnerEvent) -> None:
        level = _level(event)
        if self._handler is not None and level >= self._level and event_log.isEnabledFor(level):
            self._handler.handle(_event_record(event, level))

    def __enter__(self) -> Self:
        if isinstance(self._output, str | Path):
            handler: logging.Handler = logging.FileHandler(self._output, encoding="utf-8")
        else:
            handler = logging.StreamHandler(self._output)
        handler.setLevel(self._level)
        handler.addFilter(EpisodeLogFilter())
        handler.setFormatter(JsonLinesFormatter())
        root = logging.getLogger()
        self._handler, self._former_level = handler, root.level
        self._limited = [(other, _FormerLevel(root.level)) for other in root.handlers]
        for other, limit in self._limited:
            other.addFilter(limit)
        root.addHandler(handler)
        root.setLevel(min(root.level, self._level))
        return self

    def __exit__(self, *_: object) -> None:
        if self._handler is not None:
            root = logging.getLogger()
            root.removeHandler(self._handler)
            root.setLevel(self._former_level)
            for other, limit in self._limited:
                other.removeFilter(limit)
            self._handler.close()
            self._handler = None


class _FormerLevel(logging.Filter):
    """Passes the records that a handler of the root logger received while that logger had `root_level`."""

    def __init__(self, root_level: int) -> None:
        super().__init__()
        self._root_level = root_level

    def filter(self, record: logging.LogRecord) -> bool:
        logger = logging.getLogger(record.name)
        while not logger.level and logger.parent is not None:
            logger = logger.parent
        return record.levelno >= (self._root_level if logger.parent is None else logger.level)


def _event_record(event: RunnerEvent, level: int) -> logging.LogRecord:
    values = {field.name: getattr(event, field.name) for field in fields(event)}
    name = type(event).__name__
    # `index` of an episode is `episode_index` in a record, as in `EpisodeLogFilter`.
    extra = {"episode_index" if key == "index" else key: value for key, value in values.items()}
    return event_log.makeRecord(event_log.name, level, "", 0, name, (), None, extra={"event": name, **extra})


def _level(event: RunnerEvent) -> int:
    if isinstance(event, EpisodeWaiting | TurnFinished):
        return logging.DEBUG
    failed = isinstance(event, EpisodeEnded) and event.outcome == "failed"
    if failed or isinstance(event, EpisodeRetried | GroupStale | WeightUpdateFailed):
        return logging.WARNING
    return logging.INFO


def _span_ids() -> dict[str, str]:
    """The ids of the current span of OpenTelemetry; nothing where it is not used."""
    trace = sys.modules.get("opentelemetry.trace")
    if trace is None:
        return {}
    context = trace.get_current_span().get_span_context()
    if not context.is_valid:
        return {}
    return {"trace_id": f"{context.trace_id:032x}", "span_id": f"{context.span_id:016x}"}


def _plain(value: Any) -> Any:
    """A value of the types of JSON."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, np.generic | np.ndarray):
        return _plain(value.tolist())
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return short_repr(value)
