"""What the routes of one server share: the engine, the renderer, the model, the caches, and whether it sleeps."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from functools import cached_property

from renderers import TemplateRenderer
from renderers.model_files import ModelTokenizer
from rollouts.serve.media import MediaCache, SourceCache
from rollouts.serve.pausable_engine import PausableEngine
from rollouts.serve.served_model import ServedAdapters, ServedModel, unknown_model

_CACHE_BYTES = 2 * 2**30


@dataclass(eq=False)
class ServerState:
    """The state of one server. `sleep_level` is 0 while it is awake; `asleep` holds the kinds of memory that sleep."""

    engine: PausableEngine
    renderer: TemplateRenderer
    model: ServedModel
    media: MediaCache = field(default_factory=lambda: MediaCache(_CACHE_BYTES))
    sources: SourceCache = field(default_factory=lambda: SourceCache(_CACHE_BYTES))
    started: float = field(default_factory=time.time)
    sleep_level: int = 0
    asleep: set[str] = field(default_factory=set)

    @cached_property
    def tokenizer(self) -> ModelTokenizer:
        """The tokenizer as transformers has it: control tokens in a text become control tokens."""
        return ModelTokenizer(self.model.directory)

    @cached_property
    def adapters(self) -> ServedAdapters:
        """The LoRA adapters that the engine has loaded."""
        return ServedAdapters(self.engine)

    async def adapter_of(self, name: str | None) -> str | None:
        """The adapter that a request names as its model; None for the model itself.

        Raises `RequestError` (404) for another name, and `EngineError`.
        """
        if name is None or name == self.model.name:
            return None
        if not await self.adapters.has(name):
            raise unknown_model(name, self.model)
        return name

    def clear_media(self) -> None:
        """Forget the images and sounds of earlier requests."""
        self.media.clear()
        self.sources.clear()
