"""Prefix trees: sequences in rows in which tokens and media that several of them begin with stand once."""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from renderers.placement import PlacedItem
from rollouts.models.placed_rows import Path, PlacedRows, TokenRow

#: The largest number of tokens in a row of trees: its mask has 16,384 x 16,384 values.
MAX_ROW_TOKENS = 16_384


class Tree(NamedTuple):
    """Sequences that share beginnings: their numbers, in an order in which neighbours share most.

    `shared` are the numbers of first tokens that each has in common with the one before it, 0 for the first;
    `tokens` is the number of different tokens.
    """

    numbers: tuple[int, ...]
    shared: tuple[int, ...]
    tokens: int

    def items(self, sequences: Sequence[TokenRow]) -> list[PlacedItem]:
        """The different media."""
        found: list[PlacedItem] = []
        for number, shared in zip(self.numbers, self.shared, strict=True):
            found += [each for each in sequences[number].media if each[1].offset >= shared]
        return found


def tree_of(numbers: Sequence[int], shared: Sequence[int], lengths: Sequence[int]) -> Tree:
    """The tree of sequences; `shared` of the first of them does not count."""
    shared = (0, *shared[1:])
    return Tree(tuple(numbers), shared, sum(lengths) - sum(shared))


def separate_trees(sequences: Sequence[TokenRow]) -> list[Tree]:
    """Each sequence in a tree of its own."""
    return [tree_of((number,), (0,), (len(sequence),)) for number, sequence in enumerate(sequences)]


def prefix_trees(
    sequences: Sequence[TokenRow],
    hidden_size: int,
    max_tokens: int,
    *,
    joins_items: bool = True,
    only_beginnings: bool = False,
) -> list[Tree]:
    """Sequences divided into trees, each for a row, so that the rows cost a model of `hidden_size` least.

    A tree has at most `max_tokens` tokens, or one sequence. What sequences share is divided, and so computed
    more than once, where attention in one long row would cost more. Shared tokens end in no item, and with
    `joins_items` between no two items whose features touch: a model that attends in both directions within
    images does so within these, too. `only_beginnings`: each sequence of a tree begins the next one.
    """
    numbers: dict[object, int] = {}
    keys = [_keys(sequence, numbers) for sequence in sequences]
    order = sorted(range(len(keys)), key=lambda number: keys[number].astype(">i8").tobytes())
    shared = np.zeros(len(keys), dtype=np.int64)
    for place, (one, other) in enumerate(itertools.pairwise(order), 1):
        length = min(len(keys[one]), len(keys[other]))
        differs = keys[one][:length] != keys[other][:length]
        differs |= _experts_differ(sequences[one], sequences[other], length)
        common = int(differs.argmax()) if differs.any() else length
        while (cut := min(_cut(sequences[number], common, joins_items) for number in (one, other))) < common:
            common = cut
        shared[place] = common
    lengths = np.array([len(keys[number]) for number in order], dtype=np.int64)
    if not shared.any():
        return separate_trees(sequences)
    if only_beginnings:
        shared[1:][shared[1:] < lengths[:-1]] = 0
    return [
        tree_of(order[run.start : run.stop], shared[run].tolist(), lengths[run].tolist())
        for run in _runs(lengths, shared, hidden_size, max_tokens)
    ]


def _keys(sequence: TokenRow, numbers: dict[object, int]) -> np.ndarray:
    """int64 (n,): equal where the token and, in the range of an item, the item and its range are equal.

    Hashes of experts are added, by which sequences are ordered; `_experts_differ` compares the experts.
    """
    keys = sequence.token_ids.astype(np.int64)
    for item, placeholder in sequence.media:
        number = numbers.setdefault((item.mm_hash, placeholder), len(numbers) + 1)
        keys[placeholder.offset : placeholder.end] += number << 32  # token ids are int32
    if sequence.experts is not None:
        experts = sequence.experts.reshape(len(keys), -1).astype(np.int64)
        keys += experts @ np.random.default_rng(0).integers(1 << 62, size=experts.shape[1])  # modulo 2^64
    return keys


def _experts_differ(one: TokenRow, other: TokenRow, length: int) -> np.ndarray | bool:
    """bool (length,): whether given experts of the first tokens differ; or one bool for all of them."""
    if one.experts is None or other.experts is None or one.experts.shape[1:] != other.experts.shape[1:]:
        return one.experts is not other.experts
    differ: np.ndarray = (one.experts[:length] != other.experts[:length]).any(axis=(1, 2))
    return differ


def _cut(sequence: TokenRow, common: int, joins_items: bool) -> int:
    """The largest number of first tokens, at most `common`, that ends in no item; see `prefix_trees`."""
    begin, features_end = 0, -1
    for _, placeholder in sequence.media:
        if not joins_items or placeholder.runs[0][0] > features_end:
            begin = placeholder.offset
        if begin < common < placeholder.end:
            return begin
        features_end = placeholder.runs[-1][1]
    return common


def _runs(lengths: np.ndarray, shared: np.ndarray, hidden_size: int, max_tokens: int) -> list[slice]:
    """Neighbours divided into runs whose rows cost least: for each end the best begin."""
    new = np.concatenate([[0], np.cumsum(lengths - shared)])
    best = np.zeros(len(new))
    begins = np.zeros(len(new), dtype=np.int64)
    lowest = 0
    for end in range(1, len(new)):
        lowest = lowest if shared[end - 1] else end - 1
        begin = np.arange(lowest, end)
        tokens = shared[begin] + new[end] - new[begin]
        total = best[begin] + row_cost(tokens, hidden_size)
        total[:-1][tokens[:-1] > max_tokens] = np.inf
        chosen = int(total.argmin())
        best[end], begins[end] = total[chosen], begin[chosen]
    runs: list[slice] = []
    end = len(lengths)
    while end:
        runs.append(slice(int(begins[end]), end))
        end = runs[-1].start
    return runs[::-1]


def row_cost(tokens: np.ndarray, hidden_size: int) -> np.ndarray:
    """float64: the cost of rows with these numbers of tokens, as `token_cost` has it.

    Attention costs twice as much as there: a mask hides values that are computed.
    """
    return tokens * (12.0 * hidden_size + 2.0 * tokens)


def rows_cost(rows: Sequence[Sequence[Tree]], hidden_size: int) -> float:
    """The cost of rows, all of them padded to the widest."""
    widest = max(sum(tree.tokens for tree in row) for row in rows)
    return float(len(rows) * row_cost(np.array(widest), hidden_size))


def filled_rows(trees: Sequence[Tree], hidden_size: int, max_tokens: int) -> list[list[Tree]]:
    """Trees in rows, as many in one as makes rows of one width cost least."""
    longest, total = max(tree.tokens for tree in trees), sum(tree.tokens for tree in trees)
    counts = [1 << power for power in range(len(trees).bit_length())]
    widths = {longest, *(max(longest, min(-(-total // count), max_tokens)) for count in counts)}
    layouts = [_first_fit(trees, width) for width in sorted(widths)]
    return min(layouts, key=lambda rows: rows_cost(rows, hidden_size))


def _first_fit(trees: Sequence[Tree], width: int) -> list[list[Tree]]:
    rows: list[list[Tree]] = []
    free: list[int] = []
    for tree in sorted(trees, key=lambda tree: -tree.tokens):
        row = next((row for row, room in enumerate(free) if room >= tree.tokens), len(rows))
        if row == len(rows):
            rows.append([])
            free.append(width)
        rows[row].append(tree)
        free[row] -= tree.tokens
    return rows


def tree_rows(
    sequences: Sequence[TokenRow],
    rows: Sequence[Sequence[Tree]],
    *,
    pad_id: int,
    packed: bool,
    multiple_of: int = 1,
) -> PlacedRows:
    """The trees of each row, one after another, in a number of columns that is a multiple of `multiple_of`.

    Not `packed`: rows of one tree each, in which every sequence begins the next one; they need no mask.
    """
    paths = [Path(sequence, 0, np.empty(0, dtype=np.int64)) for sequence in sequences]
    parts: list[tuple[TokenRow, int, int, int]] = []
    for row, trees in enumerate(rows):
        column = 0
        for tree in trees:
            columns = np.empty(0, dtype=np.int64)
            for number, shared in zip(tree.numbers, tree.shared, strict=True):
                sequence = sequences[number]
                added = np.arange(column, column + len(sequence) - shared)
                columns = np.concatenate([columns[:shared], added])
                paths[number] = Path(sequence, row, columns, shared)
                if len(added):
                    parts.append((sequence.part(shared, len(sequence)), row, column, shared))
                column += len(added)
    widest = max(sum(tree.tokens for tree in row) for row in rows)
    shape = len(rows), -(-widest // multiple_of) * multiple_of
    input_ids = np.full(shape, pad_id, dtype=np.int64)
    position_ids = np.zeros(shape, dtype=np.int64)
    sequence_ids = np.full(shape, -1, dtype=np.int32)
    for index, (part, row, column, shared) in enumerate(parts):
        where = row, slice(column, column + len(part))
        input_ids[where] = part.token_ids
        position_ids[where] = np.arange(shared, shared + len(part))
        sequence_ids[where] = index
    starts = np.array([(row, column) for _, row, column, _ in parts], dtype=np.int64)
    own = tuple(part for part, *_ in parts)
    return PlacedRows(own, input_ids, position_ids, sequence_ids, starts, packed, tuple(paths))
