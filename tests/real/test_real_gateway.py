"""The gateway in front of a real server: what an OpenAI client samples has the log-probabilities of transformers."""

import asyncio
import dataclasses
from contextlib import asynccontextmanager

import numpy as np
import openai
import torch
import uvicorn
from images import png_url
from starlette.applications import Starlette
from transformers import AutoModelForImageTextToText

from renderers import load_renderer
from rollouts.engines.vllm import VLLMEngine
from rollouts.serve.gateway.routes import Gateway
from rollouts.training import TrainingBatch, mismatch_report, samples_from_trajectory, token_logprobs

SESSIONS, TURNS = 8, 4


def image_part(random):
    height, width = (int(side) for side in random.integers(20, 120, 2))
    url = png_url(random.integers(0, 256, (height, width, 3), dtype=np.uint8))
    return {"type": "image_url", "image_url": {"url": url}}


async def play(client, number):
    """A conversation with images that drops nothing of what it receives, and samples its last turn twice."""
    random = np.random.default_rng(number)
    headers = {"X-Session-ID": f"s{number}"}
    messages = [{"role": "system", "content": f"You are critic {number}."}]
    for turn in range(TURNS):
        parts = [image_part(random) for _ in range(turn % 3)]
        messages.append({"role": "user", "content": [*parts, {"type": "text", "text": f"What is it? é 🙂 {turn}"}]})
        response = await client.chat.completions.create(
            model="policy", messages=messages, max_tokens=12, seed=turn, n=1 + turn // 3, extra_headers=headers
        )
        messages.append(response.choices[0].message)


def config(gateway):
    """Idle connections stay open: one that the server closes as the client uses it again would fail the request."""
    return uvicorn.Config(Starlette(routes=gateway.routes()), port=0, log_level="warning", timeout_keep_alive=600)


@asynccontextmanager
async def served(gateway):
    """A client of the gateway behind a real server."""
    server = uvicorn.Server(config(gateway))
    serving = asyncio.create_task(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    port = server.servers[0].sockets[0].getsockname()[1]
    async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        yield client
    server.should_exit = True
    await serving
    await gateway.close()


async def test_log_probabilities_of_chats_with_images_are_those_of_transformers(vllm_server):
    renderer = load_renderer(vllm_server.model_dir)
    async with VLLMEngine(vllm_server.base_url) as engine:
        gateway = Gateway(engine, renderer)
        async with served(gateway) as client:
            await asyncio.gather(*(play(client, number) for number in range(SESSIONS)))
        trajectories = [gateway.trajectory(f"s{number}") for number in range(SESSIONS)]
    model = AutoModelForImageTextToText.from_pretrained(vllm_server.model_dir, dtype=torch.float32)
    worst, tokens = 0.0, 0
    for trajectory in trajectories:
        assert (trajectory.num_turns, trajectory.forks) == (TURNS + 1, 1)
        assert len(trajectory.leaves()) == 2
        assert len(list(trajectory.all_media())) == 3
        samples = samples_from_trajectory(trajectory, advantage=1.0, processors=renderer.processors)
        batch = TrainingBatch.from_samples(samples, pad_id=0)
        with torch.no_grad():
            report = mismatch_report(batch, token_logprobs(model, batch))
        worst, tokens = max(worst, report.max_abs), tokens + report.tokens
    assert tokens > SESSIONS * TURNS * 4
    assert worst < 1e-4


class CountingEngine(VLLMEngine):
    """Keeps how many tokens each streamed request has sampled: 3,000 or more, which take seconds."""

    sampled = ()

    async def generate(self, request, listen=None):
        sampling = dataclasses.replace(request.sampling, extra={**request.sampling.extra, "min_tokens": 3000})
        result = await super().generate(dataclasses.replace(request, sampling=sampling), listen)
        self.sampled = (*self.sampled, *(len(completion.token_ids) for completion in result.completions))
        return result


async def test_a_live_stream_ends_at_its_stop_string_and_so_does_the_server(vllm_server):
    renderer = load_renderer(vllm_server.model_dir)
    async with CountingEngine(vllm_server.base_url) as engine:
        gateway = Gateway(engine, renderer)
        options = {"model": "policy", "messages": [{"role": "user", "content": "Which?"}], "max_tokens": 3500}
        async with served(gateway) as client:
            for seed in range(100):  # until a completion has enough text
                pieces, session = [], {"X-Session-ID": f"s{seed}"}
                sent = {**options, "seed": seed, "extra_headers": session, "stream": True}
                async for chunk in await client.chat.completions.create(**sent):
                    pieces += [choice.delta.content for choice in chunk.choices if choice.delta.content]
                text = "".join(pieces)
                if len(text) > 10:
                    break
            stopped = []
            stop = text[8:10]
            async for chunk in await client.chat.completions.create(**sent, stop=[stop]):
                stopped += [choice.delta.content for choice in chunk.choices if choice.delta.content]
        trajectory = gateway.trajectory(session["X-Session-ID"])
    whole, cut = (trajectory.nodes[turn.node].token_ids.tolist() for turn in trajectory.turns)
    assert len(pieces) > 5
    assert "".join(stopped) == text.partition(stop)[0]
    assert cut == whole[: len(cut)]
    assert len(cut) <= engine.sampled[-1] < len(whole)
