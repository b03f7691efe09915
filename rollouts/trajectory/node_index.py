"""Finds the nodes of a trajectory that a prompt continues, without a look at those of other branches."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

import numpy as np

from rollouts.trajectory.token_node import MediaReference, TokenNode, same_media

_OFFSET: Final = attrgetter("placeholder.offset")


class NodeIndex:
    """The children of each node and where its tokens begin, for the nodes of a trajectory that grows.

    It holds no tokens of its own: an episode that waits uses little memory beyond those of its nodes.
    """

    __slots__ = ("_children", "_ids", "_nodes", "_starts")

    def __init__(self) -> None:
        self._nodes: list[TokenNode] = []
        self._ids: list[np.ndarray] = []  # int32 (n,) each: the arrays of the nodes, unless those have another dtype
        self._starts: list[int] = []  # of each node: the number of tokens on the path before it
        self._children: dict[int, list[int]] = {}  # in order of creation; those of -1 are the roots

    def update(self, nodes: Sequence[TokenNode]) -> None:
        """Index the nodes that are new. Where others were replaced, all are indexed again."""
        if self._nodes != nodes[: len(self._nodes)]:  # compares by identity
            for kept in (self._nodes, self._ids, self._starts, self._children):
                kept.clear()
        for index in range(len(self._nodes), len(nodes)):
            node = nodes[index]
            self._nodes.append(node)
            self._ids.append(np.ascontiguousarray(node.token_ids, np.int32))
            self._starts.append(self._end(node.parent))
            self._children.setdefault(node.parent, []).append(index)

    def longest_prefixes(
        self, prompt: np.ndarray, references: Sequence[MediaReference], after: int | None
    ) -> tuple[list[int], int]:
        """The deepest nodes whose whole path is a prefix of the prompt, and the length of their paths.

        `prompt` is int32 (n,), `references` are its media. Where the path to `after` is such a prefix, only `after` and
        the nodes below it are considered. The nodes are in order of creation; -1, which is before all roots, is the
        first of those without tokens.
        """
        tokens = prompt.tobytes()  # compared as bytes, because numpy takes ten times as long for few tokens
        first = -1 if after is None or not self._holds_path(after, tokens, references) else after
        found, length, unvisited = [first], self._end(first), [first]
        while unvisited:
            for child in self._children.get(unvisited.pop(), ()):
                if self._holds(child, tokens, references):
                    unvisited.append(child)
                    end = self._end(child)
                    if end > length:
                        found, length = [], end
                    if end == length:
                        found.append(child)
        return sorted(found), length

    def _end(self, node: int) -> int:
        return 0 if node == -1 else self._starts[node] + len(self._ids[node])

    def _holds_path(self, node: int, tokens: bytes, references: Sequence[MediaReference]) -> bool:
        """Whether a prompt begins with the whole path to a node. Its last node is what most likely differs."""
        while node != -1:
            if not self._holds(node, tokens, references):
                return False
            node = self._nodes[node].parent
        return True

    def _holds(self, index: int, tokens: bytes, references: Sequence[MediaReference]) -> bool:
        """Whether a prompt has the tokens and the media of a node where the node begins."""
        media, start = self._nodes[index].media, self._starts[index]
        if not tokens.startswith(self._ids[index], 4 * start):  # type: ignore[arg-type]  # an array is a buffer
            return False
        if not references:
            return not media
        first, end = (bisect_left(references, place, key=_OFFSET) for place in (start, self._end(index)))
        return same_media(media, start, references[first:end])
