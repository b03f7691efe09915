"""An engine for tests of environments and trainers: it returns the completions of a script and keeps the requests."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

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
from rollouts.errors import EngineClosedError, EngineError, short_repr


@dataclass(frozen=True, slots=True)
class ScriptedCompletion:
    """One completion of a script. `logprobs` is one number for all tokens, or one for each.

    `finish_reason` None: STOP or LENGTH, as `ScriptedEngine` describes.
    """

    output: str | Sequence[int] | np.ndarray
    logprobs: float | Sequence[float] | np.ndarray = -0.5
    finish_reason: FinishReason | None = None


#: What a script may hold for one completion.
Entry: TypeAlias = "str | Sequence[int] | np.ndarray | ScriptedCompletion | Completion | BaseException | GenerateResult"
EntryFunction: TypeAlias = "Callable[[GenerateRequest], Entry | Awaitable[Entry]]"


class ScriptedEngine(Engine):
    """An engine that returns completions from a script, without a model. Needs neither torch nor a network.

        engine = ScriptedEngine(["left", "right", TimeoutError("down")], renderer=renderer)

    The script is a list, of which each completion takes the next entry, or one function that is called for
    every completion. An entry is one of:

    - text, which needs `renderer`: its ids (the text may contain control tokens), then the renderer's first
      stop token unless the text ends with one;
    - token ids, returned unchanged;
    - a `ScriptedCompletion`, for other log-probabilities and finish reasons, or a `Completion`;
    - an exception, which is raised;
    - a `GenerateResult`, which is returned unchanged, valid or not;
    - a function of the request, `async` or not, that returns one of these.

    As with a real engine, a completion is cut off after `sampling.max_tokens` tokens; it ends with
    `FinishReason.STOP` where its last token is a stop token and with `LENGTH` elsewhere. Every
    log-probability is -0.5 unless the script gives another. `requests` holds the requests in order of
    arrival, `updates` the arguments of `update_weights`, and `closed` whether `close` was called. Raises
    `EngineError` when the script has no entry left.
    """

    def __init__(
        self,
        script: Iterable[Entry | EntryFunction] | EntryFunction,
        *,
        renderer: Any = None,
        weight_version: str = "0",
    ) -> None:
        if isinstance(script, str):
            raise EngineError("script", f"a script is a list of entries, not the text {script!r:.40}; pass [text]")
        self.requests: list[GenerateRequest] = []
        self.updates: list[tuple[Any, str, InFlight]] = []
        self.closed = False
        self._taken = 0
        self._function = script if callable(script) else None
        self._script: Iterator[Entry | EntryFunction] = iter(()) if callable(script) else iter(script)
        self._renderer = getattr(renderer, "renderer", renderer)  # a pool has a renderer
        self._weight_version = weight_version

    async def generate(self, request: GenerateRequest, listen: TokenListener | None = None) -> GenerateResult:
        """Return the next completions of the script. Raises its exceptions, `EngineError` and `EngineClosedError`."""
        if self.closed:
            raise EngineClosedError(request.request_id, "the engine is closed")
        self.requests.append(request)
        first = self._taken
        entries = [self._next(request) for _ in range(request.sampling.n)]
        await asyncio.sleep(0)  # lets other episodes run, as a model that samples does
        completions: list[Completion] = []
        for index, entry in enumerate(entries):
            number = first + index
            if callable(entry) and not isinstance(entry, type):
                entry = entry(request)
                entry = await entry if inspect.isawaitable(entry) else entry
            if isinstance(entry, GenerateResult):
                return entry
            completions.append(self._completion(request, index, entry, number))
        return GenerateResult(request.request_id, completions)

    @property
    def weight_version(self) -> str:
        """The version that completions are labelled with."""
        return self._weight_version

    async def update_weights(self, weights: Any, version: str, *, in_flight: InFlight = "abort") -> None:
        """Label completions with `version` from now on, and append the call to `updates`. `weights` may be anything.

        Raises `ArgumentError` and `EngineClosedError`.
        """
        check_update_arguments(version, in_flight)
        if self.closed:
            raise EngineClosedError("update_weights", "the engine is closed")
        self.updates.append((weights, version, in_flight))
        self._weight_version = version

    async def close(self) -> None:
        """Refuse further requests."""
        self.closed = True

    def _next(self, request: GenerateRequest) -> Any:
        self._taken += 1
        if self._function is not None:
            return self._function
        try:
            return next(self._script)
        except StopIteration:
            raise EngineError(
                request.request_id,
                f"the script has no entry left for request {len(self.requests)}; give it one more, or a function",
            ) from None

    def _completion(self, request: GenerateRequest, index: int, entry: Any, number: int) -> Completion:
        if isinstance(entry, BaseException) or (isinstance(entry, type) and issubclass(entry, BaseException)):
            raise entry
        if isinstance(entry, Completion):
            return replace(entry, index=index)
        scripted = entry if isinstance(entry, ScriptedCompletion) else ScriptedCompletion(entry)
        ids = self._token_ids(request, scripted, number)[: request.sampling.max_tokens]
        stopped = bool(ids) and ids[-1] in {*request.sampling.stop_token_ids, *self._stop_ids()}
        reason = scripted.finish_reason or (FinishReason.STOP if stopped else FinishReason.LENGTH)
        logprobs = np.asarray(scripted.logprobs, np.float32)
        return Completion(
            index=index,
            token_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), logprobs, np.float32) if logprobs.ndim == 0 else logprobs[: len(ids)],
            finish_reason=reason,
            stop_token_id=ids[-1] if stopped and reason is FinishReason.STOP else None,
            weight_spans=(WeightSpan(self._weight_version, 0, len(ids)),) if ids else (),
        )

    def _token_ids(self, request: GenerateRequest, scripted: ScriptedCompletion, number: int) -> list[int]:
        output = scripted.output
        if not isinstance(output, str):
            try:
                return [int(token) for token in output]
            except (TypeError, ValueError) as error:
                raise EngineError(
                    request.request_id,
                    f"entry {number} of the script is {short_repr(output)} ({type(output).__name__}); pass text, token "
                    "ids, a ScriptedCompletion, a Completion, a GenerateResult, an exception or a function",
                ) from error
        if self._renderer is None:
            raise EngineError(request.request_id, f"{output!r:.40} needs a tokenizer; pass renderer=, or token ids")
        ids: list[int] = self._renderer.tokenizer.encode_scaffold(output)
        stops = self._stop_ids()
        cut_off = scripted.finish_reason not in (None, FinishReason.STOP)
        return ids if cut_off or (ids and ids[-1] in stops) else [*ids, stops[0]]

    def _stop_ids(self) -> list[int]:
        return [] if self._renderer is None else list(self._renderer.get_stop_token_ids())
