"""One tensor per row, where rows differ in shape or have none."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import torch


class TensorList(Sequence[torch.Tensor | None]):
    """Rows that cannot be stacked: pixel patches, grids. None says that a row has none; nothing stands in for it."""

    def __init__(self, rows: Sequence[torch.Tensor | None]) -> None:
        self._rows = list(rows)

    @overload
    def __getitem__(self, key: int) -> torch.Tensor | None: ...
    @overload
    def __getitem__(self, key: slice) -> TensorList: ...
    def __getitem__(self, key: int | slice) -> torch.Tensor | TensorList | None:
        return TensorList(self._rows[key]) if isinstance(key, slice) else self._rows[key]

    def __len__(self) -> int:
        return len(self._rows)

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        return iter(self._rows)

    def to(self, device: torch.device | str) -> TensorList:
        """Every row on `device`; dtypes are left alone."""
        return TensorList([None if row is None else row.to(device) for row in self._rows])

    def cat(self) -> torch.Tensor | None:
        """The rows that are there, one after the other along dimension 0; None if no row is there."""
        present = [row for row in self._rows if row is not None]
        return torch.cat(present) if present else None
