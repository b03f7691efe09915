"""A renderer for many coroutines: its work runs on threads, never on an event loop."""

from __future__ import annotations

import asyncio
import functools
import os
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextvars import copy_context
from types import TracebackType
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from renderers.errors import PoolClosedError
from renderers.parsing.response import ParsedResponse
from renderers.protocol import Messages, Renderer, Tools
from renderers.rendered import MultiModalData, RenderedTokens

P = ParamSpec("P")
T = TypeVar("T")

# Rendering holds the interpreter's lock for a large part of its time, so that more threads than this gain nothing.
_MAX_THREADS = 8


def _on_threads(
    method: Callable[Concatenate[RendererPool, P], T],
) -> Callable[Concatenate[RendererPool, P], Coroutine[Any, Any, T]]:
    """The coroutine method that runs `method` on the threads of the pool."""

    @functools.wraps(method)
    async def method_async(pool: RendererPool, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await pool._run(functools.partial(method, pool, *args, **kwargs))

    return method_async


class RendererPool:
    """A `Renderer` with an `_async` variant of each method, which runs on a thread.

    The methods of the renderer are there too and run on the caller's thread. The pool is multimodal if its renderer is.
    It is not bound to an event loop: coroutines of several loops, and threads, may share it. The renderer must be safe
    to share between threads, as `TemplateRenderer` is, unless `threads` is 1 and only `_async` methods are called.

        async with RendererPool(load_renderer("Qwen/Qwen3-8B")) as pool:
            prompt = await pool.render_async(messages, add_generation_prompt=True)

    `threads` defaults to the number of cores, at most 8. Calls wait for a thread in the order in which they were made.
    A call that is cancelled before a thread begins it never runs. Errors are raised by the call that caused them. Once
    the pool is closed, `_async` calls raise `PoolClosedError`.
    """

    def __init__(self, renderer: Renderer, *, threads: int | None = None) -> None:
        self.renderer = renderer
        self._executor = ThreadPoolExecutor(
            min(_MAX_THREADS, os.cpu_count() or 1) if threads is None else threads, thread_name_prefix="renderer-pool"
        )

    def render(
        self, messages: Messages, *, tools: Tools | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        return self.renderer.render(messages, tools=tools, add_generation_prompt=add_generation_prompt)

    def render_ids(
        self, messages: Messages, *, tools: Tools | None = None, add_generation_prompt: bool = False
    ) -> list[int]:
        return self.renderer.render_ids(messages, tools=tools, add_generation_prompt=add_generation_prompt)

    def parse_response(
        self, token_ids: Sequence[int], *, tools: Tools | None = None, prompt_ids: Sequence[int] | None = None
    ) -> ParsedResponse:
        return self.renderer.parse_response(token_ids, tools=tools, prompt_ids=prompt_ids)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Messages,
        *,
        tools: Tools | None = None,
        previous_messages: Messages | None = None,
        previous_multi_modal_data: MultiModalData | None = None,
    ) -> RenderedTokens | None:
        # A renderer of a text model need not accept the argument.
        media = {} if previous_multi_modal_data is None else {"previous_multi_modal_data": previous_multi_modal_data}
        return self.renderer.bridge_to_next_turn(
            previous_prompt_ids,
            previous_completion_ids,
            new_messages,
            tools=tools,
            previous_messages=previous_messages,
            **media,
        )

    def get_stop_token_ids(self) -> list[int]:
        return self.renderer.get_stop_token_ids()

    @property
    def mm_token_type_id_map(self) -> dict[int, int]:
        """The map of the renderer; empty for a text model."""
        return dict(getattr(self.renderer, "mm_token_type_id_map", {}))

    render_async = _on_threads(render)
    render_ids_async = _on_threads(render_ids)
    parse_response_async = _on_threads(parse_response)
    bridge_to_next_turn_async = _on_threads(bridge_to_next_turn)

    def close(self, *, wait: bool = True) -> None:
        """Accept no more `_async` calls, and return when all earlier ones are done. May be called again.

        `wait` False: return at once. Calls that a thread has begun finish, others raise `PoolClosedError`.
        """
        self._executor.shutdown(wait=wait, cancel_futures=not wait)

    async def aclose(self) -> None:
        """`close` without blocking the event loop."""
        self._executor.shutdown(wait=False)  # no more calls from here on
        await asyncio.to_thread(self._executor.shutdown, wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _run(self, call: Callable[[], T]) -> T:
        try:
            # In a copy of the caller's context, so that context variables of the caller hold on the thread.
            work: Future[T] = self._executor.submit(copy_context().run, _result_of, call)
        except RuntimeError as error:
            raise PoolClosedError from error
        try:
            return await asyncio.wrap_future(work)
        except asyncio.CancelledError as error:
            if work.cancelled() and not _is_being_cancelled():  # by `close(wait=False)`
                raise PoolClosedError from error
            raise


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _result_of(call: Callable[[], T]) -> T:
    """Call, with a StopIteration made a RuntimeError: `asyncio` cannot pass a StopIteration on to a coroutine."""
    try:
        return call()
    except StopIteration as error:
        raise RuntimeError("the renderer raised StopIteration") from error
