"""A taskset of verifiers: a user shows a new image of random pixels in each turn."""

import base64
import io
import random

import verifiers.v1 as vf
from colours_v1 import ColoursHarness
from PIL import Image

TURNS = 6
SIDE = 160
"""Pixels; a file of random pixels does not compress, so this is about 77 kB."""


def image_url(seed: str) -> str:
    file = io.BytesIO()
    Image.frombytes("RGB", (SIDE, SIDE), random.Random(seed).randbytes(3 * SIDE * SIDE)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"


class NoiseData(vf.TaskData):
    # Read by the harness.
    tool: bool = False
    forgets: bool = False
    asks: int = 1


class NoiseTask(vf.Task[NoiseData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def answered(self, trace: vf.Trace) -> float:
        return len(trace.assistant_messages) / TURNS


class NoiseEnv(vf.SingleAgentEnv):
    async def run(self, task, agents):
        async with agents.agent.interaction(task) as interaction:
            for turn in range(TURNS):
                url = image_url(f"task {task.data.idx}, turn {turn}")
                parts = [
                    {"type": "image_url", "image_url": {"url": url}},
                    {"type": "text", "text": f"Image {turn}: what do you see?"},
                ]
                if (await interaction.turn([{"role": "user", "content": parts}])).terminated:
                    break


class NoiseTaskset(vf.Taskset[NoiseTask, vf.TasksetConfig]):
    def load(self):
        for number in range(4):
            yield NoiseTask(NoiseData(idx=number, prompt=None, system_prompt="Describe the image."))


__all__ = ["ColoursHarness", "NoiseEnv", "NoiseTaskset"]
