"""Plays rollouts of the taskset noise-images-v1 with verifiers' `TrainClient`; writes their traces as JSON.

Runs in an environment that has verifiers with PyPI's `renderers` or with this project, so it imports nothing else.
Arguments: base URL of the server, its model name, model directory, number of rollouts, file to write. The rollouts run
one after another, so that a server without other users samples the same tokens for the same prompts again.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import verifiers.v1 as vf
from verifiers.v1.configs.client import TrainClientConfig

from renderers import Qwen3VLRendererConfig

MAX_TOKENS = 12


async def play(base_url: str, model: str, directory: str, rollouts: int) -> list[dict]:
    env = vf.load_environment(
        vf.resolve_env_config({"taskset": {"id": "noise-images-v1"}, "agent": {"runtime": {"type": "subprocess"}}})
    )
    config = TrainClientConfig(
        base_url=f"{base_url}/v1",
        api_key_var="NO_API_KEY",
        renderer=Qwen3VLRendererConfig(),
        renderer_model_name=directory,
    )
    records = []
    async with env.serving():
        tasks = list(env.taskset)
        for number in range(rollouts):
            sampling = vf.SamplingConfig(seed=number, max_tokens=MAX_TOKENS, temperature=1.0)
            context = vf.ModelContext(model=model, client=config, sampling=sampling)
            episode = await env.run_episode(tasks[number % len(tasks)], context)
            records += [trace.to_record(float_decimals=None) for trace in episode.traces]
    return records


if __name__ == "__main__":
    played = asyncio.run(play(sys.argv[1], sys.argv[2], sys.argv[3], int(sys.argv[4])))
    Path(sys.argv[5]).write_text(json.dumps(played), encoding="utf-8")
