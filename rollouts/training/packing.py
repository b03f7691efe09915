"""Plans the rows and ranks that samples of a step are packed in, within budgets of tokens and patches."""

import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from rollouts.errors import ArgumentError, SampleError
from rollouts.models.prefix_tree import Tree, prefix_trees, separate_trees, tree_of
from rollouts.training.batch import TrainingBatch
from rollouts.training.bins import Bins
from rollouts.training.samples import TrainingSample
from rollouts.training.truncation import Truncation, sample_rows, tower_rows, trees_within, truncate_sample
from rollouts.values import check_choice, check_integer, whole_number

TooLong = Literal["error", "drop", "truncate"]
"""What becomes of a sample that does not fit a row: an error, left out, or cut to the row."""


@dataclass(frozen=True, slots=True)
class LeftOut:
    """A sample that is in no row: its name, and why."""

    name: str
    reason: str


#: The name of samples that train nothing: they fill up the rows of ranks and steps.
_PADDING = "padding"

Row = tuple[TrainingSample, ...]


@dataclass(frozen=True, slots=True)
class PackingPlan:
    """Rows of packed samples: `steps[s][r]` are the samples that rank r computes in step s.

    All ranks have the same number of steps. Steps are micro-steps of one optimizer step: rows of a step have
    similar costs, so the lengths differ from step to step. `filled` is the fraction of the token budget of
    all rows that has tokens of samples, 0 without rows; what samples share counts once there, and in
    `distinct_tokens`, but not in `tokens`. `imbalance` is the mean over the steps of the largest
    cost of a rank divided by the mean cost, minus 1. `truncations` and `left_out` have the samples that were
    cut and those that were left out. A plan without rows has no steps for each of its `ranks`.
    """

    steps: tuple[tuple[Row, ...], ...]
    tokens: int
    distinct_tokens: int
    filled: float
    imbalance: float
    truncations: tuple[Truncation, ...]
    left_out: tuple[LeftOut, ...]
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
        """Rows, tokens, filling and balance, and what was cut or left out."""
        cut = sum(truncation.lost_last_trained for truncation in self.truncations)
        filling = f", {self.filled:.1%} filled, imbalance {self.imbalance:.1%}" if self.steps else ""
        tokens = f"{self.tokens} tokens, {self.distinct_tokens} of them distinct"
        return (
            f"{len(self.steps)} steps{filling}; {tokens}; "
            f"{len(self.truncations)} samples truncated, {cut} of them without their last trained token; "
            f"{len(self.left_out)} left out"
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
    share_prefixes: bool = True,
) -> PackingPlan:
    """Pack samples into rows of at most `max_tokens` tokens and `max_patches` patches and frames, for `ranks` ranks.

    Samples that begin with the same tokens and media stay together, and these count once, as `token_logprobs`
    computes them. Without `share_prefixes` every token of every sample counts: for models without prefix
    trees, and for rows that another function computes.

    Rows are filled by first-fit decreasing. Their number is rounded up to a multiple of `ranks`; the
    additional rows take samples of the rows with the highest cost, and rows that are not full are evened out.
    Rows are then divided among the ranks by their cost for a model of `hidden_size` (see `token_cost`).

    With `uniform_modality` all rows of a step have media of the same modalities, so that no rank waits for
    another one in a tower that it does not run itself (FSDP). Where a modality has fewer samples than a step
    has ranks, a row gets a copy of a sample with shared media and without loss.

    `too_long` decides what becomes of a sample that exceeds a budget. "drop" leaves it out, "truncate" cuts
    it, never inside a medium (see `truncate_sample`), and leaves it out if no trained token remains; "error"
    raises `SampleError`. A sample without tokens is always left out. `left_out` of the plan has what was.

    Raises `ArgumentError` for budgets, ranks and sizes below 1.
    """
    counts = {"max_tokens": max_tokens, "ranks": ranks, "hidden_size": hidden_size}
    for name, value in (counts if max_patches is None else {**counts, "max_patches": max_patches}).items():
        check_integer(name, value)
    check_choice("too_long", too_long, TooLong)
    kept, truncations, left_out = _fitting_samples(samples, max_tokens, max_patches, too_long)

    def trees_of(own: Sequence[TrainingSample]) -> list[Tree]:
        return _trees(own, max_tokens, max_patches, ranks, hidden_size, share_prefixes)

    groups = _groups(kept, ranks, uniform_modality, trees_of)
    stand_ins = [stand_in for group in groups for stand_in in group.stand_ins]
    items = [*kept, *stand_ins]
    trees = [tree for group in groups for tree in group.trees]
    distinct, first_stand_in = sum(tree.tokens for tree in trees), len(trees)
    trees += [tree_of((number,), (0,), (len(items[number]),)) for number in range(len(kept), len(items))]
    tokens = np.array([tree.tokens for tree in trees], dtype=np.int64)
    patches = np.zeros_like(tokens)
    if max_patches is not None:
        patches[:] = [sum(tower_rows(item) for item, _ in tree.items(items)) for tree in trees]
    costs = token_cost(tokens, hidden_size)
    bins = Bins(tokens, patches, max_tokens, max_patches, empty=ranks)
    groups_of_rows = _fill(bins, groups, first_stand_in, ranks, costs, max_tokens)
    row_costs = [float(costs[members].sum()) for members in bins.members]
    # Ranks that wait for each other after every step wait little where the rows of a step have similar costs.
    by_cost = (sorted(rows, key=lambda row: -row_costs[row]) for rows in groups_of_rows)
    in_order = [rows[start : start + ranks] for rows in by_cost for start in range(0, len(rows), ranks)]
    steps = assign_ranks(in_order, row_costs)
    cells = max_tokens * ranks * len(steps)
    rows = [tuple(items[n] for tree in members for n in trees[tree].numbers) for members in bins.members]
    spread = [max(each) * ranks / sum(each) - 1 for each in ([row_costs[row] for row in step] for step in steps)]
    return PackingPlan(
        steps=tuple(tuple(map(rows.__getitem__, step)) for step in steps),
        tokens=sum(map(len, kept)),
        distinct_tokens=distinct,
        filled=distinct / cells if steps else 0.0,
        imbalance=float(np.mean(spread)) if steps else 0.0,
        truncations=tuple(truncations),
        left_out=tuple(left_out),
        ranks=int(ranks),
    )


@dataclass(frozen=True, slots=True)
class _Group:
    """Trees of samples that share the rows of a step, and samples for rows that would lack their modality."""

    trees: Sequence[Tree]
    stand_ins: tuple[TrainingSample, ...] = ()


def _groups(
    samples: Sequence[TrainingSample],
    ranks: int,
    uniform_modality: bool,
    trees_of: Callable[[Sequence[TrainingSample]], list[Tree]],
) -> list[_Group]:
    """All samples in one group, or one group for each set of modalities, that of text alone at the end."""
    if not uniform_modality:
        return [_Group(trees_of(samples))]
    by_modalities: dict[tuple[str, ...], list[int]] = {}
    for number, sample in enumerate(samples):
        # Of a video with its sound both: it runs the towers of both.
        modalities = {modality for item, _ in sample.media for modality, _ in item.feature_counts}
        by_modalities.setdefault(tuple(sorted(modalities)), []).append(number)
    text = by_modalities.pop((), [])
    groups = []
    for seen, numbers in [*sorted(by_modalities.items()), ((), text)]:
        own = [samples[number] for number in numbers]
        trees = [tree._replace(numbers=tuple(numbers[n] for n in tree.numbers)) for tree in trees_of(own)]
        # No more than these are needed: without them, each tree may have a row of its own.
        count = -len(trees) % ranks if seen else 0
        smallest = min(own, key=lambda sample: (sample_rows(sample), len(sample)), default=None)
        groups.append(_Group(trees, (without_training(smallest),) * count if smallest else ()))
    return groups


def _trees(
    samples: Sequence[TrainingSample],
    max_tokens: int,
    max_patches: int | None,
    ranks: int,
    hidden_size: int,
    share_prefixes: bool,
) -> list[Tree]:
    """The trees that stay together, by their first samples."""
    if not share_prefixes:
        return separate_trees(samples)
    trees = prefix_trees(samples, hidden_size, max_tokens)
    # Larger trees than this would leave ranks without work.
    most = 2 * sum(tree.tokens for tree in trees) // ranks
    if most < max((tree.tokens for tree in trees), default=0):
        trees = prefix_trees(samples, hidden_size, most)
    if max_patches is not None:
        trees = trees_within(trees, samples, max_patches)
    return sorted(trees, key=lambda tree: min(tree.numbers))


def _fill(
    bins: Bins, groups: Sequence[_Group], stand_in: int, ranks: int, costs: np.ndarray, max_tokens: int
) -> list[range]:
    """Fill the bins with the trees of the groups; the rows of each group, a multiple of `ranks`.

    The last group also takes the room that the groups before it have left. `stand_in` is the number of the
    first stand-in.
    """
    rows = []
    begin = 0
    for position, group in enumerate(groups):
        first, is_last = len(bins.members), position == len(groups) - 1
        bins.add(np.arange(begin, begin + len(group.trees)), 0 if is_last else first)
        begin += len(group.trees)
        _round_up(bins, first, ranks, costs, list(range(stand_in, stand_in + len(group.stand_ins))))
        stand_in += len(group.stand_ins)
        rows.append(range(first, len(bins.members)))
        # In rows that are nearly full, there is no room to even them out.
        # The free fraction of rows above which their costs are evened out.
        if bins.free_tokens[first : len(bins.members)].sum() > 0.02 * max_tokens * len(rows[-1]):
            bins.even_out(rows[-1], costs)
    return rows


def _round_up(bins: Bins, first: int, ranks: int, costs: np.ndarray, stand_ins: list[int]) -> None:
    """Add rows after row `first`, until they are a multiple of `ranks`: parts of expensive rows, else stand-ins."""
    while (len(bins.members) - first) % ranks:
        divisible = [row for row in range(first, len(bins.members)) if len(bins.members[row]) > 1]
        if divisible:
            bins.split(max(divisible, key=lambda row: costs[bins.members[row]].sum()), costs)
            continue
        new = bins.open()
        if stand_ins:
            bins.put(stand_ins.pop(), new)


def _fitting_samples(
    samples: Sequence[TrainingSample],
    max_tokens: int,
    max_patches: int | None,
    too_long: TooLong,
) -> tuple[list[TrainingSample], list[Truncation], list[LeftOut]]:
    """The samples that fit a row, some of them truncated, and what is left out."""
    kept: list[TrainingSample] = []
    truncations: list[Truncation] = []
    left_out: list[LeftOut] = []
    for sample in samples:
        if not len(sample):
            left_out.append(LeftOut(sample.name, "it has no tokens"))
            continue
        patches = 0 if max_patches is None else sample_rows(sample)
        if len(sample) <= max_tokens and (max_patches is None or patches <= max_patches):
            kept.append(sample)
            continue
        size, limit = (
            f"{tokens} tokens" + (f" and {rows} patches and frames" if max_patches is not None else "")
            for tokens, rows in ((len(sample), patches), (max_tokens, max_patches))
        )
        reason = f"it has {size}, and a row has room for {limit}"
        if too_long == "error":
            raise SampleError(sample.name, f'{reason}; increase the limit, or pass too_long="truncate" or "drop"')
        if too_long == "truncate":
            shorter, truncation = truncate_sample(sample, max_tokens, max_patches)
            if truncation.trained[1]:
                kept.append(shorter)
                truncations.append(truncation)
                continue
            reason = f"{reason}; truncated, it has no trained token"
        left_out.append(LeftOut(sample.name, reason))
    return kept, truncations, left_out


def neutral_sample(token_id: int) -> TrainingSample:
    """A sample of one token `token_id` without loss and without media."""
    zeros = np.zeros(1, dtype=np.float32)
    return TrainingSample(np.array([token_id], dtype=np.int32), zeros.astype(bool), zeros, zeros, name=_PADDING)


def without_training(sample: TrainingSample) -> TrainingSample:
    """`sample` with the same tokens and the same media objects, but no trained token."""
    zeros = np.zeros(len(sample), dtype=np.float32)
    return replace(
        sample,
        loss_mask=zeros.astype(bool),
        logprobs=zeros,
        advantages=zeros,
        weight_spans=(),
        name=_PADDING,
        routed_experts=None,
        top_logprobs=None,
        sampling_mask=None,
    )


def token_cost(lengths: np.ndarray, hidden_size: int) -> np.ndarray:
    """float64 (n,): the cost of samples of `lengths` tokens, proportional to the FLOPs of a transformer layer.

    A layer of width h takes 24 s h^2 FLOPs for its matrices and 4 s^2 h for attention (Narayanan et al. 2021,
    arXiv:2104.04473), and half of the latter where the attention is causal: 2 h s (12 h + s) in all.
    """
    return lengths * (12.0 * hidden_size + lengths)


def assign_ranks(steps: Sequence[Sequence[int]], costs: Sequence[float]) -> list[list[int]]:
    """Each step with its rows reordered: position r is for rank r, and the ranks' total costs are about equal.

    The largest differencing method of Karmarkar and Karp, in its form for parts of equal size (Michiels et
    al. 2003, "Performance ratios for the differencing method applied to the balanced number partitioning
    problem"): the two partial assignments in which the ranks differ most are joined, the most expensive rank
    of one with the cheapest of the other, until one is left.
    """
    if not steps:
        return []
    numbers = itertools.count()  # decides between partial assignments of equal spread
    heap = []
    for step in steps:
        totals = [costs[row] for row in step]
        # A heap gives the smallest: with the sign changed, that is the largest difference.
        heap.append((min(totals) - max(totals), next(numbers), totals, [[row] for row in step]))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, _, totals, rows = heapq.heappop(heap)
        _, _, other_totals, other_rows = heapq.heappop(heap)
        descending = sorted(range(len(totals)), key=lambda rank: -totals[rank])
        ascending = sorted(range(len(totals)), key=lambda rank: other_totals[rank])
        pairs = list(zip(descending, ascending, strict=True))
        sums = [totals[one] + other_totals[other] for one, other in pairs]
        joined = [rows[one] + other_rows[other] for one, other in pairs]
        heapq.heappush(heap, (min(sums) - max(sums), next(numbers), sums, joined))
    rank_of = {row: rank for rank, of_rank in enumerate(heap[0][3]) for row in of_rank}
    return [sorted(step, key=rank_of.__getitem__) for step in steps]
