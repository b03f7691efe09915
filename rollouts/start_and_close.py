"""Objects that start with an `async with` block and close at its end."""

from __future__ import annotations

from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class StartAndClose(ABC):
    """`async with` calls `start`, and `close` at the end of the block and after a start that failed."""

    @abstractmethod
    async def start(self) -> None:
        """Start; returns when the object can be used."""

    @abstractmethod
    async def close(self) -> None:
        """End what runs. A second call does nothing."""

    async def __aenter__(self) -> Self:
        try:
            await self.start()
        except BaseException:
            await self.close()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
