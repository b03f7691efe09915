"""What happened in an episode, exactly as the engine saw it: a tree of token nodes.

A node holds what one prompt extension or one completion added. Root to leaf, concatenated, is what the engine was
given and what it sampled. A turn attaches to the longest path that is a prefix of its prompt, token by token and
picture by picture (two pictures of one size have the same placeholder tokens), and forks otherwise. So a shared prefix
exists once, and a picture lives on the node that introduced it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from renderers import MediaSource, Message, MultiModalData, PlaceholderRange
from renderers.media.item import Modality
from rollouts.engines.protocol import Completion, FinishReason, WeightSpan
from transport import wire_type

wire_type("renderers.PlaceholderRange")(PlaceholderRange)


@wire_type("rollouts.MediaReference")
@dataclass(frozen=True, slots=True)
class MediaReference:
    """A picture on a node: its pixels' name, its source, and where its tokens sit relative to the node's start."""

    modality: Modality
    mm_hash: str
    source: MediaSource
    where: PlaceholderRange


@wire_type("rollouts.TokenNode")
@dataclass(frozen=True, slots=True, eq=False)
class TokenNode:
    """Tokens that were added together. Arrays are parallel: token_ids int32 (n,), sampled bool (n,).

    `logprobs` is float32 with one value per *sampled* token, in order; `weight_spans` count sampled tokens likewise.
    `parent` is the index of the node before, -1 at a root.
    """

    parent: int
    token_ids: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray
    weight_spans: tuple[WeightSpan, ...] = ()
    media: tuple[MediaReference, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)


@wire_type("rollouts.Turn")
@dataclass(frozen=True, slots=True)
class Turn:
    """One model call: the node that its completion became, how it ended, and what the environment paid."""

    node: int
    finish_reason: FinishReason
    message: Message
    reward: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)


@wire_type("rollouts.Trajectory")
@dataclass(slots=True, eq=False)
class Trajectory:
    """One episode. Grows through `add_turn`; `reward` is the sum over turns."""

    episode_id: str
    seed: int = 0
    group_id: str = ""
    nodes: list[TokenNode] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    done: bool = False
    truncated: bool = False
    forks: int = 0

    def add_turn(
        self, prompt_ids: Sequence[int], media: MultiModalData | None, completion: Completion, message: Message
    ) -> int:
        """Attach a prompt and its completion; return the index of the completion's node."""
        prompt = np.asarray(prompt_ids, dtype=np.int32)
        references = [
            MediaReference(item.modality, item.mm_hash, item.source, where)
            for item, where in (media.placed() if media is not None else ())
        ]
        parent, shared = self._longest_prefix(prompt, references)
        if self.turns and parent != self.turns[-1].node:
            self.forks += 1
        if shared < len(prompt):
            parent = self._append(_prompt_node(parent, prompt, shared, references))
        node = self._append(
            TokenNode(
                parent=parent,
                token_ids=np.asarray(completion.token_ids, dtype=np.int32),
                sampled=np.ones(len(completion.token_ids), dtype=bool),
                logprobs=np.asarray(completion.logprobs, dtype=np.float32),
                weight_spans=completion.weight_spans,
            )
        )
        self.turns.append(Turn(node, completion.finish_reason, message))
        return node

    def pay(self, reward: float, info: dict[str, Any]) -> None:
        """Record what the environment said to the last turn."""
        self.turns[-1] = replace(self.turns[-1], reward=float(reward), info=info)

    @property
    def reward(self) -> float:
        return float(sum(turn.reward for turn in self.turns))

    @property
    def num_turns(self) -> int:
        return len(self.turns)

    def leaves(self) -> list[int]:
        """The nodes that nothing follows, in order of creation: one training sample each."""
        parents = {node.parent for node in self.nodes}
        return [index for index in range(len(self.nodes)) if index not in parents]

    def path(self, leaf: int) -> list[int]:
        """Node indices from the root to `leaf`."""
        path = [leaf]
        while (parent := self.nodes[path[-1]].parent) != -1:
            path.append(parent)
        return path[::-1]

    def token_ids(self, leaf: int) -> np.ndarray:
        """Root to `leaf`, concatenated: int32 (n,)."""
        return np.concatenate([self.nodes[index].token_ids for index in self.path(leaf)])

    def media(self, leaf: int) -> list[MediaReference]:
        """The pictures along the path to `leaf`, in prompt order, with absolute ranges."""
        return [
            replace(reference, where=reference.where.shifted(start))
            for start, node in self._with_starts(leaf)
            for reference in node.media
        ]

    def all_media(self) -> Iterator[MediaReference]:
        """Every picture of the episode, once per node that introduced it."""
        return (reference for node in self.nodes for reference in node.media)

    def _with_starts(self, leaf: int) -> Iterator[tuple[int, TokenNode]]:
        start = 0
        for index in self.path(leaf):
            yield start, self.nodes[index]
            start += len(self.nodes[index])

    def _append(self, node: TokenNode) -> int:
        self.nodes.append(node)
        return len(self.nodes) - 1

    def _longest_prefix(self, prompt: np.ndarray, references: Sequence[MediaReference]) -> tuple[int, int]:
        """(node, tokens): the deepest node whose whole path is a prefix of the prompt, and that path's length."""
        best, best_length = -1, 0
        lengths: dict[int, int] = {-1: 0}  # nodes whose path is a prefix; parents come before their children
        for index, node in enumerate(self.nodes):
            start = lengths.get(node.parent)
            if start is None:
                continue
            end = start + len(node)
            if (
                end <= len(prompt)
                and np.array_equal(prompt[start:end], node.token_ids)
                and node.media == _within(references, start, end)
            ):
                lengths[index] = end
                if end >= best_length:
                    best, best_length = index, end
        return best, best_length


def _prompt_node(parent: int, prompt: np.ndarray, start: int, references: Sequence[MediaReference]) -> TokenNode:
    added = prompt[start:]
    return TokenNode(
        parent=parent,
        token_ids=added,
        sampled=np.zeros(len(added), dtype=bool),
        logprobs=np.empty(0, dtype=np.float32),
        media=_within(references, start, len(prompt)),
    )


def _within(references: Sequence[MediaReference], start: int, end: int) -> tuple[MediaReference, ...]:
    """The references that begin in tokens `start:end`, with ranges relative to `start`."""
    return tuple(
        replace(reference, where=reference.where.shifted(-start))
        for reference in references
        if start <= reference.where.offset < end
    )
