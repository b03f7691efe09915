"""`rollouts run` through a real vllm-router before two processes of `rollouts serve`: `kind = "router"`."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
from router_process import router_process
from served_process import SECONDS, served_process

from transport import read_records

pytest.importorskip("vllm_router")

TASKS, TURNS = 8, 6
CONFIG = """\
concurrency = 8
tasks = {{ kind = "import", source = "gallery_env:tasks" }}
environment = {{ kind = "import", factory = "gallery_env:Gallery", arguments = {{ policy = {policy} }} }}
renderer = {{ model = {model} }}
sampling = {{ max_tokens = 4 }}
output = {{ directory = {output} }}

[engine]
kind = "router"
base_url = {router}
urls = {urls}
"""
ENVIRONMENT = f"""\
import numpy as np

from rollouts import StepResult, Task

tasks = [Task(str(number), number) for number in range({TASKS})]


class Gallery:
    def __init__(self, task, policy):
        self.random = np.random.default_rng([task.data, len(policy)])  # images that the servers do not have yet
        self.turns = 0

    def reset(self, seed):
        return [self.image()]

    def step(self, assistant):
        self.turns += 1
        return StepResult([self.image()], reward=1.0, done=self.turns == {TURNS})

    def image(self):
        pixels = self.random.integers(0, 256, (64, 48, 3), dtype=np.uint8)
        return {{"role": "user", "content": [{{"type": "image", "image": pixels}}]}}
"""


async def run(directory: Path, config: str) -> str:
    """Run a configuration; what it prints on standard error."""
    (directory / "gallery_env.py").write_text(ENVIRONMENT)
    (directory / "run.toml").write_text(config)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from rollouts.cli.main import main; main()", "run", str(directory / "run.toml")),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"},
    )
    output, errors = await asyncio.wait_for(process.communicate(), SECONDS)
    assert process.returncode == 0, output.decode() + errors.decode()
    return errors.decode()


@pytest.mark.slow
async def test_a_run_through_a_router_says_when_the_router_does_not_keep_sessions(tiny_model_dir, tmp_path):
    async with AsyncExitStack() as stack:
        starts = [stack.enter_async_context(served_process(tiny_model_dir, "--name", "tiny")) for _ in range(2)]
        urls = [server.base_url for server in [await start for start in starts]]
        reports = {}
        for policy in ("consistent_hash", "round_robin"):
            output = tmp_path / policy
            async with router_process(urls, tmp_path / f"{policy}.log", policy) as router:
                values = {"model": tiny_model_dir, "output": output, "router": router, "policy": policy}
                texts = {name: json.dumps(str(value)) for name, value in values.items()}
                reports[policy] = await run(tmp_path, CONFIG.format(**texts, urls=json.dumps(urls)))
            episodes = [episode for group in read_records(output / "trajectories.mmr") for episode in group]
            assert [episode.error for episode in episodes] == [""] * TASKS
            assert {episode.num_turns for episode in episodes} == {TURNS}
    assert "X-Session-ID" not in reports["consistent_hash"]
    assert reports["round_robin"].count("does not keep sessions at one server") == 1
    assert "--policy consistent_hash" in reports["round_robin"]
