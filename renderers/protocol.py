"""The interface of a renderer."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from renderers.parsing.response import ParsedResponse
from renderers.rendered import MultiModalData, RenderedTokens

Messages = Sequence[Mapping[str, Any]]
Tools = Sequence[Mapping[str, Any]]


@runtime_checkable
class Renderer(Protocol):
    """Turns messages into tokens and back for one model."""

    def render(
        self, messages: Messages, *, tools: Tools | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens: ...

    def render_ids(
        self, messages: Messages, *, tools: Tools | None = None, add_generation_prompt: bool = False
    ) -> list[int]: ...

    def parse_response(
        self, token_ids: Sequence[int], *, tools: Tools | None = None, prompt_ids: Sequence[int] | None = None
    ) -> ParsedResponse: ...

    def get_stop_token_ids(self) -> list[int]: ...

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Messages,
        *,
        tools: Tools | None = None,
        previous_messages: Messages | None = None,
    ) -> RenderedTokens | None: ...


@runtime_checkable
class MultimodalRenderer(Renderer, Protocol):
    """A renderer of a multimodal model; `mm_token_type_id_map` maps placeholder ids to 1 (image), 2 (video)
    or 3 (sound)."""

    @property
    def mm_token_type_id_map(self) -> dict[int, int]: ...

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: Sequence[int],
        previous_completion_ids: Sequence[int],
        new_messages: Messages,
        *,
        tools: Tools | None = None,
        previous_messages: Messages | None = None,
        previous_multi_modal_data: MultiModalData | None = None,
    ) -> RenderedTokens | None: ...


def is_multimodal(renderer: object) -> bool:
    """Whether the renderer's model reads media. Holds for any object with a `mm_token_type_id_map`."""
    return bool(getattr(renderer, "mm_token_type_id_map", None))
