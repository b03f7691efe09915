"""The batch that a training step is computed on: samples placed in rows, with their tensors and media."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
import torch

from renderers.placement import PlacedItem
from rollouts.errors import SampleError, short_repr
from rollouts.files import replaced_path
from rollouts.training.media_tensors import combined
from rollouts.training.rows import Layout, Side, check_layout, padding_bounds, place_samples, token_numbers
from rollouts.training.samples import OPTIONAL_COLUMNS, TrainingSample
from rollouts.training.tensor_list import RowIndex, TensorList, equal_tensors, own_storage, row_numbers
from rollouts.training.token_extras import rows_of_tokens, split_by_sample, teacher_rows
from rollouts.trajectory.token_node import TEACHER_COLUMNS
from rollouts.values import check_integer
from transport import RecordReader, RecordWriter, wire_type

#: The columns of a batch that hold values of its samples: the name of each in a sample, and its dtype in the batch.
COLUMNS: Mapping[str, tuple[str, torch.dtype]] = {
    "input_ids": ("token_ids", torch.int64),
    "loss_mask": ("loss_mask", torch.bool),
    "logprobs": ("logprobs", torch.float32),
    "advantages": ("advantages", torch.float32),
}


def check_tensors(batch: TrainingBatch) -> None:
    """Raise `SampleError` unless the tensors have their dtypes, shapes and device, and each sample has its tokens.

    A sample has as many tokens as `lengths` says, in its row and apart from others.
    """
    ids, count = batch.input_ids, len(batch.samples)
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2:
        raise SampleError(None, f"input_ids is {short_repr(ids)}; pass an int64 tensor (rows, columns)")
    shape, cpu = batch._shape, torch.device("cpu")
    expected: dict[str, Any] = {name: (dtype, shape, ids.device) for name, (_, dtype) in COLUMNS.items()}
    expected |= {"starts": (torch.int64, (count, 2), cpu), "lengths": (torch.int64, (count,), cpu)}
    for name, (dtype, size, device) in expected.items():
        tensor = getattr(batch, name)
        if not isinstance(tensor, torch.Tensor) or (tensor.dtype, tensor.shape, tensor.device) != (dtype, size, device):
            is_tensor = isinstance(tensor, torch.Tensor)
            found = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}" if is_tensor else short_repr(tensor)
            raise SampleError(None, f"{name} is {found}; {count} samples in {shape} need {dtype} {size} on {device}")
    cells, sizes, first = batch.starts.numpy(), batch.lengths.numpy(), first_tokens(batch)
    order = np.argsort(first, kind="stable")
    overlapping = np.zeros(count, bool)
    overlapping[order[1:]] = first[order[1:]] < (first + sizes)[order[:-1]]
    outside = (cells < 0).any(axis=1) | (cells[:, 0] >= shape[0]) | (cells[:, 1] + sizes > shape[1]) | overlapping
    for number, sample in enumerate(batch.samples):
        if outside[number] or sizes[number] != len(sample):
            raise SampleError(
                None,
                f"sample {number} ({sample.name:.80}) of {len(sample)} tokens is said to have {sizes[number]} at row "
                f"and column {cells[number].tolist()} of {shape}; lay out the samples with from_samples",
            )


def check_trained(
    loss_mask: torch.Tensor,
    position_ids: torch.Tensor,
    sequence_ids: torch.Tensor,
    samples: Sequence[TrainingSample],
) -> None:
    """Raise `SampleError` if `loss_mask` (B, T) trains padding or a first token of a sample: nothing predicts them."""
    if loss_mask.is_meta:  # it has no values
        return
    wrong = loss_mask & (position_ids == 0)
    if not bool(wrong.any()):
        return
    row, column = wrong.nonzero()[0].tolist()
    number = int(sequence_ids[row, column])
    token = "padding" if number < 0 else f"the first token of sample {number} ({samples[number].name:.80})"
    raise SampleError(
        None,
        f"loss_mask is True at row {row} and column {column}, which is {token}; no token of a sample predicts it. Set "
        "loss_mask to False wherever position_ids is 0",
    )


#: What a `pad_id` must be.
_PAD_RULE = "pass a token id, for example 0: padding is masked"


@wire_type("rollouts.TrainingBatch")
@dataclass(frozen=True, slots=True, eq=False, repr=False)
class TrainingBatch:
    """N samples in B rows and T columns.

    `layout` "padded": one sample a row, padded on `side`; "packed": all samples one after another in one row,
    which a model must not attend across. T is a multiple of `multiple_of`.

    Tensors (B, T): `input_ids` int64, `pad_id` on padding; `loss_mask` bool; `logprobs` float32, the
    sampler's; `advantages` float32; `attention_mask` bool, False on padding; `position_ids` int64, the
    position of a token in its sample, 0 on padding; `sequence_ids` int32, the number of the token's sample,
    -1 on padding. All but the first are 0 or False on padding.

    `starts` int64 (N, 2) holds row and column of each sample's first token, `lengths` int64 (N,) the numbers
    of tokens; both stay on the CPU. Media, routed experts and likeliest tokens stay in `samples`: they are
    neither padded nor copied. `extras` are tensors of the caller's own, one for each sample (`with_extras`).

    The tensors are the batch's values: selections, copies and files have what the tensors hold, also after a change of
    `advantages` in place. Raises `SampleError` for tensors of other shapes or dtypes, and for a `loss_mask` that is
    True on padding or on the first token of a sample.
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
        check_integer("pad_id", self.pad_id, least=0, rule=_PAD_RULE)
        check_tensors(self)
        rows, columns = self._shape
        first, lengths = first_tokens(self), self.lengths.numpy()
        position_ids = np.empty(rows * columns, dtype=np.int64)
        sequence_ids = np.empty(rows * columns, dtype=np.int32)
        for start, end in padding_bounds(first, lengths, rows * columns):
            position_ids[start:end] = 0
            sequence_ids[start:end] = -1
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
        check_trained(self.loss_mask, self.position_ids, self.sequence_ids, self.samples)

    def __repr__(self) -> str:
        rows, columns = self._shape
        trained = int(self.loss_mask.sum())
        return (
            f"<TrainingBatch {self.layout}: {len(self.samples)} samples, ({rows}, {columns}), {trained} tokens trained>"
        )

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

        Raises `SampleError` unless there is at least one sample, and `ArgumentError` for a `pad_id` that is no token id
        and for other arguments that do not exist.
        """
        if not samples:
            usual = "usually all episodes of the step failed or were skipped; look at `episode.error`"
            raise SampleError(None, f"a batch needs at least one TrainingSample, and the list is empty: {usual}")
        pad_id = check_integer("pad_id", pad_id, least=0, rule=_PAD_RULE)
        check_layout(layout, side, multiple_of)
        lengths = np.array([len(sample) for sample in samples], dtype=np.int64)
        placement = place_samples(lengths, layout, side, multiple_of)
        first = placement.starts @ np.array([placement.columns, 1])
        padding = padding_bounds(first, lengths, placement.rows * placement.columns)
        bounds = list(zip(first.tolist(), (first + lengths).tolist(), strict=True))

        def laid_out(name: str, fill: int = 0) -> torch.Tensor:
            source, dtype = COLUMNS[name]
            column = torch.empty(placement.rows, placement.columns, dtype=dtype)
            flat = column.numpy().reshape(-1)
            for sample, (start, end) in zip(samples, bounds, strict=True):
                flat[start:end] = getattr(sample, source)
            for start, end in padding:
                flat[start:end] = fill
            return column

        return cls(
            samples=tuple(samples),
            input_ids=laid_out("input_ids", pad_id),
            loss_mask=laid_out("loss_mask"),
            logprobs=laid_out("logprobs"),
            advantages=laid_out("advantages"),
            starts=torch.from_numpy(placement.starts),
            lengths=torch.from_numpy(lengths),
            pad_id=pad_id,
            layout=layout,
            side=side,
            multiple_of=multiple_of,
        )

    def __len__(self) -> int:
        return len(self.samples)

    def concatenated_media(self, name: str) -> torch.Tensor | None:
        """The arrays `name` of all media in one tensor, in the order of the samples; None if there are none.

        Each pixel is copied once. Raises `SampleError` for arrays whose rows have different shapes or dtypes.
        """
        tensor = combined([item for sample in self.samples for item, _ in sample.media if name in item], name)
        return None if tensor is None else tensor.to(self.input_ids.device)

    # Rows.

    def __getitem__(self, index: RowIndex) -> TrainingBatch:
        """A batch of the selected samples in the same layout, laid out anew; for an integer, a batch of one sample.

        An index may be negative, a slice or list may select nothing. Values that were changed in the tensors of this
        batch are kept. Raises `IndexError` for a sample that does not exist.
        """
        return replace(self, **gathered([self], row_numbers(index, len(self))))

    def chunk(self, count: int) -> list[TrainingBatch]:
        """Exactly `count` batches, in order, whose numbers of samples differ by at most one."""
        return [self[numbers] for numbers in np.array_split(np.arange(len(self)), check_integer("count", count))]

    @classmethod
    def concat(cls, batches: Sequence[TrainingBatch]) -> TrainingBatch:
        """The samples of all `batches` in one, with the extras of all; None for samples of a batch without an extra.

        Raises `SampleError` unless there is at least one batch and all have one `layout`, `side`, `pad_id`,
        `multiple_of` and device.
        """
        if not batches:
            raise SampleError(None, "pass a list of at least one TrainingBatch")
        check_alike(batches)
        return replace(batches[0], **gathered(batches, np.arange(sum(map(len, batches)))))

    # Extras.

    def with_extras(self, **extras: torch.Tensor) -> TrainingBatch:
        """This batch with more extras: tensors (B, T, ...), of which each sample gets its tokens.

        `batch.with_extras(reference=token_logprobs(reference_model, batch))` keeps the log-probabilities of a reference
        with their samples through every selection; `column("reference")` lays them out again. A part of a tensor is a
        view on it. Raises `SampleError` for a name of a tensor of this batch and for other shapes.
        """
        taken = {each.name for each in fields(self)}
        added = {}
        for name, values in extras.items():
            if name in taken:
                raise SampleError(
                    None, f"{name} is a field of the batch; change it with dataclasses.replace(batch, {name}=...)"
                )
            added[name] = split_by_sample(name, values, self.starts, self.lengths, self._shape)
        return replace(self, extras={**self.extras, **added})

    def column(self, name: str) -> torch.Tensor:
        """The extra `name`, one row for each token, laid out as (B, T, ...); 0 on padding.

        Also a teacher's column of the samples: "teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs"; these are
        NaN or 0 in a sample that has none and trains no token. Raises `SampleError` for an extra that does not exist
        and for a sample without one row for each of its tokens.
        """
        values = rows_of_tokens(name, self._extra(name), self.samples).to(self.input_ids.device)
        out = values.new_zeros((self.input_ids.numel(), *values.shape[1:]))
        out[torch.from_numpy(token_numbers(first_tokens(self), self.lengths.numpy())).to(out.device)] = values
        return out.reshape(*self._shape, *values.shape[1:])

    def _extra(self, name: str) -> TensorList:
        if name in TEACHER_COLUMNS and name not in self.extras:
            return teacher_rows(name, self.samples)
        if name not in self.extras:
            raise SampleError(None, f"there is no extra {name!r:.80}; this batch has {sorted(self.extras)}")
        return self.extras[name]

    @property
    def _shape(self) -> tuple[int, int]:
        rows, columns = self.input_ids.shape
        return rows, columns

    # Devices, copies, files.

    def to(self, device: torch.device | str) -> TrainingBatch:
        """This batch with its tensors and extras on `device`."""
        return self._with_tensors(lambda tensor: tensor.to(device))

    def pin_memory(self) -> TrainingBatch:
        """This batch with its tensors and extras in page-locked memory. A torch DataLoader calls it."""
        return self._with_tensors(lambda tensor: tensor.pin_memory())

    def _with_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> TrainingBatch:
        columns: dict[str, Any] = {name: change(getattr(self, name)) for name in COLUMNS}
        extras = {
            name: TensorList(tensor if tensor is None else change(tensor) for tensor in extra)
            for name, extra in self.extras.items()
        }
        return replace(self, **columns, extras=extras)

    def __eq__(self, other: object) -> bool:
        """Whether layout, dtypes, devices, values, names, versions, experts and media are equal, NaN equal to NaN."""
        if not isinstance(other, TrainingBatch):
            return NotImplemented
        values = ("layout", "side", "multiple_of", "pad_id", "extras")
        return (
            all(getattr(self, name) == getattr(other, name) for name in values)
            and all(
                equal_tensors(getattr(self, name), getattr(other, name)) for name in (*COLUMNS, "starts", "lengths")
            )
            and all(map(_equal_origin, self.samples, other.samples))
        )

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        values = [getattr(self, each.name) for each in fields(self) if each.init]
        return TrainingBatch, tuple(own_storage(v) if isinstance(v, torch.Tensor) else v for v in values)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write this batch to a record file at `path`, in place of a file that is there.

        Media are in the file once; nothing is pickled. A failure leaves nothing behind.
        """
        with replaced_path(path) as unfinished, RecordWriter(unfinished) as file:
            file.append(self)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> TrainingBatch:
        """The batch in a file that `save` wrote.

        Raises `SampleError` for a record file of something else, and the errors of `transport.RecordReader`.
        """
        with RecordReader(path) as reader:
            batch = reader[0] if len(reader) == 1 else None
        if not isinstance(batch, TrainingBatch):
            raise SampleError(
                None, f"{os.fspath(path)!r:.120} does not hold one TrainingBatch; load what batch.save wrote"
            )
        return batch


def equal_media(one: Sequence[PlacedItem], other: Sequence[PlacedItem]) -> bool:
    """Whether the items have the same hashes, ranges and tensors, dtypes included."""
    if len(one) != len(other):
        return False
    for (item, placeholder), (other_item, other_placeholder) in zip(one, other, strict=True):
        if placeholder != other_placeholder or item.mm_hash != other_item.mm_hash:
            return False
        if item is not other_item and not (
            item.keys() == other_item.keys() and all(_equal_arrays(item[name], other_item[name]) for name in item)
        ):
            return False
    return True


def _equal_arrays(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def _equal_origin(one: TrainingSample, other: TrainingSample) -> bool:
    """Whether two samples have one name, the same weight versions and optional columns, and equal media."""
    return one is other or (
        (one.name, one.weight_spans) == (other.name, other.weight_spans)
        and equal_media(one.media, other.media)
        and all(_equal_arrays(getattr(one, name), getattr(other, name)) for name in OPTIONAL_COLUMNS)
        and all(map(_equal_arrays, one.top_logprobs or (None, None), other.top_logprobs or (None, None)))
    )


def first_tokens(batch: TrainingBatch) -> np.ndarray:
    """int64 (N,): the position of each sample's first token in the flattened columns of the batch."""
    first: np.ndarray = batch.starts.numpy() @ np.array([batch.input_ids.shape[1], 1])
    return first


def gathered(batches: Sequence[TrainingBatch], chosen: np.ndarray) -> dict[str, Any]:
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


def check_alike(batches: Sequence[TrainingBatch]) -> None:
    """Raise `SampleError` if the batches cannot become one because of different layouts or devices."""
    first = batches[0]
    for number, batch in enumerate(batches):
        for name in ("layout", "side", "pad_id", "multiple_of", "device"):
            one, other = (str(getattr(each.input_ids if name == "device" else each, name)) for each in (first, batch))
            if one != other:
                raise SampleError(
                    None, f"{name} is {one!r} in batch 0 and {other!r} in batch {number}; make them alike"
                )


def _union_of_extras(batches: Sequence[TrainingBatch]) -> dict[str, TensorList]:
    names = dict.fromkeys(name for batch in batches for name in batch.extras)
    return {
        name: TensorList.concat(batch.extras.get(name, TensorList([None] * len(batch.samples))) for batch in batches)
        for name in names
    }


def micro_batches(
    samples: Sequence[TrainingSample], *, rows: int, pad_id: int, stretch: float = math.inf
) -> Iterator[TrainingBatch]:
    """Batches of at most `rows` samples, in order, each padded to its own width.

    A sample more than `stretch` times as long as the first of its batch starts a new batch: with samples sorted by
    length this limits the padding. Raises `ArgumentError` for `rows` below 1.
    """
    check_integer("rows", rows)
    part: list[TrainingSample] = []
    for sample in samples:
        if part and (len(part) == rows or len(sample) > stretch * len(part[0])):
            yield TrainingBatch.from_samples(part, pad_id=pad_id)
            part = []
        part.append(sample)
    if part:
        yield TrainingBatch.from_samples(part, pad_id=pad_id)
