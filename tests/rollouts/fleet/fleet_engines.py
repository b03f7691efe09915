"""Engines of a fleet whose health, failures and progress a test decides."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from rollouts.engines.fleet import EngineFleet
from rollouts.engines.protocol import (
    Completion,
    Engine,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    SamplingParams,
    TokenListener,
    WeightSpan,
)
from rollouts.errors import ServerError, ServerUnreachableError


class MemberEngine(Engine):
    """Answers with one token. `failure` is raised instead; while `gate` is clear, requests wait."""

    weight_version = ""

    def __init__(self, version: str = "0", model: str = "tiny", **capabilities: Any) -> None:
        self.weight_version = version
        self.served = {"model": model, **capabilities}
        self.is_healthy = True
        self.is_slow = False  # a health check gets no answer
        self.failure: Exception | None = None
        self.gate = asyncio.Event()
        self.gate.set()
        self.sessions: list[str | None] = []
        self.running = 0
        self.started = asyncio.Event()
        self.health_checks = 0
        self.closed = False

    async def generate(self, request: GenerateRequest, listen: TokenListener | None = None) -> GenerateResult:
        self.sessions.append(request.session_id)
        self.running += 1
        self.started.set()
        try:
            await self.gate.wait()
            if self.failure is not None:
                raise self.failure
            return GenerateResult(request.request_id, [self._completion(index) for index in range(request.sampling.n)])
        finally:
            self.running -= 1

    def _completion(self, index: int) -> Completion:
        spans = (WeightSpan(self.weight_version, 0, 1),)
        ids, logprobs = np.array([7], np.int32), np.array([-0.5], np.float32)
        return Completion(index, ids, logprobs, FinishReason.LENGTH, weight_spans=spans)

    async def check_health(self) -> None:
        self.health_checks += 1
        if self.is_slow:
            await asyncio.Event().wait()
        if not self.is_healthy:
            raise ServerError("check_health", "its health check failed", status=503, body="")

    async def capabilities(self) -> Any:
        if not self.is_healthy:
            raise ServerUnreachableError("capabilities", "connection refused")
        return SimpleNamespace(**self.served)

    async def close(self) -> None:
        self.closed = True


def request(session: str | None = "session", **options: Any) -> GenerateRequest:
    return GenerateRequest([1, 2, 3], SamplingParams(max_tokens=1, **options), session_id=session)


def states(fleet: EngineFleet) -> dict[str, str]:
    return {member.name: str(member.state) for member in fleet.members}


async def until(condition: Callable[[], bool]) -> None:
    """Waits for a state; the test's own time limit is the bound."""
    async with asyncio.timeout(20):
        while not condition():  # noqa: ASYNC110  the state of a fleet can only be asked for
            await asyncio.sleep(0.005)
