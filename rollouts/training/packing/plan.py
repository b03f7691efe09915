"""Packing samples into rows for several ranks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from rollouts.error_texts import short_repr
from rollouts.errors import ArgumentError, SampleError
from rollouts.numbers import whole_number
from rollouts.training.batch.neutral_samples import neutral_sample, without_training
from rollouts.training.batch.training_batch import TrainingBatch
from rollouts.training.packing.balance import assign_ranks, steps_of_similar_rows, token_cost
from rollouts.training.packing.first_fit import Bins
from rollouts.training.packing.truncation import Truncation, sample_patches, truncate_sample
from rollouts.training.quarantine import Quarantine
from rollouts.training.samples import TrainingSample

TooLong = Literal["error", "drop", "truncate"]
"""What becomes of a sample that does not fit a row: an error, left out, or cut to the row."""

#: The free fraction of rows above which their costs are evened out.
_ROOM = 0.02

Row = tuple[TrainingSample, ...]


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """Rows of packed samples: `steps[s][r]` are the samples that rank r computes in step s.

    All ranks have the same number of steps. Steps are micro-steps of one optimizer step: rows of a step have similar
    costs, so the lengths differ from step to step. `filled` is the fraction of the token budget of all rows that has
    tokens of samples, 0 without rows. `imbalance` is the mean over the steps of the largest cost of a rank divided by
    the mean cost, minus 1. `truncations` and `quarantine` have the samples that were cut and those that were left out.
    A plan without rows has no steps for each of its `ranks`.
    """

    steps: tuple[tuple[Row, ...], ...]
    filled: float
    imbalance: float
    truncations: tuple[Truncation, ...]
    quarantine: Quarantine
    ranks: int

    def batches(self, rank: int, *, pad_id: int, multiple_of: int = 1) -> Iterator[TrainingBatch]:
        """The packed batches of one rank, one for each step; a row without samples has one neutral token `pad_id`.

        Raises `ArgumentError` for a rank that the plan does not have.
        """
        if (number := whole_number(rank)) is None or not 0 <= number < self.ranks:
            raise ArgumentError("rank", rank, f"pass a rank from 0 to {self.ranks - 1}")
        return (
            TrainingBatch.from_samples(
                step[number] or (neutral_sample(pad_id),), pad_id=pad_id, layout="packed", multiple_of=multiple_of
            )
            for step in self.steps
        )

    def summary(self) -> str:
        """Rows, filling and balance, and what was cut or left out."""
        cut = sum(truncation.lost_last_trained for truncation in self.truncations)
        filling = f", {self.filled:.1%} filled, imbalance {self.imbalance:.1%}" if self.steps else ""
        return (
            f"{len(self.steps)} steps{filling}; "
            f"{len(self.truncations)} samples truncated, {cut} of them without their last trained token; "
            f"{self.quarantine.summary()}"
        )


def pack_samples(
    samples: Sequence[TrainingSample],
    *,
    max_tokens: int,
    max_patches: int | None = None,
    ranks: int = 1,
    too_long: TooLong = "error",
    uniform_modality: bool = False,
    hidden_size: int = 4096,
    quarantine: Quarantine | None = None,
) -> PackingPlan:
    """Pack samples into rows of at most `max_tokens` tokens and `max_patches` vision patches, for `ranks` ranks.

    Rows are filled by first-fit decreasing. Their number is rounded up to a multiple of `ranks`; the additional rows
    take samples of the rows with the highest cost, and rows that are not full are evened out. Rows are then divided
    among the ranks by their cost for a model of `hidden_size` (see `token_cost`).

    With `uniform_modality` all rows of a step have media of the same modalities, so that no rank waits for another one
    in a vision tower that it does not run itself (FSDP). Where a modality has fewer samples than a step has ranks, a
    row gets a copy of a sample with shared media and without loss.

    `too_long` decides what becomes of a sample that exceeds a budget. "drop" leaves it out, "truncate" cuts it, never
    inside an image (see `truncate_sample`), and leaves it out if no trained token remains; "error" raises
    `SampleError`. What is left out is in `quarantine`, which may be the one that collected the samples. A sample
    without tokens is always left out.

    Raises `ArgumentError` for budgets, ranks and sizes below 1 and `SampleError` for values that are no samples.
    """
    _check_arguments(max_tokens, max_patches, ranks, too_long, hidden_size)
    if not isinstance(samples, Sequence):
        raise SampleError(None, f"pass a list of TrainingSample, not {short_repr(samples)}")
    if quarantine is None:
        quarantine = Quarantine()
        quarantine.seen = len(samples)
    kept, kept_patches, truncations = _fitting_samples(samples, max_tokens, max_patches, too_long, quarantine)
    groups = _groups(kept, ranks, uniform_modality)
    stand_ins = [stand_in for group in groups for stand_in in group.stand_ins]
    items = [*kept, *stand_ins]
    tokens = np.array([len(sample.token_ids) for sample in items], dtype=np.int64)
    patches = np.array([*kept_patches, *map(sample_patches, stand_ins)], dtype=np.int64)
    costs = token_cost(tokens, hidden_size)
    bins = Bins(tokens, patches, max_tokens, max_patches, empty=ranks)
    groups_of_rows = _fill(bins, groups, len(kept), ranks, costs, max_tokens)
    row_costs = [float(costs[members].sum()) for members in bins.members]
    in_order = [step for rows in groups_of_rows for step in steps_of_similar_rows(rows, row_costs, ranks)]
    steps = assign_ranks(in_order, row_costs)
    cells = max_tokens * ranks * len(steps)
    spread = [max(each) * ranks / sum(each) - 1 for each in ([row_costs[row] for row in step] for step in steps)]
    return PackingPlan(
        steps=tuple(tuple(tuple(items[item] for item in bins.members[row]) for row in step) for step in steps),
        filled=float(tokens[: len(kept)].sum() / cells) if steps else 0.0,
        imbalance=float(np.mean(spread)) if steps else 0.0,
        truncations=tuple(truncations),
        quarantine=quarantine,
        ranks=int(ranks),
    )


@dataclass(frozen=True, slots=True)
class _Group:
    """Numbers of the samples that share the rows of a step, and samples for rows that would lack their modality."""

    samples: np.ndarray
    stand_ins: tuple[TrainingSample, ...] = ()


def _groups(samples: Sequence[TrainingSample], ranks: int, uniform_modality: bool) -> list[_Group]:
    """All samples in one group, or one group for each set of modalities, that of text alone at the end."""
    if not uniform_modality:
        return [_Group(np.arange(len(samples)))]
    by_modalities: dict[tuple[str, ...], list[int]] = {}
    for number, sample in enumerate(samples):
        by_modalities.setdefault(tuple(sorted({item.modality for item, _ in sample.media})), []).append(number)
    text = by_modalities.pop((), [])
    groups = []
    for _, numbers in sorted(by_modalities.items()):
        smallest = min(
            (samples[number] for number in numbers), key=lambda sample: (sample_patches(sample), len(sample))
        )
        # No more than these are needed: without them, each sample may have a row of its own.
        groups.append(_Group(np.array(numbers), (without_training(smallest),) * (-len(numbers) % ranks)))
    return [*groups, _Group(np.array(text, dtype=np.int64))]


def _fill(
    bins: Bins, groups: Sequence[_Group], stand_in: int, ranks: int, costs: np.ndarray, max_tokens: int
) -> list[range]:
    """Fill the bins with the groups, and return the rows of each group; their numbers are multiples of `ranks`.

    The last group also takes the room that the groups before it have left. `stand_in` is the number of the first
    stand-in.
    """
    rows = []
    for position, group in enumerate(groups):
        first, is_last = len(bins.members), position == len(groups) - 1
        bins.add(group.samples, 0 if is_last else first)
        _round_up(bins, first, ranks, costs, list(range(stand_in, stand_in + len(group.stand_ins))))
        stand_in += len(group.stand_ins)
        rows.append(range(first, len(bins.members)))
        # In rows that are nearly full, there is no room to even them out.
        if bins.free_tokens(rows[-1]) > _ROOM * max_tokens * len(rows[-1]):
            bins.even_out(rows[-1], costs)
    return rows


def _round_up(bins: Bins, first: int, ranks: int, costs: np.ndarray, stand_ins: list[int]) -> None:
    """Add rows after row `first`, until they are a multiple of `ranks`: parts of expensive rows, else stand-ins."""
    sums = {row: float(costs[bins.members[row]].sum()) for row in range(first, len(bins.members))}
    while (len(bins.members) - first) % ranks:
        divisible = [row for row in sums if len(bins.members[row]) > 1]
        if divisible:
            row = max(divisible, key=sums.__getitem__)
            bins.split(row, costs)
            new = len(bins.members) - 1
            sums |= {each: float(costs[bins.members[each]].sum()) for each in (row, new)}
        else:
            new = bins.open()
            if stand_ins:
                bins.put(stand_ins.pop(), new)


def _fitting_samples(
    samples: Sequence[TrainingSample],
    max_tokens: int,
    max_patches: int | None,
    too_long: TooLong,
    quarantine: Quarantine,
) -> tuple[list[TrainingSample], list[int], list[Truncation]]:
    """The samples that fit a row, some of them truncated; their patches, 0 without a budget of patches."""
    kept: list[TrainingSample] = []
    kept_patches: list[int] = []
    truncations: list[Truncation] = []
    for number, sample in enumerate(samples):
        if not isinstance(sample, TrainingSample):
            raise SampleError(str(number), f"{short_repr(sample)} is not a TrainingSample")
        tokens = len(sample.token_ids)
        if not tokens:
            quarantine.leave_out(sample.name, "no tokens", "the sample has no tokens")
            continue
        patches = 0 if max_patches is None else sample_patches(sample)
        if tokens <= max_tokens and (max_patches is None or patches <= max_patches):
            kept.append(sample)
            kept_patches.append(patches)
            continue
        size = f"{tokens} tokens" + (f" and {patches} vision patches" if max_patches is not None else "")
        limit = f"{max_tokens} tokens" + (f" and {max_patches} vision patches" if max_patches is not None else "")
        reason = f"it has {size}, and a row has room for {limit}"
        if too_long == "error":
            raise SampleError(sample.name, f'{reason}; increase the limit, or pass too_long="truncate" or "drop"')
        if too_long == "drop":
            quarantine.leave_out(sample.name, "too long", reason)
            continue
        shorter, truncation = truncate_sample(sample, max_tokens, max_patches)
        if not truncation.trained[1]:
            quarantine.leave_out(sample.name, "too long", f"{reason}; truncated, it has no trained token")
            continue
        kept.append(shorter)
        kept_patches.append(0 if max_patches is None else sample_patches(shorter))
        truncations.append(truncation)
    return kept, kept_patches, truncations


def _check_arguments(
    max_tokens: object, max_patches: object, ranks: object, too_long: object, hidden_size: object
) -> None:
    counts = {"max_tokens": max_tokens, "ranks": ranks, "hidden_size": hidden_size}
    for name, value in (counts if max_patches is None else {**counts, "max_patches": max_patches}).items():
        if (whole_number(value) or 0) < 1:
            raise ArgumentError(name, value, "pass an integer of at least 1")
    if too_long not in get_args(TooLong):
        raise ArgumentError("too_long", too_long, f"pass one of {', '.join(get_args(TooLong))}")
