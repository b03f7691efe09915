"""The requests of a model of the Tinker API, which run one after another: training, and its checkpoints."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tinker.types as types

from rollouts.errors import ArgumentError, SampleError
from rollouts.serve.errors import RequestError
from rollouts.tinker.downloads import save_for_download
from rollouts.tinker.mismatch import mismatch
from rollouts.tinker.run_directory import Kind, uri_of
from rollouts.tinker.sessions import Json, Model, metadata_texts
from rollouts.tinker.training_records import TrainingRecords
from rollouts.tinker.turns import GAP_SECONDS
from rollouts.tinker.wire import Row, TrainRequest, train_result
from rollouts.training.datums import Datum
from rollouts.training.trainer import AdamParams, LossResult

if TYPE_CHECKING:
    from rollouts.tinker.service import Service


class ModelRequests:
    """Each method accepts a request, by its body, and returns `{"request_id": ..., "model_id": ...}`.

    The request waits for its turn then. They raise `RequestError`.
    """

    def __init__(self, service: Service, records: TrainingRecords) -> None:
        self._service = service
        self._backend = service.backend
        self._trainer = service.backend.trainer
        self._directory = service.directory
        self._futures = service.futures
        self._records = records

    def train(self, request: TrainRequest) -> Json:
        """`forward` and `forward_backward`: rows are read at once, and computed in the turn of the request."""
        model = self._service.model(request.model_id)
        reading = asyncio.create_task(asyncio.to_thread(self._data, request.rows))
        reading.add_done_callback(lambda read: read.cancelled() or read.exception())  # an error is that of the turn

        def computed(data: list[Datum]) -> LossResult:
            started = time.monotonic()
            compute = self._trainer.forward if request.forward_only else self._trainer.forward_backward
            result = compute(model.model_id, data, request.loss, request.options, correction=request.correction)
            if self._backend.check_mismatch:
                result = result._replace(metrics=result.metrics | mismatch(data, result))
            seconds, only = time.monotonic() - started, request.forward_only
            self._records.trained(model.model_id, data, request.loss, result, seconds, forward_only=only)
            return result

        async def work() -> bytes:
            return train_result(*await self._backend.train(computed, await reading))

        return self._in_turn(model, request.seq_id, work)

    def optim_step(self, body: types.OptimStepRequest) -> Json:
        model = self._service.model(body.model_id)
        try:
            if not isinstance(body.optim_params, types.AdamParams):
                raise TypeError("they are not those of AdamW, which this server has")
            adam = AdamParams(**body.optim_params.model_dump())
        except (ArgumentError, TypeError) as error:
            raise RequestError(400, f"optim_params: {error}") from error

        def step() -> dict[str, float]:
            started = time.monotonic()
            try:
                metrics = self._trainer.optim_step(model.model_id, adam)
            except ArgumentError:
                self._records.forgotten(model.model_id)
                raise
            model.steps += 1
            figures = {"learning_rate": adam.learning_rate, "grad_norm": metrics["grad_norm"]}
            self._records.stepped(model.model_id, model.steps, **figures, seconds=time.monotonic() - started)
            return metrics

        async def work() -> Json:
            return {"type": body.type, "metrics": await self._backend.train(step)}

        return self._in_turn(model, body.seq_id, work)

    def _data(self, rows: Sequence[Row]) -> list[Datum]:
        places = [f"data[{number}]" for number in range(len(rows))]
        for place, row in zip(places, rows, strict=True):
            if "target_tokens" not in row.inputs:
                raise SampleError(place, "it has no target_tokens; send one target for each token")
        inputs = self._backend.reader.read_rows(
            [(f"{place}.model_input", row.chunks) for place, row in zip(places, rows, strict=True)]
        )
        others = [{name: each for name, each in row.inputs.items() if name != "target_tokens"} for row in rows]
        return [
            Datum(token_ids, row.inputs["target_tokens"], other, media)
            for row, other, (token_ids, media) in zip(rows, others, inputs, strict=True)
        ]

    def save_weights(self, body: types.SaveWeightsRequest) -> Json:
        """Save what training goes on from."""
        return self._save(body, "weights", self._trainer.save, overwrite=body.overwrite)

    def save_external(self, body: types.SaveWeightsExternalRequest) -> Json:
        """Save what can be downloaded."""
        if body.age_encryption_recipients:
            raise RequestError(400, "age_encryption_recipients: this server does not encrypt; leave them out")
        return self._save(body, "external_weights", partial(save_for_download, self._trainer))

    def save_for_sampler(self, body: types.SaveWeightsForSamplerRequest) -> Json:
        """Save what can be sampled from; without a path, begin a sampling session of weights without a name."""
        model, sampling_seq_id = self._service.model(body.model_id), body.sampling_session_seq_id
        if body.kind != "snapshot":
            rule = "samplers of this server keep the weights that they began with; leave kind out, and save after steps"
            raise RequestError(400, f"kind is {body.kind!r}, and {rule}")
        if body.path is not None:
            return self._save(body, "sampler_weights", self._trainer.save_for_sampler)
        if sampling_seq_id is None:
            raise RequestError(400, "save_weights_for_sampler needs a path, or a sampling_session_seq_id")

        async def work() -> Json:
            path = self._directory.unlisted(model.model_id, f"session-{sampling_seq_id}")
            await self._backend.train(self._trainer.save_for_sampler, model.model_id, path)
            uri = uri_of(model.model_id, "unlisted", path.name)
            sampling = model.session.add_sampling(sampling_seq_id, model.base_model, uri, path)
            return {"type": body.type, "path": None, "sampling_session_id": sampling}

        return self._in_turn(model, body.seq_id, work)

    def _save(self, body: Any, kind: Kind, save: Callable[[str, Path], object], *, overwrite: bool = False) -> Json:
        model = self._service.model(body.model_id)
        options = {
            "overwrite": overwrite,
            "ttl_seconds": body.ttl_seconds,
            "user_metadata": metadata_texts(getattr(body, "user_metadata", None)) or None,
        }

        async def work() -> Json:
            name = body.path or f"step-{model.steps:06}"
            with self._directory.saving(model.model_id, kind, name, **options) as path:
                await self._backend.train(save, model.model_id, path)
            return {"type": body.type, "path": uri_of(model.model_id, kind, name)}

        return self._in_turn(model, body.seq_id, work)

    def load_weights(self, body: types.LoadWeightsRequest) -> Json:
        """Go on from a checkpoint; without a model, begin one with its weights."""
        if body.weights_access_token is not None:
            raise RequestError(400, "weights_access_token is not supported by this server")
        if body.model_id is None:
            return self._service.create_model_from(body)
        model = self._service.model(body.model_id)

        async def work() -> Json:
            path = self._directory.weights(body.path, "weights")
            await self._backend.train(self._trainer.load, model.model_id, path, with_optimizer=body.optimizer)
            self._records.forgotten(model.model_id)
            return {"type": body.type, "path": body.path}

        return self._in_turn(model, body.seq_id, work)

    def refuse(self, model_id: str, seq_id: int, error: RequestError) -> Json:
        """Accept a request of a model that fails with this error in its turn."""

        async def work() -> Json:
            raise error

        return self._in_turn(self._service.model(model_id), seq_id, work)

    def _in_turn(self, model: Model, seq_id: int | None, work: Callable[[], Awaitable[Json | bytes]]) -> Json:
        """Accept a request of a model: `work` runs once, after those of smaller numbers.

        It runs also for a client that has ended: a script may save weights last, and wait for nothing.
        """
        if seq_id is None or seq_id < 1:
            raise RequestError(400, f"seq_id is {seq_id}; it counts the requests of a model from 1")
        request_id = f"{model.model_id}/{seq_id}"
        answer: Json = {"request_id": request_id, "model_id": model.model_id}
        if request_id in self._futures:
            return answer
        if not model.turns.accept(seq_id):
            text = f"request {seq_id} of the model was done, and its result is gone; or those after it have waited"
            raise RequestError(400, f"{text} {GAP_SECONDS:g} s for it, and it is skipped: send it as a new request")

        async def in_turn() -> Json | bytes:
            try:
                await model.turns.take(seq_id)
                return await work()
            finally:
                # Also after an error: the requests of larger numbers wait for it.
                model.turns.end(seq_id)

        self._futures.submit(request_id, in_turn)
        return answer
