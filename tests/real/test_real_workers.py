"""`rollouts run --workers` with two processes of `rollouts worker`, which sample from a real server."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from gallery_runs import mismatches, reference_model, samples_of_episodes
from reserved_ports import reserved_address
from vllm_server import LONGEST_SECONDS

from transport import read_records

EPISODES, TURNS, TOKENS = 8, 2, 50
CONFIG = """\
concurrency = 4
tasks = {{ kind = "import", source = "shown_images:tasks" }}
environment = {{ kind = "import", factory = "shown_images:HeldGallery", arguments = {{ turns = {turns} }} }}
engine = {{ kind = "vllm", base_url = {base_url} }}
renderer = {{ model = {model} }}
sampling = {{ max_tokens = {tokens}, extra = {{ min_tokens = {tokens} }} }}
output = {{ directory = "out" }}
"""
#: No episode begins before both workers have connected: they start at different times, and the run may be short.
TASKS = f"""\
import asyncio
from pathlib import Path

from gallery_runs import Gallery
from rollouts.runner import Task

tasks = [Task(f"worked-{{number}}", 8200 + number) for number in range({EPISODES})]


class HeldGallery(Gallery):
    async def reset(self, seed):
        while not Path("both-connected").exists():
            await asyncio.sleep(0.05)
        return super().reset(seed)
"""


async def start(directory: Path, *arguments: str) -> asyncio.subprocess.Process:
    """Start the command `rollouts` in a directory; its modules and those of these tests can be imported."""
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", "from rollouts.cli.main import main; main()", *arguments),
        cwd=directory,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))},
    )


async def output_of(process: asyncio.subprocess.Process, connected: asyncio.Event) -> str:
    """What a process prints until it ends; `connected` is set when a worker has connected or ended."""
    assert process.stdout is not None
    lines = []
    async for line in process.stdout:
        lines.append(line.decode())
        if "connected to the orchestrator" in lines[-1]:
            connected.set()
    connected.set()
    await process.wait()
    return "".join(lines)


async def test_episodes_of_worker_processes_have_the_log_probabilities_of_transformers(vllm_server, tmp_path):
    (tmp_path / "shown_images.py").write_text(TASKS)
    values = {"base_url": json.dumps(vllm_server.base_url), "model": json.dumps(str(vllm_server.model_dir))}
    (tmp_path / "run.toml").write_text(CONFIG.format(turns=TURNS, tokens=TOKENS, **values))
    address = reserved_address()
    processes = [await start(tmp_path, "run", "--workers", address, "run.toml")]
    processes += [
        await start(tmp_path, "worker", "--connect", address, "--slots", "4", "--name", name, "run.toml")
        for name in ("one", "two")
    ]
    try:
        connected = [asyncio.Event() for _ in processes]
        printing = asyncio.gather(*map(output_of, processes, connected))
        async with asyncio.timeout(LONGEST_SECONDS):
            await asyncio.gather(*(worker.wait() for worker in connected[1:]))
            (tmp_path / "both-connected").touch()
            printed = await printing
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
