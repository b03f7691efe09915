"""An engine for tests of environments and trainers: it answers what a script says and keeps the requests."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np

from rollouts.engines.protocol import Completion, FinishReason, GenerateRequest, GenerateResult, WeightSpan
from rollouts.errors import EngineClosedError
from rollouts.testing.errors import ScriptError


@dataclass(frozen=True, slots=True)
class ScriptedAnswer:
    """One completion. `said` is text or token ids; `logprobs` are one number for all tokens, or one for each.

    `finish_reason` None: as an engine would have it (see `ScriptedEngine`).
    """

    said: str | Sequence[int] | np.ndarray
    logprobs: float | Sequence[float] | np.ndarray = -0.5
    finish_reason: FinishReason | None = None


#: What a script may hold for one completion.
Answer: TypeAlias = "str | Sequence[int] | np.ndarray | ScriptedAnswer | Completion | BaseException | GenerateResult"
AnswerFunction: TypeAlias = "Callable[[GenerateRequest], Answer | Awaitable[Answer]]"


class ScriptedEngine:
    """An `Engine` that answers from a script, without a model. Needs neither torch nor a network.

        engine = ScriptedEngine(["left", "right", TimeoutError("down")], renderer=renderer)

    The script is a list, of which each completion takes the next answer, or one function that answers every request:

    - text, which needs `renderer`: its ids (control tokens may be spelled), then the renderer's first stop token unless
      the text ends with one;
    - token ids, as they are;
    - a `ScriptedAnswer`, for log-probabilities and finish reasons of your own, or a `Completion`;
    - an exception, which is raised;
    - a `GenerateResult`, which is returned as it is, whatever is wrong with it;
    - a function of the request, `async` or not, that returns one of these.

    As with a real engine, a completion is cut off after `sampling.max_tokens` tokens; it ends with `FinishReason.STOP`
    where its last token is a stop token and with `LENGTH` elsewhere. Every log-probability is -0.5 unless the script
    says otherwise. `requests` holds the requests in the order in which they came, `closed` whether `close` was called.
    Raises `ScriptError` when the script is at its end.
    """

    def __init__(
        self,
        script: Iterable[Answer | AnswerFunction] | AnswerFunction,
        *,
        renderer: Any = None,
        weight_version: str = "0",
    ) -> None:
        if isinstance(script, str):
            raise ScriptError("script", f"a script is a list of answers, not the text {script!r:.40}; pass [text]")
        self.requests: list[GenerateRequest] = []
        self.closed = False
        self._function = script if callable(script) else None
        self._script: Iterator[Answer | AnswerFunction] = iter(()) if callable(script) else iter(script)
        self._renderer = getattr(renderer, "renderer", renderer)  # of a pool the one behind it
        self._weight_version = weight_version

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Answer with the next of the script. Raises what the script says, `ScriptError` and `EngineClosedError`."""
        if self.closed:
            raise EngineClosedError(request.request_id, "the engine is closed")
        self.requests.append(request)
        scripted = [self._next(request) for _ in range(request.sampling.n)]
        await asyncio.sleep(0)  # other episodes have their turn, as while a model samples
        completions: list[Completion] = []
        for index, answer in enumerate(scripted):
            if callable(answer) and not isinstance(answer, type):
                answer = answer(request)
                answer = await answer if inspect.isawaitable(answer) else answer
            if isinstance(answer, GenerateResult):
                return answer
            completions.append(self._completion(request, index, answer))
        return GenerateResult(request.request_id, completions)

    async def close(self) -> None:
        """Refuse further requests."""
        self.closed = True

    def _next(self, request: GenerateRequest) -> Any:
        if self._function is not None:
            return self._function
        try:
            return next(self._script)
        except StopIteration:
            raise ScriptError(
                request.request_id,
                f"the script has no answer left for request {len(self.requests)}; give it one more, or a function",
            ) from None

    def _completion(self, request: GenerateRequest, index: int, answer: Any) -> Completion:
        if isinstance(answer, BaseException) or (isinstance(answer, type) and issubclass(answer, BaseException)):
            raise answer
        if isinstance(answer, Completion):
            return replace(answer, index=index)
        given = answer if isinstance(answer, ScriptedAnswer) else ScriptedAnswer(answer)
        ids = self._ids(request, given)[: request.sampling.max_tokens]
        stops = {*request.sampling.stop_token_ids, *self._stop_ids()}
        stopped = bool(ids) and ids[-1] in stops
        reason = given.finish_reason or (FinishReason.STOP if stopped else FinishReason.LENGTH)
        logprobs = np.asarray(given.logprobs, np.float32)
        return Completion(
            index=index,
            token_ids=np.array(ids, np.int32),
            logprobs=np.full(len(ids), logprobs, np.float32) if logprobs.ndim == 0 else logprobs[: len(ids)],
            finish_reason=reason,
            stop_token_id=ids[-1] if stopped and reason is FinishReason.STOP else None,
            weight_spans=(WeightSpan(self._weight_version, 0, len(ids)),) if ids else (),
        )

    def _ids(self, request: GenerateRequest, given: ScriptedAnswer) -> list[int]:
        if not isinstance(given.said, str):
            return [int(token) for token in given.said]
        if self._renderer is None:
            raise ScriptError(request.request_id, f"{given.said!r:.40} needs a tokenizer; pass renderer=, or token ids")
        ids: list[int] = self._renderer.tokenizer.encode_scaffold(given.said)
        stops = self._stop_ids()
        cut_off = given.finish_reason not in (None, FinishReason.STOP)
        return ids if cut_off or (ids and ids[-1] in stops) else [*ids, stops[0]]

    def _stop_ids(self) -> list[int]:
        return [] if self._renderer is None else list(self._renderer.get_stop_token_ids())
