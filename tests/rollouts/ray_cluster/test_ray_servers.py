"""Servers that actors start, and the fleet of their addresses, on a real Ray cluster."""

import asyncio
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from rollouts import GenerateRequest, SamplingParams
from rollouts.engines.fleet import EngineFleet
from rollouts.engines.fleet.servers import RayServerNames
from rollouts.errors import ArgumentError, RolloutsError
from rollouts.ray import RayServers

PROGRAM = Path(__file__).parent.parent / "vllm" / "fake_vllm_serve.py"
COMMAND = [sys.executable, str(PROGRAM), "{port}"]


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 100))


def server_processes() -> list[int]:
    listed = subprocess.run(["pgrep", "-f", str(PROGRAM)], capture_output=True, text=True, check=False).stdout
    return [int(pid) for pid in listed.split()]


def test_a_fleet_samples_from_the_servers_of_actors(cluster):
    async def main():
        async with RayServers(COMMAND, num_servers=2, name="sampled") as servers:
            fleet = await asyncio.to_thread(EngineFleet.from_ray, servers.names)
            async with fleet:
                request = GenerateRequest([1, 2, 3], SamplingParams(max_tokens=3), session_id="one")
                result = await fleet.generate(request)
                return result, len(fleet.members)

    result, count = run(main())
    assert len(result.completions) == 1
    assert count == 2
    assert server_processes() == []  # they ended with their actors


def test_a_server_that_was_killed_is_started_again_and_its_new_address_is_followed(cluster):
    async def main():
        async with RayServers(COMMAND, num_servers=1, name="killed") as servers:
            names = RayServerNames(servers.names, None)
            [before] = await asyncio.to_thread(names.read)
            assert before.startswith("http://127.0.0.1:")  # as the cluster, not at another address of the machine
            assert await asyncio.to_thread(names.read_if_changed) is None
            for pid in server_processes():
                os.kill(pid, signal.SIGKILL)
            changed = None
            while changed is None:
                changed = await asyncio.to_thread(names.read_if_changed)
            return before, changed

    before, changed = run(main())
    assert len(changed) == 1
    assert changed != [before]


def test_a_server_that_does_not_start_is_an_error_with_the_end_of_its_log(cluster):
    async def main():
        async with RayServers([*COMMAND, "3"], num_servers=1, name="broken"):
            pass

    with pytest.raises(RolloutsError, match="out of memory"):
        run(main())


def test_a_name_that_no_actor_has_is_an_error(cluster):
    with pytest.raises(RolloutsError, match="nobody"):
        EngineFleet.from_ray(["nobody"])


@pytest.mark.parametrize(
    ("command", "count", "match"),
    [("vllm serve", 1, "command"), (["vllm"], 1, "port"), (COMMAND, 0, "num_servers"), ([], 1, "command")],
)
def test_wrong_arguments_are_refused(command, count, match):
    with pytest.raises(ArgumentError, match=match):
        RayServers(command, num_servers=count)


def test_without_a_connection_a_fleet_of_ray_is_refused():
    import ray

    if ray.is_initialized():
        pytest.skip("this process is connected to the cluster of other tests")
    with pytest.raises(ArgumentError, match=r"rollouts.ray.connect\(\)"):
        EngineFleet.from_ray(["server-0"])
