"""An engine whose calls are those of another one: the base of engines that change a few of them."""

import os
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

from rollouts.engines.protocol import (
    Engine,
    GenerateRequest,
    GenerateResult,
    InFlight,
    TokenListener,
    generate_at,
)


class NoEngine(Engine):
    """What is known of an engine that does not exist yet: nothing. No request runs at it."""

    async def generate(self, request: GenerateRequest, listen: TokenListener | None = None) -> GenerateResult:
        raise NotImplementedError

    async def abort(self, request_ids: Iterable[str]) -> None:
        pass

    async def abort_all(self) -> None:
        pass

    async def close(self) -> None:
        pass


class ForwardingEngine(Engine):
    """Makes each call at `engine`.

    A subclass may begin with `NoEngine()` and start another one in `start`, which `generate` and the calls
    that change weights or adapters await.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    async def start(self) -> Engine:
        """The engine, which can be used."""
        return self.engine

    @property
    def vocab_size(self) -> int | None:
        return self.engine.vocab_size

    @property
    def max_model_len(self) -> int | None:
        return self.engine.max_model_len

    @property
    def weight_version(self) -> str:
        return self.engine.weight_version

    @property
    def streams(self) -> bool:
        return self.engine.streams

    @property
    def base_url(self) -> str:
        return self.engine.base_url

    @property
    def control(self) -> Any:
        return self.engine.control

    async def capabilities(self) -> Any:
        return await self.engine.capabilities()

    async def check_health(self) -> None:
        await self.engine.check_health()

    async def served_version(self) -> str | None:
        return await self.engine.served_version()

    def expecting_request(self) -> AbstractContextManager[None]:
        return self.engine.expecting_request()

    async def abort(self, request_ids: Iterable[str]) -> None:
        await self.engine.abort(request_ids)

    async def abort_all(self) -> None:
        await self.engine.abort_all()

    async def context_length(self) -> int | None:
        return await (await self.start()).context_length()

    async def generate(self, request: GenerateRequest, listen: TokenListener | None = None) -> GenerateResult:
        return await generate_at(await self.start(), request, listen)

    async def update_weights(self, weights: Any, version: str, *, in_flight: InFlight = "abort") -> None:
        await (await self.start()).update_weights(weights, version, in_flight=in_flight)

    async def load_adapter(self, name: str, directory: str | os.PathLike[str]) -> None:
        await (await self.start()).load_adapter(name, directory)

    async def unload_adapter(self, name: str) -> None:
        await (await self.start()).unload_adapter(name)

    async def adapters(self) -> Mapping[str, str]:
        return await (await self.start()).adapters()

    async def close(self) -> None:
        await self.engine.close()
