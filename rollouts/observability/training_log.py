"""The figures of training steps and their mismatch, written beside the episodes, for `rollouts report`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

import numpy as np

from rollouts.compared_tokens import ComparedTokens
from rollouts.observability.metric_sinks import TRAINING, JsonLinesSink, MetricSink
from transport import MalformedError, RecordReader, RecordWriter

if TYPE_CHECKING:  # needs torch
    from rollouts.training.mismatch import MismatchReport

TRAINING_FILE: Final = "training.jsonl"
MISMATCH_FILE: Final = "mismatch.mmr"

_COLUMNS: Final = {"sampler": "f", "trainer": "f", "sample": "i", "position": "i", "item": "i"}
_KINDS: Final = {**_COLUMNS, "current": "b"}
_TABLES: Final = ("names", "media_modalities")


class TrainingLog:
    """Writes a line for each training step to `training.jsonl` of a directory, and its mismatch to `mismatch.mmr`.

        with TrainingLog("run-out", sinks=[TensorBoardSink("logs")]) as log:
            log.write(step, {"loss": 0.31, "entropy": 1.2}, mismatch=mismatch_report(batch, logprobs))

    `sinks` get the same figures under the section "training", and are closed with the log. A log that the
    directory has is continued. Raises `OSError`, and `FileLockedError` if another process writes the log.
    """

    def __init__(self, directory: str | os.PathLike[str], *, sinks: Sequence[MetricSink] = ()) -> None:
        self._directory = Path(directory)
        self._directory.mkdir(parents=True, exist_ok=True)
        self._sinks: list[MetricSink] = [JsonLinesSink(self._directory / TRAINING_FILE), *sinks]
        self._mismatch: RecordWriter | None = None

    def write(self, step: int, figures: Mapping[str, float], *, mismatch: MismatchReport | None = None) -> None:
        """Write the figures of step `step`; steps ascend. The names are yours; the report draws a curve for each.

        `mismatch` adds the figures `mismatch_mean`, `mismatch_max` and `mismatch_kl`, in nats, of the tokens that
        its `trainer_version` has sampled, of all where it has none, and keeps the log-probabilities of each
        token: 21 bytes a token. All sinks get the figures, also where one raises.
        """
        values = dict(figures)
        if mismatch is not None and mismatch.tokens:
            from rollouts.training.mismatch.report import difference_statistics  # torch is there, of who has made it

            current = mismatch.compared.sampled_by(mismatch.trainer_version)
            if current.any():
                statistics = difference_statistics(mismatch.compared.difference[current])
                values |= {
                    "mismatch_mean": statistics.mean_abs,
                    "mismatch_max": statistics.max_abs,
                    "mismatch_kl": statistics.k3,
                }
            self._append(step, mismatch.compared, current)
        with ExitStack() as writing:
            for sink in reversed(self._sinks):
                writing.callback(sink.write, TRAINING, step, values)

    def _append(self, step: int, compared: ComparedTokens, current: np.ndarray) -> None:
        if self._mismatch is None:
            self._mismatch = RecordWriter(self._directory / MISMATCH_FILE)
        columns = {name: getattr(compared, name) for name in _COLUMNS}
        tables = {name: list(getattr(compared, name)) for name in _TABLES}
        self._mismatch.append({"step": step, "current": current, **columns, **tables})

    def close(self) -> None:
        """Close the files and the sinks, all of them, whatever one raises."""
        with ExitStack() as closing:
            for closed in (self._mismatch, *reversed(self._sinks)):
                if closed is not None:
                    closing.callback(closed.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def read_step_mismatch(reader: RecordReader, record: int, path: Path) -> tuple[ComparedTokens, np.ndarray]:
    """One record of `mismatch.mmr`, without `turn` and `version`, and which tokens the current weights have sampled.

    Raises `TransportError`.
    """
    held = reader[record]
    if reason := _violation(held):
        raise MalformedError(f"{path}, record {record}: {reason}", "Delete the file if another program wrote it.")
    tables: dict[str, Any] = {name: tuple(held[name]) for name in _TABLES}
    return ComparedTokens(**{name: held[name] for name in _COLUMNS}, **tables), held["current"]


def _violation(held: Any) -> str:
    """What is wrong with a record; empty where nothing is."""
    if not isinstance(held, dict) or set(held) != {"step", *_KINDS, *_TABLES}:
        return "it does not hold the columns of compared tokens"
    for name in _TABLES:
        if not isinstance(held[name], list | tuple) or not all(isinstance(entry, str) for entry in held[name]):
            return f"{name} is no list of texts"
    for name, kind in _KINDS.items():
        column = held[name]
        if not isinstance(column, np.ndarray) or column.ndim != 1 or column.dtype.kind != kind:
            return f"{name} is no array of numbers"
        if len(column) != len(held["sampler"]):
            return f"{name} has another length than sampler"
    # The columns that are indices, and the tables that they are into.
    for name, table in {"sample": "names", "item": "media_modalities"}.items():
        column = held[name]
        lowest = 0 if name == "sample" else -1
        if len(column) and not lowest <= column.min() <= column.max() < len(held[table]):
            return f"{name} has an index outside {table}"
    return ""
