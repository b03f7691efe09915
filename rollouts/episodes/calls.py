"""Calls of renderers and other short functions of episodes on threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NoReturn, TypeVar

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

T = TypeVar("T")

# A thread takes a tenth of a millisecond to begin a call and hand over its result, and several times that while other
# threads hold the interpreter's lock. Parsing a short completion, adding a short message, or rendering a short first
# prompt takes about as long, and a thread that computes in Python keeps the event loop waiting, too. So such calls are
# made on the event loop itself, a few at a time.

#: Characters and tokens of the largest call that is made on the event loop.
_LARGEST_SIZE: Final = 4096
#: What a message without text costs, in characters.
_MESSAGE_SIZE: Final = 32
#: As many calls are made before the loop looks at what else is due.
_CALLS_AT_ONCE: Final = 8


class ShortCalls:
    """Makes calls on the event loop, a few before the loop looks at what else is due. The episodes of a run share it.

    The first call of a kind is made on a thread while the others wait: it also fills caches, which takes long.
    """

    def __init__(self) -> None:
        self._slots = asyncio.Semaphore(_CALLS_AT_ONCE)
        self._first = asyncio.Lock()
        self._known: set[str] = set()

    async def run(self, pool: RendererPool, kind: str, call: Callable[[], T]) -> T:
        if kind not in self._known:
            async with self._first:
                if kind not in self._known:
                    try:
                        return await pool.run_on_thread(call)
                    finally:
                        self._known.add(kind)
        async with self._slots:
            result = call()
            await asyncio.sleep(0)  # with the slot, until the loop has looked at what else is due
            return result


# Calls of a renderer by an episode: all but short ones run on threads; unknown exceptions become errors of ours.


@contextmanager
def renderer_pool(renderer: Renderer | RendererPool | None) -> Iterator[RendererPool | None]:
    """The pool that was given, or a pool of the renderer, which is closed at the end of the block; None without one.

    Closing does not wait: after a cancellation a thread may stay busy for as long as fetching a medium takes.
    """
    if renderer is None or _is_pool(renderer):
        yield renderer  # type: ignore[misc]  # it has the methods that are used, if not the class
        return
    pool = RendererPool(renderer)
    try:
        yield pool
    finally:
        pool.close(wait=False)


class RendererCalls:
    """Calls a pool for an episode. Raises `RendererError`; `RendererFailedError` for other exceptions.

    With `short_calls`, short calls are made on the event loop where threads share one `TemplateRenderer`: it computes,
    and waits for nothing.
    """

    def __init__(self, pool: RendererPool, short_calls: ShortCalls | None = None) -> None:
        self._pool = pool
        renderer = getattr(pool, "renderer", pool)
        self._name = type(renderer).__name__
        self._template_renderer = renderer if isinstance(renderer, TemplateRenderer) else None
        is_shared = isinstance(pool, RendererPool) and pool.shares_one_renderer and self._template_renderer is not None
        self._short_calls = short_calls if is_shared else None
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
            short_calls = self._if_short(text_size, messages if has_media else ())
            if short_calls is None or tools:  # the cost grows with the tools, too, whose size is not known
                return await self._pool.render_async(messages, **options)
            render = partial(self._caller.render, messages, **options)
            return await short_calls.run(self._pool, "render with media" if has_media else "render", render)
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
            short_calls = self._if_short(text_size + len(completion_ids), new_messages if has_media else ())
            if short_calls is None:
                return await self._pool.bridge_to_next_turn_async(*arguments, **options)
            bridge = partial(self._caller.bridge_to_next_turn, *arguments, **options)
            return await short_calls.run(self._pool, "bridge with media" if has_media else "bridge", bridge)
        except BaseException as error:  # noqa: BLE001  raised below
            self._raise(error, "bridge_to_next_turn")

    async def parse(
        self, completion_ids: Sequence[int], tools: Any, prompt: RenderedTokens
    ) -> tuple[Message, ParsedResponse]:
        """The completion as an assistant message, and what it was parsed into."""
        options = {"tools": tools, "prompt_ids": prompt.token_ids}
        try:
            short_calls = self._if_short(len(completion_ids))
            if short_calls is None:
                parsed = await self._pool.parse_response_async(completion_ids, **options)
            else:
                parse = partial(self._caller.parse_response, completion_ids, **options)
                parsed = await short_calls.run(self._pool, "parse", parse)
            return parsed.to_message(), parsed
        except BaseException as error:  # noqa: BLE001  raised below
            self._raise(error, "parse_response")

    def _if_short(self, size: int, messages_with_media: Sequence[Message] = ()) -> ShortCalls | None:
        """What makes a call that is short enough for the event loop: no medium has to be loaded or processed."""
        if self._short_calls is None or size > _LARGEST_SIZE or self._template_renderer is None:
            return None
        if messages_with_media and not self._template_renderer.has_processed(messages_with_media):
            return None
        return self._short_calls

    def _raise(self, error: BaseException, method: str) -> NoReturn:
        """Raise what an episode raises for an exception of the renderer's `method`, which may be anything."""
        try:
            if isinstance(error, (RendererError, RolloutsError)) or ends_task(error):
                raise error
            raise RendererFailedError(self._name, method, error) from error
        finally:
            del error  # it refers to this frame


def _text_size(messages: Sequence[Message]) -> tuple[int, bool]:
    """The characters of messages, with a few for each of them, and whether there may be media, too."""
    size, has_media = 0, False
    for message in messages:
        size += _MESSAGE_SIZE + sum(_characters(value) for key, value in message.items() if key != "content")
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


def _characters(value: Any) -> int:
    """The characters of the texts in a value, which is not nested inside itself: messages were checked."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_characters, value.values()))
    return sum(map(_characters, value)) if isinstance(value, list | tuple) else 0


def _is_pool(renderer: object) -> bool:
    methods = ("render_async", "bridge_to_next_turn_async", "parse_response_async")
    return all(callable(getattr(renderer, name, None)) for name in methods)
