"""The record of an episode, exactly as the engine saw it: a tree of token nodes.

A node holds the new tokens of a prompt, or a completion. The nodes from a root to a leaf, concatenated, are
what the engine received and what it sampled. A turn attaches to the longest path that is a prefix of its
prompt, token by token and medium by medium (two images of one size have the same placeholder tokens). Where
no path ends at a completion that the prompt extends, the tree forks. So a shared prefix is stored once, and a
medium is stored on the node that introduced it. Branches, compacted histories and sub-agents need no further
rules.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import NoneType
from typing import Any, Final, cast

import numpy as np

from renderers import MediaSource, Message, MultiModalData, PlaceholderRange, RenderedTokens
from renderers.messages import Modality, media_parts, media_value, part_kind
from renderers.vision.processor import MediaProcessor
from rollouts.engines.protocol import Completion, FinishReason, TopLogprobs
from rollouts.engines.token_checks import logprobs_error, token_ids_error
from rollouts.errors import (
    ArgumentError,
    TrajectoryError,
    TrajectoryFinishedError,
    is_unicode,
    short_repr,
)
from rollouts.trajectory.added_nodes import (
    completion_node,
    mask_of,
    media_of,
    prompt_node,
    reported_extras,
    with_sources,
)
from rollouts.trajectory.media_reference import MediaReference, media_counts
from rollouts.trajectory.prefixes import longest_prefixes
from rollouts.trajectory.provenance import Provenance
from rollouts.trajectory.storable import check_stored, stored_copy
from rollouts.trajectory.token_node import TOP_IDS, TOP_LOGPROBS, TokenNode, read_only, token_array
from rollouts.trajectory.turn import Turn, is_plain_number
from rollouts.values import finite_number, whole_number
from transport import wire_type
from transport.errors import quoted

_FIELD_TYPES: Final[Mapping[str, tuple[type, ...]]] = {
    **dict.fromkeys(("episode_id", "group_id", "error", "truncation_reason"), (str,)),
    **dict.fromkeys(("done", "truncated"), (bool,)),
    **dict.fromkeys(("nodes", "turns"), (list, tuple)),
    "metrics": (Mapping,),
    "provenance": (Provenance, NoneType),
}


@wire_type("rollouts.Trajectory")
@dataclass(slots=True, eq=False, repr=False)
class Trajectory:
    """One episode. It grows through `add_turn` until `finish`; `reward` is the sum over turns.

    `metrics` are numbers of the whole episode, `error` says why it failed, `truncation_reason` which limit
    ended a truncated one, empty where that is not known. `started_at` is in seconds since the epoch,
    `seconds` is its duration, `provenance` the versions of what made it. Raises `TrajectoryError` for values
    of another type, for a node before its parent, and for a turn without its node, also when decoded.
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
    truncation_reason: str = ""
    finished: bool = False

    def __post_init__(self) -> None:
        error = self._first_error()
        if error is not None:
            raise TrajectoryError(f"episode {quoted(self.episode_id)}: {error}")

    def _first_error(self) -> str | None:
        """The first value that is wrong, in a sentence. Nodes and turns have checked themselves."""
        for name, types in _FIELD_TYPES.items():
            if not isinstance(value := getattr(self, name), types):
                return f"{name} is a {type(value).__name__}"
        for name in ("started_at", "seconds"):
            if not is_plain_number(value := getattr(self, name)):
                return f"{name} is {quoted(value)}, not a finite number"
        if type(self.seed) is not int or not -(2**63) <= self.seed < 2**63:
            return f"its seed {quoted(self.seed)} is not an integer of 64 bits"
        for index, node in enumerate(self.nodes):
            if not isinstance(node, TokenNode):
                return f"node {index} is a {type(node).__name__}"
            if node.parent >= index:
                return f"node {index} has the parent {node.parent}, which is not before it"
        if self.nodes and (error := _range_error(self.nodes)) is not None:
            return error
        for index, turn in enumerate(self.turns):
            if not isinstance(turn, Turn):
                return f"turn {index} is a {type(turn).__name__}"
            if turn.node >= len(self.nodes):
                return f"turn {index} has the node {turn.node}, and there are {len(self.nodes)}"
        return None

    def __setattr__(self, name: str, value: object) -> None:
        if getattr(self, "finished", False):
            raise TrajectoryFinishedError(self.episode_id, name)
        if isinstance(value, str):
            value = str.__str__(value)  # only plain text can be stored; this is the text of a StrEnum, for example
            if not is_unicode(value):
                raise TrajectoryError(
                    f"{name} is {value!a:.80}, which holds half a surrogate pair and cannot be stored"
                )
        object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        # Short, because `asyncio.run` computes the repr of what its task returned: a list of trajectories,
        # perhaps.
        state = self.error or ("done" if self.done else "truncated" if self.truncated else "not done")
        return f"<Trajectory {self.episode_id:.80}: {len(self.turns)} turns, {state:.80}>"

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
        agent: str = "",
        after: int | None = None,
    ) -> int:
        """Attach a prompt and its completion; return the index of the completion's node.

        `message` is the parsed completion. `messages` are the messages that the prompt's message indices
        refer to; for a bridge these are the new messages. `extras` are arrays with one row for each sampled
        token, in addition to those of a completion that has experts, masks or likeliest tokens
        (`reported_extras`). Arrays and messages are copied. `after` is the node of the completion that the
        prompt continues, where the caller knows it: of several completions with the same tokens, the turn
        attaches to that one. It is of no effect where the path to that node is not a prefix of the prompt, as
        after a bridge that was refused.

        Raises `TrajectoryFinishedError`, `ArgumentError` for an `after` that is no node, and
        `TrajectoryError` where token ids are invalid, log-probabilities are missing, not finite or positive,
        lengths do not agree, ranges lie outside, an extra is given twice, or something cannot be stored (the
        error names its place). After an error the trajectory is unchanged.
        """
        nodes, turns = self._growing()
        if after is not None and not 0 <= after < len(nodes):
            raise self._no_node("after", after)
        ids = token_array(prompt.token_ids, "prompt")
        references = media_of(prompt)
        parent, shared = self._longest_prefix(ids, references, agent, after)
        # A view would keep the whole prompt, and numpy gives up the interpreter's lock to copy an array.
        new_ids = np.frombuffer(ids.tobytes()[4 * shared :], np.int32) if shared else ids
        reported = reported_extras(completion, shared + len(new_ids), shared)
        sampled_extras = reported.completion
        if extras:
            if duplicates := sampled_extras.keys() & extras.keys():
                raise TrajectoryError(f"the completion has {', '.join(sorted(duplicates))}; pass other extras only")
            sampled_extras = {**extras, **sampled_extras}
        added: list[TokenNode] = []
        if len(new_ids):
            # From the end, because a turn nearly always follows the latest one.
            follows_completion = parent >= 0 and any(turn.node == parent for turn in reversed(turns))
            path_messages = self._messages(parent) if parent >= 0 and not follows_completion else []
            num_path_messages = None if follows_completion else len(path_messages)
            added.append(
                prompt_node(parent, prompt, shared, new_ids, references, messages, num_path_messages, reported.prompt)
            )
        added.append(completion_node(len(nodes) if added else parent, completion, sampled_extras))
        return self._attach(added, completion.finish_reason, message, seconds, agent)

    def add_message_turn(
        self,
        message: Message,
        finish_reason: FinishReason,
        messages: Sequence[Message],
        *,
        seconds: float = 0.0,
        agent: str = "",
        after: int | None = None,
    ) -> int:
        """Attach a turn of which messages are known and no tokens; return the index of the completion's node.

        A chat endpoint gives such turns. Their nodes have no tokens: `has_tokens` is False, and no training
        sample is made of them. `messages` are all of a conversation, or the new ones after the turn whose
        node is `after`; their media are `MediaSource`s. Messages are copied.

        Raises `TrajectoryFinishedError`, `ArgumentError` for an `after` that is no node, and
        `TrajectoryError` for what cannot be stored. After an error the trajectory is unchanged.
        """
        nodes, _ = self._growing()
        parent = -1 if after is None else after
        if not -1 <= parent < len(nodes):
            raise self._no_node("after", parent)
        media = tuple(
            MediaReference(cast(Modality, part_kind(part)), source.digest, source, PlaceholderRange(0, 0))
            for one in messages
            for _, part in media_parts(one)
            if isinstance(source := media_value(part), MediaSource)
        )
        empty = TokenNode(parent, read_only((), np.int32), mask_of(b""), read_only((), np.float32))
        prompt = replace(empty, media=media, messages=with_sources(messages, media, 0))
        added = [prompt, replace(empty, parent=len(nodes))]
        return self._attach(added, finish_reason, message, seconds, agent)

    def _attach(
        self, added: Sequence[TokenNode], finish_reason: FinishReason, message: Message, seconds: float, agent: str
    ) -> int:
        """Add nodes, the last of which is a completion, and its turn. Returns the index of the completion's node."""
        nodes, turns = self._growing()
        node = len(nodes) + len(added) - 1
        stored_message = cast(Message, stored_copy(message, f"the message of turn {len(turns)}"))
        turn = Turn(node, finish_reason, stored_message, seconds=seconds, agent=agent)
        # The arrays and media of the nodes can always be stored.
        given = {
            "messages": [list(node.messages) for node in added],
            "weight_spans": [[span.version, span.start, span.end] for span in added[-1].weight_spans],
            "message": stored_message,
            "agent": agent,
        }
        check_stored(given, f"turn {len(turns)}")
        self._count_fork(agent, added[0].parent)
        nodes += added
        turns.append(turn)
        return node

    def _count_fork(self, agent: str, parent: int) -> None:
        """Count a turn of `agent` that does not continue its latest one."""
        if self.turns and self.turns[-1].agent == agent and self.turns[-1].node == parent:
            return  # the usual case
        latest = next((earlier.node for earlier in reversed(self.turns) if earlier.agent == agent), parent)
        if parent != latest:
            self.forks += 1

    def record_reward(self, reward: float, info: Mapping[str, Any], *, turn: int | None = None) -> None:
        """Set the reward and the info of the turn with index `turn`, in place of earlier ones.

        `info` is copied. Without `turn` they are those of the last turn. Raises `TrajectoryFinishedError`,
        and `TrajectoryError` if there is no such turn, `reward` is not a finite number, or `info` is not a
        mapping that can be stored; the error names the place in it.
        """
        _, turns = self._growing()
        index = len(turns) - 1 if turn is None else whole_number(turn)
        if index is None or not 0 <= index < len(turns):
            raise TrajectoryError(
                f"episode {self.episode_id} has {len(turns)} turns and no turn {short_repr(turn)}; call add_turn first"
            )
        number = finite_number(reward)
        if number is None:
            raise TrajectoryError(f"the reward of turn {index} is {short_repr(reward)}; pass a finite number")
        name = f"the info of turn {index}"
        copied = stored_copy(info, name)
        check_stored(copied, name)
        old = turns[index]
        turns[index] = Turn(old.node, old.finish_reason, old.message, number, copied, old.seconds, old.agent)

    def finish(self) -> None:
        """Make the trajectory immutable. A second call does nothing."""
        if not self.finished:
            self.nodes, self.turns = tuple(self.nodes), tuple(self.turns)
            self.finished = True

    def _growing(self) -> tuple[list[TokenNode], list[Turn]]:
        """Nodes and turns while they may be extended. Raises `TrajectoryFinishedError`."""
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

    @property
    def has_tokens(self) -> bool:
        """Whether the tokens of the turns are known. Those of a chat endpoint are not: it cannot be trained on."""
        return not self.turns or any(len(node) for node in self.nodes)

    @property
    def length_stops(self) -> int:
        """How many turns were cut: `max_tokens` or the end of the context came before a stop token."""
        return sum(turn.finish_reason is FinishReason.LENGTH for turn in self.turns)

    @property
    def status(self) -> str:
        """How the episode ended: "error", "truncated" or "done"; "open" if it has not ended."""
        if self.error:
            return "error"
        if self.truncated:
            return "truncated"
        return "done" if self.done else "open"

    def leaves(self) -> list[int]:
        """The nodes without children, in order of creation: one training sample each."""
        parents = {node.parent for node in self.nodes}
        return [index for index in range(len(self.nodes)) if index not in parents]

    def path(self, leaf: int) -> list[int]:
        """Node indices from the root to `leaf`. Raises `ArgumentError`, as do all methods that take a leaf."""
        if not 0 <= leaf < len(self.nodes):
            raise self._no_node("leaf", leaf)
        path = [leaf]
        while (parent := self.nodes[path[-1]].parent) != -1:
            path.append(parent)
        return path[::-1]

    def _no_node(self, name: str, node: int) -> ArgumentError:
        rule = f"episode {self.episode_id} has {len(self.nodes)} nodes; pass one of leaves()"
        return ArgumentError(name, node, rule)

    def token_ids(self, leaf: int) -> np.ndarray:
        """Root to `leaf`, concatenated: int32 (n,)."""
        return np.concatenate(
            [self.nodes[index].token_ids for index in self.path(leaf)], dtype=np.int32, casting="unsafe"
        )

    def extra(self, leaf: int, name: str) -> np.ndarray:
        """One extra, root to `leaf`, concatenated: one row per token.

        Raises `TrajectoryError` where a node lacks it, or has rows of another shape or dtype than the root.
        """
        columns: list[np.ndarray] = []
        for index in self.path(leaf):
            rows = self.nodes[index].extras.get(name)
            if rows is None or (columns and (rows.shape[1:], rows.dtype) != (columns[0].shape[1:], columns[0].dtype)):
                root = f" with rows of {columns[0].dtype} {columns[0].shape[1:]}, which the root has" if columns else ""
                raise TrajectoryError(
                    f"episode {self.episode_id}: node {index} has no extra {name!r}{root}. Have the engine report it "
                    "in every turn, or take those of single nodes from nodes[i].extras"
                )
            columns.append(rows)
        return np.concatenate(columns)

    def top_logprobs(self, leaf: int) -> TopLogprobs | None:
        """The likeliest tokens, root to `leaf`, a row a token; without a prediction where none was recorded.

        Those of prompts are not recorded. Where turns recorded different numbers of them, each row has the
        smallest number: the k likeliest are the first k of more. None where no node of the path has any.
        """
        nodes = [self.nodes[index] for index in self.path(leaf)]
        k = min((node.extras[TOP_IDS].shape[1] for node in nodes if TOP_IDS in node.extras), default=None)
        if k is None:
            return None
        return TopLogprobs.joined(
            TopLogprobs(node.extras[TOP_IDS][:, :k], node.extras[TOP_LOGPROBS][:, :k])
            if TOP_IDS in node.extras
            else TopLogprobs.unpredicted(len(node), k)
            for node in nodes
        )

    def media(self, leaf: int) -> list[MediaReference]:
        """The media on the path to `leaf`, in prompt order; their ranges count from the root."""
        references: list[MediaReference] = []
        start = 0
        for index in self.path(leaf):
            node = self.nodes[index]
            references += [reference.shifted(start) for reference in node.media]
            start += len(node)
        return references

    def multi_modal_data(self, leaf: int, processors: Mapping[Modality, MediaProcessor]) -> MultiModalData:
        """The media of `media(leaf)` with their pixels, computed again by a renderer's `processors`.

        Raises `PixelMismatchError` if the result differs from the pixels that the sampler saw,
        `RolloutsError`.
        """
        return MultiModalData.from_items(
            (reference.derive(processors), reference.placeholder) for reference in self.media(leaf)
        )

    def to_messages(self, leaf: int) -> list[Message]:
        """The messages on the path to `leaf`; media are sources.

        Raises `TrajectoryError` where `add_turn` did not receive the messages of a prompt.
        """
        completions = {turn.node for turn in self.turns}
        for index in self.path(leaf):
            node = self.nodes[index]
            # A prompt that extends a root or a completion begins a message.
            if index not in completions and not node.messages and (node.parent == -1 or node.parent in completions):
                raise TrajectoryError(
                    f"episode {self.episode_id}: the prompt of node {index} was stored without its messages; pass "
                    "messages= to add_turn"
                )
        return self._messages(leaf)

    def _messages(self, leaf: int) -> list[Message]:
        """The messages on the path to `leaf`, as far as `add_turn` received them."""
        completions = {turn.node: turn.message for turn in self.turns}
        messages: list[Message] = []
        for index in self.path(leaf):
            messages += self.nodes[index].messages
            if index in completions:
                messages.append(completions[index])
        return messages

    def all_media(self) -> Iterator[MediaReference]:
        """Every medium of the episode, once per node that introduced it."""
        return (reference for node in self.nodes for reference in node.media)

    def media_counts(self) -> dict[str, int]:
        """The numbers `images` (videos too), `sounds`, `distinct_images` and `distinct_sounds`.

        The first two count what the nodes show: a medium counts for each node that introduced it, so that one
        of a prompt that was stored again after a fork counts again, as its tokens do. `distinct_` counts
        sources of different bytes, once as an image and once as a video where they are shown as both.
        """
        shown = [(reference.modality, reference.source.digest) for reference in self.all_media()]
        distinct = media_counts(modality for modality, _ in set(shown))
        return {
            **media_counts(modality for modality, _ in shown),
            **{f"distinct_{name}": count for name, count in distinct.items()},
        }

    def _longest_prefix(
        self, prompt: np.ndarray, references: Sequence[MediaReference], agent: str, after: int | None
    ) -> tuple[int, int]:
        """(node, tokens): the deepest node whose path is a prefix of the prompt, and that path's length.

        Where the path to `after` is such a prefix, only `after` and the nodes below it are considered. Of
        completions with the same tokens, it is the last one of `agent`, or the first one where none is the
        agent's.
        """
        nodes, length = longest_prefixes(self.nodes, prompt, references, after)
        if len(nodes) == 1:
            return nodes[0], length
        of_others = {turn.node for turn in self.turns if turn.agent != agent}
        return next((node for node in reversed(nodes) if node not in of_others), nodes[0]), length


def _range_error(nodes: Sequence[TokenNode]) -> str | None:
    """The first token id or log-probability that is out of range.

    The arrays of all nodes are checked together: numpy takes as long for one short array as for forty. An
    array of several nodes is taken once, so that no more memory is used than the arrays themselves use.
    """
    ids = {id(node.token_ids): node.token_ids for node in nodes}
    logprobs = {id(node.logprobs): node.logprobs for node in nodes}
    if _values_error(np.concatenate(list(ids.values())), np.concatenate(list(logprobs.values()))) is None:
        return None
    for index, node in enumerate(nodes):
        if (error := _values_error(node.token_ids, node.logprobs)) is not None:
            return f"node {index}: {error}"
    return None  # together, arrays of several dtypes have yet another dtype


def _values_error(token_ids: np.ndarray, logprobs: np.ndarray) -> str | None:
    return token_ids_error(token_ids) or logprobs_error(logprobs, len(logprobs))
