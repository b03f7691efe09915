"""A runner on a real server whose weights are replaced while episodes with images run.

The log-probabilities of every span of weight versions are those of transformers with the checkpoint of that version.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest
from gallery_runs import Gallery, mismatches, reference_model, samples_of
from vllm_server import LONGEST_SECONDS

from renderers import load_renderer
from rollouts import SamplingParams, Trajectory
from rollouts.engines.vllm import VLLMEngine
from rollouts.runner import Asynchronous, EpisodeLimits, Group, Runner, Task

TURNS, TOKENS = 2, 800  # a turn takes seconds
GROUP_SIZE, NUM_TASKS = 2, 2
OLD, NEW = "default", "new"  # vLLM's name of the weights that it was started with
SAMPLING = SamplingParams(max_tokens=TOKENS, extra={"min_tokens": TOKENS})  # never a stop token before


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


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
@pytest.mark.usefixtures("restored")
async def test_each_span_of_versions_is_from_the_weights_that_it_names(engine, vllm_server, other, mode):
    async with runner_of(engine, vllm_server, mode, mode=Asynchronous(1)) as runner:
        groups = await collect_with_update(runner, vllm_server, other, mode)
    episodes = [episode for group in groups for episode in group.episodes]
    assert all(len(list(episode.all_media())) == TURNS for episode in episodes)

    completions = [versions for episode in episodes for versions in versions_of(episode)]
    if mode == "wait":
        assert all(versions in ([OLD], [NEW]) for versions in completions)
    else:
        assert [OLD, NEW] in completions
    assert [group.oldest_version for group in groups] == [OLD] * NUM_TASKS

    samples = samples_of(groups, vllm_server.model_dir, episodes=GROUP_SIZE * NUM_TASKS, turns=TURNS)
    by_version = {OLD: reference_model(vllm_server.model_dir), NEW: reference_model(other)}
    num_tokens = 0
    for version, model in by_version.items():
        found = mismatches(model, samples, version)
        assert found.max() < 1e-4
        num_tokens += len(found)
    assert num_tokens == TURNS * TOKENS * len(episodes)
    # The planted fault: the tokens of one version, recomputed with the weights of the other.
    assert mismatches(by_version[OLD], samples, NEW).max() > 0.1
