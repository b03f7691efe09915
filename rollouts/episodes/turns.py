"""The turns of an episode: prompt, completion, step of the environment, next prompt."""

from __future__ import annotations

import itertools
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from renderers import Message, RenderedTokens, RendererPool
from renderers.errors import OverlongPromptError as OverlongRenderError
from rollouts.engines.protocol import Engine, GenerateRequest, SamplingParams
from rollouts.episodes.activity import EpisodeActivity
from rollouts.episodes.deadlines import EpisodeDeadlines
from rollouts.episodes.engine_calls import expecting_request, generate_completion, known_vocab_size
from rollouts.episodes.environment import Environment
from rollouts.episodes.environment_calls import (
    environment_tools,
    make_environment,
    reset_environment,
    step_environment,
)
from rollouts.episodes.errors import naming_origin
from rollouts.episodes.limits import EpisodeLimits
from rollouts.episodes.renderer_calls import RendererCalls
from rollouts.episodes.seeds import derived_seed
from rollouts.errors import OverlongPromptError
from rollouts.trajectory.provenance import Provenance
from rollouts.trajectory.tree import Trajectory

#: Makes the environment of an episode.
EnvironmentFactory = Callable[[], Environment | Awaitable[Environment]]


@dataclass(frozen=True, slots=True)
class EpisodeSettings:
    """What the episodes of a run have in common."""

    engine: Engine
    renderer: RendererPool
    sampling: SamplingParams
    limits: EpisodeLimits


@dataclass(slots=True)
class Prompt:
    """A prompt, the messages that its message indices refer to, and the token ranges that a model sampled."""

    rendered: RenderedTokens
    messages: Sequence[Message]
    sampled: list[tuple[int, int]]

    @classmethod
    def of(cls, rendered: RenderedTokens, messages: Sequence[Message]) -> Prompt:
        """The prompt of a whole conversation, in which the model would have sampled the assistant turns."""
        return cls(rendered, messages, [(span.start, span.end) for span in rendered.spans if span.sampled])


class EpisodeTurns:
    """Runs the turns of one episode into its trajectory."""

    def __init__(self, trajectory: Trajectory, settings: EpisodeSettings, activity: EpisodeActivity) -> None:
        self._trajectory = trajectory
        self._engine = settings.engine
        self._limits = settings.limits
        self._activity = activity
        self._renderer = RendererCalls(settings.renderer)
        self._vocab_size = known_vocab_size(settings.engine, settings.renderer)
        self._sampling = settings.sampling
        if not self._sampling.stop_token_ids:
            self._sampling = replace(self._sampling, stop_token_ids=self._renderer.stop_token_ids())
        trajectory.provenance = Provenance.of(settings.renderer, settings.engine)

    async def run(self, factory: EnvironmentFactory) -> None:
        """Run turns until the environment is done or a limit is reached; the trajectory says which."""
        deadlines = EpisodeDeadlines(self._limits)
        try:
            async with deadlines.scope:
                reason = await self._run(factory, deadlines)
        except TimeoutError:
            reason = deadlines.reason(self._activity)
            if reason is None:
                raise
        except (OverlongPromptError, OverlongRenderError) as error:
            reason = f"overlong prompt: {error}"
        if reason is not None:
            self._trajectory.truncated = True
            self._trajectory.truncation_reason = reason

    async def _run(self, factory: EnvironmentFactory, deadlines: EpisodeDeadlines) -> str | None:
        """Why the episode was truncated; None where the environment was done."""
        activity = self._activity
        deadlines.begin_turn()
        with activity.during("environment.make"):
            environment = await make_environment(factory)
        with activity.during("environment.reset"):
            conversation: Sequence[Message] = await reset_environment(environment, self._trajectory.seed)
            tools = environment_tools(environment)
        name = type(environment).__name__
        with naming_origin(f"{name}.reset"):
            prompt = await self._render(conversation, tools)

        for turn in itertools.count():
            request = self._request(prompt, turn)
            if (violation := self._limits.prompt_violation(request, turn)) is not None:
                return violation
            completion_ids, assistant = await self._complete(request, prompt, tools)
            with activity.during("environment.step"):
                step = await step_environment(environment, assistant)
            self._trajectory.record_reward(step.reward, step.info)
            activity.finish_turn(
                prompt_tokens=len(request.prompt_ids),
                completion_tokens=len(completion_ids),
                images=len(request.media),
            )
            if step.done:
                self._trajectory.done = True
                return None
            if turn + 1 == self._limits.max_turns:
                return f"max_turns: the environment was not done after {turn + 1} turns"
            if (reason := deadlines.reason(activity)) is not None:
                return reason  # a call of the environment went on after it was cancelled
            deadlines.begin_turn()
            prompt = await self._next_prompt(
                name, conversation, prompt, completion_ids, assistant, step.messages, tools
            )
            conversation = [*conversation, assistant, *step.messages]
        raise AssertionError("turns are counted without an end")

    def _request(self, prompt: Prompt, turn: int) -> GenerateRequest:
        rendered = prompt.rendered
        changes: dict[str, Any] = {}
        if self._sampling.seed is not None:
            changes["seed"] = derived_seed(self._sampling.seed, turn)
        if self._limits.max_tokens is not None:
            room = self._limits.max_tokens - len(rendered)
            changes["max_tokens"] = max(1, min(self._sampling.max_tokens, room))
        return GenerateRequest(
            prompt_ids=rendered.token_ids,
            sampling=replace(self._sampling, **changes) if changes else self._sampling,
            multi_modal_data=rendered.multi_modal_data,
            session_id=self._trajectory.episode_id,
            request_id=f"{self._trajectory.episode_id}-{turn}",
            placeholder_token_ids=rendered.placeholder_token_ids,
            sampled=prompt.sampled,
        )

    async def _complete(self, request: GenerateRequest, prompt: Prompt, tools: Any) -> tuple[list[int], Message]:
        """Sample a completion and store the turn; the ids and the message of the completion."""
        sent_at = time.monotonic()
        with self._activity.during("engine"):
            completion = await generate_completion(self._engine, request, self._vocab_size)
        seconds = time.monotonic() - sent_at
        completion_ids: list[int] = completion.token_ids.tolist()
        with expecting_request(self._engine), self._activity.during("renderer"):
            assistant = await self._renderer.parse(completion_ids, tools, prompt.rendered)
        self._trajectory.add_turn(prompt.rendered, completion, assistant, messages=prompt.messages, seconds=seconds)
        return completion_ids, assistant

    async def _next_prompt(
        self,
        environment: str,
        prompt: Prompt,
        completion_ids: list[int],
        history: Sequence[Message],
        conversation: Sequence[Message],
        tools: Any,
    ) -> Prompt:
        """The prompt of `conversation`: `history`, the message of the completion, and new messages.

        It extends `prompt` and the completion; where the renderer refuses that, the conversation is rendered.
        """
        turn, messages = self._activity.turn - 1, conversation[len(history) + 1 :]
        with expecting_request(self._engine):
            with self._activity.during("renderer"), naming_origin(f"what {environment}.step returned for turn {turn}"):
                bridged = await self._renderer.bridge(prompt.rendered, completion_ids, messages, tools, history)
            if bridged is not None:
                start, end = len(prompt.rendered), len(prompt.rendered) + len(completion_ids)
                return Prompt(bridged, messages, [*prompt.sampled, (start, end)])
            with naming_origin(f"the conversation after {environment}.step of turn {turn}"):
                return await self._render(conversation, tools)

    async def _render(self, messages: Sequence[Message], tools: Any) -> Prompt:
        with expecting_request(self._engine), self._activity.during("renderer"):
            return Prompt.of(await self._renderer.render(messages, tools), messages)
