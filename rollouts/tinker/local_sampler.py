"""A sampler over the model of a `Trainer`: its weights are in memory once, and each adapter beside them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, ExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from rollouts.engines.event_loop import SingleFlight
from rollouts.engines.local import LocalEngine
from rollouts.errors import CapabilityError, EngineClosedError
from rollouts.models.loading import load_model
from rollouts.tinker.bounded_pool import BoundedPool
from rollouts.tinker.device_turns import DeviceTurns
from rollouts.tinker.prompt_scores import PromptScores
from rollouts.tinker.requests import SampleRequest, SampleResult
from rollouts.tinker.sampler import Endings, SavedWeights, generated
from rollouts.training.trainer import Trainer

#: A batch begins once no request has arrived for as long; those that come later wait until it has ended.
_GATHER_SECONDS = 0.02


class LocalSampler:
    """`Sampler` with engines in this process, which are made at the first request.

    Adapters run over the model of the trainer itself, at most `max_adapters` in memory. While that is trained
    as a whole, its weights are not those of the base model: the base model and directories with whole models
    are loaded from their files, at most `max_models` of them. Requests of one `share` run in batches; batches
    of several, and training steps, take turns after a token (`DeviceTurns`).
    """

    def __init__(self, trainer: Trainer, *, max_adapters: int = 32, max_models: int = 2) -> None:
        self._trainer = trainer
        self._max_adapters = max_adapters
        self._endings = Endings.of_model(trainer.directory)
        self._turns = DeviceTurns(trainer.lock)
        self._shared: _EngineOfModel | None = None
        self._starting: SingleFlight[_EngineOfModel] = SingleFlight()
        self._copies: BoundedPool[SavedWeights, _EngineOfModel] = BoundedPool(
            max_models, self._load, lambda _, copy: copy.close()
        )
        self._closed = False

    async def sample(self, weights: Path | None, request: SampleRequest, *, share: str = "") -> SampleResult:
        """Sample with the model of the trainer; also raises `SampleError` for tokens that it cannot take."""
        if self._closed:
            raise EngineClosedError("sample", "the sampler is closed")
        saved = None if weights is None else SavedWeights.at(weights)
        if saved is not None and not saved.is_adapter:
            async with self._copies.using(saved) as copy:
                return await copy.sample(None, request, share)
        try:
            shared = self._shared or await self._starting.run("shared", self._start)
            return await shared.sample(saved, request, share)
        except CapabilityError:  # of the lock: sample with a copy that is loaded from the files
            async with self._copies.using(SavedWeights.at(self._trainer.directory)) as copy:
                return await copy.sample(saved, request, share)

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        """A block of training, which begins at once; a call of the trainer in it waits for its turn."""
        with self._turns.training():
            yield

    async def close(self) -> None:
        self._closed = True
        if self._shared is not None:
            await self._shared.close()
        await self._copies.close()

    async def _start(self) -> _EngineOfModel:
        lock, is_wanted = _Lock(self._trainer, self._turns), self._turns.is_wanted
        engine = await asyncio.to_thread(LocalEngine, self._trainer.model, lock=lock, is_wanted=is_wanted)
        if self._closed:
            await engine.close()
            raise EngineClosedError("sample", "the sampler was closed while its engine was made")
        self._shared = _EngineOfModel(engine, self._endings, self._max_adapters)
        return self._shared

    async def _load(self, saved: SavedWeights) -> _EngineOfModel:
        def loaded() -> LocalEngine:
            own = self._trainer.model
            model = load_model(saved.path, dtype=own.dtype).to(own.device)
            return LocalEngine(model, lock=self._turns, is_wanted=self._turns.is_wanted)

        return _EngineOfModel(await asyncio.to_thread(loaded), self._endings, self._max_adapters)


class _EngineOfModel:
    """An engine with the adapters of its model, loaded as requests name them."""

    def __init__(self, engine: LocalEngine, endings: Endings, max_adapters: int) -> None:
        self._engine = engine
        self._endings = endings
        # Weak: the engine of a share lasts as long as a request of it.
        self._shares: WeakValueDictionary[str, LocalEngine] = WeakValueDictionary()
        self._adapters: BoundedPool[SavedWeights, str] = BoundedPool(
            max_adapters, self._load, lambda _, name: engine.unload_adapter(name)
        )

    async def sample(self, adapter: SavedWeights | None, request: SampleRequest, share: str) -> SampleResult:
        if adapter is None:
            return await self._sample(None, request, share)
        async with self._adapters.using(adapter) as name:
            return await self._sample(name, request, share)

    async def close(self) -> None:
        for each in [self._engine, *self._shares.values()]:
            await each.close()

    async def _load(self, saved: SavedWeights) -> str:
        await self._engine.load_adapter(saved.name, saved.path)
        return saved.name

    async def _sample(self, adapter: str | None, request: SampleRequest, share: str) -> SampleResult:
        if (engine := self._shares.get(share)) is None:
            engine = self._shares[share] = self._engine.beside()
        with engine.expecting_request():  # a client sends the requests of a step one after another: one batch for them
            await asyncio.sleep(_GATHER_SECONDS)
        scores = PromptScores(request, engine.vocab_size) if request.scores_others else None
        result = await generated(
            engine,
            request,
            self._endings,
            max_length=engine.max_model_len,
            adapter=adapter,
            generate=partial(engine.generate, observe=scores),
        )
        return result if scores is None else scores.added_to(result)


class _Lock(AbstractContextManager[None]):
    """The lock over the trainer's model. `CapabilityError` while all its parameters are trained."""

    def __init__(self, trainer: Trainer, turns: DeviceTurns) -> None:
        self._trainer = trainer
        self._turns = turns

    def __enter__(self) -> None:
        # Where `__enter__` raises, nobody calls `__exit__`: the turn is given back here.
        with ExitStack() as on_error:
            on_error.enter_context(self._turns)
            if None in self._trainer.models().values():
                raise CapabilityError("sample", "the model of the trainer does not have the weights of the base model")
            on_error.pop_all()

    def __exit__(self, *raised: Any) -> None:
        self._turns.__exit__(*raised)
