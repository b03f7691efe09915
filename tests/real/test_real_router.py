"""A real vllm-router before two real servers: sessions stay, images are sent once, new weights reach both."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest
from gallery_runs import Gallery, mismatches, reference_model, samples_of
from make_checkpoint import make_checkpoint
from router_process import router_process
from vllm_server import GENERATED, LONGEST_SECONDS, VLLMServer

from renderers import load_renderer
from rollouts import SamplingParams
from rollouts.engines.fleet import RoutedEngine
from rollouts.engines.protocol import GenerateRequest
from rollouts.runner import Asynchronous, EpisodeLimits, Runner, Task

pytest.importorskip("vllm_router")

EPISODES, TURNS, TOKENS = 8, 3, 100
OLD, NEW = "default", "new"  # vLLM's name of the weights that it was started with


@pytest.fixture(scope="module")
def second_server(vllm_server, vllm_venv, tmp_path_factory) -> Iterator[VLLMServer]:
    vllm_server.restartable()
    server = VLLMServer.start(vllm_venv, vllm_server.model_dir, "float32", tmp_path_factory.mktemp("second"))
    yield server
    server.stop()


async def tasks_for(engine: RoutedEngine, servers: list[VLLMServer], name: str, images: int) -> list[Task]:
    """As many tasks for each server: where the router sends a session depends on the servers' random ports."""
    left = [EPISODES // 2 // len(servers)] * len(servers)
    tasks: list[Task] = []
    for number in range(100):
        task = Task(f"{name}-{number}", images + number)
        chosen = await server_of(engine, servers, f"{task.task_id}/0.0")
        if left[chosen]:
            left[chosen] -= 1
            tasks.append(task)
        if not any(left):
            return tasks
    raise AssertionError(f"of 100 sessions, the router has sent too few to one server: {left} are left")


async def server_of(engine: RoutedEngine, servers: list[VLLMServer], session: str) -> int:
    """The index of the server to which the router sends a session: the one that generates its one token."""
    before = [(await server.metrics()).total(GENERATED) for server in servers]
    await engine.generate(GenerateRequest([5, 6], SamplingParams(max_tokens=1), session_id=session))
    async with asyncio.timeout(LONGEST_SECONDS):
        while True:  # a server may count the token after it has sent it
            for index, server in enumerate(servers):
                if (await server.metrics()).total(GENERATED) > before[index]:
                    return index


async def test_episodes_with_images_run_through_a_router_while_both_servers_get_new_weights(
    vllm_server, second_server, tmp_path
):
    directory = make_checkpoint(tmp_path / "new", "float32", seed=21)
    servers = [vllm_server, second_server]
    urls = [server.base_url for server in servers]
    async with router_process(urls, tmp_path / "router.log") as router, RoutedEngine(router, urls) as engine:
        first = await tasks_for(engine, servers, "routed", 8100)
        later = await tasks_for(engine, servers, "later", 8200)
        before = [await server.metrics() for server in servers]
        runner = Runner(
            lambda task: Gallery(task, TURNS),
            engine,
            load_renderer(vllm_server.model_dir),
            sampling=SamplingParams(max_tokens=TOKENS, extra={"min_tokens": TOKENS}),
            limits=EpisodeLimits(max_turns=TURNS),
            mode=Asynchronous(1),
            tasks=first,
        )
        async with runner:
            groups = await asyncio.wait_for(runner.collect(EPISODES // 2), LONGEST_SECONDS)
            counts = engine.media_cache_counts
            await runner.update_weights(directory, NEW, "wait")
            groups += [group async for group in runner.stream(later)]
            versions = await engine.control.weight_version()
        assert engine.lost_sessions == 0
        await engine.update_weights(vllm_server.model_dir, OLD)
    after = [await server.metrics() for server in servers]
    assert versions == dict.fromkeys(urls, NEW)
    assert all(now.total(GENERATED) > then.total(GENERATED) for then, now in zip(before, after, strict=True))
    assert counts.included_items >= EPISODES // 2 * TURNS
    assert counts.omitted_items  # a later turn names the images of the earlier ones
    samples = samples_of(groups, vllm_server.model_dir, episodes=EPISODES, turns=TURNS)
    for version, checkpoint in ((OLD, vllm_server.model_dir), (NEW, directory)):
        found = mismatches(reference_model(checkpoint), samples, version)
        assert found.size
        assert found.max() < 1e-4
