"""A taskset of verifiers: which of three hues has an image? Its harness makes one call, in this process."""

import base64
import functools
import io

import httpx
import numpy as np
import verifiers.v1 as vf
from PIL import Image
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult

from rollouts import Task

HUES = ["red", "green", "blue"]
http = functools.cache(lambda: httpx.AsyncClient(timeout=600, limits=httpx.Limits(max_keepalive_connections=0)))


class HuesHarness(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT, EXECUTES_CODE, NEEDS_CONTAINER = True, False, False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        body = {"model": ctx.model, "messages": [message_to_wire(message) for message in data.prompt]}
        key = {"Authorization": f"Bearer {secret}"}
        answer = await http().post(f"{endpoint}/chat/completions", json=body, headers=key)
        return ProgramResult(int(answer.is_error), "", answer.text)


class HueData(vf.TaskData):
    answer: str


class HueTask(vf.Task[HueData, vf.State, vf.TaskConfig]):
    @vf.reward
    async def right(self, trace: vf.Trace) -> float:
        return float([message.content for message in trace.assistant_messages] == [self.data.answer])


class HuesTaskset(vf.Taskset[HueTask, vf.TasksetConfig]):
    def load(self):
        return (HueTask(HueData(prompt=question(seed), answer=HUES[seed % 3])) for seed in range(800))


def question(seed):
    rgb = np.random.default_rng(seed).integers(40, 180, 3)
    rgb[seed % 3] = rgb.max() + 30
    file = io.BytesIO()
    Image.fromarray(np.full((32, 32, 3), rgb, np.uint8)).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


def held_out():
    return [Task(f"{seed}", seed=seed) for seed in range(500, 800)]


def conversations():
    """Any of the words, so that the model knows them and not the hues."""
    for seed in range(2000, 2090):
        yield Task(f"{seed}", {"messages": [*question(seed), {"role": "assistant", "content": HUES[seed // 3 % 3]}]})


__all__ = ["HuesHarness", "HuesTaskset"]
