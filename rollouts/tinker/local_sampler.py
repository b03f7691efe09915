"""A sampler over the model of a `Trainer`: its weights are in memory once, and each adapter beside them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import AbstractContextManager, asynccontextmanager
from pathlib import Path
from types import TracebackType

from rollouts.engines.event_loop import SingleFlight
from rollouts.engines.local import LocalEngine
from rollouts.errors import EngineClosedError, RolloutsError
from rollouts.models.loading import load_model
from rollouts.tinker.bounded_pool import BoundedPool
from rollouts.tinker.requests import SampleRequest, SampleResult
from rollouts.tinker.sampler import Endings, SavedWeights, generated
from rollouts.training.trainer import Trainer

#: A batch begins once no request has arrived for as long; those that come later wait until it has ended.
_GATHER_SECONDS = 0.02


class LocalSampler:
    """`Sampler` with engines in this process, which are made at the first request.

    Adapters run over the model of the trainer itself, at most `max_adapters` in memory. While that is trained as a
    whole, its weights are not those of the base model: the base model and directories with whole models are loaded from
    their files, at most `max_models` of them. A batch and a training step never run at the same time; inside of
    `asleep`, no batch begins.
    """

    def __init__(self, trainer: Trainer, *, max_adapters: int = 32, max_models: int = 2) -> None:
        self._trainer = trainer
        self._max_adapters = max_adapters
        self._endings = Endings.of_model(trainer.directory)
        self._steps = _TrainingSteps()
        self._shared: _EngineOfModel | None = None
        self._starting: SingleFlight[_EngineOfModel] = SingleFlight()
        self._copies: BoundedPool[SavedWeights, _EngineOfModel] = BoundedPool(
            max_models, self._load, lambda _, copy: copy.close()
        )
        self._closed = False

    async def sample(self, weights: Path | None, request: SampleRequest) -> SampleResult:
        """As in `Sampler`; also raises `SampleError` for tokens that the model cannot take."""
        if self._closed:
            raise EngineClosedError("sample", "the sampler is closed")
        saved = None if weights is None else SavedWeights.at(weights)
        if saved is not None and not saved.is_adapter:
            async with self._copies.using(saved) as copy:
                return await copy.sample(None, request)
        try:
            shared = self._shared or await self._starting.run("shared", self._start)
            return await shared.sample(saved, request)
        except _TrainedAsAWholeError:
            async with self._copies.using(SavedWeights.at(self._trainer.directory)) as copy:
                return await copy.sample(saved, request)

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        """As in `Sampler`: the block begins at once, and a call of the trainer in it waits for one batch at most."""
        with self._steps:
            yield

    async def close(self) -> None:
        self._closed = True
        if self._shared is not None:
            await self._shared.close()
        await self._copies.close()

    async def _start(self) -> _EngineOfModel:
        lock = _Lock(self._trainer, self._steps, is_shared=True)
        engine = await asyncio.to_thread(LocalEngine, self._trainer.model, lock=lock)
        if self._closed:
            await engine.close()
            raise EngineClosedError("sample", "the sampler was closed while its engine was made")
        self._shared = _EngineOfModel(engine, self._endings, self._max_adapters)
        return self._shared

    async def _load(self, saved: SavedWeights) -> _EngineOfModel:
        return _EngineOfModel(await asyncio.to_thread(self._loaded, saved.path), self._endings, self._max_adapters)

    def _loaded(self, directory: Path) -> LocalEngine:
        own = self._trainer.model
        model = load_model(directory, dtype=own.dtype).to(own.device)
        return LocalEngine(model, lock=_Lock(self._trainer, self._steps, is_shared=False))


class _EngineOfModel:
    """An engine with the adapters of its model, loaded as requests name them."""

    def __init__(self, engine: LocalEngine, endings: Endings, max_adapters: int) -> None:
        self._engine = engine
        self._endings = endings
        self._adapters: BoundedPool[SavedWeights, str] = BoundedPool(
            max_adapters, self._load, lambda _, name: engine.unload_adapter(name)
        )

    async def sample(self, adapter: SavedWeights | None, request: SampleRequest) -> SampleResult:
        if adapter is None:
            return await self._sample(None, request)
        async with self._adapters.using(adapter) as name:
            return await self._sample(name, request)

    async def close(self) -> None:
        await self._engine.close()

    async def _load(self, saved: SavedWeights) -> str:
        await self._engine.load_adapter(saved.name, saved.path)
        return saved.name

    async def _sample(self, adapter: str | None, request: SampleRequest) -> SampleResult:
        engine = self._engine
        with engine.expecting_request():  # a client sends the requests of a step one after another: one batch for them
            await asyncio.sleep(_GATHER_SECONDS)
        return await generated(engine, request, self._endings, max_length=engine.max_model_len, adapter=adapter)


class _TrainedAsAWholeError(RolloutsError):
    """The model of the trainer does not have the weights of the base model.

    Cure: sample with a copy that is loaded from its files.
    """


class _TrainingSteps:
    """How many training steps run or wait; a batch waits until there is none, or one has ended since it waits."""

    def __init__(self) -> None:
        self._count = 0
        self._none = threading.Event()
        self._none.set()

    def __enter__(self) -> None:
        self._count += 1
        self._none.clear()

    def __exit__(self, *_: object) -> None:
        self._count -= 1
        self._none.set()  # what waits now goes on, also where the next step is there already
        if self._count:
            self._none.clear()

    def wait(self) -> None:
        self._none.wait()


class _Lock(AbstractContextManager[None]):
    """The lock of a trainer, for an engine. `is_shared`: the engine uses the model of the trainer.

    Raises `_TrainedAsAWholeError` for such an engine while all parameters of the model are trained.
    """

    def __init__(self, trainer: Trainer, steps: _TrainingSteps, *, is_shared: bool) -> None:
        self._trainer = trainer
        self._steps = steps
        self._is_shared = is_shared

    def __enter__(self) -> None:
        self._steps.wait()
        self._trainer.lock.acquire()
        if self._is_shared and None in self._trainer.models().values():
            self._trainer.lock.release()
            raise _TrainedAsAWholeError

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._trainer.lock.release()
