"""Turns of an episode on a chat endpoint: messages in, a message out, with tokens where the endpoint returns them."""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, cast

from renderers import MediaPolicy, Message, RenderedTokens
from renderers.errors import MediaError, MessageError
from renderers.media.reference import source_of_part
from renderers.messages import check_messages, check_tools, media_parts, media_value, part_kind, with_medium
from rollouts.engines.protocol import (
    ChatAnswer,
    ChatEngine,
    ChatTokens,
    Completion,
    SamplingParams,
)
from rollouts.episodes.activity import EpisodeActivity
from rollouts.episodes.engine_calls import check_uninterrupted, naming_engine
from rollouts.episodes.errors import raise_naming_origin
from rollouts.episodes.own_messages import own_messages, own_tools
from rollouts.episodes.turns import EpisodeRecorder, EpisodeSettings, Prompt, SampledTurn, TurnRecorder
from rollouts.trajectory.media_reference import media_counts
from rollouts.trajectory.prefixes import longest_prefixes
from rollouts.trajectory.tree import Trajectory

#: The metrics of an episode that hold what the endpoint has counted, summed over turns.
PROMPT_TOKENS, COMPLETION_TOKENS = "endpoint_prompt_tokens", "endpoint_completion_tokens"


class ChatRecorder(EpisodeRecorder):
    """Samples turns as messages, from a chat endpoint.

    `media_policy` of the engine says which references in messages may be followed; without one, nothing is read but
    data.
    """

    engine: ChatEngine
    renderer = None

    def __init__(self, trajectory: Trajectory, settings: EpisodeSettings, activity: EpisodeActivity) -> None:
        super().__init__(trajectory, settings, activity)
        self.engine = cast(ChatEngine, settings.engine)
        self._policy: MediaPolicy = self.engine.media_policy

    async def first_prompt(self, messages: Sequence[Message], tools: Any, origin: str) -> Prompt:
        began = time.perf_counter()
        tools = own_tools(tools)
        check_tools(tools)
        new = await self._with_sources(messages, origin)
        return Prompt(RenderedTokens(), new, new, tools, (), time.perf_counter() - began)

    async def next_prompt(self, turn: SampledTurn, messages: Sequence[Message], origin: str) -> Prompt:
        began = time.perf_counter()
        new = await self._with_sources(messages, f"what {origin} returned for turn {turn.index}")
        answer = self.trajectory.turns[turn.index].message
        conversation = [*turn.prompt.conversation, answer, *new]
        seconds = time.perf_counter() - began
        return Prompt(RenderedTokens(), new, conversation, turn.prompt.tools, (), seconds, turn.index)

    async def _sample(
        self, prompt: Prompt, agent: str, sampling: SamplingParams, seed: int | None, request_id: str, number: int
    ) -> SampledTurn:
        trajectory = self.trajectory
        parts = [part for message in prompt.conversation for _, part in media_parts(message)]
        self.limits.check_media([media_value(part) for part in parts], number)
        sampling = replace(sampling, seed=None)
        with self._requesting(number):
            sent_at = time.perf_counter()
            with self.deadlines.requesting(), naming_engine(self.engine, request_id):
                answer = await self.engine.chat(prompt.conversation, tools=prompt.tools, sampling=sampling, seed=seed)
            engine_seconds = time.perf_counter() - sent_at
            check_uninterrupted(request_id, [answer])
            previous = prompt.previous_turn
            after = None if previous is None else trajectory.turns[previous].node
            if answer.tokens is None:
                trajectory.add_message_turn(
                    answer.message,
                    answer.finish_reason,
                    prompt.messages,
                    seconds=engine_seconds,
                    agent=agent,
                    after=after,
                )
            else:
                self._add_tokens(prompt, answer, answer.tokens, after, seconds=engine_seconds, agent=agent)
        counts = media_counts(map(part_kind, parts))
        counts |= {"prompt_tokens": answer.prompt_tokens or 0, "completion_tokens": answer.completion_tokens or 0}
        for metric, name in ((PROMPT_TOKENS, "prompt_tokens"), (COMPLETION_TOKENS, "completion_tokens")):
            trajectory.metrics[metric] = trajectory.metrics.get(metric, 0) + counts[name]
        index = len(trajectory.turns) - 1
        return SampledTurn(prompt, (), answer.message, answer.parsed, index, engine_seconds, prompt.seconds, counts)

    def _add_tokens(
        self, prompt: Prompt, answer: ChatAnswer, tokens: ChatTokens, after: int | None, **options: Any
    ) -> None:
        """Attach a turn whose prompt the server rendered: it may have changed what it printed of earlier turns."""
        trajectory = self.trajectory
        parents, _ = longest_prefixes(trajectory.nodes, tokens.prompt_ids, (), after)
        known = len(trajectory.to_messages(parents[-1])) if parents[-1] >= 0 else 0
        messages = prompt.conversation[known:]
        rendered = RenderedTokens(tokens.prompt_ids.tolist(), message_roles=[each["role"] for each in messages])
        completion = Completion(0, tokens.token_ids, tokens.logprobs, answer.finish_reason)
        trajectory.add_turn(rendered, completion, answer.message, messages=messages, after=after, **options)

    async def _with_sources(self, messages: Sequence[Message], origin: str) -> list[Message]:
        """Checked copies of messages, with a `MediaSource` for each medium."""
        self.activity.waits_for("renderer", self.trajectory.num_turns)  # the part of an episode that prepares prompts
        try:
            checked = check_messages(own_messages(messages))
            if any(any(True for _ in media_parts(message)) for message in checked):
                return await asyncio.to_thread(_loaded, checked, self._policy)
            return cast("list[Message]", checked)
        except (MediaError, MessageError) as error:
            raise_naming_origin(error, origin, messages)


def new_recorder(trajectory: Trajectory, settings: EpisodeSettings, activity: EpisodeActivity) -> EpisodeRecorder:
    """The recorder of an episode: of messages for a `ChatEngine`, else of tokens."""
    recorder = ChatRecorder if isinstance(settings.engine, ChatEngine) else TurnRecorder
    return recorder(trajectory, settings, activity)


def _loaded(messages: Sequence[dict[str, Any]], policy: MediaPolicy) -> list[Message]:
    for message in messages:
        for index, part in media_parts(message):
            others = {key: value for key, value in part.items() if key != "fps"}  # a source has its own
            message["content"][index] = with_medium(others, source_of_part(part, policy))
    return cast("list[Message]", messages)
