"""First-fit decreasing over bins with a budget of tokens and one of patches."""

import numpy as np


class Bins:
    """Bins with a budget of tokens and one of patches; the members of a bin are numbers of items.

    `tokens` and `patches` are int64 (n,), the sizes of all items; `empty` is the largest number of bins that
    `open` adds.
    """

    def __init__(
        self, tokens: np.ndarray, patches: np.ndarray, max_tokens: int, max_patches: int | None, empty: int = 0
    ) -> None:
        self.members: list[list[int]] = []
        self._tokens, self._patches = tokens, patches
        self._max_tokens = max_tokens
        self._max_patches = int(patches.sum()) if max_patches is None else max_patches
        self.free_tokens = np.empty(len(tokens) + empty, dtype=np.int64)  # by bin; others have members
        self._free_patches = np.empty(len(tokens) + empty, dtype=np.int64)

    def add(self, items: np.ndarray, first_bin: int = 0) -> None:
        """Put each item, the largest share of a budget first, into the first bin from `first_bin` on with room for it.

        Where none has room, a bin is added. Every item must fit an empty bin.
        """
        share = np.maximum(self._tokens[items] / self._max_tokens, self._patches[items] / max(1, self._max_patches))
        for item in items[np.argsort(-share, kind="stable")].tolist():
            self.put(item, self._first_with_room(item, first_bin))

    def put(self, item: int, bin_number: int) -> None:
        """Put an item into a bin that has room for it."""
        self.members[bin_number].append(item)
        self.free_tokens[bin_number] -= self._tokens[item]
        self._free_patches[bin_number] -= self._patches[item]

    def split(self, bin_number: int, costs: np.ndarray) -> None:
        """Move members of a bin with several members into a new bin, so that both have a similar sum of `costs`."""
        halves: tuple[list[int], list[int]] = ([], [])
        sums = [0.0, 0.0]
        for item in sorted(self.members[bin_number], key=lambda item: -costs[item]):
            lighter = int(sums[1] < sums[0])
            halves[lighter].append(item)
            sums[lighter] += float(costs[item])
        new = self.open()
        self.members[bin_number], self.members[new] = halves
        for number, half in zip((bin_number, new), halves, strict=True):
            self.free_tokens[number] = self._max_tokens - int(self._tokens[half].sum())
            self._free_patches[number] = self._max_patches - int(self._patches[half].sum())

    def even_out(self, bins: range, costs: np.ndarray) -> None:
        """Put members anew, the most expensive first, into the cheapest bin with room; all or nothing."""
        items = sorted((item for number in bins for item in self.members[number]), key=lambda item: -costs[item])
        members: list[list[int]] = [[] for _ in bins]
        sums = np.zeros(len(bins))
        tokens, patches = np.full(len(bins), self._max_tokens), np.full(len(bins), self._max_patches)
        for item in items:
            has_room = (tokens >= self._tokens[item]) & (patches >= self._patches[item])
            lowest = int(np.where(has_room, sums, np.inf).argmin())
            if not has_room[lowest]:
                return
            members[lowest].append(item)
            sums[lowest] += costs[item]
            tokens[lowest] -= self._tokens[item]
            patches[lowest] -= self._patches[item]
        self.members[bins.start : bins.stop] = members
        self.free_tokens[bins.start : bins.stop] = tokens
        self._free_patches[bins.start : bins.stop] = patches

    def _first_with_room(self, item: int, first_bin: int) -> int:
        bins = slice(first_bin, len(self.members))
        has_tokens = self.free_tokens[bins] >= self._tokens[item]
        found = np.flatnonzero(has_tokens & (self._free_patches[bins] >= self._patches[item]))
        return first_bin + int(found[0]) if len(found) else self.open()

    def open(self) -> int:
        """Add an empty bin and return its number."""
        number = len(self.members)
        self.members.append([])
        self.free_tokens[number] = self._max_tokens
        self._free_patches[number] = self._max_patches
        return number
