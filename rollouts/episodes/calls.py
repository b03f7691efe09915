"""Calls of a renderer by an episode: they run on threads, and unknown exceptions become errors of ours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

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
    """Calls a pool for an episode. Raises `RendererError`; `RendererFailedError` for other exceptions."""

    def __init__(self, pool: RendererPool) -> None:
        self._pool = pool
        renderer = getattr(pool, "renderer", pool)
        self._name = type(renderer).__name__
        self._is_template_renderer = isinstance(renderer, TemplateRenderer)

    def stop_token_ids(self) -> tuple[int, ...]:
        try:
            return tuple(self._pool.get_stop_token_ids())
        except BaseException as error:  # noqa: BLE001  raised below
            self._raise(error, "get_stop_token_ids")

    async def render(self, messages: Sequence[Message], tools: Any) -> RenderedTokens:
        """The prompt for the next assistant turn."""
        try:
            return await self._pool.render_async(messages, tools=tools, add_generation_prompt=True)
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
        passes_media = media is not None and (self._is_template_renderer or not media.is_empty())
        media_argument: dict[str, Any] = {"previous_multi_modal_data": media} if passes_media else {}
        try:
            return await self._pool.bridge_to_next_turn_async(
                prompt.token_ids,
                completion_ids,
                new_messages,
                tools=tools,
                previous_messages=previous_messages,
                **media_argument,
            )
        except BaseException as error:  # noqa: BLE001  raised below
            self._raise(error, "bridge_to_next_turn")

    async def parse(
        self, completion_ids: Sequence[int], tools: Any, prompt: RenderedTokens
    ) -> tuple[Message, ParsedResponse]:
        """The completion as an assistant message, and what it was parsed into."""
        try:
            parsed = await self._pool.parse_response_async(completion_ids, tools=tools, prompt_ids=prompt.token_ids)
            return parsed.to_message(), parsed
        except BaseException as error:  # noqa: BLE001  raised below
            self._raise(error, "parse_response")

    def _raise(self, error: BaseException, method: str) -> NoReturn:
        """Raise what an episode raises for an exception of the renderer's `method`, which may be anything."""
        try:
            if isinstance(error, (RendererError, RolloutsError)) or ends_task(error):
                raise error
            raise RendererFailedError(self._name, method, error) from error
        finally:
            del error  # it refers to this frame


def _is_pool(renderer: object) -> bool:
    methods = ("render_async", "bridge_to_next_turn_async", "parse_response_async")
    return all(callable(getattr(renderer, name, None)) for name in methods)
