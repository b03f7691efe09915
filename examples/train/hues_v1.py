"""A taskset of verifiers: which of three hues has an image? `one_call_v1` is its harness."""

import base64
import io

import numpy as np
import verifiers.v1 as vf
from PIL import Image

from rollouts import Task

__all__ = ["HuesTaskset"]
HUES = ["red", "green", "blue"]
HELD_OUT = [Task(f"{seed}", seed=seed) for seed in range(500, 800)]


class HueTask(vf.Task):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float(trace.assistant_messages[-1].content == self.data.name)


class HuesTaskset(vf.Taskset):
    def load(self):
        return (HueTask(vf.TaskData(prompt=question(seed), name=HUES[seed % 3])) for seed in range(800))


def question(seed):
    rgb = np.random.default_rng(seed).integers(40, 180, 3)
    rgb[seed % 3] = rgb.max() + 30
    file = io.BytesIO()
    Image.fromarray(np.full((32, 32, 3), rgb, np.uint8)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def conversations():
    """Any of the words, so that the model knows them and not the hues."""
    for seed in range(2000, 2090):
        yield Task(f"{seed}", {"messages": [*question(seed), {"role": "assistant", "content": HUES[seed // 3 % 3]}]})
