"""Finds the nodes of a token tree whose paths are prefixes of a prompt."""

from bisect import bisect_left
from collections.abc import Sequence
from operator import attrgetter
from typing import Final

import numpy as np

from rollouts.trajectory.media_reference import MediaReference, same_media
from rollouts.trajectory.token_node import TokenNode

_OFFSET: Final = attrgetter("placeholder.offset")


def longest_prefixes(
    nodes: Sequence[TokenNode], prompt: np.ndarray, references: Sequence[MediaReference], after: int | None
) -> tuple[list[int], int]:
    """The deepest nodes whose whole path is a prefix of the prompt, and the length of their paths.

    `prompt` is int32 (n,), `references` are its media. Where the path to `after` is such a prefix, only
    `after` and the nodes below it are considered. The nodes are in order of creation; -1, which is before all
    roots, is the first of those without tokens.
    """
    tokens = prompt.tobytes()  # compared as bytes, because numpy takes ten times as long for few tokens
    ends = {-1: 0}  # of the paths that are prefixes
    for index, node in enumerate(nodes):
        if node.parent in ends and _begins_with(tokens, references, node, ends[node.parent]):
            ends[index] = ends[node.parent] + len(node.token_ids)
    if after is not None and after in ends:
        below = {after: ends[after]}
        for index, end in ends.items():
            if index > after and nodes[index].parent in below:
                below[index] = end
        ends = below
    length = max(ends.values())
    return [index for index, end in ends.items() if end == length], length


def _begins_with(tokens: bytes, references: Sequence[MediaReference], node: TokenNode, start: int) -> bool:
    """Whether a prompt has the tokens and the media of a node from token `start` on."""
    ids = np.ascontiguousarray(node.token_ids, np.int32)
    if not tokens.startswith(ids, 4 * start):  # type: ignore[arg-type]  # an array is a buffer
        return False
    if not references:
        return not node.media
    first, end = (bisect_left(references, place, key=_OFFSET) for place in (start, start + len(ids)))
    return same_media(node.media, start, references[first:end])
