"""A runner on a real server whose weights are replaced while episodes with images run.

The log-probabilities of every span of weight versions are those of transformers with the checkpoint of that version.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from gallery_runs import Gallery, mismatches, reference_model, samples_of
from make_checkpoint import make_checkpoint
from vllm_server import LONGEST_SECONDS

from renderers import load_renderer
from rollouts import SamplingParams, Trajectory
from rollouts.engines.vllm import VLLMEngine
from rollouts.errors import WeightUpdateError
from rollouts.runner import Asynchronous, EpisodeLimits, Group, Runner, Synchronous, Task

TURNS, TOKENS = 2, 800  # a turn takes seconds
GROUP_SIZE, NUM_TASKS = 2, 2
OLD, NEW = "default", "new"  # vLLM's name of the weights that it was started with
SAMPLING = SamplingParams(max_tokens=TOKENS, extra={"min_tokens": TOKENS})  # never a stop token before


@pytest.fixture
async def engine(vllm_server):
    async with VLLMEngine(vllm_server.base_url) as engine:
        await engine.capabilities()
        yield engine
        await engine.control.update_weights(vllm_server.model_dir, OLD)


@pytest.fixture
def new_directory(tmp_path):
    return make_checkpoint(tmp_path / "new", "float32", seed=21)


def runner_of(engine: VLLMEngine, server: Any, name: str, **options: Any) -> Runner:
    tasks = [Task(f"{name}-{number}", number) for number in range(NUM_TASKS)]
    return Runner(
        lambda task: Gallery(task, TURNS),
        engine,
        load_renderer(server.model_dir),
        sampling=SAMPLING,
        group_size=GROUP_SIZE,
        limits=EpisodeLimits(max_turns=TURNS),
        tasks=tasks,
        **options,
    )


async def collect_with_update(runner: Runner, server: Any, directory: Path, mode: Any) -> list[Group]:
    """All groups; the weights are replaced while all episodes are in their first turn."""
    before = await server.metrics()
    collecting = asyncio.ensure_future(runner.collect(NUM_TASKS))
    await server.until_generating(collecting, before, GROUP_SIZE * NUM_TASKS)
    await runner.update_weights(directory, NEW, mode)
    return await asyncio.wait_for(collecting, LONGEST_SECONDS)


def versions_of(episode: Trajectory) -> list[list[str]]:
    """The versions of the spans of each completion."""
    return [[span.version for span in node.weight_spans] for node in episode.nodes if node.weight_spans]


def models(server: Any, new_directory: Path) -> dict[str, Any]:
    return {OLD: reference_model(server.model_dir), NEW: reference_model(new_directory)}


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_each_span_of_versions_is_from_the_weights_that_it_names(engine, vllm_server, new_directory, mode):
    async with runner_of(engine, vllm_server, mode, mode=Asynchronous(1)) as runner:
        groups = await collect_with_update(runner, vllm_server, new_directory, mode)
    episodes = [episode for group in groups for episode in group.episodes]
    assert all(len(list(episode.all_media())) == TURNS for episode in episodes)

    completions = [versions for episode in episodes for versions in versions_of(episode)]
    if mode == "wait":
        assert all(versions in ([OLD], [NEW]) for versions in completions)
    else:
        assert [OLD, NEW] in completions
    assert [group.oldest_version for group in groups] == [OLD] * NUM_TASKS

    samples = samples_of(groups, vllm_server.model_dir, episodes=GROUP_SIZE * NUM_TASKS, turns=TURNS)
    by_version = models(vllm_server, new_directory)
    num_tokens = 0
    for version, model in by_version.items():
        found = mismatches(model, samples, version)
        assert found.max() < 1e-4
        num_tokens += len(found)
    assert num_tokens == TURNS * TOKENS * len(episodes)
    # The planted fault: the tokens of one version, recomputed with the weights of the other.
    assert mismatches(by_version[OLD], samples, NEW).max() > 0.1


async def test_a_synchronous_run_drops_what_an_update_made_too_old_and_frees_the_server(
    engine, vllm_server, new_directory
):
    async with runner_of(engine, vllm_server, "sync", mode=Synchronous()) as runner:
        assert await collect_with_update(runner, vllm_server, new_directory, "abort") == []
        assert runner.metrics()["groups_stale/drop"] == NUM_TASKS
        await vllm_server.until(lambda now: now.running == 0)


async def test_a_failed_update_leaves_the_old_weights_serving_and_says_why(engine, vllm_server, tmp_path):
    async with runner_of(engine, vllm_server, "failed", mode=Asynchronous(1)) as runner:
        before = await vllm_server.metrics()
        collecting = asyncio.ensure_future(runner.collect(NUM_TASKS))
        await vllm_server.until_generating(collecting, before)
        with pytest.raises(WeightUpdateError, match="Nothing was changed"):
            await runner.update_weights(tmp_path / "absent", NEW)
        groups = await asyncio.wait_for(collecting, LONGEST_SECONDS)
    episodes = [episode for group in groups for episode in group.episodes]
    assert [versions_of(episode) for episode in episodes] == [[[OLD]] * TURNS] * GROUP_SIZE * NUM_TASKS
