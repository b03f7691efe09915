"""A renderer for many coroutines: its work runs on threads, never on an event loop."""

from __future__ import annotations

import asyncio
import functools
import queue
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Concatenate, ParamSpec, Self, TypeVar, cast

from renderers.errors import RendererError
from renderers.parsing.response import ParsedResponse
from renderers.process.threads import DaemonThreads, available_cores
from renderers.protocol import Messages, Renderer, Tools, is_multimodal
from renderers.rendered import MultiModalData, RenderedTokens

P = ParamSpec("P")
T = TypeVar("T")

# Rendering holds the interpreter's lock for a large part of its time, so that more threads than this gain nothing.
_MAX_THREADS = 8
_CLOSED = "this RendererPool is closed; make calls before close(), or inside its `with` block"


def _on_threads(
    method: Callable[Concatenate[RendererPool, P], T],
) -> Callable[Concatenate[RendererPool, P], Coroutine[Any, Any, T]]:
    @functools.wraps(method)
    async def method_async(pool: RendererPool, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await pool.run_on_thread(functools.partial(method, pool, *args, **kwargs))

    return method_async


class RendererPool:
    """A `Renderer` with an `_async` variant of each method, which runs on a thread.

    The methods of the renderer are there too and run on the caller's thread. The pool is multimodal if its
    renderer is. It is not bound to an event loop: coroutines of several loops, and threads, may share it. The
    renderer must be safe to share between threads, as `TemplateRenderer` is, unless the pool makes its
    renderers, or `threads` is 1 and only `_async` methods are called.

        async with RendererPool(load_renderer("Qwen/Qwen3-8B")) as pool:
            prompt = await pool.render_async(messages, add_generation_prompt=True)

    As in PyPI's `renderers`, a function that makes a renderer can be given with the `size` of the pool: it
    is called `size` times, and each renderer is used by one call at a time, which suits those that threads
    must not share. `checkout` gives one of them for several calls; `size` is how many calls run at a time.

    `threads` defaults to `size`, and without it to the number of cores; at most 8. Calls wait for a thread
    in the order in which they were made. A call that is cancelled before a thread begins it never runs.
    Errors are raised by the call that caused them. Once the pool is closed, `_async` calls raise
    `RendererError`.
    """

    def __init__(
        self, renderer: Renderer | Callable[[], Renderer], size: int | None = None, *, threads: int | None = None
    ) -> None:
        if size is None:
            self.renderer = cast("Renderer", renderer)
            self._free: queue.LifoQueue[Renderer] | None = None
        else:
            made = _renderers(cast("Callable[[], Renderer]", renderer), size)
            self.renderer = made[0]
            self._free = queue.LifoQueue()
            for one in reversed(made):
                self._free.put(one)
        if threads is None:
            threads = min(_MAX_THREADS, size or available_cores())
        self.size = threads if size is None else size
        self._executor = DaemonThreads(threads, "renderer-pool")

    def checkout(self) -> AbstractContextManager[Renderer]:
        """A renderer that no other call uses meanwhile, unless threads share one. Waits for a free one."""
        return nullcontext(self.renderer) if self._free is None else _checked_out(self._free)

    @property
    def renderer_cls(self) -> type[Renderer]:
        """The class of the renderers."""
        return type(self.renderer)

    @property
    def is_multimodal(self) -> bool:
        """Whether the renderers take images, videos or sounds (`renderers.is_multimodal`)."""
        return is_multimodal(self.renderer)

    @property
    def supports_tools(self) -> bool:
        """That of the renderers; True for those that do not say."""
        return bool(getattr(self.renderer, "supports_tools", True))

    @property
    def supports_process_multimodal(self) -> bool:
        """That of the renderers; False for those that do not say."""
        return bool(getattr(self.renderer, "supports_process_multimodal", False))

    def render(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = False,
        process_multimodal: bool = True,
    ) -> RenderedTokens:
        with self.checkout() as renderer:
            return renderer.render(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, **_unprocessed(process_multimodal)
            )

    def render_ids(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        add_generation_prompt: bool = False,
        process_multimodal: bool = True,
    ) -> list[int]:
        with self.checkout() as renderer:
            return renderer.render_ids(
                messages, tools=tools, add_generation_prompt=add_generation_prompt, **_unprocessed(process_multimodal)
            )

    def parse_response(
        self, token_ids: Sequence[int], *, tools: Tools | None = None, prompt_ids: Sequence[int] | None = None
    ) -> ParsedResponse:
        with self.checkout() as renderer:
            return renderer.parse_response(token_ids, tools=tools, prompt_ids=prompt_ids)

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Messages,
        *,
        tools: Tools | None = None,
        previous_messages: Messages | None = None,
        previous_multi_modal_data: MultiModalData | None = None,
        process_multimodal: bool = True,
    ) -> RenderedTokens | None:
        # A renderer of a text model need not accept the argument.
        media = {} if previous_multi_modal_data is None else {"previous_multi_modal_data": previous_multi_modal_data}
        with self.checkout() as renderer:
            return renderer.bridge_to_next_turn(
                previous_prompt_ids,
                previous_completion_ids,
                new_messages,
                tools=tools,
                previous_messages=previous_messages,
                **media,
                **_unprocessed(process_multimodal),
            )

    def get_stop_token_ids(self) -> list[int]:
        return self.renderer.get_stop_token_ids()

    @property
    def mm_token_type_id_map(self) -> dict[int, int]:
        """The map of the renderer; empty for a text model."""
        return dict(getattr(self.renderer, "mm_token_type_id_map", {}))

    @property
    def shares_one_renderer(self) -> bool:
        """Whether all calls use one renderer, which threads share."""
        return self._free is None

    async def run_on_thread(self, call: Callable[[], T]) -> T:
        """Call a function on a thread of the pool, as the `_async` methods do."""
        try:
            # In a copy of the caller's context, so that context variables of the caller hold on the thread.
            result = self._executor.begin(_result_of, call)
        except RuntimeError as error:
            raise RendererError(_CLOSED) from error
        try:
            return await result
        except asyncio.CancelledError as error:
            if not _is_being_cancelled():  # by `close(wait=False)`
                raise RendererError(_CLOSED) from error
            raise

    render_async = _on_threads(render)
    render_ids_async = _on_threads(render_ids)
    parse_response_async = _on_threads(parse_response)
    bridge_to_next_turn_async = _on_threads(bridge_to_next_turn)

    def close(self, *, wait: bool = True) -> None:
        """Accept no more `_async` calls, and return when all earlier ones are done. May be called again.

        `wait` False: return at once. Calls that a thread has begun finish, others raise `RendererError`.
        """
        self._executor.shutdown(wait=wait, cancel_futures=not wait)

    async def aclose(self) -> None:
        """`close` without blocking the event loop."""
        self._executor.shutdown(wait=False)  # no more calls from here on
        # A thread of its own, because those of the pool are what is waited for.
        await DaemonThreads(1, "renderer-pool-close").run(self._executor.shutdown, wait=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.aclose()


def _renderers(make: Callable[[], Renderer], size: int) -> list[Renderer]:
    """`size` renderers. Loading a tokenizer takes long, so that threads make them."""
    with ThreadPoolExecutor(min(_MAX_THREADS, size)) as threads:
        return list(threads.map(lambda _: make(), range(size)))


@contextmanager
def _checked_out(free: queue.LifoQueue[Renderer]) -> Iterator[Renderer]:
    renderer = free.get()
    try:
        yield renderer
    finally:
        free.put(renderer)


def _unprocessed(process_multimodal: bool) -> dict[str, Any]:
    """The argument for a renderer, which need not accept it unless it supports it."""
    return {} if process_multimodal else {"process_multimodal": False}


def _is_being_cancelled() -> bool:
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _result_of(call: Callable[[], T]) -> T:
    """Call, with a StopIteration or CancelledError, which coroutines would misread, as RuntimeError."""
    try:
        return call()
    except (StopIteration, asyncio.CancelledError) as error:
        raise RuntimeError(f"the renderer raised {type(error).__name__}") from error
