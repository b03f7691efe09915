"""A runner on a real model in process: weights replaced while episodes with images are sampled."""

import asyncio
import time

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText

from rollouts import SamplingParams, StepResult
from rollouts.engines.local import LocalEngine
from rollouts.runner import Asynchronous, Runner, Synchronous, Task
from rollouts.testing import tiny_qwen3_vl
from rollouts.training import TrainingBatch, samples_from_trajectory, token_logprobs

TOKENS = 12  # twice those after which `held_batch` holds the first batch


class Gallery:
    """Shows an image in each of two turns."""

    def __init__(self, task):
        self.random = np.random.default_rng(task.data)
        self.turn = 0

    def reset(self, seed):
        return [self.image()]

    def step(self, assistant):
        self.turn += 1
        return StepResult([self.image()], reward=1.0, done=self.turn == 2)

    def image(self):
        pixels = self.random.integers(0, 256, (48, 32, 3), dtype=np.uint8)
        return {"role": "user", "content": [{"type": "image", "image": pixels}, {"type": "text", "text": "Which?"}]}


@pytest.mark.parametrize(
    "mode", [pytest.param("abort", marks=pytest.mark.slow), pytest.param("wait", marks=pytest.mark.slow), "keep"]
)
async def test_each_span_of_versions_is_from_the_weights_that_it_names(
    tiny_model_dir, tmp_path, renderer, held_batch, mode
):
    directories = {"0": tiny_model_dir, "new": tiny_qwen3_vl(tmp_path / "new", seed=5)}
    engine = LocalEngine.from_pretrained(tiny_model_dir)
    reached, released = held_batch
    async with Runner(
        Gallery,
        engine,
        renderer,
        sampling=SamplingParams(max_tokens=TOKENS),
        group_size=2,
        mode=Asynchronous(1),
        tasks=[Task("first", 1), Task("second", 2)],
    ) as runner:
        collecting = asyncio.ensure_future(runner.collect(2))
        assert await asyncio.to_thread(reached.wait, 60)
        updating = asyncio.ensure_future(runner.update_weights(directories["new"], "new", mode))
        for _ in range(10):  # the call reaches the engine in these rounds of the event loop
            await asyncio.sleep(0)
        released.set()
        await updating
        groups = await collecting
    await engine.close()
    episodes = [episode for group in groups for episode in group.episodes]
    assert [episode.error for episode in episodes] == [""] * 4
    completions = [
        [span.version for span in node.weight_spans] for e in episodes for node in e.nodes if node.weight_spans
    ]
    assert (["0", "new"] in completions) == (mode != "wait")

    samples = [
        sample
        for episode in episodes
        for sample in samples_from_trajectory(episode, advantage=1.0, processors=renderer.processors)
    ]
    batch = TrainingBatch.from_samples(samples, pad_id=0)
    num_tokens = 0
    for version, directory in directories.items():
        model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32).eval()
        with torch.no_grad():
            recomputed = token_logprobs(model, batch).numpy()
        for row, sample in enumerate(samples):
            mask = sample.loss_mask
            differences = np.abs(recomputed[row, : len(mask)] - sample.logprobs)[mask]
            of_version = np.zeros(len(differences), bool)
            for span in sample.weight_spans:
                of_version[span.start : span.end] = span.version == version
            assert differences[of_version].max(initial=0.0) < 1e-4
            assert not (~of_version).any() or differences[~of_version].max() > 0.01, "the planted fault: other weights"
            num_tokens += of_version.sum()
    assert num_tokens == sum(int(sample.loss_mask.sum()) for sample in samples)


class Talk:
    """One turn for each letter of the task."""

    def __init__(self, task):
        self.left = len(task.data)

    def reset(self, seed):
        return [{"role": "user", "content": "Go on."}]

    def step(self, assistant):
        self.left -= 1
        return StepResult(self.reset(0), done=not self.left)


async def one_by_one(tasks):
    for task in tasks:
        yield task


@pytest.mark.parametrize(("concurrency", "group_size"), [(3, 2), (5, 4)])
async def test_what_is_in_a_batch_does_not_depend_on_how_long_rendering_takes(
    tiny_model_dir, renderer, monkeypatch, concurrency, group_size
):
    """There are fewer slots than episodes: a batch waits for the episodes that begin in those that are free again."""
    run, random, batches = LocalEngine._run, np.random.default_rng(0), []

    def slower(function):
        def call(*arguments, **options):
            time.sleep(random.choice([0, 0, 0.003]))
            return function(*arguments, **options)

        return call

    def recorded(engine, requests):
        batches[-1].append(sorted(each.request.request_id for each in requests))
        return run(engine, requests)

    for name in ("render", "bridge_to_next_turn", "parse_response"):
        monkeypatch.setattr(renderer, name, slower(getattr(renderer, name)))
    monkeypatch.setattr(LocalEngine, "_run", recorded)
    tasks = [Task(str(number), turns) for number, turns in enumerate(["a", "abcd", "abc", "ab"] * 2)]
    options = {"sampling": SamplingParams(max_tokens=1), "group_size": group_size, "mode": Synchronous()}
    for _ in range(6):
        batches.append([])
        async with (
            LocalEngine.from_pretrained(tiny_model_dir) as engine,
            Runner(Talk, engine, renderer, tasks=one_by_one(tasks), concurrency=concurrency, **options) as runner,
        ):
            await runner.collect(len(tasks))
    assert all(each == batches[0] for each in batches)
    assert sum(map(len, batches[0])) == 20 * group_size
