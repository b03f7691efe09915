"""Tensors that differ from row to row, and the indices that select rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, overload

import numpy as np
import torch

from rollouts.errors import SampleError, short_repr
from rollouts.values import whole_number
from transport import wire_type

RowsIndex: TypeAlias = "slice | Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor"
RowIndex: TypeAlias = "int | RowsIndex"


def row_numbers(index: RowIndex, count: int) -> np.ndarray:
    """int64 (k,): the numbers, from 0 to `count` - 1, of the rows that `index` selects, in its order.

    A negative integer counts from the end; a slice or a list may select nothing; a mask has one bool for each row.
    Raises numpy's `IndexError` for a number that no row has, a mask of another length, and other values.
    """
    if isinstance(index, torch.Tensor):
        index = index.cpu().numpy()
    numbers = np.atleast_1d(np.arange(count)[index])
    if numbers.ndim > 1:
        raise IndexError(f"{short_repr(index)}; pass an integer, a slice, a list of integers or a mask of bools")
    return numbers


@wire_type("rollouts.TensorList")
@dataclass(frozen=True, slots=True, eq=False)
class TensorList:
    """One tensor per row; None for a row without a tensor.

    Immutable. Pickling and `transport.encode` write the elements of a view, not the storage behind it. Raises
    `SampleError` for a row that is neither a tensor nor None.
    """

    tensors: tuple[torch.Tensor | None, ...]

    def __init__(self, tensors: Iterable[torch.Tensor | None] = ()) -> None:
        object.__setattr__(self, "tensors", tuple(tensors))
        for row, tensor in enumerate(self.tensors):
            if tensor is not None and not isinstance(tensor, torch.Tensor):
                raise SampleError(None, f"row {row} of a TensorList is {short_repr(tensor)}; pass a tensor, or None")

    def __len__(self) -> int:
        return len(self.tensors)

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        return iter(self.tensors)

    @overload
    def __getitem__(self, index: int) -> torch.Tensor | None: ...
    @overload
    def __getitem__(self, index: RowsIndex) -> TensorList: ...
    def __getitem__(self, index: RowIndex) -> torch.Tensor | TensorList | None:
        """The tensor of a row for an integer; for a slice, a list of integers or a mask, a `TensorList` of these rows.

        Raises `IndexError` for a row that does not exist.
        """
        selected = [self.tensors[row] for row in row_numbers(index, len(self))]
        return TensorList(selected) if whole_number(index) is None else selected[0]

    @classmethod
    def concat(cls, lists: Iterable[TensorList]) -> TensorList:
        """The rows of all `lists`, in order."""
        return cls(tensor for each in lists for tensor in each)

    def __eq__(self, other: object) -> bool:
        """Whether the rows are equal in dtype, shape, device and values, NaN equal to NaN."""
        if not isinstance(other, TensorList):
            return NotImplemented
        return len(self) == len(other) and all(map(equal_tensors, self.tensors, other.tensors))

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        return TensorList, (tuple(map(own_storage, self.tensors)),)


def equal_tensors(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether both are None, or tensors of one dtype, shape and device with equal values, NaN equal to NaN."""
    if one is None or other is None:
        return one is other
    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
        return False
    if torch.equal(one, other):
        return True
    return one.is_floating_point() and bool(torch.all((one == other) | (one.isnan() & other.isnan())))


def own_storage(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor; a copy if it is a view on a larger storage, all of which torch would pickle."""
    if tensor is None or tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)
