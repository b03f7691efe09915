"""Calls of renderers and other short functions of episodes on threads."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from math import inf
from typing import Any, Final, NamedTuple, NoReturn, TypeVar

from renderers import (
    Message,
    ParsedResponse,
    RenderedTokens,
    Renderer,
    RendererError,
    RendererPool,
    TemplateRenderer,
)
from rollouts.episodes.errors import RendererFailedError, ends_task
from rollouts.errors import RolloutsError

# Calls of a renderer that are so short that a thread would cost more than the call.
#
# A thread takes a tenth of a millisecond to begin a call and hand over its result, and several times that while other
# threads hold the interpreter's lock. Parsing a short completion, adding a short message, or rendering a short first
# prompt takes about as long or less, and a thread that computes in Python keeps the event loop waiting, too: for up to
# 5 ms, after which it has to release the lock. So such calls are made on the event loop itself if they take a
# millisecond at most on average. Of many that are due at once, a few are made at a time; then the loop looks at what
# else is due.


T = TypeVar("T")

_LONGEST_CALL_SECONDS: Final = 0.001

#: Larger calls are made on threads: calls whose result the renderer has cached say little about one that is not cached.
_LARGEST_SIZE: Final = 4096


#: As many calls are made before the loop looks at what else is due, or fewer that take so long by their means.
_CALLS_AT_ONCE: Final = 8
_SECONDS_AT_ONCE: Final = 0.004

#: The fixed part of a call's cost, as if it had so many tokens or characters more.
_FIXED_SIZE: Final = 64

#: The share of the latest call in the mean cost of its kind.
_LATEST_SHARE: Final = 0.1


class _Measuring(NamedTuple):
    """One of the first two calls of a kind, and the event loop on which the others wait for it."""

    loop: asyncio.AbstractEventLoop
    ended: asyncio.Event


class ShortCalls:
    """Makes calls on the event loop or on the threads of a pool, by what calls of the same kind have cost.

    Only calls of a `TemplateRenderer` that threads share are made on the event loop: it computes, and waits for
    nothing. The first two calls of a kind are made on a thread, one after the other, and the others wait for them: what
    a call costs is known then, and thousands of episodes that begin at once do not all go to the threads.
    """

    def __init__(self) -> None:
        self._seconds_per_size: dict[str, float] = {}  # by kind: the mean of recent calls
        self._measuring: dict[str, _Measuring] = {}  # by kind: its first or second call, while it is made
        self._failed: set[str] = set()  # kinds for whose first calls the others do not wait any more
        self._made = 0  # since the loop has looked at what else is due
        self._planned_seconds = 0.0  # of these
        self._waiting: deque[tuple[asyncio.Future[None], float]] = deque()  # with the seconds that the call may take

    async def run(self, pool: RendererPool, kind: str, size: int, call: Callable[[], T]) -> T:
        """Make a call whose cost grows with `size`, a number of tokens or characters. `call` needs no media."""
        is_shared = pool.shares_one_renderer and isinstance(pool.renderer, TemplateRenderer)
        may_be_short = is_shared and size <= _LARGEST_SIZE
        if may_be_short:
            loop = asyncio.get_running_loop()
            while (measuring := self._measuring.get(kind)) is not None and measuring.loop is loop:
                await measuring.ended.wait()
        seconds = self._seconds_per_size.get(kind, inf) * (size + _FIXED_SIZE)
        if not may_be_short or seconds > _LONGEST_CALL_SECONDS:
            if may_be_short and seconds == inf and kind not in self._failed:
                return await self._measure(pool, kind, size, call)
            return await pool.run_on_thread(partial(self._measured_on_thread, kind, size, call))
        if self._are_enough() or self._waiting:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append((turn, seconds))
            await turn
        else:
            if not self._made:
                asyncio.get_running_loop().call_soon(self._next_calls)
            self._plan(seconds)
        started = time.perf_counter()
        result = call()
        self._note(kind, size, time.perf_counter() - started)
        return result

    def _are_enough(self) -> bool:
        """Whether the loop has to look at what else is due before the next call."""
        return self._made >= _CALLS_AT_ONCE or self._planned_seconds >= _SECONDS_AT_ONCE

    def _plan(self, seconds: float) -> None:
        self._made += 1
        self._planned_seconds += seconds

    def _next_calls(self) -> None:
        """Let the next calls begin. The loop calls this after it has looked at what is due."""
        self._made, self._planned_seconds = 0, 0.0
        while self._waiting and not self._are_enough():
            turn, seconds = self._waiting.popleft()
            if not turn.done():  # it is cancelled with its caller
                turn.set_result(None)
                self._plan(seconds)
        if self._made:
            asyncio.get_running_loop().call_soon(self._next_calls)

    async def _measure(self, pool: RendererPool, kind: str, size: int, call: Callable[[], T]) -> T:
        """Make one of the first two calls of a kind, while the others wait.

        If it fails or is cancelled, the others go to the threads as they are, and the first of them are measured there:
        how long a call takes that fails says nothing, and they could fail one after the other, too.
        """
        measuring = _Measuring(asyncio.get_running_loop(), asyncio.Event())
        self._measuring[kind] = measuring
        try:
            return await pool.run_on_thread(partial(self._measured_on_thread, kind, size, call))
        except BaseException:
            self._failed.add(kind)
            raise
        finally:
            if self._measuring.get(kind) is measuring:
                del self._measuring[kind]
            measuring.ended.set()

    def _measured_on_thread(self, kind: str, size: int, call: Callable[[], T]) -> T:
        started = time.thread_time()  # processor time: a thread also waits for other threads
        result = call()
        self._note(kind, size, time.thread_time() - started)
        return result

    def _note(self, kind: str, size: int, seconds: float) -> None:
        """Count what a call has taken in the mean of its kind."""
        rate = seconds / (size + _FIXED_SIZE)
        mean = self._seconds_per_size.get(kind)
        if mean is None:
            self._seconds_per_size[kind] = inf  # the first call also fills caches, so that it does not count
        else:
            self._seconds_per_size[kind] = rate if mean == inf else mean + _LATEST_SHARE * (rate - mean)


# Calls of a renderer by an episode: all but short ones run on threads; unknown exceptions become errors of ours.


@contextmanager
def renderer_pool(renderer: Renderer | RendererPool) -> Iterator[RendererPool]:
    """The pool that was given, or a pool of the renderer, which is closed at the end of the block.

    Closing does not wait: after a cancellation a thread may stay busy for as long as fetching an image takes.
    """
    if _is_pool(renderer):
        yield renderer  # type: ignore[misc]  # it has the methods that are used, if not the class
        return
    pool = RendererPool(renderer)
    try:
        yield pool
    finally:
        pool.close(wait=False)


class RendererCalls:
    """Calls a pool for an episode. Raises `RendererError`; `RendererFailedError` for other exceptions.

    With `short_calls`, which the episodes of a run share, calls that are short enough are made on the event loop.
    """

    def __init__(self, pool: RendererPool, short_calls: ShortCalls | None = None) -> None:
        self._pool = pool
        renderer = getattr(pool, "renderer", pool)
        self._name = type(renderer).__name__
        self._template_renderer = renderer if isinstance(renderer, TemplateRenderer) else None
        self._short_calls: ShortCalls | None = None
        if isinstance(pool, RendererPool) and pool.shares_one_renderer and self._template_renderer is not None:
            self._short_calls = short_calls
        # The methods of a pool with one renderer are those of the renderer, which threads share.
        self._caller: Any = renderer if self._short_calls is not None and type(pool) is RendererPool else pool

    def stop_token_ids(self) -> tuple[int, ...]:
        try:
            return tuple(self._pool.get_stop_token_ids())
        except BaseException as error:  # noqa: BLE001  raised below
            self._raise(error, "get_stop_token_ids")

    async def render(self, messages: Sequence[Message], tools: Any) -> RenderedTokens:
        """The prompt for the next assistant turn."""
        options = {"tools": tools, "add_generation_prompt": True}
        try:
            text_size, has_media = _text_size(messages)
            # The cost grows with the tools, too, whose size is not known.
            if self._short_calls is None or tools or (has_media and not self._has_processed(messages)):
                return await self._pool.render_async(messages, **options)
            kind = "render with media" if has_media else "render"
            render = partial(self._caller.render, messages, **options)
            return await self._short_calls.run(self._pool, kind, text_size, render)
        except BaseException as error:  # noqa: BLE001  raised below
            self._raise(error, "render")

    async def bridge(
        self,
        prompt: RenderedTokens,
        completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Any,
        previous_messages: Sequence[Message],
    ) -> RenderedTokens | None:
        """The prompt after prompt + completion + new messages, or None where the renderer refuses."""
        # Another package's renderer for text alone has no parameter for media, and its prompts have none.
        media = prompt.multi_modal_data
        passes_media = media is not None and (self._template_renderer is not None or not media.is_empty())
        media_argument: dict[str, Any] = {"previous_multi_modal_data": media} if passes_media else {}
        arguments = (prompt.token_ids, completion_ids, new_messages)
        options = {"tools": tools, "previous_messages": previous_messages, **media_argument}
        try:
            text_size, has_media = _text_size(new_messages)
            if self._short_calls is None or (has_media and not self._has_processed(new_messages)):
                return await self._pool.bridge_to_next_turn_async(*arguments, **options)
            kind = "bridge with media" if has_media else "bridge"
            bridge = partial(self._caller.bridge_to_next_turn, *arguments, **options)
            return await self._short_calls.run(self._pool, kind, text_size + len(completion_ids), bridge)
        except BaseException as error:  # noqa: BLE001  raised below
            self._raise(error, "bridge_to_next_turn")

    async def parse(
        self, completion_ids: Sequence[int], tools: Any, prompt: RenderedTokens
    ) -> tuple[Message, ParsedResponse]:
        """The completion as an assistant message, and what it was parsed into."""
        options = {"tools": tools, "prompt_ids": prompt.token_ids}
        try:
            if self._short_calls is None:
                parsed = await self._pool.parse_response_async(completion_ids, **options)
            else:
                parse = partial(self._caller.parse_response, completion_ids, **options)
                parsed = await self._short_calls.run(self._pool, "parse", len(completion_ids), parse)
            return parsed.to_message(), parsed
        except BaseException as error:  # noqa: BLE001  raised below
            self._raise(error, "parse_response")

    def _has_processed(self, messages: Sequence[Message]) -> bool:
        """Whether no medium of the messages has to be loaded or processed, which takes long."""
        return self._template_renderer is not None and self._template_renderer.has_processed(messages)

    def _raise(self, error: BaseException, method: str) -> NoReturn:
        """Raise what an episode raises for an exception of the renderer's `method`, which may be anything."""
        try:
            if isinstance(error, (RendererError, RolloutsError)) or ends_task(error):
                raise error
            raise RendererFailedError(self._name, method, error) from error
        finally:
            del error  # it refers to this frame


def _text_size(messages: Sequence[Message]) -> tuple[int, bool]:
    """The characters in the contents of messages, and whether there may be media, too."""
    size, has_media = 0, False
    for message in messages:
        content: Any = message.get("content")
        if type(content) is str:
            size += len(content)
            continue
        for part in content if isinstance(content, list) else [content]:
            text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else part
            if isinstance(text, str):
                size += len(text)
            else:
                has_media = True
    return size, has_media


def _is_pool(renderer: object) -> bool:
    methods = ("render_async", "bridge_to_next_turn_async", "parse_response_async")
    return all(callable(getattr(renderer, name, None)) for name in methods)
