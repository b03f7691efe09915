"""An agent that knows only the OpenAI client, recorded as exact trajectories and compared with the trainer's model.

    python examples/openai_client_agent.py
    python examples/openai_client_agent.py --base-url http://127.0.0.1:8000/v1

The first form serves a tiny model from this process. The second plays the agent against a server that runs already,
`rollouts serve --model DIR --any-model`, and prints what the server has recorded.
"""

import argparse
import asyncio
import base64
import io
import json
import tempfile
from contextlib import asynccontextmanager

import openai
import torch
import uvicorn
from PIL import Image
from starlette.applications import Starlette
from transformers import AutoModelForImageTextToText

from renderers import load_renderer
from rollouts import LocalEngine
from rollouts.serve.gateway.routes import Gateway
from rollouts.serve.server import base_url, bound_socket
from rollouts.testing import tiny_qwen3_vl
from rollouts.training import TrainingBatch, mismatch_report, samples_from_trajectory, token_logprobs

COLOURS = {"left": (200, 30, 30), "right": (40, 70, 210)}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look at one side.",
            "parameters": {"type": "object", "properties": {"side": {"enum": ["left", "right"]}}},
        },
    }
]


def picture(colour):
    """A square as a part of a message."""
    file = io.BytesIO()
    Image.new("RGB", (32, 32), colour).save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


async def agent(client, task, seed, max_turns=3):
    """Play one task: it knows messages, and nothing of tokens. Returns the last answer."""
    messages = [{"role": "user", "content": f"{task} Answer after you have looked."}]
    for _ in range(max_turns):
        response = await client.chat.completions.create(
            model="policy", messages=messages, tools=TOOLS, max_tokens=16, seed=seed
        )
        message = response.choices[0].message
        messages.append(message)
        for call in message.tool_calls or ():
            side = json.loads(call.function.arguments).get("side", "left")
            content = [picture(COLOURS.get(side, COLOURS["left"]))]
            messages.append({"role": "tool", "tool_call_id": call.id, "content": content})
        if not message.tool_calls:
            messages.append({"role": "user", "content": [picture(COLOURS["left"]), {"type": "text", "text": "Now?"}]})
    return message.content


async def play(root, episodes):
    """Play episodes at the same time, each in a session of its own, and reward them. Returns the ids of sessions."""
    sessions = [f"episode-{number}" for number in range(episodes)]

    async def episode(seed, session):
        # The session is in the base URL, for agents that let their users choose nothing else.
        async with openai.AsyncOpenAI(base_url=f"{root}/sessions/{session}/v1", api_key="none") as client:
            answer = await agent(client, "Which colour is on the left?", seed)
        async with openai.AsyncOpenAI(base_url=f"{root}/sessions/{session}", api_key="none") as client:
            await client.post("/reward", body={"reward": float("red" in (answer or ""))}, cast_to=object)

    await asyncio.gather(*(episode(*each) for each in enumerate(sessions)))
    return sessions


@asynccontextmanager
async def serving(gateway):
    """Serve a gateway from this process; `rollouts serve` does so from a process of its own."""
    listener = bound_socket("127.0.0.1", 0)
    listener.listen()
    server = uvicorn.Server(uvicorn.Config(Starlette(routes=gateway.routes()), log_level="warning"))
    task = asyncio.create_task(server.serve(sockets=[listener]))
    yield base_url(listener)
    server.should_exit = True
    await task
    await gateway.close()


async def main(directory, episodes=4):
    renderer = load_renderer(directory)
    engine = LocalEngine.from_pretrained(directory)
    gateway = Gateway(engine, renderer, model="policy")
    async with serving(gateway) as root:
        sessions = await play(root, episodes)
        trajectories = [gateway.trajectory(session) for session in sessions]
    await engine.close()

    samples = [
        sample
        for trajectory in trajectories
        for sample in samples_from_trajectory(trajectory, advantage=1.0, processors=renderer.processors)
    ]
    batch = TrainingBatch.from_samples(samples, pad_id=0)
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        report = mismatch_report(batch, token_logprobs(model, batch))
    print(f"{len(trajectories)} episodes, {sum(trajectory.num_turns for trajectory in trajectories)} turns")
    print(f"mismatch over {report.tokens} sampled tokens: {report.max_abs:.1e} nats")
    return trajectories, report


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base-url", metavar="URL", help="the /v1 of a running server")
    running = parser.parse_args().base_url
    if running is not None:
        print("sessions:", *asyncio.run(play(running.removesuffix("/v1"), 4)))
    else:
        with tempfile.TemporaryDirectory() as model_directory:
            asyncio.run(main(tiny_qwen3_vl(model_directory)))
