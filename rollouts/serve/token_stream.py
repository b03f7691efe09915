"""The tokens of one request as they are sampled, collected into chunks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import numpy as np

from rollouts.engines.protocol import GenerateRequest, GenerateResult, StreamingEngine, TokenDelta


class TokenStream:
    """Runs a request; `deltas` yields its tokens, then `result` returns the whole result.

    Without `cancel`, the request runs to its end.
    """

    def __init__(self, engine: StreamingEngine, request: GenerateRequest) -> None:
        self._queue: asyncio.Queue[TokenDelta | None] = asyncio.Queue()
        self._task = asyncio.ensure_future(engine.generate_streamed(request, self._queue.put_nowait))
        self._task.add_done_callback(lambda _: self._queue.put_nowait(None))
        self._first: TokenDelta | None = None

    async def begin(self) -> None:
        """Wait for the first token, or the end. Raises what the engine raises before the first token."""
        self._first = await self._queue.get()
        if self._first is None:
            await self._task

    async def deltas(self, interval: int) -> AsyncIterator[TokenDelta]:
        """The first token of each completion as soon as it is there, then its tokens in chunks of `interval`.

        The last chunk of a completion may be missing: those tokens are in the result alone.
        """
        delta = self._first
        pending: dict[int, list[TokenDelta]] = {}
        while delta is not None:
            is_first = delta.index not in pending
            waiting = pending.setdefault(delta.index, [])
            waiting.append(delta)
            if is_first or sum(len(each.token_ids) for each in waiting) >= interval:
                yield _joined(waiting)
                waiting.clear()
            delta = await self._queue.get()

    async def result(self) -> GenerateResult:
        """The result. Raises what the engine raises."""
        return await self._task

    def cancel(self) -> None:
        """End the request if it runs."""
        self._task.cancel()


def _joined(deltas: list[TokenDelta]) -> TokenDelta:
    if len(deltas) == 1:
        return deltas[0]
    token_ids = np.concatenate([each.token_ids for each in deltas])
    return TokenDelta(deltas[0].index, token_ids, np.concatenate([each.logprobs for each in deltas]))
