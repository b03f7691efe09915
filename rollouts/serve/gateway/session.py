"""One session: the trajectory of an agent, and which of its turns a request continues."""

from __future__ import annotations

import time
from collections import ChainMap, OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, NamedTuple

from renderers import RenderedTokens
from rollouts.episodes.turns import Prompt, SampledTurn, TurnRecorder
from rollouts.serve.gateway.history import History, extended_digest, reasoning_of

#: Turns of a session whose prompts stay in memory; those of other turns are made again from the trajectory.
_KEPT_PROMPTS: Final = 8
#: Estimated bytes of a token in a trajectory: id, mask, log-probability.
_TOKEN_BYTES: Final = 12


@dataclass(frozen=True, slots=True, eq=False)
class RecordedTurn:
    """A turn of the trajectory, as a client knows it.

    `parent` is the turn that its request continued. `reasoning` and `call_ids` are by position in the conversation, of
    the messages that the parent does not have; `call_ids` are the ids that the client received. `order` is larger for a
    later request, and for a smaller index among its choices. `sampled` are the sampled ranges of a prompt that was
    rendered in full, None for one that was bridged.
    """

    index: int
    parent: RecordedTurn | None
    reasoning: Mapping[int, str | None]
    call_ids: Mapping[int, Sequence[str]]
    order: tuple[int, int]
    tools: Any
    prompt_length: int
    length: int
    sampled: Sequence[tuple[int, int]] | None
    placeholder_token_ids: Mapping[str, int]


class Match(NamedTuple):
    """The turn that a request continues, and how many of its messages the turn has, its own included."""

    turn: RecordedTurn
    num_messages: int


class Session:
    """Made on the event loop that serves it. `is_anonymous`: its client named no session.

    Its trajectory is finished when it ends; `is_delivered` says that it was handed over, too.
    """

    def __init__(self, recorder: TurnRecorder, *, is_anonymous: bool) -> None:
        self.recorder = recorder
        self.trajectory = recorder.trajectory
        self.is_anonymous = is_anonymous
        self.last_used = self.began = time.monotonic()
        self.is_delivered = False
        self.in_flight = 0
        self.num_requests = 0
        self.nbytes = 0
        self.turns: dict[bytes, list[RecordedTurn]] = {}  # by the digest of the conversation that ends with the turn
        self._internal_ids: dict[str, str] = {}  # of tool calls: from the id that clients have to the model's
        self._prompts: OrderedDict[int, SampledTurn] = OrderedDict()
        self._counted_nodes = 0
        self._counted_sources: set[str] = set()

    @property
    def id(self) -> str:
        return self.trajectory.episode_id

    @property
    def call_ids(self) -> Collection[str]:
        """The ids of tool calls that clients received."""
        return self._internal_ids.keys()

    # Which turn a request continues.

    def find(self, history: History) -> Match | None:
        """The turn with the longest conversation that the request begins with."""
        for end in history.turn_ends:
            turns = [turn for turn in self.turns.get(history.digests[end], ()) if self._agrees(turn, history)]
            if turns:
                return Match(max(turns, key=lambda turn: turn.order), end)
        return None

    def _agrees(self, turn: RecordedTurn | None, history: History) -> bool:
        """Whether reasoning and ids of calls are those of the turn and of the turns before it, where they were sent."""
        while turn is not None:
            for position, reasoning in turn.reasoning.items():
                sent = reasoning_of(history.messages[position])
                if sent is not None and sent != reasoning:
                    return False
            for position, ids in turn.call_ids.items():
                calls = history.messages[position].get("tool_calls") or ()
                # Ids that this gateway did not make are the client's own.
                if any(
                    (sent := call.get("id")) != expected and sent in self._internal_ids
                    for call, expected in zip(calls, ids, strict=False)
                ):
                    return False
            turn = turn.parent
        return True

    # Ids of tool calls.

    def model_messages(self, history: History, match: Match | None, start: int) -> Sequence[Any]:
        """The messages from `start` on with the ids of tool calls that the model wrote."""
        ids: ChainMap[str, str] = ChainMap({}, self._internal_ids)
        if match is not None:
            last = match.num_messages - 1
            calls = history.messages[last].get("tool_calls") or ()
            for call, known in zip(calls, match.turn.call_ids.get(last, ()), strict=False):
                if "id" in call:
                    ids.setdefault(call["id"], self._internal_ids[known])
        return [_with_ids(message, ids) for message in history.messages[start:]] if ids else history.messages[start:]

    # Recording.

    def add(
        self,
        turn: SampledTurn,
        history: History,
        match: Match | None,
        *,
        choice: int,
        message: Mapping[str, Any],
        variants: Sequence[Mapping[str, Any]],
    ) -> list[bytes]:
        """Remember a turn of the trajectory, for requests that continue it; returns the digests that find it.

        `message` is what the client receives, `variants` what else it may send back for it.
        """
        position = len(history.messages)
        start = 0 if match is None else match.num_messages
        new = [*enumerate(history.messages[start:], start), (position, message)]
        prompt = turn.prompt
        is_bridged = match is not None and prompt.messages is not prompt.conversation
        recorded = RecordedTurn(
            index=turn.index,
            parent=None if match is None else match.turn,
            reasoning={at: reasoning_of(one) for at, one in new if one["role"] == "assistant"},
            call_ids={
                at: [call.get("id", "") for call in one["tool_calls"]] for at, one in new if one.get("tool_calls")
            },
            order=(self.num_requests, -choice),
            tools=prompt.tools,
            prompt_length=len(prompt.rendered),
            length=len(turn.completion_ids),
            sampled=None if is_bridged else prompt.sampled,
            placeholder_token_ids=prompt.rendered.placeholder_token_ids,
        )
        for sent, own in zip(message.get("tool_calls") or (), turn.message.get("tool_calls") or (), strict=False):
            self._internal_ids[sent["id"]] = own["id"]
        digests = list(dict.fromkeys(extended_digest(history.digests[-1], one) for one in (message, *variants)))
        for digest in digests:
            self.turns.setdefault(digest, []).append(recorded)
        self._keep(turn)
        self._count(history, start)
        return digests

    def _count(self, history: History, start: int) -> None:
        """Add the estimated bytes of what is new in the trajectory."""
        nodes = self.trajectory.nodes
        for node in nodes[self._counted_nodes :]:
            self.nbytes += _TOKEN_BYTES * len(node) + sum(array.nbytes for array in node.extras.values())
            for reference in node.media:
                if reference.source.digest not in self._counted_sources:
                    self._counted_sources.add(reference.source.digest)
                    self.nbytes += reference.source.nbytes
        self._counted_nodes = len(nodes)
        self.nbytes += sum(_text_bytes(message) for message in history.messages[start:]) + 2000

    # Prompts of earlier turns.

    def _keep(self, turn: SampledTurn) -> None:
        prompt = turn.prompt
        media = prompt.rendered.multi_modal_data
        if media is not None and not media.is_empty():
            # The trajectory has the sources of the media; the messages of the request have them in base64.
            parent = self.trajectory.nodes[self.trajectory.turns[turn.index].node].parent
            conversation = self.trajectory.to_messages(parent)
            turn = replace(turn, prompt=prompt._replace(messages=(), conversation=conversation))
        self._prompts[turn.index] = turn
        if len(self._prompts) > _KEPT_PROMPTS:
            self._prompts.popitem(last=False)

    async def sampled_turn(self, recorded: RecordedTurn) -> SampledTurn:
        """A turn with its prompt, made again from the trajectory if it is not kept."""
        kept = self._prompts.get(recorded.index)
        if kept is None:
            kept = await self.recorder.renderer.run_on_thread(lambda: self._made_again(recorded))
        self._prompts[recorded.index] = kept
        self._prompts.move_to_end(recorded.index)
        if len(self._prompts) > _KEPT_PROMPTS:
            self._prompts.popitem(last=False)
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
        ranges.append((recorded.prompt_length, recorded.prompt_length + recorded.length))
    return [*recorded.sampled, *reversed(ranges)]


def _with_ids(message: Any, ids: Mapping[str, str]) -> Any:
    if message.get("tool_call_id") in ids:
        return {**message, "tool_call_id": ids[message["tool_call_id"]]}
    if message.get("tool_calls"):
        calls = [{**call, "id": ids[call["id"]]} if call.get("id") in ids else call for call in message["tool_calls"]]
        return {**message, "tool_calls": calls}
    return message


def _text_bytes(message: Mapping[str, Any]) -> int:
    content = message.get("content") or ""
    if isinstance(content, str):
        return len(content)
    return sum(len(part["text"]) for part in content if part["type"] == "text")
