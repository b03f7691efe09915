"""An environment of one turn: the messages of a task, and scoring functions for the completion."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Final

from renderers import Message
from rollouts.episodes.environment import StepResult, resolve
from rollouts.errors import ArgumentError
from rollouts.rewards import Reward, rewards_of, score_episode
from rollouts.task import Task

_PROMPT_KEYS: Final = ("messages", "prompt", "question")


def messages_of_row(task: Task) -> list[Message]:
    """The prompt that the row of a task has.

    `messages` or `prompt` is a list of messages, or the text of one of the user; so is `question`. Raises
    `ArgumentError` for a row without them.
    """
    row = task.data if isinstance(task.data, Mapping) else {}
    for key in _PROMPT_KEYS:
        prompt = row.get(key)
        if isinstance(prompt, str):
            return [{"role": "user", "content": prompt}]
        if isinstance(prompt, Sequence) and prompt:
            return list(prompt)
    rule = (
        f"the row of task {task.task_id!r:.80} has no prompt; add one of {', '.join(_PROMPT_KEYS)}, or pass a function"
    )
    raise ArgumentError("messages", sorted(map(str, row)), rule)


class ScoredPrompt:
    """An environment of one turn: `messages(task)` is the prompt, `score(completion, task)` the reward.

        def messages(task):
            return [{"role": "user", "content": [{"type": "image", "image": task.data["image"]}]}]

        def score(completion, task):
            return float(completion["content"] == task.data["label"])

        Runner(lambda task: ScoredPrompt(task, messages, score), ...)

    `task` is any object; it is passed to both functions. `completion` is the assistant's message. `score` is a
    function that returns a finite number, or a `Reward` or a list of them, whose sum of weighted scores is the reward;
    the info of the turn has each under `rewards`. Both functions may be `async`; functions that are not run on the
    event loop, unless a `Reward` is `threaded`. Raises `ArgumentError`; an episode whose scoring function fails has
    the completion and an error (`RolloutsError`) that names the function.
    """

    def __init__(
        self,
        task: Any,
        messages: Callable[[Any], Sequence[Message] | Awaitable[Sequence[Message]]],
        score: Callable[[Message, Any], Any] | Reward | Sequence[Reward],
    ) -> None:
        if not callable(messages):
            raise ArgumentError("messages", messages, "pass a function of the task that returns a list of messages")
        self._task = task
        self._messages = messages
        self._rewards = rewards_of(score)

    async def reset(self, seed: int) -> Sequence[Message]:
        """The messages of the task; `seed` is not used."""
        messages: Sequence[Message] = await resolve(self._messages(self._task))
        return messages

    async def step(self, assistant: Message) -> StepResult:
        """Score the completion and end the episode. Raises `RolloutsError`."""
        scores = await score_episode(self._rewards, type(self).__name__, assistant, self._task)
        return StepResult(reward=scores.reward, done=True, info=scores.info)
