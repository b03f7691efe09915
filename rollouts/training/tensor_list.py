"""Tensors that differ from row to row, and the indices that select rows."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, overload

import numpy as np
import torch

from rollouts.errors import BatchError, short_repr
from rollouts.values import check_integer, whole_number
from transport import wire_type

RowsIndex: TypeAlias = "slice | Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor"
RowIndex: TypeAlias = "int | RowsIndex"


def row_numbers(index: RowIndex, count: int) -> np.ndarray:
    """int64 (k,): the numbers, from 0 to `count` - 1, of the rows that `index` selects, in its order.

    A negative integer counts from the end; a slice or a list may select nothing; a mask has one bool for each row.
    Raises `IndexError` for a number that no row has, a mask of another length, and other values.
    """
    if isinstance(index, slice):
        return np.arange(count)[index]
    single = whole_number(index)
    array = np.array([single]) if single is not None else _as_array(index, count)
    if array.dtype == np.bool_:
        if len(array) != count:
            raise IndexError(f"a mask of {len(array)} values for {count} rows; pass one for each row")
        return np.flatnonzero(array)
    outside = (array < -count) | (array >= count)
    if outside.any():
        wrong = int(array[outside][0])
        raise IndexError(f"there is no row {wrong}; pass numbers from {-count} to {count - 1}")
    return np.where(array < 0, array + count, array)


def _as_array(index: object, count: int) -> np.ndarray:
    if isinstance(index, torch.Tensor):
        index = index.detach().cpu().numpy()
    elif isinstance(index, Sequence) and all(isinstance(each, int | np.integer | np.bool_) for each in index):
        index = np.array(index, dtype=None if len(index) else np.int64)
    if not isinstance(index, np.ndarray) or index.ndim != 1 or index.dtype.kind not in "bui":
        rule = "pass an integer, a slice, a list of integers or a mask of bools"
        raise IndexError(f"index {short_repr(index)} into {count} rows; {rule}")
    return index if index.dtype == np.bool_ else index.astype(np.int64)


@wire_type("rollouts.TensorList")
@dataclass(frozen=True, slots=True, eq=False)
class TensorList:
    """One tensor per row, such as pixel patches and grids, which cannot be stacked; None for a row without a tensor.

    Immutable. No operation copies a tensor except `cat` and, where something changes, `to` and `pin_memory`. Pickling
    and `transport.encode` write the elements of a view, not the storage behind it. Raises `BatchError` for a row that
    is neither a tensor nor None.
    """

    tensors: tuple[torch.Tensor | None, ...]

    def __init__(self, tensors: Iterable[torch.Tensor | None] = ()) -> None:
        if not isinstance(tensors, Iterable) or isinstance(tensors, torch.Tensor):
            raise BatchError(f"a TensorList is made of one tensor or None for each row, not of {short_repr(tensors)}")
        object.__setattr__(self, "tensors", tuple(tensors))
        for row, tensor in enumerate(self.tensors):
            if tensor is not None and not isinstance(tensor, torch.Tensor):
                raise BatchError(f"row {row} of a TensorList is {short_repr(tensor)}; pass a tensor, or None")

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

    def cat(self) -> torch.Tensor | None:
        """The tensors concatenated along dimension 0; None if every row is None.

        Raises `BatchError` for tensors of different dtypes or row shapes.
        """
        present = [(row, tensor) for row, tensor in enumerate(self.tensors) if tensor is not None]
        if not present:
            return None
        first = present[0][1]
        for row, tensor in present:
            if not tensor.ndim or tensor.dtype != first.dtype or tensor.shape[1:] != first.shape[1:]:
                raise BatchError(
                    f"row {row} is {tensor.dtype} of shape {tuple(tensor.shape)}, row {present[0][0]} {first.dtype} of "
                    f"shape {tuple(first.shape)}; tensors that are concatenated differ in their first dimension only"
                )
        return torch.cat([tensor for _, tensor in present])

    def to(self, device: torch.device | str | None = None, *, dtype: torch.dtype | None = None) -> TensorList:
        """The tensors on `device`; floating-point tensors in `dtype`, all others in their own dtype."""
        return TensorList(
            tensor if tensor is None else tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
            for tensor in self.tensors
        )

    def pin_memory(self) -> TensorList:
        """The tensors in page-locked memory, from which copies to an accelerator are asynchronous."""
        return TensorList(tensor if tensor is None else tensor.pin_memory() for tensor in self.tensors)

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


def chunk_bounds(length: int, count: int) -> list[tuple[int, int]]:
    """The half-open bounds of `count` parts of `length` rows; the first parts have one row more than the others.

    Raises `ArgumentError` for a `count` below 1.
    """
    number = check_integer("count", count)
    edges = [part * (length // number) + min(part, length % number) for part in range(number + 1)]
    return list(itertools.pairwise(edges))
