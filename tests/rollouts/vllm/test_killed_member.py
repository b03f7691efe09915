"""Two servers in their own processes as one fleet; one is killed with kill -9 while episodes run."""

from __future__ import annotations

import asyncio
import os
import sys
from collections import Counter
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from rollouts import SamplingParams, StepResult
from rollouts.engines.fleet import EngineFleet, FleetLimits
from rollouts.engines.fleet.routing import ranked_members
from rollouts.engines.vllm import HttpLimits, VLLMEngine
from rollouts.runner import Asynchronous, EpisodeLimits, Runner, Task
from rollouts.training import TrainingBatch, samples_from_trajectory, token_logprobs

EPISODES, TURNS, TOKENS = 8, 2, 60
SECONDS = 120  # far more than a start takes
PROGRAM = Path(__file__).with_name("engine_vllm_serve.py")


@asynccontextmanager
async def served_process(directory):
    """The address and the process of a server of a directory, once it answers."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, str(PROGRAM), "serve", str(directory), "--port", "0"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, env=environment)
    try:
        yield (await asyncio.wait_for(process.stdout.readline(), SECONDS)).decode().strip(), process
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


class Gallery:
    """Shows a new image in each turn."""

    def __init__(self, task):
        self._random = np.random.default_rng(task.data)
        self._turns = 0

    def reset(self, seed):
        return [self._image("What is it?")]

    def step(self, assistant):
        self._turns += 1
        return StepResult([self._image("And this?")], reward=1.0, done=self._turns == TURNS)

    def _image(self, text):
        pixels = self._random.integers(0, 256, (64, 48, 3), dtype=np.uint8)
        return {"role": "user", "content": [{"type": "image", "image": pixels}, {"type": "text", "text": text}]}


class RecordingEngine(VLLMEngine):
    """Records the session of each request that it has answered, and sets `begun` at the first one."""

    def __init__(self, base_url):
        super().__init__(base_url, limits=HttpLimits(retries=1))
        self.answered = Counter()
        self.begun = asyncio.Event()

    async def generate(self, request):
        result = await super().generate(request)
        self.answered[request.session_id] += 1
        self.begun.set()
        return result


def tasks_for(addresses):
    """As many tasks for each server: the hash of a session depends on the port, which is random."""
    left = dict.fromkeys(addresses, EPISODES // len(addresses))
    for number in range(1000):
        preferred = ranked_members(f"task-{number}/0.0", addresses)[0]
        if left[preferred]:
            left[preferred] -= 1
            yield Task(f"task-{number}", number)


def largest_mismatch(directory, renderer, episodes):
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
    processors = renderer.processors
    samples = [
        sample
        for episode in episodes
        for sample in samples_from_trajectory(episode, advantage=1.0, processors=processors)
    ]
    batch = TrainingBatch.from_samples(samples, pad_id=0)
    with torch.inference_mode():
        recomputed = token_logprobs(model, batch)
    difference = (recomputed - batch.logprobs)[batch.loss_mask].abs()
    assert len(difference) > EPISODES * TURNS  # completions end at their length, or at a stop token
    return float(difference.max())


@pytest.mark.slow
async def test_a_killed_server_loses_its_episodes_to_the_other_which_is_not_disturbed(tiny_model_dir, renderer):
    async with AsyncExitStack() as stack:
        starts = [stack.enter_async_context(served_process(tiny_model_dir)) for _ in range(2)]
        (one, _), (other, process) = [await start for start in starts]
        engines = {url: RecordingEngine(url) for url in (one, other)}
        fleet = EngineFleet(engines, limits=FleetLimits(check_seconds=0.5))
        runner = Runner(
            Gallery,
            fleet,
            renderer,
            sampling=SamplingParams(max_tokens=TOKENS, extra={"ignore_eos": True}),
            limits=EpisodeLimits(max_turns=TURNS),
            mode=Asynchronous(1),
            tasks=list(tasks_for(list(engines))),
        )
        async with fleet, runner:
            collecting = asyncio.ensure_future(runner.collect(EPISODES))
            await asyncio.wait_for(engines[other].begun.wait(), SECONDS)
            process.kill()
            await process.wait()
            groups = await asyncio.wait_for(collecting, SECONDS)
            states = {member.name: str(member.state) for member in fleet.members}
    assert states == {one: "ready", other: "ejected"}
    episodes = [episode for group in groups for episode in group.episodes]
    assert [episode.error for episode in episodes] == [""] * EPISODES
    assert {episode.num_turns for episode in episodes} == {TURNS}
    # Every turn was answered once, and the sessions of the survivor have stayed with it.
    survivor, victim = engines[one].answered, engines[other].answered
    assert set((survivor + victim).values()) == {TURNS}
    assert sum(count == TURNS for count in survivor.values()) >= EPISODES // 2
    assert largest_mismatch(tiny_model_dir, renderer, episodes) < 1e-4
