"""Rows divided among ranks so that all ranks compute about as long, in each step and in total."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Sequence

import numpy as np


def token_cost(lengths: np.ndarray, hidden_size: int) -> np.ndarray:
    """float64 (n,): the cost of samples of `lengths` tokens, proportional to the FLOPs of a transformer layer.

    A layer of width h takes 24 s h^2 FLOPs for its matrices and 4 s^2 h for attention (Narayanan et al. 2021,
    arXiv:2104.04473), and half of the latter where the attention is causal: 2 h s (12 h + s) in all.
    """
    return lengths * (12.0 * hidden_size + lengths)


def steps_of_similar_rows(rows: Sequence[int], costs: Sequence[float], ranks: int) -> list[list[int]]:
    """The rows, the most expensive first, in steps of `ranks` neighbours; `costs` are those of all rows.

    Ranks that wait for each other after every step then wait little. The number of rows is a multiple of `ranks`.
    """
    order = sorted(rows, key=lambda row: -costs[row])
    return [order[start : start + ranks] for start in range(0, len(order), ranks)]


def assign_ranks(steps: Sequence[Sequence[int]], costs: Sequence[float]) -> list[list[int]]:
    """Each step with its rows reordered: position r is for rank r, and the ranks' total costs are about equal.

    The largest differencing method of Karmarkar and Karp, in its form for parts of equal size (Michiels et al. 2003,
    "Performance ratios for the differencing method applied to the balanced number partitioning problem"): the two
    partial assignments in which the ranks differ most are joined, the most expensive rank of one with the cheapest of
    the other, until one is left.
    """
    if not steps:
        return []
    numbers = itertools.count()  # decides between partial assignments of equal spread
    heap = []
    for step in steps:
        totals = [costs[row] for row in step]
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
