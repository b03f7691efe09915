"""The batch that a training step is computed on: samples placed in rows, with their tensors."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeAlias

import numpy as np
import torch

from renderers import MediaItem
from renderers.placement import PlacedItem
from rollouts.errors import SampleError, short_repr
from rollouts.files import replaced_path
from rollouts.models.placed_rows import Layout, Side, laid_out, numbered, place
from rollouts.training.samples import OPTIONAL_COLUMNS, TrainingSample, check_comparable_with_teacher
from rollouts.training.token_extras import Extra, of_samples, teacher_rows
from rollouts.trajectory.token_node import TEACHER_COLUMNS
from rollouts.values import check_integer
from transport import RecordReader, RecordWriter, wire_type

RowIndex: TypeAlias = "int | slice | Sequence[int] | Sequence[bool] | np.ndarray | torch.Tensor"

#: The columns of a batch that hold values of its samples: the name of each in a sample, and its dtype in the batch.
COLUMNS: Mapping[str, tuple[str, torch.dtype]] = {
    "input_ids": ("token_ids", torch.int64),
    "loss_mask": ("loss_mask", torch.bool),
    "logprobs": ("logprobs", torch.float32),
    "advantages": ("advantages", torch.float32),
}


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
    neither padded nor copied. `extras` are tensors of the caller's own, for each sample one or None
    (`with_extras`).

    The tensors are the batch's values: selections, copies and files have what the tensors hold, also after a
    change of `advantages` in place. Raises `SampleError` for tensors of other shapes or dtypes, and for a
    `loss_mask` that is True on padding or on the first token of a sample.
    """

    samples: tuple[TrainingSample, ...]
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    logprobs: torch.Tensor
    advantages: torch.Tensor
    pad_id: int
    layout: Layout = "padded"
    side: Side = "right"
    multiple_of: int = 1
    extras: Mapping[str, Extra] = field(default_factory=dict)
    starts: torch.Tensor = field(init=False)
    lengths: torch.Tensor = field(init=False)
    attention_mask: torch.Tensor = field(init=False)
    position_ids: torch.Tensor = field(init=False)
    sequence_ids: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        _check_pad_id(self.pad_id)
        lengths = [len(sample) for sample in self.samples]
        starts, shape = place(lengths, self.layout, self.side, self.multiple_of)
        device = getattr(self.input_ids, "device", None)
        for name, (_, dtype) in COLUMNS.items():
            tensor = getattr(self, name)
            is_tensor = isinstance(tensor, torch.Tensor)
            if not is_tensor or (tensor.dtype, tensor.shape, tensor.device) != (dtype, shape, device):
                found = f"{tensor.dtype} {tuple(tensor.shape)} on {tensor.device}" if is_tensor else short_repr(tensor)
                of_samples = f"{len(lengths)} samples of {sum(lengths)} tokens"
                raise SampleError(
                    None, f"{name} is {found}; {of_samples} in this layout need {dtype} {shape} on {device}"
                )
        position_ids, sequence_ids = numbered(starts, lengths, shape)
        derived = {
            "position_ids": position_ids,
            "sequence_ids": sequence_ids,
            "attention_mask": sequence_ids >= 0,
        }
        for name, array in derived.items():
            # The class is frozen, and these follow from its fields.
            object.__setattr__(self, name, torch.from_numpy(array).to(device))
        object.__setattr__(self, "starts", torch.from_numpy(starts))
        object.__setattr__(self, "lengths", torch.tensor(lengths, dtype=torch.int64))
        check_trained(self.loss_mask, self.position_ids, self.sequence_ids, self.samples)

    def __repr__(self) -> str:
        shape, trained = tuple(self.input_ids.shape), int(self.loss_mask.sum())
        return f"<TrainingBatch {self.layout}: {len(self.samples)} samples, {shape}, {trained} tokens trained>"

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

        Raises `SampleError` unless there is at least one sample, and `ArgumentError` for a `pad_id` that is
        no token id and for other arguments that do not exist.
        """
        if not samples:
            usual = "usually all episodes of the step failed or were skipped; look at `episode.error`"
            raise SampleError(None, f"a batch needs at least one TrainingSample, and the list is empty: {usual}")
        pad_id = _check_pad_id(pad_id)
        starts, shape = place([len(sample) for sample in samples], layout, side, multiple_of)
        columns: dict[str, Any] = {}
        for name, (source, dtype) in COLUMNS.items():
            columns[name] = torch.empty(shape, dtype=dtype)
            array = columns[name].numpy()  # on one thread: those of torch wait for each other
            array.fill(pad_id if name == "input_ids" else 0)
            laid_out([getattr(sample, source) for sample in samples], starts, array)
        return cls(tuple(samples), **columns, pad_id=pad_id, layout=layout, side=side, multiple_of=multiple_of)

    def __len__(self) -> int:
        return len(self.samples)

    # Rows.

    def __getitem__(self, index: RowIndex) -> TrainingBatch:
        """A batch of the selected samples in the same layout, laid out anew; for an integer, a batch of one sample.

        An index may be negative, a slice or list may select nothing. Values that were changed in the tensors
        of this batch are kept. Raises `IndexError` for a sample that does not exist.
        """
        if isinstance(index, torch.Tensor):
            index = index.cpu().numpy()
        # numpy decides what an index means: negative numbers, slices, masks, and the error for one that is
        # too large.
        numbers = np.atleast_1d(np.arange(len(self))[index])
        if numbers.ndim > 1:
            raise IndexError(f"{short_repr(index)}; pass an integer, a slice, a list of integers or a mask of bools")
        return _selected([self], numbers)

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
        for number, batch in enumerate(batches):
            for name in ("layout", "side", "pad_id", "multiple_of", "device"):
                of_both = (each.input_ids if name == "device" else each for each in (batches[0], batch))
                one, other = (str(getattr(each, name)) for each in of_both)
                if one != other:
                    raise SampleError(
                        None, f"{name} is {one!r} in batch 0 and {other!r} in batch {number}; make them alike"
                    )
        return _selected(batches, np.arange(sum(map(len, batches))))

    # Extras.

    def with_extras(self, **extras: torch.Tensor) -> TrainingBatch:
        """This batch with more extras: tensors (B, T, ...), of which each sample gets its tokens.

        `batch.with_extras(reference=token_logprobs(reference_model, batch))` keeps the log-probabilities of a
        reference with their samples through every selection; `column("reference")` lays them out again. A
        part of a tensor is a view on it. Raises `SampleError` for a name of a tensor of this batch and for
        other shapes.
        """
        shape = tuple(self.input_ids.shape)
        added: dict[str, Extra] = {}
        for name, values in extras.items():
            if name in {each.name for each in fields(self)}:
                cure = f"change it with dataclasses.replace(batch, {name}=...)"
                raise SampleError(None, f"{name} is a field of the batch; {cure}")
            if not isinstance(values, torch.Tensor) or tuple(values.shape[:2]) != shape:
                found = f"of shape {tuple(values.shape)}" if isinstance(values, torch.Tensor) else short_repr(values)
                raise SampleError(None, f"extra {name!r} is {found}; pass a tensor {(*shape, '...')}")
            added[name] = of_samples(values, self.starts, self.lengths)
        return replace(self, extras={**self.extras, **added})

    def column(self, name: str) -> torch.Tensor:
        """The extra `name`, one row for each token, laid out as (B, T, ...); 0 on padding.

        Also a teacher's column of the samples: "teacher_logprobs", "teacher_top_ids", "teacher_top_logprobs";
        these are NaN or 0 in a sample that has none and trains no token. Raises `SampleError` for an extra
        that does not exist and for a sample without one row for each of its tokens.
        """
        if name not in self.extras and name not in TEACHER_COLUMNS:
            raise SampleError(None, f"there is no extra {name!r:.80}; this batch has {sorted(self.extras)}")
        if name == "teacher_logprobs":
            for sample in self.samples:
                check_comparable_with_teacher(sample)
        extra = self.extras[name] if name in self.extras else teacher_rows(name, self.samples)
        first = next((tensor for tensor in extra if tensor is not None), torch.zeros(0))
        for sample, tensor in zip(self.samples, extra, strict=True):
            if tensor is None or tensor.shape != (len(sample), *first.shape[1:]):
                found = "no values" if tensor is None else f"values of shape {tuple(tensor.shape)}"
                raise SampleError(None, f"extra {name!r}: sample {sample.name:.80} of {len(sample)} tokens has {found}")
        out = first.new_zeros((*self.input_ids.shape, *first.shape[1:]), device=self.input_ids.device)
        return laid_out(extra, self.starts, out)

    # Devices and copies.

    def to(self, device: torch.device | str) -> TrainingBatch:
        """This batch with its tensors and extras on `device`."""
        return self._with_tensors(lambda tensor: tensor.to(device))

    def pin_memory(self) -> TrainingBatch:
        """This batch with its tensors and extras in page-locked memory. A torch DataLoader calls it."""
        return self._with_tensors(lambda tensor: tensor.pin_memory())

    def _with_tensors(self, change: Callable[[torch.Tensor], torch.Tensor]) -> TrainingBatch:
        columns: dict[str, Any] = {name: change(getattr(self, name)) for name in COLUMNS}
        extras = {
            name: tuple(tensor if tensor is None else change(tensor) for tensor in extra)
            for name, extra in self.extras.items()
        }
        return replace(self, **columns, extras=extras)

    def __eq__(self, other: object) -> bool:
        """Whether layout, dtypes, devices, values, names, versions, experts and media are equal, NaN equal to NaN."""
        if not isinstance(other, TrainingBatch):
            return NotImplemented
        return (
            all(getattr(self, name) == getattr(other, name) for name in ("layout", "side", "multiple_of", "pad_id"))
            and all(_equal_tensors(getattr(self, name), getattr(other, name)) for name in COLUMNS)
            and len(self) == len(other)
            and all(map(_equal_origin, self.samples, other.samples))
            and self.extras.keys() == other.extras.keys()
            and all(all(map(_equal_tensors, extra, other.extras[name])) for name, extra in self.extras.items())
        )

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> tuple[Any, ...]:
        values = {each.name: getattr(self, each.name) for each in fields(self) if each.init}
        values |= {name: _own_storage(values[name]) for name in COLUMNS}
        values["extras"] = {name: tuple(map(_own_storage, extra)) for name, extra in self.extras.items()}
        return TrainingBatch, tuple(values.values())

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


def _check_pad_id(pad_id: Any) -> int:
    return check_integer("pad_id", pad_id, least=0, rule="pass a token id, for example 0: padding is masked")


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


def _selected(batches: Sequence[TrainingBatch], chosen: np.ndarray) -> TrainingBatch:
    """A batch, laid out like the first of `batches`, of the samples numbered `chosen` int64 (k,).

    The samples of all batches are counted through. Values come from the tensors of the batches, on their
    device; an extra that a batch does not have is None for its samples.
    """
    like = batches[0]
    samples = [sample for batch in batches for sample in batch.samples]
    selected = tuple(samples[number] for number in chosen)
    starts, shape = place([len(sample) for sample in selected], like.layout, like.side, like.multiple_of)
    columns: dict[str, Any] = {}
    for name in COLUMNS:
        parts = [part for batch in batches for part in of_samples(getattr(batch, name), batch.starts, batch.lengths)]
        out = getattr(like, name).new_full(shape, like.pad_id if name == "input_ids" else 0)
        columns[name] = laid_out([parts[number] for number in chosen], starts, out)
    extras = {}
    for name in dict.fromkeys(name for batch in batches for name in batch.extras):
        tensors = [tensor for batch in batches for tensor in batch.extras.get(name, (None,) * len(batch))]
        extras[name] = tuple(tensors[number] for number in chosen)
    return replace(like, samples=selected, **columns, extras=extras)


def _equal_tensors(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    """Whether both are None, or tensors of one dtype, shape, device and values, NaN equal to NaN."""
    if one is None or other is None:
        return one is other
    if (one.dtype, one.shape, one.device) != (other.dtype, other.shape, other.device):
        return False
    # The second comparison makes three tensors; most batches that are compared are equal without it.
    return torch.equal(one, other) or bool(torch.all((one == other) | ((one != one) & (other != other))))


def _own_storage(tensor: torch.Tensor | None) -> torch.Tensor | None:
    """The tensor; a copy if it is a view on a larger storage, all of which torch would pickle."""
    if tensor is None or tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size():
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _equal_origin(one: TrainingSample, other: TrainingSample) -> bool:
    """Whether two samples have one name, the same weight versions and optional columns, and equal media."""
    # Selections share their samples: the same object needs no comparison of its media.
    return one is other or (
        (one.name, one.weight_spans) == (other.name, other.weight_spans)
        and _equal_media(one.media, other.media)
        and all(_equal_arrays(getattr(one, name), getattr(other, name)) for name in OPTIONAL_COLUMNS)
        and all(map(_equal_arrays, one.top_logprobs or (None, None), other.top_logprobs or (None, None)))
    )


def _equal_media(one: Sequence[PlacedItem], other: Sequence[PlacedItem]) -> bool:
    """Whether the items have the same hashes, ranges and tensors, dtypes included."""
    return len(one) == len(other) and all(
        placeholder == other_placeholder and (item is other_item or _equal_items(item, other_item))
        for (item, placeholder), (other_item, other_placeholder) in zip(one, other, strict=True)
    )


def _equal_items(one: MediaItem, other: MediaItem) -> bool:
    return (
        one.mm_hash == other.mm_hash
        and one.keys() == other.keys()
        and all(_equal_arrays(one[name], other[name]) for name in one)
    )


def _equal_arrays(one: np.ndarray | None, other: np.ndarray | None) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and np.array_equal(one, other, equal_nan=one.dtype.kind == "f")


def micro_batches(
    samples: Sequence[TrainingSample], *, rows: int, pad_id: int, stretch: float = math.inf
) -> Iterator[TrainingBatch]:
    """Batches of at most `rows` samples, in order, each padded to its own width.

    A sample more than `stretch` times as long as the first of its batch starts a new batch: with samples
    sorted by length this limits the padding. Raises `ArgumentError` for `rows` below 1.
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
