"""A renderer as an episode uses it: its work runs on threads, and what it raises is typed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from renderers import Message, RenderedTokens, Renderer, RendererError, RendererPool
from rollouts.errors import RendererFailedError, RolloutsError
from rollouts.user_code.calls import failures_as


@contextmanager
def renderer_pool(renderer: Renderer | RendererPool) -> Iterator[RendererPool]:
    """The pool that was given, or one made of the renderer, which is closed in the end.

    Closing does not wait: after a cancellation a thread may still be busy, for as long as fetching an image takes.
    """
    if _is_pool(renderer):
        yield renderer  # type: ignore[misc]  # has the methods that are used, if not the class
        return
    pool = RendererPool(renderer)
    try:
        yield pool
    finally:
        pool.close(wait=False)


class EpisodeRenderer:
    """The calls of an episode. Raises `RendererError`, and `RendererFailedError` for what else a renderer raises."""

    def __init__(self, pool: RendererPool) -> None:
        self._pool = pool
        self._name = type(getattr(pool, "renderer", pool)).__name__

    def stop_token_ids(self) -> tuple[int, ...]:
        with self._named("get_stop_token_ids"):
            return tuple(self._pool.get_stop_token_ids())

    async def render(self, messages: Sequence[Message], tools: Any) -> RenderedTokens:
        """The prompt that asks for the next turn."""
        with self._named("render"):
            return await self._pool.render_async(messages, tools=tools, add_generation_prompt=True)

    async def bridge(
        self,
        prompt: RenderedTokens,
        completion_ids: Sequence[int],
        new_messages: Sequence[Message],
        tools: Any,
        previous_messages: Sequence[Message],
    ) -> RenderedTokens | None:
        """The prompt after prompt + completion + new messages, or None where the renderer refuses."""
        # A renderer of text only has no parameter for media, and a prompt of text has none.
        media = prompt.multi_modal_data
        carried = {"previous_multi_modal_data": media} if media is not None and media.items_with_ranges() else {}
        with self._named("bridge_to_next_turn"):
            return await self._pool.bridge_to_next_turn_async(
                prompt.token_ids,
                completion_ids,
                new_messages,
                tools=tools,
                previous_messages=previous_messages,
                **carried,
            )

    async def parse(self, completion_ids: Sequence[int], tools: Any, prompt: RenderedTokens) -> Message:
        """The completion as a message of the assistant."""
        with self._named("parse_response"):
            parsed = await self._pool.parse_response_async(completion_ids, tools=tools, prompt_ids=prompt.token_ids)
            message: Message = parsed.to_message()
            return message

    def _named(self, method: str) -> Any:
        return failures_as(
            lambda error: RendererFailedError(self._name, method, error), passing=(RendererError, RolloutsError)
        )


def _is_pool(renderer: object) -> bool:
    methods = ("render_async", "bridge_to_next_turn_async", "parse_response_async")
    return all(callable(getattr(renderer, name, None)) for name in methods)
