"""Clients of the package `tinker` against a server in a thread, and the adapters that it writes."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tinker
from family_rows import LoadedFamily, Row
from images import png
from safetensors.torch import load_file
from served_in_thread import ServedInThread
from tinker import types
from tinker.lib.api_future_impl import _APIFuture
from tinker.lib.client_connection_pool_type import ClientConnectionPoolType
from trainer_checks import peft_model, plain_gradients, plain_names, random_weights

from rollouts.tinker.model_app import model_app
from rollouts.training.trainer import Datum

KEYS = ("tml-one", "tml-two")
#: With these numbers a step of AdamW subtracts the gradient itself, whatever the steps before it were.
PLAIN_STEP = types.AdamParams(learning_rate=1e10, beta1=0.0, beta2=0.0, eps=1e10)
FIRST_STEP = types.AdamParams(learning_rate=0.05)


class Server:
    """A server of a family's model, with two users."""

    def __init__(self, family: LoadedFamily, directory: Path) -> None:
        self.family = family
        self.directory = directory
        options = {"device": "cpu", "tokens_per_pass": 150}
        self._served = ServedInThread(model_app(family.directory, directory, names=["tiny"], keys=KEYS, **options))
        self._clients: dict[int, tinker.ServiceClient] = {}

    def client(self, user: int = 0) -> tinker.ServiceClient:
        if user not in self._clients:
            self._clients[user] = tinker.ServiceClient(base_url=self._served.base_url, api_key=KEYS[user])
        return self._clients[user]

    def training(self, seed: int = 1, client: tinker.ServiceClient | None = None) -> tinker.TrainingClient:
        """A new adapter. It has had a step: the product of a new one is 0, which hides half of its gradients."""
        service = client or self.client()
        training = service.create_lora_training_client("tiny", rank=4, seed=seed, train_unembed=False).result()
        row = self.family.row("the first step")
        training.forward_backward([datum_of(row, random_weights(row.sample, seed))], "cross_entropy").result()
        training.optim_step(FIRST_STEP).result()
        return training

    def adapter(self, training: tinker.TrainingClient, name: str) -> Path:
        """The directory that the server writes for a sampler."""
        path = training.save_weights_for_sampler(name).result().path
        (found,) = self.directory.glob(f"user-*/{path.removeprefix('tinker://')}")
        return found

    def post(self, path: str, body: Any) -> Any:
        """The answer to the first user's request."""
        return self._served.post(f"/api/v1/{path}", body, {"x-api-key": KEYS[0]})

    def stop(self) -> None:
        for client in self._clients.values():
            client.close("success").result()
        self._served.stop()


class Gradients:
    """Of an adapter: those that it gets inside the block, by the names of its file."""

    def __init__(self, server: Server, training: tinker.TrainingClient) -> None:
        self.server, self.training = server, training

    def __enter__(self) -> Gradients:
        self.before = self.server.adapter(self.training, "before")
        return self

    def __exit__(self, error: object, *_: object) -> None:
        if error is None:
            self.training.optim_step(PLAIN_STEP).result()
            before, after = weights(self.before), weights(self.server.adapter(self.training, "after"))
            self.found = {name: before[name] - after[name] for name in before}

    def assert_are_those_of(self, rows: Sequence[Row], data: Sequence[Datum]) -> None:
        """Equal within 1e-5 to the gradients of a plain loop over transformers' and PEFT's model."""
        model = peft_model(self.server.family.directory, self.before)
        expected = plain_names(plain_gradients(model, [row.sample for row in rows], data))
        assert self.found.keys() == expected.keys()
        for name, value in expected.items():
            largest = max(1.0, np.abs(value).max())
            np.testing.assert_allclose(self.found[name], value, atol=1e-5 * largest, rtol=0, err_msg=name)
        assert max(np.abs(value).max() for value in expected.values()) > 1e-2


def weights(directory: Path) -> dict[str, np.ndarray]:
    return {name: value.numpy() for name, value in load_file(directory / "adapter_model.safetensors").items()}


def weighted(rows: Sequence[Row]) -> list[Datum]:
    return [random_weights(row.sample, seed) for seed, row in enumerate(rows)]


def datum_of(row: Row, datum: Datum) -> types.Datum:
    """What a client sends for a datum of a row without videos: text around the files of the images."""
    chunks: list[Any] = []
    at = 0
    for (_, where), pixels in zip(datum.media, row.images, strict=True):
        chunks.append(types.EncodedTextChunk(tokens=datum.token_ids[at : where.offset].tolist()))
        chunks.append(types.ImageChunk(data=png(pixels), format="png", expected_tokens=where.length))
        at = where.end
    chunks.append(types.EncodedTextChunk(tokens=datum.token_ids[at:].tolist()))
    inputs = {"target_tokens": datum.target_ids.astype(np.int64), "weights": datum.inputs["weights"]}
    return types.Datum(types.ModelInput(chunks=chunks), inputs)


def post(training: tinker.TrainingClient, request: Any) -> Any:
    """Send a request with a number of its own; returns the future of its result."""
    holder = training.holder
    rows = isinstance(request, types.ForwardBackwardRequest)
    kind = types.ForwardBackwardOutput if rows else types.OptimStepResponse

    async def send() -> Any:
        with holder.aclient(ClientConnectionPoolType.TRAIN) as client:
            call = client.training.forward_backward if rows else client.training.optim_step
            return await call(request=request)

    answer = holder.run_coroutine_threadsafe(send()).result()
    return _APIFuture(kind, holder, answer, request_start_time=time.time(), request_type=kind.__name__)


def request_of(training: tinker.TrainingClient, seq_id: int, data: Sequence[types.Datum]) -> Any:
    rows = types.ForwardBackwardInput(data=list(data), loss_fn="cross_entropy")
    return types.ForwardBackwardRequest(forward_backward_input=rows, model_id=training.model_id, seq_id=seq_id)
