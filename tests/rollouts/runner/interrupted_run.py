"""A run for tests that interrupt it: `python interrupted_run.py MODEL_DIRECTORY DIRECTORY WAITS_IN`.

Episodes of even tasks end at once, those of odd tasks wait for an hour in WAITS_IN: "engine", "thread" (of a blocking
environment) or "renderer" (a thread of the pool). A line is printed for each episode that waits.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path
from typing import Any

from renderers import RendererPool, load_renderer
from rollouts import GenerateRequest, SamplingParams, StepResult, ThreadedEnvironment
from rollouts.runner import Journal, Runner, Task
from rollouts.testing import ScriptedEngine

NUM_TASKS = 8


def report_waiting() -> None:
    sys.stdout.write("waiting\n")
    sys.stdout.flush()


class WaitingEngine(ScriptedEngine):
    async def generate(self, request: GenerateRequest) -> Any:
        if request.session_id is not None and request.session_id.startswith("waits"):
            report_waiting()
            await asyncio.sleep(3600)
        return await super().generate(request)


class Waiting:
    """Waits in `step` if `blocks`; closing it takes no time, but begins only when `step` has ended."""

    def __init__(self, text: str, blocks: bool) -> None:
        self.text = text
        self.blocks = blocks

    def reset(self, seed: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": self.text}]

    def step(self, assistant: Any) -> StepResult:
        if self.blocks:
            report_waiting()
            time.sleep(3600)
        return StepResult(reward=1.0, done=True)

    def close(self) -> None:
        pass


class WaitingRenderer:
    """A renderer that waits for messages that say so."""

    def __init__(self, renderer: Any) -> None:
        self._renderer = renderer

    def render(self, messages: Any, **options: Any) -> Any:
        if messages[0]["content"] == "wait":
            report_waiting()
            time.sleep(3600)
        return self._renderer.render(messages, **options)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._renderer, name)


async def run(model_directory: str, directory: Path, waits_in: str) -> None:
    renderer = load_renderer(model_directory)

    def make_environment(task: Task) -> Any:
        waits = bool(task.data % 2)
        text = "wait" if waits and waits_in == "renderer" else "go"
        return ThreadedEnvironment(Waiting(text, waits and waits_in == "thread"))

    runner = Runner(
        make_environment,
        WaitingEngine(lambda request: "yes", renderer=renderer),
        RendererPool(WaitingRenderer(renderer), threads=NUM_TASKS),
        sampling=SamplingParams(max_tokens=8),
        journal=Journal.open(directory / "journal"),
    )
    prefix = {True: "waits", False: "ends"}
    tasks = [Task(f"{prefix[waits_in == 'engine' and bool(n % 2)]}-{n}", n) for n in range(NUM_TASKS)]
    async with runner:
        async for group in runner.stream(tasks):
            sys.stdout.write(f"delivered {group.task.task_id}\n")
            sys.stdout.flush()


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], Path(sys.argv[2]), sys.argv[3]))
