"""Training batches: samples in padded rows, or packed into one row."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from renderers.rendered import TOKEN_TYPE_IDS
from rollouts.error_texts import short_repr
from rollouts.errors import ArgumentError, BatchError, SampleError
from rollouts.numbers import finite_number, whole_number
from rollouts.training.row_index import RowIndex, row_numbers
from rollouts.training.row_layout import (
    Layout,
    Side,
    check_layout,
    padding_bounds,
    place_samples,
    token_numbers,
)
from rollouts.training.samples import TrainingSample
from rollouts.training.tensor_list import TensorList, check_times, chunk_bounds
from transport import wire_type

#: The cure in the error for a model that `token_logprobs` and `model_inputs` do not support.
OWN_FORWARD = (
    "Call the model itself with batch.input_ids and batch.attention_mask; its media are in sample.media of "
    "batch.samples, and renderers.vision.normalise.normalised(item, name) makes floats of their pixels"
)

#: The columns of a batch that are copies of columns of its samples: the sample's name for each, and the dtype.
_COLUMNS: Mapping[str, tuple[str, torch.dtype]] = {
    "input_ids": ("token_ids", torch.int64),
    "loss_mask": ("loss_mask", torch.bool),
    "logprobs": ("logprobs", torch.float32),
    "advantages": ("advantages", torch.float32),
}


@wire_type("rollouts.TrainingBatch")
@dataclass(frozen=True, slots=True, eq=False)
class TrainingBatch:
    """N samples in B rows and T columns.

    `layout` "padded": one sample a row, padded on `side`; "packed": all samples one after another in one row, which a
    model must not attend across. T is a multiple of `multiple_of`.

    Tensors (B, T): `input_ids` int64, `pad_id` on padding; `loss_mask` bool; `logprobs` float32, the sampler's;
    `advantages` float32; `attention_mask` bool, False on padding; `position_ids` int64, the position of a token in its
    sample, 0 on padding; `sequence_ids` int32, the number of the token's sample, -1 on padding. All but the first are
    0 or False on padding.

    `starts` int64 (N, 2) holds row and column of each sample's first token, `lengths` int64 (N,) the numbers of tokens;
    both stay on the CPU. Images stay in `samples`: they are neither padded nor copied. `extras` are tensors of the
    user's own, one for each sample. Raises `BatchError` for tensors of other shapes or dtypes.
    """

    samples: tuple[TrainingSample, ...]
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    pad_id: int
    layout: Layout = "padded"
    side: Side = "right"
    multiple_of: int = 1
    extras: Mapping[str, TensorList] = field(default_factory=dict)
    attention_mask: torch.Tensor = field(init=False)
    position_ids: torch.Tensor = field(init=False)
    sequence_ids: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        check_layout(self.layout, self.side, self.multiple_of)
        _check_tensors(self)
        rows, columns = self.input_ids.shape
        first, lengths = self._first_tokens(), self.lengths.numpy()
        position_ids = np.zeros(rows * columns, dtype=np.int64)
        sequence_ids = np.full(rows * columns, -1, dtype=np.int32)
        ascending = np.arange(int(lengths.max(initial=0)))
        for number, (start, length) in enumerate(zip(first.tolist(), lengths.tolist(), strict=True)):
            position_ids[start : start + length] = ascending[:length]
            sequence_ids[start : start + length] = number
        derived: dict[str, np.ndarray] = {
            "position_ids": position_ids,
            "sequence_ids": sequence_ids,
            "attention_mask": sequence_ids >= 0,
        }
        for name, array in derived.items():
            tensor = torch.from_numpy(array.reshape(rows, columns))
            object.__setattr__(self, name, tensor.to(self.input_ids.device))

    @classmethod
    def from_samples(
        cls,
        samples: Sequence[TrainingSample],
        *,
        pad_id: int,
        layout: Layout = "padded",
        side: Side = "right",
        multiple_of: int = 1,
    ) -> TrainingBatch:
        """Lay out `samples`; see the class for `layout`, `side` and `multiple_of`.

        Raises `SampleError` unless there is at least one sample and each is a `TrainingSample`, and `ArgumentError` for
        a `pad_id` that is no token id and for other arguments that do not exist.
        """
        if not isinstance(samples, Sequence) or not samples:
            raise SampleError("-", f"a batch needs a list of at least one TrainingSample, not {short_repr(samples)}")
        for index, sample in enumerate(samples):
            if not isinstance(sample, TrainingSample):
                raise SampleError(str(index), f"{short_repr(sample)} is not a TrainingSample")
        if (number := whole_number(pad_id)) is None or number < 0:
            raise ArgumentError("pad_id", pad_id, "pass a token id, for example 0: padding is masked")
        check_layout(layout, side, multiple_of)
        lengths = np.array([len(sample) for sample in samples], dtype=np.int64)
        placement = place_samples(lengths, layout, side, multiple_of)
        first = placement.starts @ np.array([placement.columns, 1])
        padding = padding_bounds(first, lengths, placement.rows * placement.columns)
        bounds = list(zip(first.tolist(), (first + lengths).tolist(), strict=True))

        def laid_out(name: str, fill: int = 0) -> torch.Tensor:
            source, dtype = _COLUMNS[name]
            column = torch.empty(placement.rows, placement.columns, dtype=dtype)
            flat = column.numpy().reshape(-1)
            for sample, (start, end) in zip(samples, bounds, strict=True):
                flat[start:end] = getattr(sample, source)
            for start, end in padding:
                flat[start:end] = fill
            return column

        return cls(
            samples=tuple(samples),
            input_ids=laid_out("input_ids", number),
            loss_mask=laid_out("loss_mask"),
            logprobs=laid_out("logprobs"),
            advantages=laid_out("advantages"),
            starts=torch.from_numpy(placement.starts),
            lengths=torch.from_numpy(lengths),
            pad_id=number,
            layout=layout,
            side=side,
            multiple_of=multiple_of,
        )

    def __len__(self) -> int:
        return len(self.samples)

    @property
    def has_media(self) -> torch.Tensor:
        """bool (B,): True for rows with an image or a video."""
        rows = torch.zeros(len(self.input_ids), dtype=torch.bool)
        rows[self.starts[[bool(sample.media) for sample in self.samples], 0]] = True
        return rows

    @property
    def mm_token_type_ids(self) -> torch.Tensor:
        """int64 (B, T): 1 on tokens of images, 2 on tokens of videos, by range; 0 on a sampled placeholder token."""
        types = torch.zeros_like(self.input_ids)
        for (row, column), sample in zip(self.starts.tolist(), self.samples, strict=True):
            for item, placeholder in sample.media:
                for start, end in placeholder.runs:
                    types[row, column + start : column + end] = TOKEN_TYPE_IDS[item.modality]
        return types

    def media_tensors(self, name: str) -> TensorList:
        """One tensor per sample: the arrays `name` of its media, concatenated; None for a sample without them."""
        return TensorList(_row_tensor(sample, name) for sample in self.samples)

    # Rows.

    def __getitem__(self, index: RowIndex) -> TrainingBatch:
        """A batch of the selected samples in the same layout, laid out anew; for an integer, a batch of one sample.

        An index may be negative, a slice or list may select nothing. Values that were changed in the tensors of this
        batch are kept. Raises `RowIndexError` for a sample that does not exist.
        """
        return _gathered([self], row_numbers(index, len(self)))

    def split(self, rows: int) -> Iterator[TrainingBatch]:
        """Batches of at most `rows` samples, in order, each padded to its own width."""
        size = whole_number(rows) or 0
        if size < 1:
            raise ArgumentError("rows", rows, "pass an integer of at least 1")
        return (self[start : start + size] for start in range(0, len(self), size))

    def chunk(self, count: int) -> list[TrainingBatch]:
        """Exactly `count` batches, in order, whose numbers of samples differ by at most one."""
        return [self[start:end] for start, end in chunk_bounds(len(self), count)]

    def repeat(self, times: int) -> TrainingBatch:
        """All samples `times` times: (a, b) becomes (a, b, a, b). Images are shared, not copied."""
        return self[np.tile(np.arange(len(self)), check_times(times))]

    def repeat_interleave(self, times: int) -> TrainingBatch:
        """Each sample `times` times: (a, b) becomes (a, a, b, b). Images are shared, not copied."""
        return self[np.repeat(np.arange(len(self)), check_times(times))]

    @classmethod
    def concat(cls, batches: Sequence[TrainingBatch]) -> TrainingBatch:
        """The samples of all `batches` in one, with the extras of all; None for samples of a batch without an extra.

        Raises `BatchError` unless there is at least one batch and all have one layout, side, `pad_id` and device.
        """
        return _gathered(batches, np.arange(sum(map(len, _alike(batches)))))

    def _first_tokens(self) -> np.ndarray:
        """int64 (N,): the position of each sample's first token in the flattened columns."""
        first: np.ndarray = self.starts.numpy() @ np.array([self.input_ids.shape[1], 1])
        return first


def _gathered(batches: Sequence[TrainingBatch], chosen: np.ndarray) -> TrainingBatch:
    """The samples numbered `chosen` of all `batches`, counted through, in the layout of the first batch."""
    like = batches[0]
    offsets = np.cumsum([0, *(batch.input_ids.numel() for batch in batches)])
    first = np.concatenate([batch._first_tokens() + offset for batch, offset in zip(batches, offsets, strict=False)])
    lengths = np.concatenate([batch.lengths.numpy() for batch in batches])[chosen]
    placement = place_samples(lengths, like.layout, like.side, like.multiple_of)
    device = like.input_ids.device
    source = torch.from_numpy(token_numbers(first[chosen], lengths)).to(device)
    new_first = placement.starts @ np.array([placement.columns, 1])
    target = torch.from_numpy(token_numbers(new_first, lengths)).to(device)

    def moved(name: str, fill: int = 0) -> torch.Tensor:
        columns: list[torch.Tensor] = [getattr(batch, name) for batch in batches]
        out = torch.full((placement.rows * placement.columns,), fill, dtype=columns[0].dtype, device=device)
        out[target] = torch.cat([column.reshape(-1) for column in columns])[source]
        return out.reshape(placement.rows, placement.columns)

    samples = [sample for batch in batches for sample in batch.samples]
    return TrainingBatch(
        samples=tuple(samples[number] for number in chosen),
        input_ids=moved("input_ids", like.pad_id),
        loss_mask=moved("loss_mask"),
        logprobs=moved("logprobs"),
        advantages=moved("advantages"),
        starts=torch.from_numpy(placement.starts),
        lengths=torch.from_numpy(lengths),
        pad_id=like.pad_id,
        layout=like.layout,
        side=like.side,
        multiple_of=like.multiple_of,
        extras={name: extra[chosen] for name, extra in _union_of_extras(batches).items()},
    )


def _alike(batches: Sequence[TrainingBatch]) -> Sequence[TrainingBatch]:
    """The batches. Raises `BatchError` if they cannot become one batch."""
    if not isinstance(batches, Sequence) or not all(isinstance(batch, TrainingBatch) for batch in batches):
        raise BatchError(f"pass a list of TrainingBatch, not {short_repr(batches)}")
    if not batches:
        raise BatchError("no batches to concatenate; pass at least one")
    for number, batch in enumerate(batches):
        for name in ("layout", "side", "pad_id", "multiple_of"):
            one, other = getattr(batches[0], name), getattr(batch, name)
            if one != other:
                raise BatchError(f"{name} is {one!r} in batch 0 and {other!r} in batch {number}; make them alike")
        if batch.input_ids.device != batches[0].input_ids.device:
            raise BatchError(
                f"batch 0 is on {batches[0].input_ids.device} and batch {number} on {batch.input_ids.device}; "
                "move them to one device with to(device)"
            )
    return batches


def _union_of_extras(batches: Sequence[TrainingBatch]) -> dict[str, TensorList]:
    names = dict.fromkeys(name for batch in batches for name in batch.extras)
    return {
        name: TensorList.concat(batch.extras.get(name, TensorList([None] * len(batch))) for batch in batches)
        for name in names
    }


def _check_tensors(batch: TrainingBatch) -> None:
    """Raise `BatchError` unless shapes and dtypes are right and each sample has tokens of its own."""
    shape = batch.input_ids.shape if isinstance(batch.input_ids, torch.Tensor) else ()
    if len(shape) != 2:
        raise BatchError(f"input_ids is {short_repr(batch.input_ids)}; pass an int64 tensor (rows, columns)")
    count = len(batch.samples)
    expected = {name: (tuple(shape), dtype) for name, (_, dtype) in _COLUMNS.items()}
    expected |= {"starts": ((count, 2), torch.int64), "lengths": ((count,), torch.int64)}
    for name, (size, dtype) in expected.items():
        tensor = getattr(batch, name)
        if not isinstance(tensor, torch.Tensor) or tuple(tensor.shape) != size or tensor.dtype != dtype:
            found = f"{tensor.dtype} {tuple(tensor.shape)}" if isinstance(tensor, torch.Tensor) else short_repr(tensor)
            raise BatchError(f"{name} is {found}; {count} samples in {tuple(shape)} need {dtype} {size}")
    for name, extra in batch.extras.items():
        if not isinstance(extra, TensorList) or len(extra) != count:
            raise BatchError(f"extra {name!r} is {short_repr(extra)}; pass a TensorList of {count} rows")
    starts, lengths = batch.starts.numpy(), batch.lengths.numpy()
    outside = (starts < 0).any(axis=1) | (starts[:, 0] >= shape[0]) | (starts[:, 1] + lengths > shape[1])
    for number, sample in enumerate(batch.samples):
        if outside[number] or lengths[number] != len(sample):
            raise BatchError(
                f"sample {number} ({sample.name:.80}) of {len(sample)} tokens is said to have {lengths[number]} at row "
                f"and column {starts[number].tolist()} of {tuple(shape)}; lay out the samples with from_samples"
            )


def micro_batches(
    samples: Sequence[TrainingSample], *, rows: int, pad_id: int, stretch: float = math.inf
) -> Iterator[TrainingBatch]:
    """Batches of at most `rows` samples, in order, each padded to its own width.

    A sample more than `stretch` times as long as the first of its batch starts a new batch: with samples sorted by
    length this limits the padding. Raises `ArgumentError` for `rows` or `stretch` below 1.
    """
    if (whole_number(rows) or 0) < 1:
        raise ArgumentError("rows", rows, "pass an integer of at least 1")
    if stretch != math.inf and (finite_number(stretch) or 0) < 1:
        raise ArgumentError("stretch", stretch, "pass a number of at least 1, or leave it out")
    return _micro_batches(samples, rows, pad_id, stretch)


def _micro_batches(
    samples: Sequence[TrainingSample], rows: int, pad_id: int, stretch: float
) -> Iterator[TrainingBatch]:
    part: list[TrainingSample] = []
    for sample in samples:
        if part and (len(part) == rows or len(sample) > stretch * len(part[0])):
            yield TrainingBatch.from_samples(part, pad_id=pad_id)
            part = []
        part.append(sample)
    if part:
        yield TrainingBatch.from_samples(part, pad_id=pad_id)


def _row_tensor(sample: TrainingSample, name: str) -> torch.Tensor | None:
    # np.atleast_2d: an item has one grid (3,), but many rows of patches.
    arrays = [np.atleast_2d(item[name]) for item, _ in sample.media if name in item]
    return torch.from_numpy(np.concatenate(arrays)) if arrays else None
