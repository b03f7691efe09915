"""A conversation between the policy and a user whose messages a model writes."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any, cast

from renderers import Message, Renderer, RendererPool
from renderers.messages import check_messages, media_parts
from rollouts.engines.protocol import ChatEngine, Engine, SamplingParams
from rollouts.episodes.calls import renderer_pool
from rollouts.episodes.chat_turns import new_recorder
from rollouts.episodes.context import EpisodeContext, GeneratedTurn
from rollouts.episodes.deadlines import OVERLONG_ERRORS, EpisodeActivity, EpisodeLimits, overlong_limit
from rollouts.episodes.environment import StepResult, resolve
from rollouts.episodes.episode import check_renderer
from rollouts.episodes.turns import EpisodeSettings, SampledTurn, derived_seed
from rollouts.errors import ArgumentError, RolloutsError
from rollouts.rewards import Reward, rewards_of, score_episode
from rollouts.trajectory.tree import Trajectory
from rollouts.values import check_integer


class UserSimulation:
    """An environment in which a model plays the user.

        UserSimulation(
            instructions="You want to know the colour of the picture. Write STOP when you know it.",
            opening=[{"role": "user", "content": [{"type": "image", "image": picture}]}],
            engine=user_engine,
            renderer=user_renderer,
            stop_phrase="STOP",
            score=lambda conversation: float("red" in conversation[-1]["content"]),
        )

    `instructions` are the system message of the simulated user. It sees the conversation with the roles exchanged:
    messages of the user are its own, and messages of the policy, without their reasoning, are those of a user. Media
    are visible to it; those of its own messages are in the message before them, since templates place media
    in messages of a user. System messages of `opening` are the policy's alone.

    `opening` are the messages before the policy's first turn. Unless the last of them is the user's, the simulated user
    writes the first message, to the request `begin`.

    The conversation ends when the user's message contains `stop_phrase`, when `is_over(conversation)` is true after a
    turn of the policy, or with the policy's response to the last of `max_user_turns` messages of the simulated user.
    `score(conversation)`, a function or `Reward`s, is then the reward of the policy's last turn. Functions may be
    `async`; they receive the messages as the policy has them, with its last turn. The `info` of the last turn has
    `ended_by` ("stop_phrase", "is_over" or "max_user_turns"), `user_turns` and `rewards`; after a stop phrase,
    `user_message` is the user's last message.

    The user's turns are sampled by `engine` through `renderer` (a `RendererPool` that all episodes share, or else a
    renderer) with `sampling`, seeded from the seed of the environment. They are not in the episode's trajectory and not
    trained. Without an engine, the policy plays the user too: its turns have the agent "user" in the trajectory, are
    seeded like the policy's other turns, and are trained unless `samples_from_trajectory(agents=...)` leaves them out.

    Raises `ArgumentError`, and `MessageError` for an invalid `opening`; in an episode `RolloutsError` where the user's
    message is empty or its first one contains the stop phrase.
    """

    def __init__(
        self,
        *,
        instructions: str,
        opening: Sequence[Message] = (),
        begin: str = "Write your first message.",
        engine: Engine | ChatEngine | None = None,
        renderer: Renderer | RendererPool | None = None,
        sampling: SamplingParams | None = None,
        max_user_turns: int = 8,
        stop_phrase: str | None = None,
        is_over: Callable[[list[Message]], Any] | None = None,
        score: Callable[[list[Message]], Any] | Reward | Sequence[Reward] | None = None,
    ) -> None:
        if not isinstance(instructions, str) or not instructions:
            raise ArgumentError("instructions", instructions, "pass text: what the simulated user is to do")
        if engine is None and renderer is not None:
            raise ArgumentError("renderer", renderer, "pass the engine of the user's model too, or neither")
        if engine is not None:
            check_renderer(renderer, engine)
        check_integer("max_user_turns", max_user_turns)
        if stop_phrase is not None and (not isinstance(stop_phrase, str) or not stop_phrase):
            raise ArgumentError("stop_phrase", stop_phrase, "pass text that is not empty, or None")
        self._opening = cast(list[Message], check_messages(opening))
        self._view = _view_of(instructions, self._opening, begin)
        self._engine = engine
        self._renderer = renderer
        self._sampling = sampling
        self._max_user_turns = max_user_turns
        self._stop_phrase = stop_phrase
        self._is_over = is_over
        self._rewards = rewards_of(score)
        self._context: EpisodeContext | None = None
        self._at_end = ExitStack()

    def attach(self, context: EpisodeContext) -> None:
        self._context = context

    async def reset(self, seed: int) -> list[Message]:
        self._user = self._make_user(seed)
        self._conversation: list[Message] = list(self._opening)
        self._unread: Sequence[Message] = self._view  # messages of the user's view since its last turn
        self._user_turns = 0
        if not self._opening or self._opening[-1]["role"] != "user":
            self._conversation.append(await self._user_message())
            if self._has_stop_phrase(self._conversation[-1]):
                raise RolloutsError(
                    f"the first message of the simulated user contains the stop phrase {self._stop_phrase!r:.80}: the "
                    "conversation would end before the policy's turn; say in the instructions when to write it"
                )
        return self._conversation

    async def step(self, assistant: Message) -> StepResult:
        self._conversation = [*self._conversation, assistant]
        self._unread = [*self._unread, _as_user(assistant)]
        if self._is_over is not None and await resolve(self._is_over(self._conversation)):
            return await self._end("is_over")
        if self._user_turns == self._max_user_turns:
            return await self._end("max_user_turns")
        message = await self._user_message()
        if self._has_stop_phrase(message):
            return await self._end("stop_phrase", user_message=message["content"])
        self._conversation = [*self._conversation, message]
        return StepResult([message])

    def close(self) -> None:
        self._at_end.close()

    def _make_user(self, seed: int) -> _Policy | _OtherModel:
        if self._engine is not None:
            pool = self._at_end.enter_context(renderer_pool(self._renderer))
            sampling = replace(self._sampling or SamplingParams(), seed=derived_seed(seed, "user"))
            return _OtherModel(self._engine, pool, sampling)
        if self._context is None:
            raise RolloutsError("the policy plays the user only in an episode: run_episode attaches its context")
        return _Policy(self._context, self._sampling)

    async def _user_message(self) -> Message:
        message = await self._user.write(self._unread)
        self._unread = ()
        self._user_turns += 1
        content = message.get("content")
        if not isinstance(content, str) or not content.strip():
            raise RolloutsError(
                f"message {self._user_turns} of the simulated user is empty; raise max_tokens of its sampling, or tell "
                "it in the instructions to write text"
            )
        return {"role": "user", "content": content}

    def _has_stop_phrase(self, message: Message) -> bool:
        return self._stop_phrase is not None and self._stop_phrase in str(message["content"])

    async def _end(self, ended_by: str, **info: Any) -> StepResult:
        scores = await score_episode(self._rewards, type(self).__name__, self._conversation)
        info |= {"ended_by": ended_by, "user_turns": self._user_turns}
        return StepResult(reward=scores.reward, done=True, info={**info, **scores.info})


class _Policy:
    """The policy of the episode as the user: its turns are in the episode's trajectory."""

    def __init__(self, context: EpisodeContext, sampling: SamplingParams | None) -> None:
        self._context = context
        self._sampling = sampling
        self._last: GeneratedTurn | None = None

    async def write(self, messages: Sequence[Message]) -> Message:
        """The next message of the user, after the new messages of its view."""
        self._last = await self._context.generate_turn(
            messages, agent="user", sampling=self._sampling, after=self._last
        )
        return self._last.message


class _OtherModel:
    """Another model as the user: its turns are in a trajectory of their own, which is not kept."""

    def __init__(self, engine: Engine | ChatEngine, renderer: RendererPool | None, sampling: SamplingParams) -> None:
        settings = EpisodeSettings(engine, renderer, sampling, EpisodeLimits())
        self._recorder = new_recorder(Trajectory(uuid.uuid4().hex), settings, EpisodeActivity())
        self._last: SampledTurn | None = None

    async def write(self, messages: Sequence[Message]) -> Message:
        try:
            if self._last is None:
                prompt = await self._recorder.first_prompt(messages, None, "UserSimulation")
            else:
                prompt = await self._recorder.next_prompt(self._last, messages, "UserSimulation")
            path = (self._recorder.trajectory.num_turns,)
            self._last = await self._recorder.sample(prompt, agent="user", path=path)
        except OVERLONG_ERRORS as error:
            raise overlong_limit(error) from error
        return self._last.message


def _view_of(instructions: str, opening: Sequence[Message], begin: str) -> list[Message]:
    """The opening with the roles exchanged, as the user's model reads it."""
    view: list[Message] = [{"role": "system", "content": instructions}]
    for message in opening:
        if message["role"] == "assistant":
            view.append(_as_user(message))
        elif message["role"] == "user":
            media = [part for _, part in media_parts(message)]
            if view[-1]["role"] != "user":
                view.append({"role": "user", "content": begin})
            if media:
                text = {"type": "text", "text": view[-1]["content"]}
                view[-1] = cast(Message, {"role": "user", "content": [*media, text]})
            view.append({"role": "assistant", "content": _text_of(message)})
        elif message["role"] == "tool":
            raise ArgumentError("opening", message, "leave out tool messages: a simulated user sees none")
    if not opening or opening[-1]["role"] in ("system", "developer"):
        view.append({"role": "user", "content": begin})
    return view


def _as_user(assistant: Message) -> Message:
    """A message of the policy in the user's view: its text, without reasoning and tool calls."""
    return {"role": "user", "content": _text_of(assistant)}


def _text_of(message: Message) -> str:
    content = message.get("content") or ""
    parts: Sequence[Any] = [{"type": "text", "text": content}] if isinstance(content, str) else content
    return "".join(part["text"] for part in parts if part.get("type") == "text")
