"""`rollouts run --workers` with two processes of `rollouts worker`, which sample from a real server."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from pathlib import Path

from gallery_runs import mismatches, reference_model, samples_of_episodes
from vllm_server import LONGEST_SECONDS

from transport import read_records

EPISODES, TURNS, TOKENS = 8, 2, 50
CONFIG = """\
concurrency = 4
tasks = {{ kind = "import", source = "shown_images:tasks" }}
environment = {{ kind = "import", factory = "gallery_runs:Gallery", arguments = {{ turns = {turns} }} }}
engine = {{ kind = "vllm", base_url = {base_url} }}
renderer = {{ model = {model} }}
sampling = {{ max_tokens = {tokens}, extra = {{ min_tokens = {tokens} }} }}
output = {{ directory = "out" }}
"""
TASKS = f"""\
from rollouts.runner import Task

tasks = [Task(f"worked-{{number}}", 8200 + number) for number in range({EPISODES})]
"""


def free_address() -> str:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{listener.getsockname()[1]}"


async def start(directory: Path, *arguments: str) -> asyncio.subprocess.Process:
    """Start the command `rollouts` in a directory; its modules and those of these tests can be imported."""
    paths = [str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from rollouts.cli.main import main; main()", *arguments),
        cwd=directory,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )


async def test_episodes_of_worker_processes_have_the_log_probabilities_of_transformers(vllm_server, tmp_path):
    (tmp_path / "shown_images.py").write_text(TASKS)
    values = {"base_url": json.dumps(vllm_server.base_url), "model": json.dumps(str(vllm_server.model_dir))}
    (tmp_path / "run.toml").write_text(CONFIG.format(turns=TURNS, tokens=TOKENS, **values))
    address = free_address()
    processes = [await start(tmp_path, "run", "--workers", address, "run.toml")]
    processes += [
        await start(tmp_path, "worker", "--connect", address, "--slots", "4", "--name", name, "run.toml")
        for name in ("one", "two")
    ]
    try:
        ended = asyncio.gather(*(process.communicate() for process in processes))
        printed = [output.decode() for output, _ in await asyncio.wait_for(ended, LONGEST_SECONDS)]
    finally:
        for process in processes:
            if process.returncode is None:
                process.kill()
                await process.wait()
    assert [process.returncode for process in processes] == [0, 0, 0], "\n".join(printed)

    episodes = [episode for group in read_records(tmp_path / "out" / "trajectories.mmr") for episode in group]
    samples = samples_of_episodes(episodes, vllm_server.model_dir, episodes=EPISODES, turns=TURNS)
    found = mismatches(reference_model(vllm_server.model_dir), samples, "default")
    assert found.size == EPISODES * TURNS * TOKENS
    assert found.max() < 1e-4
