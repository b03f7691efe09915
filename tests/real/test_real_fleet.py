"""Two real servers as one engine: one is killed, and the weights are replaced, while episodes with images run."""

import asyncio
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import pytest
from gallery_runs import Gallery, mismatches, reference_model, samples_of
from make_checkpoint import make_checkpoint
from vllm_server import LONGEST_SECONDS, VLLMServer

from renderers import load_renderer
from rollouts import SamplingParams
from rollouts.engines.fleet import EngineFleet, FleetLimits
from rollouts.engines.fleet.routing import ranked_members
from rollouts.engines.protocol import GenerateRequest, GenerateResult, TokenListener
from rollouts.engines.vllm import HttpLimits, VLLMEngine
from rollouts.runner import Asynchronous, EpisodeLimits, Runner, Task

EPISODES, TURNS, TOKENS = 8, 2, 600
OLD, NEW = "default", "new"  # vLLM's name of the weights that it was started with
SAMPLING = SamplingParams(max_tokens=TOKENS, extra={"min_tokens": TOKENS})  # never a stop token before
LIMITS = FleetLimits(check_seconds=0.5)


class RecordingEngine(VLLMEngine):
    """Records the session of each request that it has answered."""

    def __init__(self, base_url: str) -> None:
        super().__init__(base_url, limits=HttpLimits(retries=1))
        self.answered: list[str | None] = []

    async def generate(self, request: GenerateRequest, listen: TokenListener | None = None) -> GenerateResult:
        result = await super().generate(request)
        self.answered.append(request.session_id)
        return result


@pytest.fixture(scope="module")
def second_server(vllm_server, vllm_venv, tmp_path_factory) -> Iterator[VLLMServer]:
    vllm_server.restartable()
    server = VLLMServer.start(vllm_venv, vllm_server.model_dir, "float32", tmp_path_factory.mktemp("second"))
    yield server
    server.stop()


def tasks_for(servers: list[VLLMServer], name: str) -> list[Task]:
    """As many tasks for each server: the hash of a session depends on the port of the server, which is random."""
    addresses = [server.base_url for server in servers]
    left = dict.fromkeys(addresses, EPISODES // len(servers))
    tasks: list[Task] = []
    for number in range(1000):
        preferred = ranked_members(f"{name}-{number}/0.0", addresses)[0]
        if left[preferred]:
            left[preferred] -= 1
            tasks.append(Task(f"{name}-{number}", number))
    return tasks


def runner_of(fleet: EngineFleet, servers: list[VLLMServer], name: str) -> Runner:
    return Runner(
        lambda task: Gallery(task, TURNS),
        fleet,
        load_renderer(servers[0].model_dir),
        sampling=SAMPLING,
        limits=EpisodeLimits(max_turns=TURNS),
        mode=Asynchronous(1),
        tasks=tasks_for(servers, name),
    )


async def both_generating(servers: list[VLLMServer], collecting: asyncio.Future[Any]) -> None:
    at_each = EPISODES // len(servers)
    await asyncio.gather(*(server.until(lambda now: now.running == at_each, during=collecting) for server in servers))


async def test_new_weights_reach_both_servers_while_episodes_run(vllm_server, second_server, tmp_path):
    directory = make_checkpoint(tmp_path / "new", "float32", seed=21)
    servers = [vllm_server, second_server]
    engines = {server.base_url: RecordingEngine(server.base_url) for server in servers}
    async with EngineFleet(engines, limits=LIMITS) as fleet, runner_of(fleet, servers, "update") as runner:
        collecting = asyncio.ensure_future(runner.collect(EPISODES))
        await both_generating(servers, collecting)
        await runner.update_weights(directory, NEW, "abort")
        groups = await asyncio.wait_for(collecting, LONGEST_SECONDS)
        await fleet.control.update_weights(vllm_server.model_dir, OLD)
    samples = samples_of(groups, vllm_server.model_dir, episodes=EPISODES, turns=TURNS)
    for version, checkpoint in ((OLD, vllm_server.model_dir), (NEW, directory)):
        found = mismatches(reference_model(checkpoint), samples, version)
        assert found.size
        assert found.max() < 1e-4
    assert all(engine.answered for engine in engines.values())


async def test_a_killed_server_loses_its_episodes_to_the_other_which_is_not_disturbed(vllm_server, second_server):
    servers = [vllm_server, second_server]
    engines = {server.base_url: RecordingEngine(server.base_url) for server in servers}
    survivor, victim = vllm_server.base_url, second_server.base_url
    async with EngineFleet(engines, limits=LIMITS) as fleet, runner_of(fleet, servers, "kill") as runner:
        collecting = asyncio.ensure_future(runner.collect(EPISODES))
        await both_generating(servers, collecting)
        second_server.kill()
        groups = await asyncio.wait_for(collecting, LONGEST_SECONDS)
        states = {member.name: str(member.state) for member in fleet.members}
    assert states == {survivor: "ready", victim: "ejected"}

    # Every turn was answered once, and the sessions of the survivor have stayed with it.
    answered = defaultdict(int)
    for engine in engines.values():
        for session in engine.answered:
            answered[session] += 1
    assert set(answered.values()) == {TURNS}
    of_survivor = [session for session, turns in answered.items() if engines[survivor].answered.count(session) == turns]
    assert len(of_survivor) >= EPISODES // 2

    samples = samples_of(groups, vllm_server.model_dir, episodes=EPISODES, turns=TURNS)
    found = mismatches(reference_model(vllm_server.model_dir), samples, OLD)
    assert found.size == EPISODES * TURNS * TOKENS
    assert found.max() < 1e-4
