"""A real vLLM server in an actor of Ray: it starts, samples, is started again after a kill, and ends with its actor."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator

import pytest
from vllm_server import LONGEST_SECONDS, MODES

from rollouts import GenerateRequest, SamplingParams
from rollouts.engines.fleet import EngineFleet, FleetLimits

ray = pytest.importorskip("ray")


@pytest.fixture
def cluster(monkeypatch) -> Iterator[None]:
    from rollouts.ray import connect

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    connect()
    yield
    ray.shutdown()


def processes_of(model_dir) -> list[int]:
    """The processes of servers of this checkpoint, without those that supervise them."""
    listed = subprocess.run(
        ["pgrep", "-f", rf"^\S+ \S+/vllm serve {model_dir} "], capture_output=True, text=True, check=False
    )
    return [int(pid) for pid in listed.stdout.split()]


async def test_a_server_in_an_actor_samples_restarts_after_a_kill_and_ends_with_its_actor(
    cluster, checkpoints, vllm_venv, tmp_path
):
    from rollouts.ray import RayServers

    mode = MODES["float32"]
    command = [str(vllm_venv / "bin" / "vllm"), *mode.vllm_arguments(checkpoints["float32"], 0)]
    for option, value in (("--host", "{host}"), ("--port", "{port}")):
        command[command.index(option) + 1] = value
    environment = {**mode.environment(), "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    request = GenerateRequest([5, 6, 7], SamplingParams(max_tokens=8, temperature=0.0), session_id="one")
    limits = FleetLimits(check_seconds=1.0, wait_seconds=LONGEST_SECONDS)
    async with (
        RayServers(command, num_servers=1, environment=environment, name="vllm") as servers,
        await asyncio.to_thread(EngineFleet.from_ray, servers.names, limits=limits) as fleet,
    ):
        (first,) = (await fleet.generate(request)).completions
        killed = processes_of(checkpoints["float32"])
        for pid in killed:
            os.kill(pid, signal.SIGKILL)
        async with asyncio.timeout(LONGEST_SECONDS):
            while any(member.state == "ready" for member in fleet.members):
                await fleet.check()
        # It waits until the actor has started the server again, and goes to the new address.
        (second,) = (await asyncio.wait_for(fleet.generate(request), LONGEST_SECONDS)).completions
        started = processes_of(checkpoints["float32"])
    assert len(first.token_ids) == 8
    assert second.token_ids.tolist() == first.token_ids.tolist()
    assert killed
    assert started
    assert not set(killed) & set(started)
    assert processes_of(checkpoints["float32"]) == []
