"""The state of a user of the Tinker API: sessions and models, how they begin and how they end."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

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


class Service:
    """The state of one user: sessions and models; `requests` are those of its models, `sampling` those of sampling.

    Its methods are routes: each returns the answer, as JSON. Those that take long return
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

    async def create_session(self, metadata: Mapping[str, Any] | None, display_name: str | None) -> Json:
        texts, named = metadata_texts(metadata), metadata_texts({"display_name": display_name or ""})
        await self.tidy()
        if len(self._sessions) >= self.limits.sessions:
            raise RequestError(429, f"{self.limits.sessions} sessions are open; {self._cure('--max-sessions')}")
        session = Session(uuid.uuid4().hex, texts, named["display_name"] or None)
        self._sessions[session.session_id] = session
        return {"type": "create_session", "session_id": session.session_id}

    def heartbeat(self, session_id: str) -> Json:
        self.session(session_id)
        return {"type": "session_heartbeat"}

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

    def create_model(
        self, session_id: str, model_seq_id: int, base_model: str, lora: Mapping[str, Any] | None,
        optimizer: str, metadata: Mapping[str, Any] | None,
    ) -> Json:  # fmt: skip
        """Begin an adapter, or without `lora` the training of all parameters."""
        session = self.session(session_id)
        self.backend.check_name(base_model)
        _check_optimizer(optimizer)
        options = None if lora is None else self._lora_options(**lora)
        texts = metadata_texts(metadata)

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
        self.backend.check_name(name)
        texts = metadata_texts(metadata)

        async def work(model_id: str) -> Json:
            path = self.directory.weights(uri, "weights")
            options = self.directory.training_run(self.directory.find(uri).model_id).lora
            lora = None if options is None else LoraOptions(**options)
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
            self.futures.forget(f"{model.model_id}/")  # first: what waits must not begin
            await self.backend.train(self.trainer.unload, model.model_id)
            self._records.unloaded(model.model_id)


def _check_optimizer(optimizer: str | None) -> None:
    if optimizer not in (None, "adamw"):
        raise RequestError(400, f"optimizer_config.type is {short_repr(optimizer)}; this server has adamw")
