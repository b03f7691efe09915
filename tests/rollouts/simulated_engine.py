"""An engine without a model, for tests of what runs many episodes: random latency, failures, and weight updates."""

import asyncio
import functools
import heapq
import itertools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import numpy as np

from rollouts.engines.continuation import join_spans
from rollouts.engines.protocol import (
    Completion,
    Engine,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    InFlight,
    TokenListener,
    WeightSpan,
    check_update_arguments,
)
from rollouts.errors import EngineClosedError, EngineError, ServerUnreachableError, WeightUpdateError

#: Bounds of a number that is drawn anew each time.
Range: TypeAlias = tuple[float, float]

_TOKEN_SECONDS: Range = (0.01, 0.05)


@dataclass(eq=False, slots=True)
class _Request:
    """A request that the engine holds. `tokens` are those sampled so far, `versions` their weights."""

    request: GenerateRequest
    random: random.Random
    tokens_left: int
    fails_after: int | None
    aborts_after: int | None
    result: asyncio.Future[Completion]
    tokens: list[int] = field(default_factory=list)
    spans: tuple[WeightSpan, ...] = ()


class SimulatedEngine(Engine):
    """An engine that draws tokens at random, one at a time, on a clock of its own.

        engine = SimulatedEngine(seed=1, error_rate=0.1)

    Every request waits in a queue for a time from the range `queue_seconds`, then samples a token each 0.01 to 0.05 s.
    The seconds are simulated: the engine takes one round of the event loop for each event. A completion has a length
    from `tokens`, unless `max_tokens` is smaller; its tokens are drawn from `token_ids`, with the log-probability of
    that draw, and the last is the first stop token of the request. What a request gets depends on the seeds of engine
    and request alone, and for a request without a seed on its id; the order of events depends on what else runs.

    `error_rate` is the probability that a request raises `ServerUnreachableError` at one of its tokens, `abort_rate`
    that it ends there with `FinishReason.ABORT`. `update_failure_rate` is the probability that an update, which takes
    `update_seconds`, raises `WeightUpdateError` and leaves the weights as they were.

    Tokens are labelled with the version of the weights that sampled them. `update_weights` treats running requests as a
    server does: "abort" sends them back to the queue with the tokens they have, "wait" lets them finish before, "keep"
    stops them meanwhile. A cancelled request is removed.

    `running` is the number of requests that the engine holds, `peak_running` its maximum.
    """

    def __init__(
        self,
        *,
        seed: int = 0,
        tokens: tuple[int, int] = (1, 16),
        token_ids: Sequence[int] = range(256),
        queue_seconds: Range = (0.0, 1.0),
        update_seconds: Range = (0.1, 1.0),
        error_rate: float = 0.0,
        abort_rate: float = 0.0,
        update_failure_rate: float = 0.0,
    ) -> None:
        self._seed = seed
        self._lengths = tokens
        self._token_ids = tuple(token_ids)
        self._queue_seconds = queue_seconds
        self._update_seconds = update_seconds
        self._error_rate = error_rate
        self._abort_rate = abort_rate
        self._update_failure_rate = update_failure_rate
        self._weight_version = "0"
        self._logprob = -math.log(len(self._token_ids))
        self._random = random.Random(f"{seed} engine")
        self._clock = 0.0
        self.peak_running = 0
        self.closed = False
        self._requests: set[_Request] = set()
        # Due time, number, what happens then.
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._stopped: list[_Request] = []  # those whose next token waits for the end of a pause or an update
        self._paused = False
        self._updating: InFlight | None = None
        self._update_over: asyncio.Future[None] | None = None
        self._drained: asyncio.Event | None = None
        self._driver: asyncio.Task[None] | None = None

    # As an engine.

    @property
    def weight_version(self) -> str:
        """The version of the weights in use."""
        return self._weight_version

    @property
    def running(self) -> int:
        """How many requests the engine holds."""
        return len(self._requests)

    async def generate(self, request: GenerateRequest, listen: TokenListener | None = None) -> GenerateResult:
        """Sample one completion. Raises `ServerUnreachableError` at the rate of errors, and `EngineClosedError`."""
        if self.closed:
            raise EngineClosedError(request.request_id, "the engine is closed")
        held = self._new_request(request)
        try:
            return GenerateResult(request.request_id, [await held.result])
        finally:
            self._remove(held)
            del held  # its result holds an error, which refers to this frame

    async def update_weights(self, weights: Any, version: str, *, in_flight: InFlight = "abort") -> None:
        """Label tokens with `version` once the update is over; `weights` may be anything.

        Raises `ArgumentError`, `EngineClosedError`, and `WeightUpdateError` at the rate of failures and while another
        update is under way.
        """
        check_update_arguments(version, in_flight)
        if self.closed:
            raise EngineClosedError("update_weights", "the engine is closed")
        if self._updating is not None:
            raise WeightUpdateError(f"an update is under way; nothing was changed by that to {version!r:.80}")
        self._updating = in_flight
        self._update_over = over = asyncio.get_running_loop().create_future()
        try:
            if in_flight == "wait":
                await self._until_drained()
            self._at(self._random.uniform(*self._update_seconds), functools.partial(_set_done, over))
            await over
            if self._random.random() < self._update_failure_rate:
                raise WeightUpdateError(
                    f"the simulated update to {version!r:.80} failed; version {self._weight_version!r:.80} is in use"
                )
            self._weight_version = version
        finally:
            over.cancel()
            self._updating = None
            self._continue_stopped(from_queue=in_flight == "abort")

    async def close(self) -> None:
        """Refuse further requests, and end the running ones with `EngineClosedError`."""
        self.closed = True
        self._events.clear()
        for held in list(self._requests):
            self._end(held, EngineClosedError(held.request.request_id, "the engine is closed"))
        if self._update_over is not None and not self._update_over.done():
            self._update_over.set_exception(EngineClosedError("update_weights", "the engine is closed"))
        if self._driver is not None:
            self._driver.cancel()
            await asyncio.wait([self._driver])

    # Pauses.

    def pause(self) -> None:
        """Sample no token until `resume`."""
        self._paused = True

    def resume(self) -> None:
        """Go on after `pause`. Without a pause it does nothing."""
        self._paused = False
        self._continue_stopped(from_queue=False)

    # Requests.

    def _new_request(self, request: GenerateRequest) -> _Request:
        sampling = request.sampling
        source = request.request_id if sampling.seed is None else sampling.seed
        rng = random.Random(f"{self._seed} {source}")
        length = min(rng.randint(int(self._lengths[0]), int(self._lengths[1])), sampling.max_tokens)
        fails, aborts = rng.random() < self._error_rate, rng.random() < self._abort_rate
        cut = rng.randrange(length)
        held = _Request(
            request=request,
            random=rng,
            tokens_left=length,
            fails_after=cut if fails else None,
            aborts_after=cut if aborts else None,
            result=asyncio.get_running_loop().create_future(),
        )
        self._requests.add(held)
        self.peak_running = max(self.peak_running, self.running)
        self._enqueue(held)
        return held

    def _enqueue(self, held: _Request) -> None:
        self._at(held.random.uniform(*self._queue_seconds), functools.partial(self._sample, held))

    def _sample(self, held: _Request) -> None:
        """Sample the next token, unless nothing may be sampled now."""
        if held not in self._requests:
            return
        if self._paused or (self._updating is not None and not (self._updating == "wait" and held.tokens)):
            self._stopped.append(held)
            return
        done = len(held.tokens)
        if done == held.fails_after:
            error = ServerUnreachableError(held.request.request_id, f"simulated failure after {done} tokens")
            self._end(held, error)
            return
        if done == held.aborts_after:
            self._end(held, self._completion(held, FinishReason.ABORT))
            return
        stops = held.request.sampling.stop_token_ids
        held.tokens_left -= 1
        is_last = held.tokens_left == 0
        at_limit = done + 1 == held.request.sampling.max_tokens
        stopped = is_last and bool(stops) and not at_limit
        held.tokens.append(stops[0] if stopped else held.random.choice(self._token_ids))
        held.spans = join_spans(held.spans, (WeightSpan(self._weight_version, 0, 1),), done)
        if is_last or held.tokens[-1] in stops:
            reason = FinishReason.STOP if held.tokens[-1] in stops else FinishReason.LENGTH
            self._end(held, self._completion(held, reason))
        else:
            self._at(held.random.uniform(*_TOKEN_SECONDS), functools.partial(self._sample, held))

    def _completion(self, held: _Request, reason: FinishReason) -> Completion:
        return Completion(
            index=0,
            token_ids=np.array(held.tokens, np.int32),
            logprobs=np.full(len(held.tokens), self._logprob, np.float32),
            finish_reason=reason,
            stop_token_id=held.tokens[-1] if reason is FinishReason.STOP else None,
            weight_spans=held.spans,
        )

    def _end(self, held: _Request, outcome: Completion | EngineError) -> None:
        if held.result.done():  # cancelled; its caller removes it
            return
        if isinstance(outcome, Completion):
            held.result.set_result(outcome)
        else:
            held.result.set_exception(outcome)
        self._remove(held)

    def _remove(self, held: _Request) -> None:
        """Forget a request. Its result, if it has none, is cancelled."""
        self._requests.discard(held)
        held.result.cancel()
        if self._drained is not None and not any(each.tokens for each in self._requests):
            self._drained.set()

    async def _until_drained(self) -> None:
        """Wait until no request has tokens. New ones do not begin meanwhile."""
        self._drained = asyncio.Event()
        try:
            if any(each.tokens for each in self._requests):
                await self._drained.wait()
        finally:
            self._drained = None

    def _continue_stopped(self, *, from_queue: bool) -> None:
        if self._paused or self._updating is not None:
            return
        stopped, self._stopped = self._stopped, []
        for held in stopped:
            if from_queue:
                self._enqueue(held)
            else:
                self._at(held.random.uniform(*_TOKEN_SECONDS), functools.partial(self._sample, held))

    # The clock.

    def _at(self, seconds: float, event: Callable[[], None]) -> None:
        """Let an event happen `seconds` from now on the simulated clock."""
        heapq.heappush(self._events, (self._clock + seconds, next(self._numbers), event))
        if self._driver is None or self._driver.done():
            self._driver = asyncio.get_running_loop().create_task(self._run_events())

    async def _run_events(self) -> None:
        """Let events happen in order until there is none."""
        while self._events:
            await asyncio.sleep(0)
            if self._events:  # `close` may have removed it; a new one may be due earlier
                due, _, event = heapq.heappop(self._events)
                self._clock = max(self._clock, due)
                event()


def _set_done(future: asyncio.Future[None]) -> None:
    if not future.done():
        future.set_result(None)
