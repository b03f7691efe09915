"""Environments with sub-agents, and an engine that keeps what it returned, for tests of `EpisodeContext`."""

import asyncio

from rollouts import SamplingParams, StepResult, run_episode
from rollouts.testing import ScriptedEngine


class RecordingEngine(ScriptedEngine):
    """A scripted engine that keeps, for each request that was answered, its prompt and completion as one row of ids."""

    def __init__(self, script, *, renderer):
        super().__init__(script, renderer=renderer)
        self.rows = []
        self.cancelled = 0

    async def generate(self, request, listen=None):
        try:
            result = await super().generate(request)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        self.rows.append([*request.prompt_ids, *result.completions[0].token_ids.tolist()])
        return result


def last_user_text(renderer, request):
    """The text of the last user message of a prompt of the tiny model, without its images."""
    text = renderer.tokenizer.decode(list(request.prompt_ids))
    return text.rsplit("<|im_start|>user\n", 1)[1].split("<|im_end|>", 1)[0].rsplit("<|vision_end|>", 1)[-1]


def rows_of_turns(trajectory):
    """For each turn, the tokens from the root of the tree to the end of its completion."""
    return [trajectory.token_ids(turn.node).tolist() for turn in trajectory.turns]


def user(text, *images):
    parts = [{"type": "image", "image": image} for image in images]
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}]}


class Echo:
    """Asks `turns` questions; the reward of each turn is `base` plus the number of the turn."""

    def __init__(self, name, turns=2, base=0.0):
        self.name, self.turns, self.base, self.step_number = name, turns, base, 0

    def reset(self, seed):
        self.seed = seed
        return [user(f"{self.name} 0")]

    def step(self, assistant):
        self.step_number += 1
        reward = self.base + self.step_number
        if self.step_number == self.turns:
            return StepResult(reward=reward, done=True)
        return StepResult([user(f"{self.name} {self.step_number}")], reward=reward)


class Nested(Echo):
    """A child with children of its own; its text is its place in the tree."""

    def __init__(self, name, tree):
        super().__init__(name, turns=tree[0])
        self.children = tree[1]

    def attach(self, context):
        self.context = context

    async def step(self, assistant):
        result = super().step(assistant)
        if self.step_number == 1:
            await asyncio.gather(
                *(
                    self.context.run_child(Nested(f"{self.name}.{n}", tree), agent=f"{self.name}.{n}", max_turns=9)
                    for n, tree in enumerate(self.children)
                )
            )
        return result


class Delegating:
    """An environment of one turn, whose step runs `work(context, assistant)`; the reward is 100."""

    def __init__(self, work):
        self.work = work
        self.result = None

    def attach(self, context):
        self.context = context

    def reset(self, seed):
        return [user("delegate")]

    async def step(self, assistant):
        self.result = await self.work(self.context, assistant)
        return StepResult(reward=100.0, done=True)


def play(environment, engine, renderer, **options):
    options = {"sampling": SamplingParams(max_tokens=64, seed=5), "max_turns": 50, "seed": 3, **options}
    return asyncio.run(run_episode(environment, engine=engine, renderer=renderer, **options))
