"""Sessions, models and sampling sessions of a server of the Tinker API, and what their requests do."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np

from rollouts.engines.protocol import TopLogprobs
from rollouts.errors import ArgumentError, SampleError, as_unicode, short_repr
from rollouts.models.lora_modules import LoraOptions
from rollouts.serve.errors import RequestError
from rollouts.tinker.backend import Backend
from rollouts.tinker.futures import Futures, Turns
from rollouts.tinker.mismatch import mismatch
from rollouts.tinker.requests import SampleRequest, SampleResult
from rollouts.tinker.run_directory import Kind, RunDirectory, TrainingRun, uri_of
from rollouts.tinker.sample_records import SampleRecords
from rollouts.tinker.training_records import TrainingRecords
from rollouts.tinker.wire import Row, TrainRequest, chunks_of_json, sample_result, train_result
from rollouts.training.datums import Datum
from rollouts.training.trainer import AdamParams, LossResult

#: The largest size of all metadata of a session, model or checkpoint: listings read and send them.
METADATA_CHARACTERS: Final = 2**16

Json = dict[str, object]


@dataclass(slots=True, eq=False)
class Session:
    """What a client has begun: its models by id; whether there ever was one; and its sampling sessions."""

    session_id: str
    user_metadata: Mapping[str, str] | None = None
    display_name: str | None = None
    last_seen: float = field(default_factory=time.monotonic)
    models: dict[str, Model] = field(default_factory=dict)
    has_begun: bool = False
    samplers: dict[str, SamplingSession] = field(default_factory=dict)

    @property
    def sampler_ids(self) -> list[str]:
        return list(self.samplers)


@dataclass(slots=True, eq=False)
class Model:
    """A model of the trainer. `steps` counts its optimiser steps, `session` began it."""

    model_id: str
    session: Session
    base_model: str
    lora: LoraOptions | None
    turns: Turns = field(default_factory=Turns)
    steps: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class SamplingSession:
    """Samples from the weights of a directory, with the URI `model_path`; from the base model where there are none."""

    sampling_session_id: str
    session: Session
    base_model: str
    model_path: str | None
    weights: Path | None


class Service:
    """The state of one user: sessions, models, sampling sessions and checkpoints.

    Its methods are the routes: each returns the answer, as JSON. Those that take long return
    `{"request_id": ..., "model_id": ...}` and go on; `futures` has their results. They raise `RequestError`.
    """

    def __init__(
        self,
        backend: Backend,
        directory: RunDirectory,
        records: TrainingRecords,
        samples: SampleRecords | None = None,
    ) -> None:
        self.backend = backend
        self.trainer = backend.trainer
        self.directory = directory
        self.directory.own()
        self.futures = Futures()
        self.limits = backend.limits
        self._records = records
        self._samples = samples
        self._sessions: dict[str, Session] = {}
        self._ending: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """End what runs. Sessions end with the server, and their unsaved weights with it."""
        await self.futures.close()
        for session_id in self._sessions:
            self.directory.remove_unlisted(session_id)
        self._records.close()
        if self._samples is not None:
            self._samples.close()
        self.directory.release()

    # Sessions.

    def sessions(self) -> list[Session]:
        return list(self._sessions.values())

    async def create_session(self, metadata: Mapping[str, Any] | None, display_name: str | None) -> Json:
        texts, named = _texts(metadata), _texts({"display_name": display_name or ""})
        await self.tidy()
        if len(self._sessions) >= self.limits.sessions:
            raise RequestError(429, f"{self.limits.sessions} sessions are open; end one, or wait until one is idle")
        session = Session(uuid.uuid4().hex, texts, named["display_name"] or None)
        self._sessions[session.session_id] = session
        return {"type": "create_session", "session_id": session.session_id}

    def heartbeat(self, session_id: str) -> Json:
        self.session(session_id)
        return {"type": "session_heartbeat"}

    def session(self, session_id: str) -> Session:
        """A session, which is alive. Raises `RequestError` 404."""
        session = self._session_of(session_id)
        if session is None or session.session_id != session_id:
            raise RequestError(404, f"there is no session {short_repr(session_id)}; create one")
        return session

    def _session_of(self, of: str) -> Session | None:
        """The session of an id, of a model or of a sampling session, which is alive; None where it has ended."""
        session = self._sessions.get(of.partition(":")[0])
        if session is not None:
            session.last_seen = time.monotonic()
        return session

    def finish_session(self, session_id: str) -> None:
        """The client is done with a session, whose models wait no longer."""
        ending = asyncio.create_task(self.end_session(session_id))
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def end_session(self, session_id: str) -> None:
        """Forget a session with its models, whose unsaved weights are lost."""
        if (session := self._sessions.pop(session_id, None)) is None:
            return
        for model in list(session.models.values()):
            await self._unload(model)
        self.futures.forget(f"{session_id}:sample:")
        self.futures.forget(f"{session_id}:", only_done=True)  # a model that begins is unloaded once it has begun
        if session.has_begun:
            await asyncio.to_thread(self.directory.remove_unlisted, session_id)
        if self._samples is not None:
            self._samples.ended(session_id)

    async def tidy(self) -> None:
        """End sessions that have sent nothing for long, and write what they have sampled."""
        oldest = time.monotonic() - self.limits.session_seconds
        for session_id in [each.session_id for each in self._sessions.values() if each.last_seen < oldest]:
            await self.end_session(session_id)
        if self._samples is not None:
            await asyncio.to_thread(self._samples.write_idle)

    # Models.

    def create_model(
        self, session_id: str, model_seq_id: int, base_model: str, lora: Mapping[str, Any] | None,
        optimizer: str, metadata: Mapping[str, Any] | None,
    ) -> Json:  # fmt: skip
        """Begin an adapter, or without `lora` the training of all parameters."""
        session = self.session(session_id)
        self._check_base_model(base_model)
        _check_optimizer(optimizer)
        options = None if lora is None else self._lora_options(**lora)
        texts = _texts(metadata)

        async def work(model_id: str) -> Json:
            await self._begin(session, model_id, base_model, options, texts)
            return {"type": "create_model", "model_id": model_id}

        return self._begin_once(session, model_seq_id, work)

    def create_model_from(
        self, session_id: str, model_seq_id: int, uri: str, *, base_model: str | None,
        with_optimizer: bool, optimizer: str | None, metadata: Mapping[str, Any] | None,
    ) -> Json:  # fmt: skip
        """Begin a model with the weights of a checkpoint, and its options."""
        session = self.session(session_id)
        _check_optimizer(optimizer)
        name = base_model or self.backend.names[0]
        self._check_base_model(name)
        texts = _texts(metadata)

        async def work(model_id: str) -> Json:
            path, lora = self._checkpoint(uri, "weights"), self._lora_of(uri)
            model = await self._begin(session, model_id, name, lora, texts)
            try:
                await self.backend.train(self.trainer.load, model_id, path, with_optimizer=with_optimizer)
            except BaseException:
                await self._unload(model)
                raise
            return {"type": "load_weights", "path": uri, "model_id": model_id}

        return self._begin_once(session, model_seq_id, work)

    def _begin_once(self, session: Session, model_seq_id: int, work: Callable[[str], Awaitable[Json]]) -> Json:
        model_id = f"{session.session_id}:train:{model_seq_id}"  # the client makes the same
        request_id = f"{model_id}-begin"
        self.futures.submit(request_id, lambda: work(model_id))
        return {"request_id": request_id, "model_id": model_id}

    async def _begin(
        self,
        session: Session,
        model_id: str,
        base_model: str,
        lora: LoraOptions | None,
        metadata: Mapping[str, str] | None,
    ) -> Model:
        def begin() -> None:  # one at a time, so that those that begin together are counted
            if len(self.trainer.models()) >= self.limits.models:
                raise RequestError(429, f"{self.limits.models} models are being trained; unload one")
            self.trainer.create_model(model_id, lora=lora)

        await self.backend.train(begin)
        model = Model(model_id, session, base_model, lora)
        session.models[model_id] = model
        try:
            self.session(session.session_id)  # it may have ended meanwhile
            session.has_begun = True
            options = None if lora is None else asdict(lora)
            self.directory.add_run(
                TrainingRun(model_id, base_model, session.session_id, options, datetime.now(UTC), metadata)
            )
        except BaseException:
            await self._unload(model)
            raise
        return model

    def _check_base_model(self, name: str) -> None:
        if name not in self.backend.names:
            raise RequestError(
                400, f"base_model {short_repr(name)} is not served; there is {', '.join(self.backend.names)}"
            )

    def _lora_options(self, rank: int, **options: Any) -> LoraOptions:
        if rank > self.limits.rank:
            raise RequestError(400, f"lora_config.rank is {rank}; this server trains ranks up to {self.limits.rank}")
        try:
            return LoraOptions(rank=rank, **options)
        except ArgumentError as error:
            raise RequestError(400, f"lora_config: {error}") from error

    def model(self, model_id: str) -> Model:
        """A model that is being trained. Raises `RequestError` 404."""
        session = self._session_of(model_id)
        if session is not None and model_id in session.models:
            return session.models[model_id]
        text = f"no model {short_repr(model_id)} is being trained; create one, or load one from a checkpoint"
        raise RequestError(404, text)

    def info(self, model_id: str) -> Json:
        model = self.model(model_id)
        return {
            "type": "get_info",
            "model_id": model_id,
            "is_lora": model.lora is not None,
            "lora_rank": None if model.lora is None else model.lora.rank,
            "model_name": model.base_model,
            "model_data": {
                "arch": self.trainer.model_type,
                "model_name": model.base_model,
                "tokenizer_id": str(self.trainer.directory.absolute()),
            },
        }

    def unload(self, model_id: str) -> Json:
        model = self.model(model_id)

        async def work() -> Json:
            await self._unload(model)
            return {"type": "unload_model", "model_id": model_id}

        self.futures.submit(f"{model_id}-unload", work)
        return {"request_id": f"{model_id}-unload", "model_id": model_id}

    async def _unload(self, model: Model) -> None:
        if model.session.models.pop(model.model_id, None) is not None:
            await self.backend.train(self.trainer.unload, model.model_id)
            self.futures.forget(f"{model.model_id}/")
            self._records.unloaded(model.model_id)

    # Training.

    def train(self, request: TrainRequest) -> Json:
        """`forward` and `forward_backward`: rows are read at once, and computed in the turn of the request."""
        model = self.model(request.model_id)

        async def read() -> list[Datum]:
            return await asyncio.to_thread(self._data, request.rows)

        def computed(data: list[Datum]) -> LossResult:
            started = time.monotonic()
            options = {name: _number(name, value) for name, value in request.options.items()}
            compute = self.trainer.forward if request.forward_only else self.trainer.forward_backward
            result = compute(model.model_id, data, request.loss, options)
            if self.backend.check_mismatch:
                result = result._replace(metrics=result.metrics | mismatch(data, result))
            seconds, only = time.monotonic() - started, request.forward_only
            self._records.trained(model.model_id, data, request.loss, result, seconds, forward_only=only)
            return result

        async def work(data: list[Datum]) -> bytes:
            return train_result(*await self.backend.train(computed, data))

        return self._in_turn(model, request.seq_id, work, read)

    def optim_step(self, model_id: str, seq_id: int | None, params: Mapping[str, float]) -> Json:
        model = self.model(model_id)
        try:
            adam = AdamParams(**params)
        except (ArgumentError, TypeError) as error:
            raise RequestError(400, f"adam_params: {error}") from error

        def step() -> dict[str, float]:
            started = time.monotonic()
            try:
                metrics = self.trainer.optim_step(model_id, adam)
            except ArgumentError:
                self._records.forgotten(model_id)
                raise
            model.steps += 1
            figures = {"learning_rate": adam.learning_rate, "grad_norm": metrics["grad_norm"]}
            self._records.stepped(model_id, model.steps, **figures, seconds=time.monotonic() - started)
            return metrics

        async def work() -> Json:
            return {"type": "optim_step", "metrics": await self.backend.train(step)}

        return self._in_turn(model, seq_id, work)

    def _data(self, rows: Sequence[Row]) -> list[Datum]:
        places = [f"data[{number}]" for number in range(len(rows))]
        for place, row in zip(places, rows, strict=True):
            if "target_tokens" not in row.inputs:
                raise SampleError(place, "it has no target_tokens; send one target for each token")
        inputs = self.backend.reader.read_rows(
            [(f"{place}.model_input", row.chunks) for place, row in zip(places, rows, strict=True)]
        )
        data = []
        for row, (token_ids, media) in zip(rows, inputs, strict=True):
            others = {name: values for name, values in row.inputs.items() if name != "target_tokens"}
            data.append(Datum(token_ids, row.inputs["target_tokens"], others, media))
        return data

    # Checkpoints.

    def save_weights(
        self, model_id: str, seq_id: int | None, name: str | None, *, overwrite: bool, **options: Any
    ) -> Json:
        """Save what training goes on from. `options` are those of `RunDirectory.saving`."""
        model = self.model(model_id)

        async def work() -> Json:
            named = name or f"step-{model.steps:06}"
            with self.directory.saving(model_id, "weights", named, overwrite=overwrite, **_checked(options)) as path:
                await self.backend.train(self.trainer.save, model_id, path)
            return {"type": "save_weights", "path": uri_of(model_id, "weights", named)}

        return self._in_turn(model, seq_id, work)

    def load_weights(self, model_id: str, seq_id: int | None, uri: str, *, with_optimizer: bool) -> Json:
        model = self.model(model_id)

        async def work() -> Json:
            path = self._checkpoint(uri, "weights")
            await self.backend.train(self.trainer.load, model_id, path, with_optimizer=with_optimizer)
            self._records.forgotten(model_id)
            return {"type": "load_weights", "path": uri}

        return self._in_turn(model, seq_id, work)

    def save_named(
        self, model_id: str, seq_id: int | None, kind: Literal["sampler_weights", "external_weights"], name: str,
        **options: Any,
    ) -> Json:  # fmt: skip
        """Save what can be sampled from, or downloaded, as a checkpoint."""
        model = self.model(model_id)

        async def work() -> Json:
            with self.directory.saving(model_id, kind, name, **_checked(options)) as path:
                await self.backend.train(self.trainer.save_for_sampler, model_id, path)
            request = "save_weights_external" if kind == "external_weights" else "save_weights_for_sampler"
            return {"type": request, "path": uri_of(model_id, kind, name)}

        return self._in_turn(model, seq_id, work)

    def save_for_session(self, model_id: str, seq_id: int | None, sampling_seq_id: int) -> Json:
        """Begin a sampling session from the weights as they are, which nothing else can name."""
        model = self.model(model_id)

        async def work() -> Json:
            path = self.directory.unlisted(model_id, f"session-{sampling_seq_id}")
            await self.backend.train(self.trainer.save_for_sampler, model_id, path)
            uri = uri_of(model_id, "unlisted", path.name)
            sampling = self._add_sampling(model.session, sampling_seq_id, model.base_model, uri, path)
            return {"type": "save_weights_for_sampler", "path": None, "sampling_session_id": sampling}

        return self._in_turn(model, seq_id, work)

    def _checkpoint(self, uri: str, kind: Kind) -> Path:
        """The directory of a checkpoint of this kind. Raises `RequestError`."""
        found = self.directory.find(uri)
        if found.kind != kind:
            cure = {"weights": "save_weights", "sampler_weights": "save_weights_for_sampler"}.get(kind, "")
            raise RequestError(400, f"{uri} has {found.kind}; this needs {kind}, which {cure} saves")
        return self.directory.path(found)

    def _lora_of(self, uri: str) -> LoraOptions | None:
        options = self.directory.training_run(self.directory.find(uri).model_id).lora
        return None if options is None else LoraOptions(**options)

    # Sampling.

    def create_sampling_session(
        self, session_id: str, sampling_seq_id: int, base_model: str | None, uri: str | None
    ) -> Json:
        session = self.session(session_id)
        name, weights = self._weights(base_model, uri)
        sampling = self._add_sampling(session, sampling_seq_id, name, uri, weights)
        return {"type": "create_sampling_session", "sampling_session_id": sampling}

    def _add_sampling(self, session: Session, number: int, base_model: str, uri: str | None, path: Path | None) -> str:
        sampling_session_id = f"{session.session_id}:sample:{number}"
        session.samplers[sampling_session_id] = SamplingSession(sampling_session_id, session, base_model, uri, path)
        return sampling_session_id

    def _weights(self, base_model: str | None, uri: str | None) -> tuple[str, Path | None]:
        if uri is None:
            if base_model is None:
                raise RequestError(400, "pass base_model, or model_path")
            self._check_base_model(base_model)
            return base_model, None
        return base_model or self.backend.names[0], self._checkpoint(uri, "sampler_weights")

    def sampling_session(self, sampling_session_id: str) -> SamplingSession | None:
        session = self._session_of(sampling_session_id)
        return None if session is None else session.samplers.get(sampling_session_id)

    def sample(self, body: Any) -> Json:
        """`asample`: `body` is a `tinker.types.SampleRequest`."""
        for name, unused, cure in (
            ("target_prompt_logprobs", None, "leave it out"),
            ("prompt_alt_tokens_k", 0, "leave it out"),
            # What tinker-cookbook asks for by default.
            ("record_stability_info", None, "train with another loss than stable_reinforce, such as loss_fn=ppo"),
        ):
            if getattr(body, name, unused) not in (unused, False):
                raise RequestError(400, f"{name} is not supported by this server; {cure}")
        if (scored := body.prompt_logprobs_last_n) is not None and not body.prompt_logprobs:
            raise RequestError(400, "prompt_logprobs_last_n is one of prompt_logprobs; set these, too")
        if not 1 <= body.num_samples <= self.limits.samples:
            raise RequestError(400, f"num_samples is {body.num_samples}; pass 1 to {self.limits.samples}")
        if self.futures.unfetched >= self.limits.pending:
            raise RequestError(429, f"{self.limits.pending} requests are waiting; fetch results, or send it later")
        if body.sampling_session_id is None:
            sampling_id, session_id, version = f"direct-{uuid.uuid4().hex}", None, ""
            _, weights = self._weights(body.base_model, body.model_path)
        else:
            if (sampling := self.sampling_session(body.sampling_session_id)) is None:
                found = short_repr(body.sampling_session_id)
                raise RequestError(404, f"there is no sampling session {found}; create one")
            sampling_id, session_id, weights = body.sampling_session_id, sampling.session.session_id, sampling.weights
            version = sampling.model_path or sampling.base_model
        chunks = chunks_of_json("prompt.chunks", body.prompt.chunks)

        async def work() -> bytes:
            prompt = await asyncio.to_thread(self.backend.reader.read, "prompt", chunks)
            if scored is not None and not 1 <= scored < len(prompt.token_ids):
                raise ArgumentError(
                    "prompt_logprobs_last_n", scored, f"pass 1 to {len(prompt.token_ids) - 1}, those that are predicted"
                )
            request = _sample_request(body, prompt)
            result = await self.backend.sampler.sample(weights, request)
            if self._samples is not None and session_id is not None:
                self._samples.sampled(session_id, request, result, version)
            return sample_result(result if scored is None else _of_last(result, scored))

        request_id = f"{sampling_id}/{body.seq_id if body.seq_id is not None else uuid.uuid4().hex}"
        self.futures.submit(request_id, work)
        return {
            "request_id": request_id,
            "sample_sequence_ids": [f"{request_id}:{index}" for index in range(body.num_samples)],
        }

    def cancel(self, request_id: str) -> Json:
        """End a sampling request. Those of training run to their end, in their order."""
        if ":sample:" in request_id or request_id.startswith("direct-"):
            self.futures.cancel(request_id)
        return {}

    # What they are made of.

    def refuse(self, model_id: str, seq_id: int, error: RequestError) -> Json:
        """Accept a request of a model that fails with this error in its turn."""

        async def work() -> Json:
            raise error

        return self._in_turn(self.model(model_id), seq_id, work)

    def _in_turn(
        self,
        model: Model,
        seq_id: int | None,
        work: Callable[..., Awaitable[Json | bytes]],
        prepare: Callable[[], Awaitable[object]] | None = None,
    ) -> Json:
        """Accept a request of a model: `work` runs after those of smaller numbers, once, on what `prepare` has made."""
        if seq_id is None or seq_id < 1:
            raise RequestError(400, f"seq_id is {seq_id}; it counts the requests of a model from 1")
        request_id = f"{model.model_id}/{seq_id}"
        answer: Json = {"request_id": request_id, "model_id": model.model_id}
        if request_id in self.futures:
            return answer
        if not model.turns.accept(seq_id):
            raise RequestError(400, f"request {seq_id} of the model was done, and its result is no longer kept")

        async def in_turn() -> Json | bytes:
            try:
                try:
                    prepared = () if prepare is None else (await prepare(),)
                finally:  # one that cannot be prepared has its turn, too: others wait for it
                    await model.turns.take(seq_id)
                return await work(*prepared)
            finally:
                model.turns.end(seq_id)

        self.futures.submit(request_id, in_turn)
        return answer


def _check_optimizer(optimizer: str | None) -> None:
    if optimizer not in (None, "adamw"):
        raise RequestError(400, f"optimizer_config.type is {short_repr(optimizer)}; this server has adamw")


def _checked(options: Mapping[str, Any]) -> dict[str, Any]:
    return {**options, "user_metadata": _texts(options.get("user_metadata")) or None}


def _texts(metadata: Mapping[str, Any] | None) -> dict[str, str]:
    """Metadata of a client as texts that can be written and sent. Raises `RequestError` (400) for too many of them."""
    texts = {as_unicode(key): as_unicode(str(value)) for key, value in (metadata or {}).items()}
    if (size := sum(len(key) + len(value) for key, value in texts.items())) > METADATA_CHARACTERS:
        raise RequestError(400, f"the metadata has {size} characters; send at most {METADATA_CHARACTERS}")
    return texts


def _number(name: str, value: float | str) -> float:
    if isinstance(value, str):
        raise ArgumentError(f"loss_fn_config[{name!r}]", value, "pass a number")
    return value


def _of_last(result: SampleResult, count: int) -> SampleResult:
    """The result with what it says of the last `count` tokens of the prompt, and nothing of those before."""
    assert result.prompt_logprobs is not None
    logprobs, topk = result.prompt_logprobs.copy(), result.topk_prompt
    logprobs[:-count] = np.nan
    if topk is not None:
        topk = TopLogprobs(topk.token_ids.copy(), topk.logprobs.copy())
        topk.token_ids[:-count], topk.logprobs[:-count] = topk.token_ids[0], topk.logprobs[0]  # the empty row
    return replace(result, prompt_logprobs=logprobs, topk_prompt=topk)


def _sample_request(body: Any, prompt: Any) -> SampleRequest:
    params = body.sampling_params
    stop = params.stop
    if stop is not None:
        stop = (stop,) if isinstance(stop, str) else tuple(stop)
    return SampleRequest(
        prompt,
        num_samples=body.num_samples,
        max_tokens=params.max_tokens,
        temperature=params.temperature,
        top_p=params.top_p,
        top_k=min(max(params.top_k, 0), 2**31 - 1),  # no vocabulary is larger
        seed=params.seed,
        stop=stop,
        prompt_logprobs=bool(body.prompt_logprobs),
        topk_prompt=body.topk_prompt_logprobs,
        topk_sample=body.topk_sample_logprobs,
    )
