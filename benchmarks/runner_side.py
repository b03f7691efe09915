"""One side of `benchmarks/runner_and_verifiers.py`: our `Runner` with a `VLLMEngine`.

Arguments and output are those of `benchmarks/verifiers_side.py`.
"""

import asyncio
import json
import sys
import time
from collections.abc import Sequence

from conversation import user_text

from renderers import Message, load_renderer
from rollouts import SamplingParams, StepResult, VLLMEngine
from rollouts.runner import EpisodeLimits, Runner, Task


class Conversation:
    def __init__(self, episode: int, turns: int) -> None:
        self._episode = episode
        self._turns = turns
        self._turn = 0

    def reset(self, seed: int) -> Sequence[Message]:
        return [{"role": "user", "content": user_text(self._episode, 0)}]

    def step(self, assistant: Message) -> StepResult:
        self._turn += 1
        if self._turn == self._turns:
            return StepResult(reward=1.0, done=True)
        return StepResult([{"role": "user", "content": user_text(self._episode, self._turn)}])


async def main() -> None:
    base_url, model = sys.argv[1:3]
    turns, episodes, concurrency = map(int, sys.argv[3:6])
    tasks = [Task(str(episode), episode) for episode in range(episodes)]
    engine, renderer = VLLMEngine(base_url), load_renderer(model)

    async def run(tasks: Sequence[Task]) -> int:
        runner = Runner(
            lambda task: Conversation(task.data, turns),
            engine,
            renderer,
            sampling=SamplingParams(max_tokens=64),
            limits=EpisodeLimits(max_turns=turns + 1),
            concurrency=concurrency,
        )
        played = 0
        async with runner:
            async for group in runner.stream(tasks):
                for episode in group.episodes:
                    assert episode.done, episode.error
                    played += episode.num_turns
        assert played == turns * len(tasks)
        return played

    await run(tasks[:8])
    started, cpu = time.perf_counter(), time.process_time()
    played = await run(tasks)
    print(json.dumps([played, time.perf_counter() - started, time.process_time() - cpu]))
    await engine.close()


if __name__ == "__main__":
    asyncio.run(main())
