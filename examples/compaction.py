"""An agent that summarises its history at a limit of tokens: the trajectory branches, and each branch is a sample.

    python examples/compaction.py

The agent talks to the gateway with the OpenAI client. After a summary it keeps the task and its plan, and replaces
everything later by the summary. The gateway finds the tokens that both histories begin with; they are stored once and
trained once. The model is tiny and has random weights, so its text is meaningless; tokens and log-probabilities are
exact.
"""

import asyncio
import base64
import io
import tempfile

import httpx
import openai
import torch
from PIL import Image
from starlette.applications import Starlette
from transformers import AutoModelForImageTextToText

from renderers import load_renderer
from rollouts import LocalEngine
from rollouts.serve.gateway.routes import Gateway
from rollouts.testing import tiny_qwen3_vl
from rollouts.training import TrainingBatch, mismatch_report, samples_from_trajectory, token_logprobs

LIMIT = 200  # tokens of a prompt and its completion; an agent takes what the context of its model leaves
ROOMS = {"red": (200, 30, 30), "green": (30, 160, 60), "blue": (40, 70, 210), "white": (250, 250, 250)}


def user(text, colour=None):
    """A message, with a square of a colour if one is given."""
    content = [{"type": "text", "text": text}]
    if colour is not None:
        file = io.BytesIO()
        Image.new("RGB", (32, 32), colour).save(file, "PNG")
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    return {"role": "user", "content": content}


class Agent:
    """Walks through rooms, of which it sees an image each, and names their colours at the end."""

    def __init__(self, client):
        self.client = client
        self.messages = []

    async def walk(self):
        await self.send(user("You will see four rooms. Plan how to remember their colours."))
        plan = list(self.messages)  # the task and the plan: every later history begins with them
        summary = ""
        for number, colour in enumerate(ROOMS.values(), 1):
            tokens = await self.send(user(f"{summary}Room {number}.", colour))
            summary = ""
            if tokens > LIMIT:
                text = await self.summarise()
                self.messages, summary = list(plan), f"You saw {number} rooms. Your summary: {text}\n"
        await self.send(user(f"{summary}Which colours did you see?"))
        return self.messages[-1]["content"]

    async def summarise(self):
        await self.send(user("Summarise what you have seen."))
        return self.messages[-1]["content"]

    async def send(self, message):
        """Append a message and the model's; return the number of tokens of both with the history."""
        self.messages.append(message)
        response = await self.client.chat.completions.create(
            model="policy", messages=self.messages, max_tokens=12, temperature=1.0, seed=len(self.messages)
        )
        self.messages.append({"role": "assistant", "content": response.choices[0].message.content})
        return response.usage.total_tokens


async def main(directory):
    renderer = load_renderer(directory)
    engine = LocalEngine.from_pretrained(directory)
    gateway = Gateway(engine, renderer, model="policy")
    session = "http://gateway/sessions/walk"
    # The routes are called in this process; `rollouts serve --model DIR` serves them to agents elsewhere.
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app=Starlette(routes=gateway.routes()))) as http:
        answer = await Agent(openai.AsyncOpenAI(base_url=f"{session}/v1", api_key="none", http_client=http)).walk()
        reward = sum(colour in answer for colour in ROOMS) / len(ROOMS)
        await http.post(f"{session}/reward", json={"reward": reward})
    trajectory = gateway.trajectory("walk")
    await gateway.close()
    await engine.close()

    samples = samples_from_trajectory(trajectory, advantage=1.0, processors=renderer.processors)
    branches = {leaf: trajectory.path(leaf) for leaf in trajectory.leaves()}
    for (leaf, nodes), sample in zip(branches.items(), samples, strict=True):
        print(
            f"branch of nodes {nodes}: {len(trajectory.to_messages(leaf))} messages, {len(trajectory.media(leaf))} "
            f"images, {len(sample.token_ids)} tokens, of which {int(sample.loss_mask.sum())} are trained"
        )
    shared = set.intersection(*map(set, branches.values()))
    print(f"nodes {sorted(shared)} are shared, and trained in the first branch only")

    batch = TrainingBatch.from_samples(samples, pad_id=0)
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        report = mismatch_report(batch, token_logprobs(model, batch))
    print(f"mismatch over {report.tokens} sampled tokens: {report.max_abs:.1e} nats")
    return trajectory, samples, report


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as model_directory:
        asyncio.run(main(tiny_qwen3_vl(model_directory)))
