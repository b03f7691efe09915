"""An environment in which a model calls tools until it answers without a call."""

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from renderers import Message, ParsedResponse, ToolSpec
from rollouts.environments.tools.tool import Tool
from rollouts.environments.tools.tool_calls import (
    CallLimits,
    RequestedCall,
    answer_calls,
    calls_of_message,
    calls_of_turn,
)
from rollouts.episodes.environment import StepResult, resolve
from rollouts.errors import RolloutsError
from rollouts.rewards import Reward, rewards_of, score_episode
from rollouts.values import check_integer, check_positive


class ToolEnvironment:
    """A model calls tools until a turn has no call; then the conversation is scored and the episode is done.

        ToolEnvironment(task, tools=[look, Tool.from_function(zoom, timeout_seconds=5)], messages=question, score=exact)

    `messages(task)` are the first messages, `score(conversation, task)` the reward of a completed episode;
    both as for `ScoredPrompt`, with `conversation` a list of all messages, the model's last answer included.
    Without `score` the reward is 0. `tools` are `Tool`s and typed functions (`Tool.from_function`).

    The calls of a turn run at the same time; their tool messages are in the order of the calls. What goes
    wrong is answered in a tool message that begins with "error: ": an unknown tool, arguments that do not
    fit, an exception, an image without pixels, a sound without samples, a call that takes longer than
    `call_seconds`, and a malformed call. Of a result, `max_result_characters` characters and
    `max_result_images` images, sounds and videos reach the model. The info of a turn has the id, name and
    outcome of each call under `tool_calls`. A tool that returns what no message can hold fails the episode
    (`ToolResultError`).

    Raises `ArgumentError`, and `RolloutsError` for functions that cannot be tools and for two tools of one
    name.
    """

    def __init__(
        self,
        task: Any,
        *,
        tools: Sequence[Tool | Callable[..., Any]],
        messages: Callable[[Any], Sequence[Message] | Awaitable[Sequence[Message]]],
        score: Callable[[Sequence[Message], Any], Any] | Reward | Sequence[Reward] | None = None,
        call_seconds: float = 60.0,
        max_result_characters: int = 20_000,
        max_result_images: int = 8,
    ) -> None:
        check_positive("call_seconds", call_seconds, "pass a number of seconds above 0")
        check_integer("max_result_characters", max_result_characters)
        check_integer("max_result_images", max_result_images)
        self._task = task
        self._tools = _by_name(tools)
        self._messages = messages
        self._rewards = rewards_of(score)
        self._limits = CallLimits(call_seconds, max_result_characters, max_result_images)
        self._conversation: list[Message] = []

    @property
    def tools(self) -> list[ToolSpec]:
        """What the model is told of the tools."""
        return [tool.spec for tool in self._tools.values()]

    async def reset(self, seed: int) -> Sequence[Message]:
        """The first messages of the task; `seed` is not used."""
        self._conversation = list(await resolve(self._messages(self._task)))
        return list(self._conversation)

    async def step(self, assistant: Message) -> StepResult:
        """Answer the calls of a message, or score the conversation. Raises `RolloutsError` and `ToolResultError`."""
        return await self._step(assistant, calls_of_message(assistant))

    async def step_parsed(self, assistant: Message, parsed: ParsedResponse) -> StepResult:
        """`step`, with malformed calls answered too."""
        if not isinstance(parsed, ParsedResponse):  # of a renderer of another kind
            return await self.step(assistant)
        return await self._step(assistant, calls_of_turn(assistant, parsed))

    async def _step(self, assistant: Message, calls: Sequence[RequestedCall]) -> StepResult:
        self._conversation.append(assistant)
        if not calls:
            scores = await score_episode(self._rewards, type(self).__name__, list(self._conversation), self._task)
            return StepResult(reward=scores.reward, done=True, info=scores.info)
        messages, infos = zip(*await answer_calls(calls, self._tools, self._limits), strict=True)
        self._conversation += messages
        return StepResult(messages, info={"tool_calls": list(infos)})


def _by_name(tools: Sequence[Tool | Callable[..., Any]]) -> dict[str, Tool]:
    by_name: dict[str, Tool] = {}
    for tool in tools:
        made = tool if isinstance(tool, Tool) else Tool.from_function(tool)
        if made.name in by_name:
            raise RolloutsError(
                f"tool {made.name!r}: two tools have this name; give one another with Tool.from_function"
            )
        by_name[made.name] = made
    return by_name
