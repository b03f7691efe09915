"""Training on recorded episodes: record files, read by the workers of a torch DataLoader.

    python examples/offline_dataset.py [--quick]

Writes episodes of a tiny model to record files, as a run of rollouts would; then streams them: each worker reads files
of its own, computes the pixels of their images, and returns batches with one advantage for each episode.
"""

import argparse
import asyncio
import tempfile
from functools import cached_property
from pathlib import Path

import torch
from torch.utils.data import DataLoader
from transformers import AutoModelForImageTextToText

from renderers import load_renderer
from rollouts import LocalEngine, Runner, SamplingParams
from rollouts.demo.digits import ReadDigit, tasks
from rollouts.episodes.limits import EpisodeLimits
from rollouts.testing import tiny_qwen3_vl
from rollouts.training import TrainingBatch, policy_gradient_loss, token_logprobs
from rollouts.training.adapters import record_dataset, sample_from_row
from transport import RecordWriter


def record_episodes(directory, files, episodes):
    """Write `episodes` episodes to each of `files` record files; return the paths."""
    paths = [Path(directory) / f"episodes-{number}.mmr" for number in range(files)]

    async def play():
        engine = LocalEngine.from_pretrained(directory)
        sampling, limits = SamplingParams(max_tokens=4), EpisodeLimits(max_turns=2)
        async with Runner(ReadDigit, engine, load_renderer(directory), sampling=sampling, limits=limits) as runner:
            for number, path in enumerate(paths):
                with RecordWriter(path) as out:
                    async for group in runner.stream(tasks()[number * episodes : (number + 1) * episodes]):
                        out.append(group.episodes[0])
        await engine.close()

    asyncio.run(play())
    return paths


def advantage(trajectory):
    """The weight of an episode's tokens. None would leave the episode out; here a failed one."""
    return None if trajectory.error else trajectory.reward - 0.1


class Collate:
    """Rows of the dataset to a `TrainingBatch`; each worker loads a renderer of its own when it needs one."""

    def __init__(self, model_directory, pad_id):
        self.model_directory = model_directory
        self.pad_id = pad_id

    @cached_property
    def renderer(self):
        return load_renderer(self.model_directory)

    def __call__(self, rows):
        samples = [sample_from_row(row, self.renderer.processors) for row in rows]
        return TrainingBatch.from_samples(samples, pad_id=self.pad_id)


def train(directory, paths, workers):
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = DataLoader(
        record_dataset(paths, advantage=advantage).shuffle(seed=0, buffer_size=256),
        batch_size=16,
        num_workers=workers,
        collate_fn=Collate(directory, model.config.text_config.pad_token_id),
    )
    names = []
    for step, batch in enumerate(loader):
        logprobs = token_logprobs(model, batch)
        outcome = policy_gradient_loss(logprobs, batch.logprobs, batch.advantages, batch.loss_mask)
        outcome.loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        names += [sample.name for sample in batch.samples]
        tokens = int(batch.loss_mask.sum())
        print(f"batch {step}: {len(batch)} samples, {tokens} trained tokens, loss {outcome.loss.item():+.4f}")
    return names


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="few episodes")
    parser.add_argument("--workers", type=int, default=2, help="processes of the DataLoader")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as directory:
        tiny_qwen3_vl(directory)
        paths = record_episodes(directory, files=4, episodes=8 if options.quick else 64)
        return train(directory, paths, options.workers)


if __name__ == "__main__":
    main()
