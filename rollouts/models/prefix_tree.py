"""Prefix trees: sequences in rows in which tokens and media that several of them begin with stand once."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rollouts.models.placed_rows import Path, PlacedRows, TokenRow

#: The largest number of tokens in a row of trees: its mask has 16,384 x 16,384 values.
MAX_ROW_TOKENS = 16_384


class PrefixOrder(NamedTuple):
    """Sequences sorted by their tokens and media, so that those with a common beginning are neighbours.

    `order` int64 (N,) are numbers of sequences; of each of them in this order, int64 (N,): `lengths`, and
    `shared`, the number of first tokens that it has in common with the one before it.
    """

    order: np.ndarray
    lengths: np.ndarray
    shared: np.ndarray


def prefix_order(sequences: Sequence[TokenRow], *, joins_items: bool) -> PrefixOrder:
    """The order of sequences. `shared` ends in no item, and with `joins_items` between no two that touch.

    A model that attends in both directions within images does so within those that touch, too.
    """
    numbers: dict[object, int] = {}
    keys = [_keys(sequence, numbers) for sequence in sequences]
    order = sorted(range(len(keys)), key=lambda number: keys[number].astype(">i8").tobytes())
    shared = np.zeros(len(keys), dtype=np.int64)
    for place, (one, other) in enumerate(itertools.pairwise(order), 1):
        length = min(len(keys[one]), len(keys[other]))
        differs = keys[one][:length] != keys[other][:length]
        common = int(differs.argmax()) if differs.any() else length
        while (before := min(_cut(sequences[number], common, joins_items) for number in (one, other))) < common:
            common = before
        shared[place] = common
    lengths = np.array([len(keys[number]) for number in order], dtype=np.int64)
    return PrefixOrder(np.array(order, dtype=np.int64), lengths, shared)


def _keys(sequence: TokenRow, numbers: dict[object, int]) -> np.ndarray:
    """int64 (n,): equal where the token and, in the range of an item, the item and its range are equal."""
    keys = sequence.token_ids.astype(np.int64)
    for item, placeholder in sequence.media:
        number = numbers.setdefault((item.mm_hash, placeholder), len(numbers) + 1)
        keys[placeholder.offset : placeholder.end] += number << 32  # token ids are int32
    return keys


def _cut(sequence: TokenRow, common: int, joins_items: bool) -> int:
    """The largest number of first tokens, at most `common`, that ends in no item; see `prefix_order`."""
    begin, end = 0, 0
    for _, placeholder in sequence.media:
        if placeholder.offset > end or not joins_items:
            begin = placeholder.offset
        end = placeholder.end
        if begin < common < end:
            return begin
    return common


def row_cost(tokens: np.ndarray, hidden_size: int) -> np.ndarray:
    """float64: the cost of rows with these numbers of tokens, as `token_cost` has it.

    Attention costs twice as much as there: a mask hides values that are computed.
    """
    return tokens * (12.0 * hidden_size + 2.0 * tokens)


def tree_runs(known: PrefixOrder, joins: np.ndarray, hidden_size: int, max_tokens: int) -> list[range]:
    """Places in the order, divided into runs, each of which is a tree: the division whose rows cost least.

    `joins` bool (N,): a place may be in the run of the place before it. Each run has at most `max_tokens`
    tokens, or one place. A tree is so divided at its branches where attention in one long row costs more than
    computing what the branches share again.
    """
    new = np.concatenate([[0], np.cumsum(known.lengths - known.shared)])
    best = np.zeros(len(known.order) + 1)
    begins = np.zeros(len(known.order) + 1, dtype=np.int64)
    lowest = 0
    for end in range(1, len(best)):
        lowest = lowest if joins[end - 1] else end - 1
        begin = np.arange(lowest, end)
        tokens = known.shared[begin] + new[end] - new[begin]
        total = best[begin] + row_cost(tokens, hidden_size)
        total[:-1][tokens[:-1] > max_tokens] = np.inf
        chosen = int(total.argmin())
        best[end], begins[end] = total[chosen], begin[chosen]
    runs = []
    end = len(known.order)
    while end:
        runs.append(range(int(begins[end]), end))
        end = runs[-1].start
    return runs[::-1]


def distinct_tokens(known: PrefixOrder, runs: Sequence[range]) -> list[int]:
    """The number of tokens of each tree."""
    new = known.lengths - known.shared
    return [int(known.shared[run.start] + new[run.start : run.stop].sum()) for run in runs]


def filled_rows(sizes: Sequence[int], hidden_size: int, max_tokens: int) -> list[list[int]]:
    """The numbers of the runs of `sizes` in each row: as many in one row as makes rows of one width cost least."""
    longest, total = max(sizes), sum(sizes)
    counts = [1 << power for power in range(len(sizes).bit_length())]
    widths = {longest, *(max(longest, min(-(-total // count), max_tokens)) for count in counts)}
    layouts = [_first_fit(sizes, width) for width in sorted(widths)]
    return min(layouts, key=lambda rows: rows_cost(rows, sizes, hidden_size))


def rows_cost(rows: Sequence[Sequence[int]], sizes: Sequence[int], hidden_size: int) -> float:
    """The cost of `filled_rows`, all as wide as the widest."""
    widest = max(sum(sizes[run] for run in row) for row in rows)
    return float(len(rows) * row_cost(np.array(widest), hidden_size))


def _first_fit(sizes: Sequence[int], width: int) -> list[list[int]]:
    rows: list[list[int]] = []
    free: list[int] = []
    for run in sorted(range(len(sizes)), key=lambda run: -sizes[run]):
        row = next((row for row, room in enumerate(free) if room >= sizes[run]), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(width)
        rows[row].append(run)
        free[row] -= sizes[run]
    return rows


def tree_rows(
    sequences: Sequence[TokenRow], known: PrefixOrder, rows: Sequence[Sequence[range]], *, pad_id: int, packed: bool
) -> PlacedRows:
    """The trees of the runs in each row, one after another.

    Not `packed`: rows of one run each, in which every sequence begins the next one, so that they need no mask.
    """
    paths = [Path(sequence, 0, np.empty(0, dtype=np.int64)) for sequence in sequences]
    parts: list[tuple[TokenRow, int, int, int]] = []
    widths = [0] * len(rows)
    for row, runs in enumerate(rows):
        for begin, place in ((run.start, place) for run in runs for place in run):
            number = int(known.order[place])
            shared = 0 if place == begin else int(known.shared[place])
            sequence, column = sequences[number], widths[row]
            before = paths[known.order[place - 1]].columns[:shared]
            added = np.arange(column, column + len(sequence) - shared)
            paths[number] = Path(sequence, row, np.concatenate([before, added]), shared)
            if len(added):
                parts.append((sequence.part(shared, len(sequence)), row, column, shared))
            widths[row] += len(added)
    shape = len(rows), max(widths)
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    position_ids = np.zeros(shape, dtype=np.int64)
    sequence_ids = np.full(shape, -1, dtype=np.int32)
    for number, (part, row, column, shared) in enumerate(parts):
        columns = slice(column, column + len(part))
        input_ids[row, columns] = part.token_ids
        position_ids[row, columns] = np.arange(shared, shared + len(part))
        sequence_ids[row, columns] = number
    starts = np.array([(row, column) for _, row, column, _ in parts], dtype=np.int64)
    sequences = tuple(part for part, *_ in parts)
    return PlacedRows(sequences, input_ids, position_ids, sequence_ids, starts, packed, tuple(paths))
