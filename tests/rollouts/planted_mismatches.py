"""Episodes whose sampler has a planted fault, and the samples that a trainer makes of them."""

import asyncio
from dataclasses import replace

import numpy as np
import torch

from renderers import MultiModalData
from renderers.vision.patches import normalised
from rollouts import EpisodeSpec, LocalEngine, SamplingParams, StepResult, run_episodes
from rollouts.engines.local.batch import RowSampler
from rollouts.engines.protocol import Engine
from rollouts.training import TrainingBatch, samples_from_trajectory, token_logprobs

TOKENS_PER_TURN = 12


class ImagesInSomeEpisodes:
    """Two turns. Of three seeds, one has no image, one has an image in the first turn, one has an image in both."""

    def reset(self, seed):
        self.seed = seed
        return [user(f"Task {seed}?", [random_image(seed)] * bool(seed % 3))]

    def step(self, assistant):
        return StepResult([user("Again?", [random_image(seed + 1000) for seed in [self.seed] if seed % 3 == 2])])


def random_image(seed, side=32):
    return np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)


def user(text, images=()):
    return {
        "role": "user",
        "content": [*({"type": "image", "image": i} for i in images), {"type": "text", "text": text}],
    }


class FaultyEngine(Engine):
    """An engine that changes each request before it samples."""

    def __init__(self, engine, change):
        self.engine, self.change = engine, change
        self.expecting_request = engine.expecting_request

    async def generate(self, request, listen=None):
        return await self.engine.generate(self.change(request))

    async def close(self):
        await self.engine.close()


def sampled(
    model,
    renderer,
    *,
    request=lambda request: request,
    seeds=range(18),
    environment=ImagesInSomeEpisodes,
    **options,
):
    """The samples of one episode a seed, sampled by `model` with the fault in requests."""
    engine = FaultyEngine(LocalEngine(model), request)

    async def run():
        specs = [EpisodeSpec(seed, sampling_seed=seed, episode_id=f"e{seed}") for seed in seeds]
        sampling = SamplingParams(max_tokens=TOKENS_PER_TURN, **options)
        try:
            return await run_episodes(
                environment, specs, engine=engine, renderer=renderer, sampling=sampling, max_turns=2
            )
        finally:
            await engine.close()

    trajectories = asyncio.run(run())
    assert [trajectory.error for trajectory in trajectories if trajectory.error] == []
    return [
        sample
        for trajectory in trajectories
        for sample in samples_from_trajectory(trajectory, advantage=1.0, processors=renderer.processors)
    ]


def scored(model, samples, **layout):
    """The batch of the samples and the trainer's log-probabilities."""
    batch = TrainingBatch.from_samples(samples, pad_id=0, **layout)
    with torch.no_grad():
        return batch, token_logprobs(model, batch)


# Faults of requests.


def with_prompt(request, ids, media):
    """The request with another prompt; `media` are pairs of item and range."""
    data = MultiModalData.from_items(media) if media else None
    return replace(request, prompt_ids=list(ids), multi_modal_data=data)


def with_items(request, change):
    """The request with each of its media items replaced by `change(item)`, and without those that this makes None."""
    changed = [(change(item), placeholder) for item, placeholder in request.media]
    return with_prompt(request, request.prompt_ids, [pair for pair in changed if pair[0] is not None])


def after_tokens(request, ids):
    """The request with `ids` before its prompt."""
    moved = [(item, replace(at, offset=at.offset + len(ids))) for item, at in request.media]
    return with_prompt(request, [*ids, *request.prompt_ids], moved)


def normalised_twice(item):
    """A server normalises floats as if they were the uint8 pixels that it expects."""
    values, scale = normalised(item, "pixel_values"), item.scale
    again = ((values * scale.factor) - scale.mean[0]) / scale.std[0]
    return with_pixels(item, again)


def with_pixels(item, values):
    tensors = {**{name: item[name] for name in item}, "pixel_values": values.astype(np.float32)}
    return replace(item, scale=None, mm_hash=f"{item.mm_hash}-changed", tensors=tensors)


# Faults of completions.


def report_processed_logprobs(monkeypatch):
    """LocalEngine reports the log-probabilities of the distribution that it draws from, not those of the model."""

    def sample(self, logits, step):
        sampled = raw(self, logits, step)
        scaled = self._filter(logits.double() / self._temperature[:, None])
        return sampled._replace(logprobs=torch.log_softmax(scaled, -1).gather(-1, sampled.ids[:, None])[:, 0].float())

    raw = RowSampler.sample
    monkeypatch.setattr(RowSampler, "sample", sample)
