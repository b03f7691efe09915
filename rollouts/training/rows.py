"""The rows of a batch: which samples each holds, and their columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np
import torch

from rollouts.errors import ArgumentError, BatchError
from rollouts.training.samples import TrainingSample
from rollouts.training.tensor_list import TensorList
from rollouts.values import check_choice, check_integer

# Where the tokens of each sample of a batch are: padded, one sample a row, or packed, all samples in one row.


Layout = Literal["padded", "packed"]
"""padded: one sample a row, padded to the width of the longest. packed: all samples one after another in one row."""

Side = Literal["left", "right"]
"""The side on which a row is padded. A packed row is padded on the right."""


class Placement(NamedTuple):
    """`rows` and `columns` of a batch, and `starts` int64 (N, 2): row and column of the first token of each sample."""

    rows: int
    columns: int
    starts: np.ndarray


def place_samples(lengths: np.ndarray, layout: Layout, side: Side, multiple_of: int) -> Placement:
    """Place samples of `lengths` int64 (N,); the number of columns is rounded up to a multiple of `multiple_of`.

    No samples have 0 rows and 0 columns.
    """
    count = len(lengths)
    if layout == "packed":
        columns = _rounded_up(int(lengths.sum()), multiple_of)
        first = np.cumsum(lengths) - lengths
        return Placement(min(1, count), columns, np.stack([np.zeros(count, np.int64), first], axis=1))
    columns = _rounded_up(int(lengths.max(initial=0)), multiple_of)
    first = columns - lengths if side == "left" else np.zeros(count, np.int64)
    return Placement(count, columns, np.stack([np.arange(count), first], axis=1))


def token_numbers(first: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """int64 (sum of `lengths`,): first[0], first[0] + 1, ... for `lengths[0]` numbers, then those of first[1]..."""
    before = np.cumsum(lengths) - lengths
    return np.repeat(first - before, lengths) + np.arange(int(lengths.sum()))


def padding_bounds(first: np.ndarray, lengths: np.ndarray, size: int) -> list[tuple[int, int]]:
    """The half-open runs of the numbers from 0 to `size` that belong to no sample."""
    order = np.argsort(first, kind="stable")
    starts = np.concatenate([[0], (first + lengths)[order]])
    ends = np.concatenate([first[order], [size]])
    kept = starts < ends
    return list(zip(starts[kept].tolist(), ends[kept].tolist(), strict=True))


def check_layout(layout: object, side: object, multiple_of: object) -> None:
    """Raise `ArgumentError` for a value that `place_samples` does not take."""
    check_choice("layout", layout, Layout)
    check_choice("side", side, Side)
    check_integer("multiple_of", multiple_of)
    if layout == "packed" and side == "left":
        raise ArgumentError("side", side, 'leave it out with layout="packed": a packed row is padded on the right')


def _rounded_up(length: int, multiple_of: int) -> int:
    return -(-length // multiple_of) * multiple_of


class Rows(Protocol):
    """What the functions below read of a `TrainingBatch`."""

    @property
    def samples(self) -> tuple[TrainingSample, ...]: ...
    @property
    def input_ids(self) -> torch.Tensor: ...
    @property
    def starts(self) -> torch.Tensor: ...
    @property
    def lengths(self) -> torch.Tensor: ...
    @property
    def pad_id(self) -> int: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def side(self) -> Side: ...
    @property
    def multiple_of(self) -> int: ...
    @property
    def extras(self) -> Mapping[str, TensorList]: ...


def first_tokens(batch: Rows) -> np.ndarray:
    """int64 (N,): the position of each sample's first token in the flattened columns of the batch."""
    first: np.ndarray = batch.starts.numpy() @ np.array([batch.input_ids.shape[1], 1])
    return first


def gathered(batches: Sequence[Rows], chosen: np.ndarray) -> dict[str, Any]:
    """The fields of a batch, laid out like the first of `batches`, of the samples numbered `chosen` int64 (k,).

    The samples of all batches are counted through. Values come from the tensors of the batches, on their device; an
    extra that a batch does not have is None for its samples.
    """
    like = batches[0]
    offsets = np.cumsum([0, *(batch.input_ids.numel() for batch in batches)])
    first = np.concatenate([first_tokens(batch) + offset for batch, offset in zip(batches, offsets, strict=False)])
    lengths = np.concatenate([batch.lengths.numpy() for batch in batches])[chosen]
    placement = place_samples(lengths, like.layout, like.side, like.multiple_of)
    new_first = placement.starts @ np.array([placement.columns, 1])
    device = like.input_ids.device
    source = torch.from_numpy(token_numbers(first[chosen], lengths)).to(device)
    target = torch.from_numpy(token_numbers(new_first, lengths)).to(device)

    def moved(name: str, fill: int = 0) -> torch.Tensor:
        columns: list[torch.Tensor] = [getattr(batch, name) for batch in batches]
        out = torch.full((placement.rows * placement.columns,), fill, dtype=columns[0].dtype, device=device)
        out[target] = torch.cat([column.reshape(-1) for column in columns])[source]
        return out.reshape(placement.rows, placement.columns)

    samples = [sample for batch in batches for sample in batch.samples]
    return {
        "samples": tuple(samples[number] for number in chosen),
        "input_ids": moved("input_ids", like.pad_id),
        **{name: moved(name) for name in ("loss_mask", "logprobs", "advantages")},
        "starts": torch.from_numpy(placement.starts),
        "lengths": torch.from_numpy(lengths),
        "extras": {name: extra[chosen] for name, extra in _union_of_extras(batches).items()},
    }


def check_alike(batches: Sequence[Rows]) -> None:
    """Raise `BatchError` if the batches cannot become one because of different layouts or devices."""
    first = batches[0]
    for number, batch in enumerate(batches):
        for name in ("layout", "side", "pad_id", "multiple_of", "media_dtype"):
            one, other = getattr(first, name), getattr(batch, name)
            if one != other:
                raise BatchError(f"{name} is {one!r} in batch 0 and {other!r} in batch {number}; make them alike")
        if batch.input_ids.device != first.input_ids.device:
            raise BatchError(
                f"batch 0 is on {first.input_ids.device} and batch {number} on {batch.input_ids.device}; "
                "move them to one device with to(device)"
            )


def _union_of_extras(batches: Sequence[Rows]) -> dict[str, TensorList]:
    names = dict.fromkeys(name for batch in batches for name in batch.extras)
    return {
        name: TensorList.concat(batch.extras.get(name, TensorList([None] * len(batch.samples))) for batch in batches)
        for name in names
    }
