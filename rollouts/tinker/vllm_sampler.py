"""A sampler over vLLM servers, which load the adapters of a `Trainer` from its directories."""

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, TypeVar

from rollouts.engines.fleet import EngineFleet
from rollouts.engines.vllm import HttpLimits, VLLMEngine
from rollouts.errors import ArgumentError, EngineClosedError, EngineError, ServerTimeoutError, ServerUnreachableError
from rollouts.tinker.bounded_pool import BoundedPool
from rollouts.tinker.fair_places import FairPlaces
from rollouts.tinker.requests import SampleRequest, SampleResult
from rollouts.tinker.sampler import Endings, SavedWeights, generated
from rollouts.tinker.sleeping_servers import SleepingServers

T = TypeVar("T")


class VLLMSampler:
    """`Sampler` with vLLM servers that serve the base model.

    They are connected to at the first request, with `sleep` at the first training step too. `directory` is
    that of the base model. The servers read the directories of adapters themselves, at most `max_adapters` of
    them at a time; they need --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=True. Directories with whole
    models are refused. They report up to 20 of the likeliest tokens, or as many as --max-logprobs; up to vLLM
    0.32 one less in the places of sampled tokens.

    With `sleep`, the servers free their memory for training steps: a step runs after the requests before it
    have ended, and those after it wake the servers up. They need VLLM_SERVER_DEV_MODE=1 and
    --enable-sleep-mode. Without it training and sampling do not wait for each other.

    `options` are those of `VLLMEngine`.
    """

    def __init__(
        self,
        base_urls: Sequence[str],
        directory: Path,
        *,
        sleep: bool = False,
        max_adapters: int = 8,
        **options: Any,
    ) -> None:
        self._urls = list(base_urls)
        self._options = options
        self._endings = Endings.of_model(directory)
        limits = options.get("limits") or HttpLimits()
        self._places = FairPlaces(limits.concurrency * len(self._urls))  # the engines' own wait in their order
        self._engine: VLLMEngine | EngineFleet | None = None
        self._adapters: BoundedPool[SavedWeights, str] = BoundedPool(
            max_adapters,
            self._load,
            lambda _, name: self._connected().unload_adapter(name),
        )
        self._rest = SleepingServers(lambda name: getattr(self._connected().control, name)()) if sleep else None
        self._closed = False

    async def sample(self, weights: Path | None, request: SampleRequest, *, share: str = "") -> SampleResult:
        """Sample at the server. Raises `ArgumentError` for a whole model, and for `scores_others`."""
        if self._closed:
            raise EngineClosedError("sample", "the sampler is closed")
        if request.scores_others:
            name = "target_prompt_logprobs" if request.targets is not None else "prompt_alt_tokens_k"
            rule = "vLLM servers do not report them; start rollouts tinker without --engine vllm"
            raise ArgumentError("the request", name, rule)
        saved = None if weights is None else SavedWeights.at(weights)
        if saved is not None and not saved.is_adapter:
            rule = (
                "it is a whole model, and a vLLM server that all requests share has the base model; train an adapter, "
                "or sample with the engine of the trainer"
            )
            raise ArgumentError("weights", str(weights), rule)
        async with self._places.place(share), nullcontext() if self._rest is None else self._rest.awake():
            if saved is None:
                return await self._generated(None, request)
            async with self._adapters.using(saved) as name:
                return await self._generated(name, request)

    @asynccontextmanager
    async def asleep(self) -> AsyncIterator[None]:
        """A block of training, in which the server sleeps and requests wait."""
        if self._rest is None:
            yield
            return
        async with self._rest.asleep():
            yield

    async def close(self) -> None:
        """Refuse further requests, unload the adapters, and wake servers up that sleep."""
        self._closed = True
        if self._engine is None:
            return
        try:
            if self._rest is not None:
                await self._rest.end()
            await self._adapters.close()
        finally:
            await self._engine.close()

    def _connected(self) -> VLLMEngine | EngineFleet:
        if self._engine is None:
            if len(self._urls) == 1:
                self._engine = VLLMEngine(self._urls[0], **self._options)
            else:
                self._engine = EngineFleet.from_urls(self._urls, **self._options)
        return self._engine

    async def _generated(self, adapter: str | None, request: SampleRequest) -> SampleResult:
        engine = self._connected()
        return await generated(
            engine,
            request,
            self._endings,
            max_length=0 if request.max_tokens is not None else await _max_model_len(engine),
            adapter=adapter,
            extra={"ignore_eos": True},  # the ids that end a sequence are named
        )

    async def _load(self, saved: SavedWeights) -> str:
        engine = self._connected()
        for each in _engines_of(engine):  # a process that was killed may have left it in a server
            with suppress(EngineError):
                if saved.name in await each.adapters():
                    await each.unload_adapter(saved.name)
        await engine.load_adapter(saved.name, saved.path)
        return saved.name


def _engines_of(engine: VLLMEngine | EngineFleet) -> list[Any]:
    return [engine] if isinstance(engine, VLLMEngine) else list(engine.engines.values())


async def _max_model_len(engine: VLLMEngine | EngineFleet) -> int:
    """Of the first server that answers."""
    *others, last = _engines_of(engine)
    for each in others:
        with suppress(ServerUnreachableError, ServerTimeoutError):
            return int((await each.capabilities()).max_model_len)
    return int((await last.capabilities()).max_model_len)
