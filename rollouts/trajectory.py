"""What happened in an episode, exactly as the engine saw it: a tree of token nodes.

A node holds what one prompt extension or one completion added. Root to leaf, concatenated, is what the engine was
given and what it sampled. A turn attaches to the longest path that is a prefix of its prompt, token by token and
picture by picture (two pictures of one size have the same placeholder tokens), and forks otherwise. So a shared prefix
exists once, and a picture lives on the node that introduced it. Branching, compaction of history and sub-agents are
nothing special.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from renderers import Message, MultiModalData, RenderedTokens
from renderers.media.item import Modality
from renderers.vision.processor import MediaProcessor
from rollouts.engines.protocol import Completion, FinishReason
from rollouts.errors import InvalidTurnError, TrajectoryFinishedError
from rollouts.provenance import Provenance
from rollouts.token_node import MediaReference, TokenNode, frozen, within
from transport import wire_type


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
@dataclass(slots=True, eq=False)
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
        object.__setattr__(self, name, value)

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
        bridge counts the new ones only). `extras` are arrays with one row for each sampled token. Raises
        `TrajectoryFinishedError`, and `InvalidTurnError` where lengths do not agree.
        """
        nodes, turns = self._growing()
        for name, rows in (extras or {}).items():
            if len(rows) != len(completion.token_ids):
                raise InvalidTurnError(
                    f"extra {name!r} has {len(rows)} rows for {len(completion.token_ids)} sampled tokens"
                )
        ids = frozen(prompt.token_ids, np.int32)
        placed = prompt.multi_modal_data.placed() if prompt.multi_modal_data is not None else []
        references = [MediaReference(item.modality, item.mm_hash, item.source, where) for item, where in placed]
        parent, shared = self._longest_prefix(ids, references)
        if self.turns and parent != self.turns[-1].node:
            self.forks += 1
        if shared < len(ids):
            nodes.append(_prompt_node(parent, prompt, ids, shared, references, messages))
            parent = len(nodes) - 1
        count = len(completion.token_ids)
        nodes.append(
            TokenNode(
                parent=parent,
                token_ids=frozen(completion.token_ids, np.int32),
                sampled=frozen(np.ones(count, dtype=bool), np.bool_),
                logprobs=frozen(completion.logprobs, np.float32),
                weight_spans=completion.weight_spans,
                extras=dict(extras or {}),
            )
        )
        turns.append(Turn(len(nodes) - 1, completion.finish_reason, message, seconds=seconds))
        return len(nodes) - 1

    def pay(self, reward: float, info: dict[str, Any]) -> None:
        """Record what the environment said to the last turn."""
        _, turns = self._growing()
        turns[-1] = replace(turns[-1], reward=float(reward), info=info)

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
        """Node indices from the root to `leaf`."""
        path = [leaf]
        while (parent := self.nodes[path[-1]].parent) != -1:
            path.append(parent)
        return path[::-1]

    def token_ids(self, leaf: int) -> np.ndarray:
        """Root to `leaf`, concatenated: int32 (n,)."""
        return np.concatenate([self.nodes[index].token_ids for index in self.path(leaf)])

    def media(self, leaf: int) -> list[MediaReference]:
        """The pictures and videos along the path to `leaf`, in prompt order, with absolute ranges."""
        return [reference.shifted(start) for start, node in self._with_starts(leaf) for reference in node.media]

    def multi_modal_data(self, leaf: int, processors: Mapping[Modality, MediaProcessor]) -> MultiModalData:
        """The media of `media(leaf)` with their pixels, made again by a renderer's `processors`.

        Raises `PixelMismatchError` where those do not make the pixels that the sampler saw.
        """
        return MultiModalData.from_items(
            (reference.derive(processors), reference.where) for reference in self.media(leaf)
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
        """Every picture and video of the episode, once per node that introduced it."""
        return (reference for node in self.nodes for reference in node.media)

    def _with_starts(self, leaf: int) -> Iterator[tuple[int, TokenNode]]:
        start = 0
        for index in self.path(leaf):
            yield start, self.nodes[index]
            start += len(self.nodes[index])

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
                and node.media == within(references, start, end)
            ):
                lengths[index] = end
                if end >= best_length:
                    best, best_length = index, end
        return best, best_length


def _prompt_node(
    parent: int,
    prompt: RenderedTokens,
    ids: np.ndarray,
    start: int,
    references: Sequence[MediaReference],
    messages: Sequence[Message],
) -> TokenNode:
    """What a prompt adds from token `start` on."""
    media = within(references, start, len(ids))
    shown = _first_shown(prompt, start, messages)
    return TokenNode(
        parent=parent,
        token_ids=ids[start:],
        sampled=frozen(np.zeros(len(ids) - start, dtype=bool), np.bool_),
        logprobs=frozen(np.empty(0, dtype=np.float32), np.float32),
        media=media,
        content=_content(prompt, start) if prompt.spans else None,
        messages=_with_sources(shown, media) if messages else (),
    )


def _content(prompt: RenderedTokens, start: int) -> np.ndarray:
    """bool, True on message body, of the tokens from `start` on."""
    mask = np.zeros(len(prompt) - start, dtype=bool)
    for span in prompt.spans:
        if span.content and span.end > start:
            mask[max(span.start - start, 0) : span.end - start] = True
    return frozen(mask, np.bool_)


def _first_shown(prompt: RenderedTokens, start: int, messages: Sequence[Message]) -> Sequence[Message]:
    """The messages whose first token is `start` or behind; one that prints nothing goes with the one behind it."""
    if not messages:
        return ()
    if len(messages) != len(prompt.message_roles):
        raise InvalidTurnError(
            f"{len(messages)} messages were given for a prompt of {len(prompt.message_roles)}; pass those that it was "
            "rendered from, or for a bridge the new ones"
        )
    spans = prompt.message_token_spans()
    first = len(messages)
    for index in range(len(messages) - 1, -1, -1):
        span = spans[index]
        if span is not None and span[0] < start:
            break
        first = index
    return messages[first:]


def _with_sources(messages: Sequence[Message], media: Sequence[MediaReference]) -> tuple[Message, ...]:
    """The messages with the sources of their media in place of whatever held them."""
    sources = iter(media)
    kept = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list):
            parts = [_with_source(part, sources) for part in content]
            message = {**message, "content": parts}
        kept.append(message)
    if next(sources, None) is not None:
        raise InvalidTurnError("the prompt shows more media than its messages hold; pass the messages it shows")
    return tuple(kept)


def _with_source(part: Any, sources: Iterator[MediaReference]) -> Any:
    if isinstance(part, str) or part.get("type") == "text":
        return part
    reference = next(sources, None)
    if reference is None:
        raise InvalidTurnError("the messages hold more media than the prompt shows; pass the messages it was made of")
    return {"type": reference.modality, reference.modality: reference.source}
