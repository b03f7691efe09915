"""Writes metrics to where they are kept: a file of JSON lines here, TensorBoard and Weights & Biases elsewhere."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rollouts.errors import ArgumentError
from rollouts.numbers import finite_number
from rollouts.observability.json_lines import read_json_lines
from rollouts.observability.periodic import PeriodicThread
from rollouts.observability.run_metrics import RunMetrics

log = logging.getLogger("rollouts.observability")

#: The section of the metrics of a runner, and that of the figures of a trainer.
RUNNER, TRAINING = "runner", "training"


class MetricSink(Protocol):
    """Receives numbers by name. Called from one thread at a time."""

    def write(self, section: str, step: int, values: Mapping[str, float]) -> None:
        """Keep `values` as those of step `step` of a section, "runner" or "training". Steps of a section ascend."""
        ...

    def close(self) -> None:
        """Write what is not written yet. Has no effect on a closed sink."""
        ...


class JsonLinesSink:
    """Appends a line for each `write` to a file: {"step", "time" (seconds since the epoch), "metrics"}.

    It keeps one section, whose name is not written. A number that is not finite is the text "NaN", "Infinity" or
    "-Infinity". Raises `OSError`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        end = _end_of_complete_lines(Path(path))
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  `close` closes it
        if end is not None:
            self._file.truncate(end)

    def write(self, section: str, step: int, values: Mapping[str, float]) -> None:
        metrics = {name: _json_number(value) for name, value in values.items()}
        self._file.write(json.dumps({"step": step, "time": time.time(), "metrics": metrics}) + "\n")
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class MetricHistory:
    """Writes the metrics of a runner into sinks, at the start, every `seconds` and at the end, and closes the sinks.

        metrics = RunMetrics()
        with MetricHistory(metrics, [TensorBoardSink("logs")]):
            async with Runner(..., listeners=[metrics]) as runner:
                ...

    A step is a second of the run, counted from `first_step`. A thread writes. A sink that raises is logged and gets no
    further metrics: what observes a run does not end it. Raises `ArgumentError` for `seconds` that are not above 0.
    """

    def __init__(
        self, metrics: RunMetrics, sinks: Sequence[MetricSink], *, seconds: float = 10.0, first_step: int = 0
    ) -> None:
        number = finite_number(seconds)
        if number is None or number <= 0:
            raise ArgumentError("seconds", seconds, "pass a number of seconds above 0")
        self._metrics = metrics
        self._sinks = list(sinks)
        self._failed: list[MetricSink] = []
        self._first_step = first_step
        self._thread = PeriodicThread(self._write, number, "rollouts-metric-history")

    def __enter__(self) -> Self:
        self._write()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._thread.stop()
        self._write()
        for sink in [*self._sinks, *self._failed]:  # those too: they may hold what they received before
            try:
                sink.close()
            except Exception:  # as for `write`
                log.exception("%s could not be closed", type(sink).__name__)

    def _write(self) -> None:
        values = self._metrics.metrics()
        step = self._first_step + int(values["run_seconds"])
        for sink in tuple(self._sinks):
            try:
                sink.write(RUNNER, step, values)
            except Exception:  # a disk may be full, and a library of others may raise anything
                log.exception("%s failed; it gets no further metrics", type(sink).__name__)
                self._sinks.remove(sink)
                self._failed.append(sink)


def last_step(path: Path) -> int:
    """The step of the last line of a file of `JsonLinesSink`; 0 without lines."""
    return max((int(row["step"]) for row in read_json_lines(path, [])), default=0)


def _end_of_complete_lines(path: Path) -> int | None:
    """Where the last complete line ends, if a killed process left an incomplete one after it."""
    if not path.exists():
        return None
    content = path.read_bytes()
    return None if content.endswith(b"\n") or not content else content.rfind(b"\n") + 1


def _json_number(value: float) -> float | str:
    number = float(value)
    if math.isfinite(number):
        return number
    return "NaN" if math.isnan(number) else "Infinity" if number > 0 else "-Infinity"
