"""The LoRA adapters that a gateway samples with."""

from __future__ import annotations

from typing import Any


class ServedAdapters:
    """The adapters that an engine has loaded. An engine without the method `adapters` has none."""

    def __init__(self, engine: Any) -> None:
        self._list = getattr(engine, "adapters", None)
        self._known: frozenset[str] = frozenset()

    async def has(self, name: str) -> bool:
        """Whether the engine has the adapter. Raises `EngineError`.

        The engine is asked about a name that it did not have before: adapters are loaded while it serves. One
        that was unloaded since is an error of the engine when it samples.
        """
        return name in self._known or name in await self.names()

    async def names(self) -> list[str]:
        """The adapters that the engine has now. Raises `EngineError`."""
        self._known = frozenset({} if self._list is None else await self._list())
        return sorted(self._known)
