"""Log records and events of a runner as JSON lines."""

from __future__ import annotations

import json
import logging
import math
import sys
from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO

import numpy as np

from rollouts.error_texts import short_repr
from rollouts.observability.log_context import POSITION_ATTRIBUTES, EpisodeLogContext, EpisodeLogFilter
from rollouts.runner.events import (
    EpisodeEnded,
    EpisodeRetried,
    EpisodeWaiting,
    GroupStale,
    RunnerEvent,
    TurnFinished,
    WeightUpdateFailed,
)

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
    for the block, and its other handlers, such as that of a console, receive no more than before. Events are records of
    the logger "rollouts.events" with the fields of the event: DEBUG for `EpisodeWaiting` and `TurnFinished`, WARNING
    for failures, INFO for the others. Raises `OSError` if the file cannot be opened.
    """

    def __init__(self, output: str | Path | TextIO, *, level: int = logging.INFO) -> None:
        self._output = output
        self._level = level
        self._context = EpisodeLogContext()
        self._handler: logging.Handler | None = None
        self._former_level = logging.NOTSET
        self._other_handlers: list[logging.Handler] = []

    def __call__(self, event: RunnerEvent) -> None:
        if isinstance(event, EpisodeEnded):  # inside the episode, whose position ends with the event
            _log_event(event)
            self._context(event)
        else:
            self._context(event)
            _log_event(event)

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
        self._other_handlers = root.handlers.copy()
        for other in self._other_handlers:
            other.addFilter(self._passed_before)
        root.addHandler(handler)
        root.setLevel(min(root.level, self._level))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._handler is not None:
            root = logging.getLogger()
            root.removeHandler(self._handler)
            root.setLevel(self._former_level)
            for other in self._other_handlers:
                other.removeFilter(self._passed_before)
            self._handler.close()
            self._handler = None

    def _passed_before(self, record: logging.LogRecord) -> bool:
        """Whether a record would have been made with the former level of the root logger."""
        logger: logging.Logger | None = logging.getLogger(record.name)
        while logger is not None and logger.parent is not None:
            if logger.level:  # the record has passed it
                return True
            logger = logger.parent
        return record.levelno >= self._former_level


def _log_event(event: RunnerEvent) -> None:
    level = _level(event)
    if not event_log.isEnabledFor(level):
        return
    values = {field.name: getattr(event, field.name) for field in fields(event)}
    name = type(event).__name__
    # `index` of an episode is `episode_index` in a record, as in `EpisodeLogFilter`.
    extra = {"episode_index" if key == "index" else key: value for key, value in values.items()}
    event_log.log(level, "%s", name, extra={"event": name, **extra})


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
