"""Calls of a renderer by an episode: they run on threads, and unknown exceptions become errors of ours."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from renderers import (
    Message,
    ParsedResponse,
    RenderedTokens,
    Renderer,
    RendererError,
    RendererPool,
    TemplateRenderer,
)
from renderers.bridging.refusals import noting_refusals
from renderers.tokens.length_bound import at_most_tokens
from rollouts.episodes.errors import RendererFailedError, wrap_exceptions
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
    """Calls a pool, prompts of at most `longest` tokens. Raises `RendererError`, `RendererFailedError`."""

    def __init__(self, pool: RendererPool) -> None:
        self.longest: int | None = None
        self._pool = pool
        renderer = getattr(pool, "renderer", pool)
        self._name = type(renderer).__name__
        self._is_template_renderer = isinstance(renderer, TemplateRenderer)

    def stop_token_ids(self) -> tuple[int, ...]:
        with self._naming("get_stop_token_ids"):
            return tuple(self._pool.get_stop_token_ids())

    async def render(self, messages: Sequence[Message], tools: Any) -> RenderedTokens:
        """The prompt for the next assistant turn."""
        with at_most_tokens(self.longest), self._naming("render"):
            return await self._pool.render_async(messages, tools=tools, add_generation_prompt=True)

    async def bridge(
        self,
        prompt: RenderedTokens,
        completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Any,
        previous_messages: Sequence[Message],
    ) -> tuple[RenderedTokens | None, str]:
        """The prompt after prompt + completion + new messages; None with the reason for a refusal."""
        # Another package's renderer for text alone has no parameter for media, and its prompts have none.
        media = prompt.multi_modal_data
        passes_media = media is not None and (self._is_template_renderer or not media.is_empty())
        media_argument: dict[str, Any] = {"previous_multi_modal_data": media} if passes_media else {}
        with at_most_tokens(self.longest), noting_refusals() as reasons, self._naming("bridge_to_next_turn"):
            bridged = await self._pool.bridge_to_next_turn_async(
                prompt.token_ids,
                completion_ids,
                new_messages,
                tools=tools,
                previous_messages=previous_messages,
                **media_argument,
            )
        return bridged, "".join(reasons)

    async def parse(
        self, completion_ids: Sequence[int], tools: Any, prompt: RenderedTokens
    ) -> tuple[Message, ParsedResponse]:
        """The completion as an assistant message, and what it was parsed into."""
        with self._naming("parse_response"):
            parsed = await self._pool.parse_response_async(completion_ids, tools=tools, prompt_ids=prompt.token_ids)
            return parsed.to_message(), parsed

    def _naming(self, method: str) -> AbstractContextManager[None]:
        """Replaces an exception of the renderer's `method`, which may be anything, by one that names it."""
        return wrap_exceptions(
            lambda error: RendererFailedError(self._name, method, error), unchanged=(RendererError, RolloutsError)
        )


def _is_pool(renderer: object) -> bool:
    methods = ("render_async", "bridge_to_next_turn_async", "parse_response_async")
    return all(callable(getattr(renderer, name, None)) for name in methods)
