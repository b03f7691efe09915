"""A list of one tensor per row, for rows of different shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

import torch


class TensorList(Sequence[torch.Tensor | None]):
    """Tensors that cannot be stacked, such as pixel patches and grids; None for a row without a tensor."""

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

    def cat(self) -> torch.Tensor | None:
        """The tensors concatenated along dimension 0; None if every row is None."""
        present = [row for row in self._rows if row is not None]
        return torch.cat(present) if present else None
