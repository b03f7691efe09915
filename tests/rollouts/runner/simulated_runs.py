"""Parts of a run without threads: a renderer in the event loop, and environments whose seeds decide what they do."""

import asyncio
import itertools
import random
from collections.abc import Iterator

from renderers import RenderedTokens
from renderers.parsing.response import ParsedResponse
from rollouts import StepResult
from rollouts.task import Task

STOP = 999


class LoopRenderer:
    """A renderer of text and its own pool: its calls take no thread, so that a run depends on its seeds alone."""

    def get_stop_token_ids(self):
        return [STOP]

    async def render_async(self, messages, *, tools=None, add_generation_prompt=False):
        await asyncio.sleep(0)
        roles = [message["role"] for message in messages]
        columns = {"sampled_mask": [False] * len(roles), "is_content": [True] * len(roles)}
        return RenderedTokens(
            list(range(len(roles))), message_roles=roles, message_indices=list(range(len(roles))), **columns
        )

    async def parse_response_async(self, token_ids, *, tools=None, prompt_ids=None):
        await asyncio.sleep(0)
        return ParsedResponse(content=" ".join(map(str, token_ids)))

    async def bridge_to_next_turn_async(self, prompt, completion, new_messages, *, tools=None, previous_messages=None):
        await asyncio.sleep(0)
        ids = [*prompt, *completion, 7]
        columns = {"sampled_mask": [False] * len(ids), "is_content": [True] * len(ids)}
        indices = [-1] * (len(ids) - 1) + [0]
        return RenderedTokens(ids, message_roles=["user"], message_indices=indices, **columns)


class RandomEnvironment:
    """1 to 4 turns; waits, and fails with probability `failure_rate` in each call, as its random numbers decide."""

    def __init__(self, seed: str, failure_rate: float) -> None:
        self._random = random.Random(seed)
        self._failure_rate = failure_rate
        self._turns_left = self._random.randint(1, 4)

    async def reset(self, seed):
        await self._wait()
        return [{"role": "user", "content": "begin"}]

    async def step(self, assistant):
        await self._wait()
        self._turns_left -= 1
        return StepResult([{"role": "user", "content": "go on"}], reward=1.0, done=self._turns_left == 0)

    async def _wait(self):
        for _ in range(self._random.randint(0, 3)):
            await asyncio.sleep(0)
        if self._random.random() < self._failure_rate:
            raise KeyError("environment")


class TaskLog:
    """A source of tasks that keeps the ids of those it gave, without an end until `is_over`."""

    def __init__(self) -> None:
        self.given: list[str] = []
        self.is_over = False

    def __iter__(self) -> Iterator[Task]:
        for number in itertools.count():
            if self.is_over:
                return
            self.given.append(f"task-{number}")
            yield Task(self.given[-1])
