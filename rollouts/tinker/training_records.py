"""The figures of the models that a server trains, step by step: the files that `rollouts report` reads, and sinks."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from rollouts.observability.metric_sinks import MetricSink, last_step
from rollouts.observability.training_log import TRAINING_FILE, TrainingLog

if TYPE_CHECKING:  # they need torch
    from rollouts.training.datums import Datum
    from rollouts.training.trainer import LossResult

log = logging.getLogger("rollouts.tinker")


@dataclass(slots=True)
class _Sums:
    """What the calls of a step add up to. `means` are sums over tokens with the number of tokens, by name."""

    rows: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    seconds: float = 0.0
    surprisal: float = 0.0
    weight: float = 0.0
    has_negative_weights: bool = False
    sums: dict[str, float] = field(default_factory=dict)
    means: dict[str, tuple[float, int]] = field(default_factory=dict)
    largest: dict[str, float] = field(default_factory=dict)

    def add(self, data: Sequence[Datum], loss: str, result: LossResult, seconds: float) -> None:
        trained = sum(map(_trained_tokens, data))
        self.rows += len(data)
        self.tokens += sum(map(len, data))
        self.trained_tokens += trained
        self.seconds += seconds
        if loss == "cross_entropy":
            for datum, logprobs in zip(data, result.logprobs, strict=True):
                weights = datum.inputs.get("weights", np.ones(datum.target_ids.shape)).astype(np.float64)
                self.has_negative_weights |= bool((weights < 0).any())
                self.surprisal -= float(weights[weights > 0] @ logprobs[weights > 0])
                self.weight += float(weights.sum())
        for key, value in result.metrics.items():
            name, _, reduction = key.partition(":")
            if reduction == "sum":
                named = f"loss/{loss}" if name == "loss" else f"{name}_sum"
                self.sums[named] = self.sums.get(named, 0.0) + value
            elif reduction == "mean" and trained:
                total, count = self.means.get(f"{name}_mean", (0.0, 0))
                self.means[f"{name}_mean"] = total + value * trained, count + trained
            elif reduction == "max":
                self.largest[f"{name}_max"] = max(value, self.largest.get(f"{name}_max", value))

    def figures(self) -> dict[str, float]:
        figures = dict(self.sums)
        if self.weight > 0 and not self.has_negative_weights:
            figures["nll"] = self.surprisal / self.weight
        figures |= {name: total / count for name, (total, count) in self.means.items()}
        return figures | self.largest | {"rows": self.rows, "tokens": self.tokens}


def _trained_tokens(datum: Datum) -> int:
    names = ("mask", "sequence_ratio_mask", "advantages", "weights")
    values = next((datum.inputs[name] for name in names if name in datum.inputs), np.ones(len(datum)))
    return int(np.count_nonzero(values.reshape(len(datum), -1).any(axis=1)))


@dataclass(slots=True)
class _Model:
    """`log` is None where it could not be opened. The sums are those since the last step."""

    log: TrainingLog | None
    step: int
    trained: _Sums = field(default_factory=_Sums)
    forward: _Sums = field(default_factory=_Sums)


class TrainingRecords:
    """Writes a line for each step of a model to `DIRECTORY/MODEL_ID/training.jsonl`, and to sinks.

        records = TrainingRecords("tinker-out", sinks=lambda model_id: [TensorBoardSink(f"tinker-out/{model_id}/logs")])
        records.trained(model_id, data, "cross_entropy", result, seconds)
        records.stepped(model_id, 1, learning_rate=1e-4, grad_norm=0.3, seconds=0.1)

    The line of a step sums up the calls since the step before: `loss/NAME`, the sum of the loss of that name;
    `nll`, the weighted mean of -log p over the tokens of `cross_entropy`, unless a weight is negative; means
    and maxima of the trainer's own metrics, such as `ratio_mean` and `mismatch_max`; `rows`, `tokens`, and
    `trained_tokens`, those with a weight or an advantage; `grad_norm`, `learning_rate`, and `seconds`, the
    time of the trainer.

    A forward pass alone has a line of its own at the step that has been made, with names that begin with
    `forward_`; it sums up those since that step, so that the last one holds for all batches of an evaluation.

    `sinks` makes those of a model, which are closed with it. What cannot be written is logged, and training
    goes on. Threads may share it.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, sinks: Callable[[str], Sequence[MetricSink]] = lambda _: ()
    ) -> None:
        self._directory = Path(directory)
        self._sinks = sinks
        self._lock = threading.Lock()
        self._models: dict[str, _Model] = {}

    def trained(
        self,
        model_id: str,
        data: Sequence[Datum],
        loss: str,
        result: LossResult,
        seconds: float,
        *,
        forward_only: bool = False,
    ) -> None:
        """A call of `Trainer.forward_backward` or of `Trainer.forward` has succeeded."""
        with self._lock:
            model = self._model(model_id)
            (model.forward if forward_only else model.trained).add(data, loss, result, seconds)
            if forward_only:
                figures = {f"forward_{name}": value for name, value in model.forward.figures().items()}
                self._write(model_id, model.step, figures)

    def stepped(self, model_id: str, step: int, *, learning_rate: float, grad_norm: float, seconds: float) -> None:
        """Step number `step` of AdamW, counted from 1, has changed the model."""
        with self._lock:
            model = self._model(model_id)
            sums = model.trained
            figures = {
                **sums.figures(),
                "trained_tokens": sums.trained_tokens,
                "grad_norm": grad_norm,
                "learning_rate": learning_rate,
                "seconds": sums.seconds + seconds,
            }
            model.step, model.trained, model.forward = step, _Sums(), _Sums()
            self._write(model_id, step, figures)

    def forgotten(self, model_id: str) -> None:
        """The gradients of a model were forgotten without a step: it was loaded, or they were not finite."""
        with self._lock:
            if model_id in self._models:
                self._models[model_id].trained = _Sums()

    def unloaded(self, model_id: str) -> None:
        """Close the files and the sinks of a model."""
        with self._lock:
            model = self._models.pop(model_id, None)
            if model is not None and model.log is not None:
                with _logged("the training log of model %s could not be closed", model_id):
                    model.log.close()

    def close(self) -> None:
        """Close the files and the sinks of all models."""
        for model_id in list(self._models):
            self.unloaded(model_id)

    def _model(self, model_id: str) -> _Model:
        if model_id not in self._models:
            directory, opened = self._directory / model_id, None
            with _logged("%s: no training log is written for this model", directory):
                opened = TrainingLog(directory, sinks=self._sinks(model_id))
            self._models[model_id] = _Model(opened, last_step(directory / TRAINING_FILE))
        return self._models[model_id]

    def _write(self, model_id: str, step: int, figures: dict[str, float]) -> None:
        if (opened := self._models[model_id].log) is not None:
            with _logged("step %d of model %s was not written", step, model_id):
                opened.write(step, figures)


@contextmanager
def _logged(text: str, *values: object) -> Iterator[None]:
    """Log an error of the block: a disk may be full, and a library of others may raise anything."""
    try:
        yield
    except Exception:
        log.exception(text, *values)
