"""Writes metrics to where they are kept: a file of JSON lines here, TensorBoard and Weights & Biases elsewhere."""

import json
import logging
import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, Protocol, Self

from renderers.errors import MissingExtraError
from rollouts.errors import RolloutsError
from rollouts.observability.engine_load import PeriodicThread
from rollouts.observability.run_metrics import RunMetrics
from rollouts.values import check_positive, json_number

#: A longer line is no line of metrics, and is not read into memory as a whole.
MAX_LINE_BYTES: Final = 16 << 20


def complete_lines(path: Path, problems: list[str]) -> Iterator[tuple[int, str]]:
    """The complete lines of a file with their numbers, from 1; none if there is no file.

    `problems` gets a line for what is not read: a file that cannot be opened or read, lines longer than 16
    MiB, and a last line without a line feed, which is being written or was cut off.
    """
    try:
        with open(path, "rb") as file:
            number = 0
            while data := file.readline(MAX_LINE_BYTES):
                number += 1
                if data.endswith(b"\n"):
                    yield number, data.decode("utf-8", "replace")
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

    `problems` gets a line for each one that cannot be read, also for an incomplete last one. Of the metrics
    of a line those that are no numbers are left out.
    """
    for number, line in complete_lines(path, problems):
        try:
            row = json.loads(line)
            step, at = int(row["step"]), float(row["time"])
            float(step)  # a step that no float can hold has no place on an axis
            metrics = {
                str(name): float(value)
                for name, value in row["metrics"].items()
                if isinstance(value, int | float) or value in ("NaN", "Infinity", "-Infinity")
            }
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            problems.append(f"{path.name}, line {number}: no object with step, time and metrics")
            continue
        if not math.isfinite(at):
            problems.append(f"{path.name}, line {number}: its time {at} is no finite number")
            continue
        yield {"step": step, "time": at, "metrics": metrics}


log = logging.getLogger("rollouts.observability")

#: The section of the metrics of a runner, and that of the figures of a trainer.
RUNNER, TRAINING = "runner", "training"


class MetricSink(Protocol):
    """Receives numbers by name. Called from one thread at a time."""

    def write(self, section: str, step: int, values: Mapping[str, float]) -> None:
        """Keep `values` as those of step `step` of a section, "runner" or "training". Steps of a section ascend."""

    def close(self) -> None:
        """Write what is not written yet. Has no effect on a closed sink."""


class JsonLinesSink:
    """Appends a line for each `write` to a file: {"step", "time" (seconds since the epoch), "metrics"}.

    It keeps one section, whose name is not written. A number that is not finite is the text "NaN", "Infinity"
    or "-Infinity". Raises `OSError`.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        # Or the first line of this process would continue one that a killed process has left.
        cut_incomplete_line(Path(path))
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115  `close` closes it

    def write(self, section: str, step: int, values: Mapping[str, float]) -> None:
        metrics = {name: json_number(value) for name, value in values.items()}
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

    A step is a second of the run, counted from `first_step`. A thread writes. A sink that raises is logged
    and gets no further metrics: what observes a run does not end it. Raises `ArgumentError` for `seconds`
    that are not above 0.
    """

    def __init__(
        self, metrics: RunMetrics, sinks: Sequence[MetricSink], *, seconds: float = 10.0, first_step: int = 0
    ) -> None:
        self._metrics = metrics
        self._sinks = tuple(sinks)
        self._working = list(sinks)
        self._first_step = first_step
        self._thread = PeriodicThread(
            self._write,
            check_positive("seconds", seconds, "pass a number of seconds above 0"),
            "rollouts-metric-history",
        )

    def __enter__(self) -> Self:
        self._write()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._thread.stop()
        self._write()
        for sink in self._sinks:  # also those that failed: they may hold what they received before
            try:
                sink.close()
            except Exception:  # as for `write`
                log.exception("%s could not be closed", type(sink).__name__)

    def _write(self) -> None:
        values = self._metrics.metrics()
        step = self._first_step + int(values["run_seconds"])
        # A copy, because a sink that fails is removed from the list.
        for sink in tuple(self._working):
            try:
                sink.write(RUNNER, step, values)
            except Exception:  # a disk may be full, and a library of others may raise anything
                log.exception("%s failed; it gets no further metrics", type(sink).__name__)
                self._working.remove(sink)


def last_step(path: Path) -> int:
    """The step of the last line of a file of `JsonLinesSink`; 0 without lines."""
    return max((int(row["step"]) for row in read_json_lines(path, [])), default=0)


def cut_incomplete_line(path: Path) -> None:
    """Cut off what stands after the last line feed of a file, if there is one: a killed process has left it."""
    if path.exists():
        with open(path, "rb") as lines:
            end = sum(len(line) for line in lines if line.endswith(b"\n"))
        os.truncate(path, end)


class TensorBoardSink:
    """Writes metrics as scalars into an event file of TensorBoard. Needs the extra `tensorboard`.

    Tags are SECTION/NAME, for example `runner/turns_per_second` and `training/loss`; `tensorboard --logdir
    DIRECTORY` shows them. Each process that writes into a directory has a file of its own there. Raises
    `MissingExtraError`.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            # tensorboardX and not tensorboard: it only writes the files, and installs neither a server nor
            # gRPC.
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise MissingExtraError("metrics for TensorBoard", "tensorboard", "tensorboardX") from error
        self._writer = SummaryWriter(logdir=os.fspath(directory))

    def write(self, section: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{section}/{name}", float(value), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandbSink:
    """Logs metrics as a run of Weights & Biases. Needs the extra `wandb`.

    Keys are SECTION/NAME, for example `runner/turns_per_second` and `training/loss`, over `runner/step` and
    `training/step`. `directory` gets the folder `wandb` with the local files. `mode` "offline" sends nothing:
    `wandb sync` does that later; None is what WANDB_MODE says, else "online". The key is that of `wandb
    login` or WANDB_API_KEY. `config` are the values that the run is listed with. Neither the code, the
    repository nor the output of the program is recorded.

    Raises `MissingExtraError`, and `RolloutsError` if the run cannot be made.
    """

    def __init__(
        self,
        project: str,
        *,
        directory: str | os.PathLike[str],
        entity: str | None = None,
        name: str | None = None,
        mode: Literal["online", "offline"] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError("metrics for Weights & Biases", "wandb", "wandb") from error
        settings = wandb.Settings(console="off", silent=True, save_code=False, disable_code=True, disable_git=True)
        Path(directory).mkdir(parents=True, exist_ok=True)  # wandb writes into /tmp where it is missing
        try:
            self._run = wandb.init(
                project=project,
                entity=entity,
                name=name,
                dir=os.fspath(directory),
                mode=mode,
                config=dict(config or {}),
                # A run that the program has already goes on: the default would return it, or end it.
                reinit="create_new",
                settings=settings,
            )
        except wandb.Error as error:
            cure = "run `wandb login`, or choose the mode offline"
            raise RolloutsError(f"Weights & Biases cannot be started: {error!s}; {cure}") from error
        for section in (RUNNER, TRAINING):
            self._run.define_metric(f"{section}/*", step_metric=f"{section}/step")

    def write(self, section: str, step: int, values: Mapping[str, float]) -> None:
        named = {f"{section}/{name}": float(value) for name, value in values.items()}
        self._run.log({**named, f"{section}/step": step})

    def close(self) -> None:
        self._run.finish()
