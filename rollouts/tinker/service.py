"""The state of a user of the Tinker API: sessions and models, how they begin and how they end."""

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from typing import Any

import tinker.types as types

from rollouts.errors import ArgumentError, short_repr
from rollouts.models.lora_modules import LoraOptions
from rollouts.serve.errors import RequestError
from rollouts.tinker.backend import Backend
from rollouts.tinker.futures import Futures
from rollouts.tinker.model_requests import ModelRequests
from rollouts.tinker.run_directory import RunDirectory, TrainingRun
from rollouts.tinker.sample_records import SampleRecords
from rollouts.tinker.sampling import Sampling
from rollouts.tinker.sessions import Json, Model, Session, metadata_texts
from rollouts.tinker.training_records import TrainingRecords

#: Makes a model with these options of an adapter; None: all parameters are trained.
Begin = Callable[[LoraOptions | None], Awaitable[Model]]


class Service:
    """The state of one user: sessions and models; `requests` are those of its models, `sampling` those of sampling.

    Its methods are routes: each takes a body, and returns the answer, as JSON. Those that take long return
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
        self.requests = ModelRequests(self, records)
        self.sampling = Sampling(self, samples)
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

    async def create_session(self, body: types.CreateSessionRequest) -> Json:
        texts, named = metadata_texts(body.user_metadata), metadata_texts({"display_name": body.display_name or ""})
        await self.tidy()
        if len(self._sessions) >= self.limits.sessions:
            raise RequestError(429, f"{self.limits.sessions} sessions are open; {self._cure('--max-sessions')}")
        session = Session(uuid.uuid4().hex, texts, named["display_name"] or None)
        self._sessions[session.session_id] = session
        return {"type": body.type, "session_id": session.session_id}

    def heartbeat(self, body: types.SessionHeartbeatRequest) -> Json:
        self.session(body.session_id)
        return {"type": body.type}

    def session(self, session_id: str) -> Session:
        """A session, which is alive. Raises `RequestError` 404."""
        session = self.session_of(session_id)
        if session is None or session.session_id != session_id:
            raise RequestError(404, f"there is no session {short_repr(session_id)}; create one")
        return session

    def session_of(self, of: str) -> Session | None:
        """The session of an id, of a model or of a sampling session, which is alive; None where it has ended."""
        session = self._sessions.get(of.partition(":")[0])
        if session is not None:
            session.last_seen = time.monotonic()
        return session

    def finish_session(self, session_id: str) -> None:
        """The client is done with a session, whose models wait no longer."""
        ending = asyncio.create_task(self.end_session(session_id))
        # asyncio keeps only a weak reference to a task; without this one it may be collected before it
        # ends.
        self._ending.add(ending)
        ending.add_done_callback(self._ending.discard)

    async def end_session(self, session_id: str) -> None:
        """Forget a session with its models, whose unsaved weights are lost."""
        if (session := self._sessions.pop(session_id, None)) is None:
            return
        await asyncio.gather(*map(self._unload, session.models.values()))
        self.futures.forget(f"{session_id}:sample:")
        self.futures.forget(f"{session_id}:", only_done=True)  # a model that begins is unloaded once it has begun
        if session.has_begun:
            await asyncio.to_thread(self.directory.remove_unlisted, session_id)
        if self._samples is not None:
            self._samples.ended(session_id)

    async def tidy(self) -> None:
        """End sessions and sampling that nobody waits for, write what was sampled, and delete what has expired."""
        self.futures.forget_unasked()
        oldest = time.monotonic() - self.limits.session_seconds
        for session_id in [each.session_id for each in self._sessions.values() if each.last_seen < oldest]:
            await self.end_session(session_id)
        if self._samples is not None:
            await asyncio.to_thread(self._samples.write_idle)
        await asyncio.to_thread(self.directory.tidy)

    # Models.

    def create_model(self, body: types.CreateModelRequest) -> Json:
        """Begin an adapter, or without `lora_config` the training of all parameters."""
        lora = None if body.lora_config is None else self._lora_options(**body.lora_config.model_dump())

        async def work(model_id: str, begin: Begin) -> Json:
            await begin(lora)
            return {"type": body.type, "model_id": model_id}

        return self._begin_once(body, body.base_model, work)

    def create_model_from(self, body: types.LoadWeightsRequest) -> Json:
        """Begin a model with the weights of a checkpoint, and its options."""
        if body.session_id is None or body.model_seq_id is None:
            raise RequestError(400, "load_weights needs a model_id, or a session_id and a model_seq_id")

        async def work(model_id: str, begin: Begin) -> Json:
            path = self.directory.weights(body.path, "weights")
            options = self.directory.training_run(self.directory.find(body.path).model_id).lora
            model = await begin(None if options is None else LoraOptions(**options))
            try:
                await self.backend.train(self.trainer.load, model_id, path, with_optimizer=body.optimizer)
            except BaseException:
                await self._unload(model)
                raise
            return {"type": body.type, "path": body.path, "model_id": model_id}

        return self._begin_once(body, body.base_model or self.backend.names[0], work)

    def _begin_once(self, body: Any, name: str, work: Callable[[str, Begin], Awaitable[Json]]) -> Json:
        """Accept a request that begins the model of a session and a number. `work` gets its id, and what begins it."""
        session = self.session(body.session_id)
        self.backend.check_name(name)
        if body.optimizer_config is not None and body.optimizer_config.type != "adamw":
            found = short_repr(body.optimizer_config.type)
            raise RequestError(400, f"optimizer_config.type is {found}; this server has adamw")
        model_id = f"{session.session_id}:train:{body.model_seq_id}"  # the client makes the same
        begin = partial(self._begin, session, model_id, name, metadata_texts(body.user_metadata))
        request_id = f"{model_id}-begin"
        self.futures.submit(request_id, lambda: work(model_id, begin))
        return {"request_id": request_id, "model_id": model_id}

    async def _begin(
        self,
        session: Session,
        model_id: str,
        base_model: str,
        metadata: dict[str, str],
        lora: LoraOptions | None,
    ) -> Model:
        def begin() -> None:  # one at a time, so that those that begin together are counted
            if len(self.trainer.models()) >= self.limits.models:
                text = f"{self.limits.models} models are being trained, and they end with their sessions"
                raise RequestError(429, f"{text}; {self._cure('--max-models')}")
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

    def _cure(self, option: str) -> str:
        minutes = self.limits.session_seconds / 60
        ends = (
            f"end a session whose weights are saved (ServiceClient.close), or wait for one that is idle {minutes:g} min"
        )
        return f"{ends}; the server takes more with {option}"

    def _lora_options(self, rank: int, **options: Any) -> LoraOptions:
        if rank > self.limits.rank:
            raise RequestError(400, f"lora_config.rank is {rank}; this server trains ranks up to {self.limits.rank}")
        try:
            return LoraOptions(rank=rank, **options)
        except ArgumentError as error:
            raise RequestError(400, f"lora_config: {error}") from error

    def model(self, model_id: str) -> Model:
        """A model that is being trained. Raises `RequestError` 404."""
        session = self.session_of(model_id)
        if session is not None and model_id in session.models:
            return session.models[model_id]
        text = f"no model {short_repr(model_id)} is being trained; create one, or load one from a checkpoint"
        raise RequestError(404, text)

    def info(self, body: types.GetInfoRequest) -> Json:
        model = self.model(body.model_id)
        return {
            "type": body.type,
            "model_id": model.model_id,
            "is_lora": model.lora is not None,
            "lora_rank": None if model.lora is None else model.lora.rank,
            "model_name": model.base_model,
            "model_data": {
                "arch": self.trainer.model_type,
                "model_name": model.base_model,
                "tokenizer_id": str(self.trainer.directory.absolute()),
            },
        }

    def unload(self, body: types.UnloadModelRequest) -> Json:
        model = self.model(body.model_id)

        async def work() -> Json:
            await self._unload(model)
            return {"type": body.type, "model_id": model.model_id}

        self.futures.submit(f"{model.model_id}-unload", work)
        return {"request_id": f"{model.model_id}-unload", "model_id": model.model_id}

    async def _unload(self, model: Model) -> None:
        if model.session.models.pop(model.model_id, None) is not None:
            self.futures.forget(f"{model.model_id}/")  # first: what waits must not begin
            await self.backend.train(self.trainer.unload, model.model_id)
            self._records.unloaded(model.model_id)
