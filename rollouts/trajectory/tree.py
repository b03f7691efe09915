"""What happened in an episode, exactly as the engine saw it: a tree of token nodes.

A node holds what one prompt extension or one completion added. Root to leaf, concatenated, is what the engine was
given and what it sampled. A turn attaches to the longest path that is a prefix of its prompt, token by token and
image by image (two images of one size have the same placeholder tokens), and forks otherwise. So a shared prefix
exists once, and an image lives on the node that introduced it. Branching, compaction of history and sub-agents are
nothing special.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, cast

import numpy as np

from renderers import Message, MultiModalData, RenderedTokens
from renderers.media.item import Modality
from renderers.vision.processor import MediaProcessor
from rollouts.engines.protocol import Completion, FinishReason
from rollouts.error_texts import is_unicode, short_repr
from rollouts.errors import (
    BrokenPathError,
    InvalidTurnError,
    MissingColumnError,
    TrajectoryError,
    TrajectoryFinishedError,
)
from rollouts.numbers import finite_number
from rollouts.trajectory.plain_copy import copied_mapping
from rollouts.trajectory.prompt_node import media_of, prompt_node
from rollouts.trajectory.provenance import Provenance
from rollouts.trajectory.reported_extras import reported_extras
from rollouts.trajectory.token_node import MediaReference, TokenNode, completion_node, same_media, token_array
from transport import EncodeError, wire_type
from transport.wire.codec import check_encodable, is_plain


@wire_type("rollouts.Turn")
@dataclass(frozen=True, slots=True)
class Turn:
    """One model call: the node that its completion became, how it ended, and what the environment paid.

    `seconds` is how long the engine took.
    """

    node: int
    finish_reason: FinishReason
    message: Message
    reward: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0


class Branch(NamedTuple):
    """A way from a root to a leaf: one training sample."""

    leaf: int
    nodes: tuple[int, ...]


@wire_type("rollouts.Trajectory")
@dataclass(slots=True, eq=False, repr=False)
class Trajectory:
    """One episode. Grows through `add_turn` until `finish`; `reward` is the sum over turns.

    `metrics` are numbers of the episode as a whole, `error` says why it broke off, `started_at` is in seconds since the
    epoch and `seconds` how long it took, `provenance` what made it.
    """

    episode_id: str
    seed: int = 0
    group_id: str = ""
    nodes: list[TokenNode] | tuple[TokenNode, ...] = field(default_factory=list)
    turns: list[Turn] | tuple[Turn, ...] = field(default_factory=list)
    done: bool = False
    truncated: bool = False
    forks: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    error: str = ""
    started_at: float = 0.0
    seconds: float = 0.0
    provenance: Provenance | None = None
    finished: bool = False

    def __setattr__(self, name: str, value: object) -> None:
        if getattr(self, "finished", False):
            raise TrajectoryFinishedError(self.episode_id, name)
        if isinstance(value, str):
            value = str.__str__(value)  # of a StrEnum, say, its text: only plain text can be stored
            if not is_unicode(value):
                raise TrajectoryError(
                    f"{name} is {value!a:.80}, which holds half a surrogate pair and cannot be stored"
                )
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        # `asyncio.run` makes the repr of what its task returned: a list of these, with every array in them.
        ended = self.error or ("done" if self.done else "truncated" if self.truncated else "not done")
        # One that was decoded may hold anything in place of its texts and turns.
        turns = len(self.turns) if isinstance(self.turns, list | tuple) else "no"
        return f"<Trajectory {self.episode_id!s:.80}: {turns} turns, {ended!s:.80}>"

    # Growing.

    def add_turn(
        self,
        prompt: RenderedTokens,
        completion: Completion,
        message: Message,
        *,
        messages: Sequence[Message] = (),
        extras: Mapping[str, np.ndarray] | None = None,
        seconds: float = 0.0,
    ) -> int:
        """Attach a prompt and its completion; return the index of the completion's node.

        `message` is what the completion was read as, `messages` are those that the prompt's message indices count (a
        bridge counts the new ones only). `extras` are arrays with one row for each sampled token, beside the routed
        experts and sampling masks of a completion that has them (`reported_extras`). Arrays and messages are copied.

        Raises `TrajectoryFinishedError`, and `InvalidTurnError` where ids are no token ids, log-probabilities are
        missing, not finite or positive, lengths do not agree, ranges lie outside, an extra is given twice, or
        something cannot be stored (the place is named); the episode is then as before.
        """
        nodes, turns = self._growing()
        ids = token_array(prompt.token_ids, "prompt")
        references = media_of(prompt)
        parent, shared = self._longest_prefix(ids, references)
        reported = reported_extras(completion, len(ids), shared)
        if twice := reported.completion.keys() & (extras or {}).keys():
            raise InvalidTurnError(f"the completion has {', '.join(sorted(twice))} of its own; pass other extras only")
        added: list[TokenNode] = []
        if shared < len(ids):
            completed = any(turn.node == parent for turn in turns)
            said = None if completed else len(self.to_messages(parent)) if parent >= 0 else 0
            added.append(prompt_node(parent, prompt, ids, shared, references, messages, said, reported.prompt))
        sampled_extras = {**(extras or {}), **reported.completion}
        added.append(completion_node(len(nodes) if len(added) else parent, completion, sampled_extras))
        said_now = _copied(message, f"the message of turn {len(turns)}")
        place = len(nodes) + len(added) - 1
        turn = Turn(place, completion.finish_reason, cast(Message, said_now), seconds=seconds)
        _check_turn_stored(added, turn, f"turn {len(turns)}")
        if turns and parent != turns[-1].node:
            self.forks += 1
        nodes += added
        turns.append(turn)
        return place

    def record_reward(self, reward: float, info: Mapping[str, Any]) -> None:
        """Record what the environment said to the last turn; `info` is copied.

        Raises `TrajectoryFinishedError`, and `InvalidTurnError` if there is no turn, `reward` is not a finite number,
        or `info` is not a mapping that can be stored; the place in it is named.
        """
        _, turns = self._growing()
        if not turns:
            raise InvalidTurnError(f"episode {self.episode_id} has no turn to pay; add_turn comes first")
        last = len(turns) - 1
        number = finite_number(reward)
        if number is None:
            raise InvalidTurnError(f"turn {last} was paid {short_repr(reward)}; a reward is a finite number")
        what = f"the info of turn {last}"
        kept = _copied(info, what)
        _check_stored(kept, what)
        turns[-1] = replace(turns[-1], reward=number, info=kept)

    def finish(self) -> None:
        """Let nobody change the episode any more. Finishing twice is allowed."""
        if not self.finished:
            self.nodes, self.turns = tuple(self.nodes), tuple(self.turns)
            self.finished = True

    def _growing(self) -> tuple[list[TokenNode], list[Turn]]:
        """Nodes and turns as long as they may be added to. Raises `TrajectoryFinishedError`."""
        if not isinstance(self.nodes, list) or not isinstance(self.turns, list):
            raise TrajectoryFinishedError(self.episode_id, "turns")
        return self.nodes, self.turns

    # Reading.

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

    def branches(self) -> list[Branch]:
        """The way to each leaf."""
        return [Branch(leaf, tuple(self.path(leaf))) for leaf in self.leaves()]

    def path(self, leaf: int) -> list[int]:
        """Node indices from the root to `leaf`. Raises `BrokenPathError`, as does all that follows a path."""
        if not 0 <= leaf < len(self.nodes):
            raise BrokenPathError(self.episode_id, leaf, None, len(self.nodes))
        path = [leaf]
        while (parent := self.nodes[path[-1]].parent) != -1:
            # What was decoded may say anything, and a circle would never end.
            if type(parent) is not int or not 0 <= parent < path[-1]:
                raise BrokenPathError(self.episode_id, path[-1], parent, len(self.nodes))
            path.append(parent)
        return path[::-1]

    def token_ids(self, leaf: int) -> np.ndarray:
        """Root to `leaf`, concatenated: int32 (n,)."""
        return np.concatenate([self.nodes[index].token_ids for index in self.path(leaf)])

    def extra(self, leaf: int, name: str) -> np.ndarray:
        """One extra, root to `leaf`, concatenated: one row a token.

        Raises `MissingColumnError` where a node lacks it, or has rows of another shape or dtype than the root.
        """
        rows: list[np.ndarray] = []
        for index in self.path(leaf):
            found = self.nodes[index].extras.get(name)
            if found is None or (rows and (found.shape[1:], found.dtype) != (rows[0].shape[1:], rows[0].dtype)):
                root_rows = f"{rows[0].dtype} {rows[0].shape[1:]}" if rows else ""
                raise MissingColumnError(self.episode_id, index, name, root_rows)
            rows.append(found)
        return np.concatenate(rows)

    def media(self, leaf: int) -> list[MediaReference]:
        """The images and videos along the path to `leaf`, in prompt order, with absolute ranges."""
        return [reference.shifted(start) for start, node in self._with_starts(leaf) for reference in node.media]

    def multi_modal_data(self, leaf: int, processors: Mapping[Modality, MediaProcessor]) -> MultiModalData:
        """The media of `media(leaf)` with their pixels, made again by a renderer's `processors`.

        Raises `PixelMismatchError` where those do not make the pixels that the sampler saw, `MissingProcessorError`.
        """
        return MultiModalData.from_items(
            (reference.derive(processors), reference.placeholder) for reference in self.media(leaf)
        )

    def to_messages(self, leaf: int) -> list[Message]:
        """The conversation along the path to `leaf`, media as their sources, as far as messages were given."""
        said = {turn.node: turn.message for turn in self.turns}
        messages: list[Message] = []
        for index in self.path(leaf):
            messages += self.nodes[index].messages
            if index in said:
                messages.append(said[index])
        return messages

    def all_media(self) -> Iterator[MediaReference]:
        """Every image and video of the episode, once per node that introduced it."""
        return (reference for node in self.nodes for reference in node.media)

    def _with_starts(self, leaf: int) -> Iterator[tuple[int, TokenNode]]:
        start = 0
        for index in self.path(leaf):
            yield start, self.nodes[index]
            start += len(self.nodes[index])

    def _longest_prefix(self, prompt: np.ndarray, references: Sequence[MediaReference]) -> tuple[int, int]:
        """(node, tokens): the deepest node whose whole path is a prefix of the prompt, and that path's length."""
        best, best_length = -1, 0
        offsets = [reference.placeholder.offset for reference in references]
        lengths: dict[int, int] = {-1: 0}  # nodes whose path is a prefix; parents come before their children
        for index, node in enumerate(self.nodes):
            start = lengths.get(node.parent)
            if start is None:
                continue
            end = start + len(node)
            if (
                end <= len(prompt)
                and np.array_equal(prompt[start:end], node.token_ids)
                and same_media(node.media, start, references[bisect_left(offsets, start) : bisect_left(offsets, end)])
            ):
                lengths[index] = end
                if end >= best_length:
                    best, best_length = index, end
        return best, best_length


def _copied(mapping: Mapping[str, Any], what: str) -> dict[str, Any]:
    if not isinstance(mapping, Mapping):
        raise InvalidTurnError(f"{what} is a {type(mapping).__name__}, not a dict")
    try:
        return copied_mapping(mapping)
    except RecursionError as error:
        raise InvalidTurnError(f"{what} contains itself, or nests too deeply to be stored") from error


def _check_turn_stored(nodes: Sequence[TokenNode], turn: Turn, what: str) -> None:
    # The arrays of a node are ours. Without media and extras, what is left is the plain data of most turns.
    checked = all(not node.media and not node.extras for node in nodes) and is_plain(
        [
            [list(node.messages) for node in nodes],
            [[span.version, span.start, span.end] for node in nodes for span in node.weight_spans],
            turn.message,
            turn.seconds,
        ]
    )
    if not checked:
        _check_stored({"nodes": nodes, "turn": turn}, what)


def _check_stored(value: object, what: str) -> None:
    try:
        check_encodable(value, what)
    except EncodeError as error:
        raise InvalidTurnError(f"cannot be stored: {error}") from error
