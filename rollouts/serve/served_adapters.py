"""The LoRA adapters of an engine, as names of models that requests may give."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rollouts.engines.lora import base_labels
from rollouts.engines.protocol import Completion


class ServedAdapters:
    """The adapters that an engine has loaded. An engine without the method `adapters` has none."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._list = getattr(engine, "adapters", None)
        self._base_versions: dict[str, str] = {}  # by adapter: the label of the weights below it when it was first seen

    async def has(self, name: str) -> bool:
        """Whether the engine has the adapter. Raises `EngineError`.

        The engine is asked about a name that it did not have before: adapters are loaded while it serves. One that was
        unloaded since is an error of the engine when it samples.
        """
        return name in self._base_versions or name in await self.names()

    async def names(self) -> list[str]:
        """The adapters that the engine has now. Raises `EngineError`."""
        loaded = {} if self._list is None else await self._list()
        base_version = str(getattr(getattr(self._engine, "engine", self._engine), "weight_version", "default"))
        self._base_versions = {name: self._base_versions.get(name, base_version) for name in loaded}
        return sorted(self._base_versions)

    def base_labels(self, completions: Iterable[Completion], name: str) -> list[Completion]:
        """The completions of an adapter, labelled with the versions of the weights below it, as those of a vLLM."""
        return base_labels(completions, name, self._base_versions.get(name, "default"))
