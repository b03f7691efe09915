"""One session: the trajectory of an agent, and which of its turns a request continues."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from renderers import RenderedTokens
from rollouts.episodes.turns import Prompt, SampledTurn, TurnRecorder
from rollouts.errors import short_repr
from rollouts.serve.errors import invalid_field
from rollouts.serve.gateway.history import History, identity, reasoning_of
from rollouts.serve.gateway.limits import kept_bytes

#: Turns of a session whose prompts stay in memory; those of other turns are made again from the trajectory.
_KEPT_PROMPTS: Final = 8
#: Estimated bytes of a token: what the tree has of it, and an integer that kept prompts share.
_TOKEN_BYTES: Final = 40
#: Of a place in the list of ids of a kept prompt.
_PLACE_BYTES: Final = 8
#: Of the digest of a conversation and that of its last message, with their places.
_DIGEST_BYTES: Final = 160
#: Of a session without turns, and of a turn without tokens and messages.
_SESSION_BYTES: Final = 3000
_TURN_BYTES: Final = 2500


@dataclass(frozen=True, slots=True, eq=False)
class RecordedTurn:
    """A turn of the trajectory, as a client knows it.

    `parent` is the turn that its request continued. `num_messages` counts those of its conversation, its own
    included. `identities`, `reasoning` and `call_ids` are of the messages that the parent does not have, the latter
    two by position in the conversation; `call_ids` are the ids that the client received. `order` is larger for a
    later request, and for a smaller index among its choices. `completion` is its range of tokens, `sampled`
    are the sampled ranges of a prompt that was rendered in full, None for one that was bridged.
    """

    index: int
    parent: RecordedTurn | None
    num_messages: int
    identities: Sequence[bytes]
    reasoning: Mapping[int, str | None]
    call_ids: Mapping[int, Sequence[str]]
    order: tuple[int, int]
    tools: Any
    completion: tuple[int, int]
    sampled: Sequence[tuple[int, int]] | None
    placeholder_token_ids: Mapping[str, int]

    def lineage(self) -> Iterator[RecordedTurn]:
        """The turn, the turn that it continues, and so on."""
        turn: RecordedTurn | None = self
        while turn is not None:
            yield turn
            turn = turn.parent

    def ids_of_calls(self, history: History) -> Iterator[tuple[str, str]]:
        """The ids of all calls until the turn, in their order: that in the history, and the recorded one."""
        for each in [*self.lineage()][::-1]:
            for position, known in each.call_ids.items():
                calls = history.messages[position].get("tool_calls") or ()
                yield from zip((call.get("id", "") for call in calls), known, strict=False)


class StoredResponse(NamedTuple):
    """A response, and its turn, whose conversation begins with `first` messages of instructions."""

    response: dict[str, Any]
    turn: RecordedTurn
    first: int


class Session:
    """Made on the event loop that serves it. `is_anonymous`: its client named no session.

    The seeds of requests without one derive from `seed`, if there is one.
    Its trajectory is finished when it ends; `is_delivered` says that it was handed over, too. `nbytes` are
    the estimated bytes of all that it keeps; `on_count` is called with each change of them.
    """

    def __init__(
        self, recorder: TurnRecorder, *, seed: int | None, is_anonymous: bool, on_count: Callable[[int], object]
    ) -> None:
        self.recorder = recorder
        self.seed = seed
        self.trajectory = recorder.trajectory
        self.id = self.trajectory.episode_id
        self.is_anonymous = is_anonymous
        self.last_used = self.began = time.monotonic()
        self.is_delivered = False
        self.in_flight = 0
        self.num_requests = 0
        self.nbytes = 0
        self.on_count = on_count
        self.turns: dict[bytes, list[RecordedTurn]] = {}  # by the digest of the conversation that ends with the turn
        self.responses: dict[str, StoredResponse] = {}
        self.internal_ids: dict[str, str] = {}  # of tool calls: from the id that clients have to the model's
        self._prompts: OrderedDict[int, SampledTurn] = OrderedDict()
        self._counted_forks = 0
        self._known: set[bytes] = set()  # the digests of all conversations that requests had, and of their beginnings
        self._counted_nodes = 0
        self._counted_sources: set[str] = set()
        self._counted_prompts = 0  # the bytes of the kept prompts
        self.count(_SESSION_BYTES + kept_bytes(self.trajectory.group_id))

    # Which turn a request continues.

    def find(self, history: History) -> RecordedTurn | None:
        """The turn with the longest conversation that the request begins with; of equal ones, that which it names."""
        for end in history.turn_ends:
            turns = [turn for turn in self.turns.get(history.digests[end], ()) if self._agrees(turn, history)]
            if turns:
                named = [turn for turn in turns if history.turn in turn.lineage()] if history.turn else []
                return max(named or turns, key=lambda turn: turn.order)
        return None

    def _agrees(self, turn: RecordedTurn, history: History) -> bool:
        """Whether reasoning and ids of calls are those of the turn and of the turns before it, where they were sent."""
        for each in turn.lineage():
            for position, reasoning in each.reasoning.items():
                if reasoning_of(history.messages[position]) not in (None, reasoning):
                    return False
        # Ids that this gateway did not make are the client's own.
        pairs = turn.ids_of_calls(history)
        return all(sent == known or sent not in self.internal_ids for sent, known in pairs)

    # Ids of tool calls.

    def model_messages(self, history: History, turn: RecordedTurn | None) -> Sequence[Any]:
        """The messages after a turn, None for all, with the ids of tool calls that the model wrote."""
        start, ids = 0 if turn is None else turn.num_messages, self.internal_ids
        new = history.messages[start:]
        answered = {message.get("tool_call_id") for message in new} - {None, ""}
        if turn is not None and not answered <= ids.keys():
            pairs = turn.ids_of_calls(history)
            ids = {**{sent: ids.get(known, known) for sent, known in pairs if known}, **ids}
        return [_with_ids(message, ids) for message in new] if ids else new

    # Recording.

    def add(
        self,
        turn: SampledTurn,
        history: History,
        parent: RecordedTurn | None,
        choice: int,
        message: Mapping[str, Any],
        variants: Sequence[Mapping[str, Any]],
    ) -> tuple[RecordedTurn, list[bytes]]:
        """Remember a turn of the trajectory, for requests that continue it; returns it with the digests that find it.

        `message` is what the client receives, `variants` what else it may send back for it.
        """
        position = len(history.messages)
        start = 0 if parent is None else parent.num_messages
        new = [*enumerate(history.messages[start:], start), (position, message)]
        prompt = turn.prompt
        is_bridged = parent is not None and prompt.messages is not prompt.conversation
        recorded = RecordedTurn(
            index=turn.index,
            parent=parent,
            num_messages=position + 1,
            identities=[*history.identities[start:], identity(message)],
            reasoning={at: reasoning_of(one) for at, one in new if one["role"] == "assistant"},
            call_ids={
                at: [call.get("id", "") for call in one["tool_calls"]] for at, one in new if one.get("tool_calls")
            },
            order=(self.num_requests, -choice),
            tools=prompt.tools,
            completion=(len(prompt.rendered), len(prompt.rendered) + len(turn.completion_ids)),
            sampled=None if is_bridged else prompt.sampled,
            placeholder_token_ids=prompt.rendered.placeholder_token_ids,
        )
        if self.trajectory.forks > self._counted_forks:
            self._counted_forks += 1
            self.increment(f"forks/{self._fork_reason(history, parent, prompt, is_bridged, choice)}")
        for sent, own in zip(message.get("tool_calls") or (), turn.message.get("tool_calls") or (), strict=False):
            self.internal_ids[sent["id"]] = own["id"]
        digests = list(dict.fromkeys(history.extended_digest(one) for one in (message, *variants)))
        for digest in digests:
            self.turns.setdefault(digest, []).append(recorded)
        unknown = {*history.digests, *digests} - self._known
        self._known |= unknown
        # The choices of a request share its messages and its tools.
        shared = () if choice else (prompt.conversation[start:], None if is_bridged else recorded.tools)
        nbytes = kept_bytes(turn.message, recorded.reasoning, recorded.call_ids, *shared)
        self.count(_TURN_BYTES + _DIGEST_BYTES * len(unknown) + nbytes + self._new_in_tree())
        self._put(turn)
        return recorded, digests

    def _fork_reason(
        self, history: History, parent: RecordedTurn | None, prompt: Prompt, is_bridged: bool, choice: int
    ) -> str:
        """Why the turn of a request does not extend the turn before it; `parent` and `is_bridged` as in `add`."""
        if choice > 0:
            return "another choice"
        if history.digests[0] not in self._known:
            return "other tools"
        # The turn before a message of the model that it did not write is no `parent`.
        found = self.find(history)
        continued = 0 if found is None else found.num_messages
        if any(history.digests[end] in self.turns for end in history.turn_ends if end > continued):
            return "other reasoning or ids of calls"
        pairs = zip(history.digests[1:], history.messages, strict=True)
        role = next((message["role"] for digest, message in pairs if digest not in self._known), None)
        if role is None:
            return "no new message"
        if is_bridged:
            return "an earlier turn is continued"
        if parent is None:
            return f"the first other message has the role {role}"
        return f"the bridge was refused: {prompt.refusal or 'the renderer does not say why'}"

    def conversation(self, turn: RecordedTurn) -> tuple[list[Any], list[bytes]]:
        """The messages of a turn with the client's ids of calls, its own the last, and their identities."""
        lineage = list(turn.lineage())[::-1]
        call_ids = {at: ids for each in lineage for at, ids in each.call_ids.items()}
        known: dict[str, str] = {}
        messages: list[Any] = []
        for at, message in enumerate(self.trajectory.to_messages(self.trajectory.turns[turn.index].node)):
            if at in call_ids:
                calls = message.get("tool_calls") or ()
                known.update(zip((call.get("id", "") for call in calls), call_ids[at], strict=False))
                calls = [{**call, "id": own} if own else call for call, own in zip(calls, call_ids[at], strict=True)]
                message = {**message, "tool_calls": calls}
            messages.append(_with_ids(message, known) if "tool_call_id" in message else message)
        return messages, [one for each in lineage for one in each.identities]

    def record_reward(self, reward: float, info: Mapping[str, Any], turn: int | None) -> None:
        """Set reward and info of a turn, None for the last. Raises `RequestError`, `TrajectoryError`."""
        turns = self.trajectory.turns
        index = len(turns) - 1 if turn is None else turn
        if not 0 <= index < len(turns):
            raise invalid_field(
                f"the session {self.id!r} has {len(turns)} turns, and no turn {short_repr(index)}",
                "turn",
            )
        before = kept_bytes(turns[index].info)
        self.trajectory.record_reward(reward, info, turn=turn)
        self.count(kept_bytes(turns[index].info) - before)

    def end(self, *, done: bool | None, truncated: bool, error: str, metrics: Mapping[str, float]) -> None:
        """Set how the session ends; `done` None: unless it is truncated, or there is an error."""
        trajectory = self.trajectory
        trajectory.error, trajectory.truncated = error, truncated
        trajectory.metrics = {**metrics, **trajectory.metrics}  # reports have charts of the first ones
        trajectory.done = not truncated and not error if done is None else done
        self.count(kept_bytes(error, metrics, trajectory.group_id))

    def increment(self, metric: str) -> None:
        """Add 1 to a metric of the trajectory, unless that has ended."""
        if not self.trajectory.finished:
            self.trajectory.metrics[metric] = self.trajectory.metrics.get(metric, 0) + 1

    # How much is kept.

    def count(self, nbytes: int) -> None:
        """Add to the estimated bytes of the session."""
        self.nbytes += nbytes
        self.on_count(nbytes)

    def _new_in_tree(self) -> int:
        """The bytes of what is new in the trajectory, but for messages."""
        nodes, nbytes = self.trajectory.nodes[self._counted_nodes :], 0
        self._counted_nodes += len(nodes)
        for node in nodes:
            nbytes += _TOKEN_BYTES * len(node) + sum(array.nbytes for array in node.extras.values())
            for reference in node.media:
                if reference.source.digest not in self._counted_sources:
                    self._counted_sources.add(reference.source.digest)
                    nbytes += reference.source.nbytes
        return nbytes

    # Prompts of earlier turns.

    def _put(self, turn: SampledTurn) -> None:
        self._prompts[turn.index] = turn
        self._prompts.move_to_end(turn.index)
        if len(self._prompts) > _KEPT_PROMPTS:
            self._prompts.popitem(last=False)
        pixels: dict[str, int] = {}  # of which prompts share those of equal images
        nbytes = 0
        for prompt in (kept.prompt.rendered for kept in self._prompts.values()):
            nbytes += _PLACE_BYTES * len(prompt)
            for item, _ in () if prompt.multi_modal_data is None else prompt.multi_modal_data.items_with_ranges():
                pixels[item.mm_hash] = item.nbytes
        nbytes += sum(pixels.values())
        self.count(nbytes - self._counted_prompts)
        self._counted_prompts = nbytes

    async def sampled_turn(self, recorded: RecordedTurn) -> SampledTurn:
        """A turn with its prompt, made again from the trajectory if it is not kept."""
        kept = self._prompts.get(recorded.index)
        if kept is None:
            kept = await self.recorder.renderer.run_on_thread(lambda: self._made_again(recorded))
        self._put(kept)
        return kept

    def _made_again(self, recorded: RecordedTurn) -> SampledTurn:
        trajectory, pool = self.trajectory, self.recorder.renderer
        turn = trajectory.turns[recorded.index]
        completion = trajectory.nodes[turn.node]
        prompt_ids: list[int] = trajectory.token_ids(completion.parent).tolist()
        media = None
        if trajectory.media(completion.parent):
            media = trajectory.multi_modal_data(completion.parent, getattr(pool.renderer, "processors", {}))
        rendered = RenderedTokens(
            prompt_ids, multi_modal_data=media, placeholder_token_ids=dict(recorded.placeholder_token_ids)
        )
        conversation = trajectory.to_messages(completion.parent)
        ids = completion.token_ids.tolist()
        parsed = pool.parse_response(ids, tools=recorded.tools, prompt_ids=prompt_ids)
        prompt = Prompt(rendered, (), conversation, recorded.tools, _sampled_ranges(recorded), 0.0)
        return SampledTurn(prompt, ids, turn.message, parsed, recorded.index, 0.0, 0.0)


def _sampled_ranges(recorded: RecordedTurn) -> list[tuple[int, int]]:
    """The ranges of the prompt of a turn that completions before it sampled."""
    ranges: list[tuple[int, int]] = []
    while recorded.sampled is None:
        assert recorded.parent is not None  # a bridged prompt continues a turn
        recorded = recorded.parent
        ranges.append(recorded.completion)
    return [*recorded.sampled, *reversed(ranges)]


def _with_ids(message: Any, ids: Mapping[str, str]) -> Any:
    if message.get("tool_call_id") in ids:
        return {**message, "tool_call_id": ids[message["tool_call_id"]]}
    if message.get("tool_calls"):
        calls = [{**call, "id": ids[call["id"]]} if call.get("id") in ids else call for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}
    return message
