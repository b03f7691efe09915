"""The tokens of an episode without forks in one piece, to which the next prompt is compared."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from rollouts.engines.completion_checks import token_ids_error
from rollouts.trajectory.token_node import MediaReference, TokenNode, packed_ids, same_media

#: The tokens of further nodes are not joined: an episode that waits uses little memory beyond its tokens.
_MAX_JOINED_BYTES: Final = 16 * 1024


class KeptChain:
    """Nodes that were added one after the other, each the parent of the next, with all their tokens and media.

    The prompt of most turns begins with all of these tokens: one comparison finds that, or one for each node of a long
    episode, and only the rest is checked and stored. Bytes are compared, because numpy gives up the interpreter's lock
    to compare long arrays.
    """

    __slots__ = ("_joined", "_media", "_nodes", "_not_joined", "_num_bytes")

    def __init__(self) -> None:
        self._nodes: list[TokenNode] = []
        self._joined = b""  # the tokens of the first nodes, int32
        self._not_joined: list[np.ndarray] = []  # the tokens of the nodes after those, int32 (n,) each
        self._num_bytes = 0  # of all of them
        self._media: list[MediaReference] = []

    def __len__(self) -> int:
        """The number of tokens."""
        return self._num_bytes // 4

    def new_ids(self, nodes: Sequence[TokenNode], token_ids: object) -> np.ndarray | None:
        """The tokens of a prompt after those of the chain, as a new read-only int32 (n,).

        None where `nodes` are not those of the chain, the prompt is not a list of token ids that begins with the tokens
        of the chain, or a new token id is out of range.
        """
        if self._nodes != nodes:  # compares by identity
            return None
        packed = packed_ids(token_ids)
        if packed is None or not self._begins(packed):
            return None
        ids = np.frombuffer(packed[self._num_bytes :], np.int32)  # a view would keep the whole prompt in memory
        return ids if token_ids_error(ids) is None else None

    def _begins(self, packed: bytes) -> bool:
        """Whether a prompt, as int32, begins with the tokens of the chain."""
        if not packed.startswith(self._joined):
            return False
        start = len(self._joined)
        for ids in self._not_joined:
            if not packed.startswith(ids.data, start):
                return False
            start += ids.nbytes
        return True

    def has_media_of(self, references: Sequence[MediaReference]) -> bool:
        """Whether the media of a prompt, as far as they begin before the end of the chain, are those of the chain."""
        if not references:
            return not self._media
        end = len(self)
        return same_media(self._media, 0, [one for one in references if one.placeholder.offset < end])

    def extend(self, nodes: Sequence[TokenNode], references: Sequence[MediaReference]) -> None:
        """Add the nodes of a turn whose prompt continues the chain and has the media `references`."""
        for node in nodes:
            ids = node.token_ids
            if not self._not_joined and len(self._joined) + ids.nbytes <= _MAX_JOINED_BYTES:
                self._joined += ids.tobytes()
            else:
                self._not_joined.append(ids)
            self._num_bytes += ids.nbytes
        self._nodes += nodes
        self._media = list(references)
