"""Sampling over the model of a trainer: log-probabilities of `Trainer.forward`, ends of sequences, snapshots, top-k."""

from __future__ import annotations

import asyncio
import shutil
import threading

import numpy as np
import pytest
from family_rows import loaded_family
from trainer_checks import random_weights, with_nonzero_adapter

from rollouts.engines.local.batch import Batch
from rollouts.errors import ArgumentError, EngineClosedError, WeightUpdateError
from rollouts.models.lora_modules import LoraOptions
from rollouts.tinker.local_sampler import LocalSampler
from rollouts.tinker.requests import ModelInput, SampleRequest
from rollouts.training.trainer import AdamParams, Datum, Trainer

EVERYWHERE = LoraOptions(rank=4, alpha=8, seed=1)
FAMILIES = ("qwen3_vl", "gemma3")
TEXT = ModelInput(np.arange(70, 90), ())


@pytest.fixture(params=FAMILIES[:1])
def family(request):
    return loaded_family(request.param)


@pytest.fixture
def data(family):
    return [random_weights(row.sample, seed) for seed, row in enumerate(family.rows())]


@pytest.fixture
def trainer(family):
    return Trainer.from_pretrained(family.directory, device="cpu")


@pytest.fixture
async def sampler(trainer):
    sampler = LocalSampler(trainer)
    yield sampler
    await sampler.close()


def prompts(family):
    """Text, one image, several images, video."""
    return [
        ModelInput(row.sample.token_ids[~row.sample.loss_mask].astype(np.int64), row.sample.media)
        for row in family.rows()
    ]


def row_of(prompt, sequence):
    ids = np.concatenate([prompt.token_ids, sequence.token_ids])
    return Datum(ids[:-1], ids[1:], {}, list(prompt.media))


def scored(trainer, model_id, prompt, sequence):
    """What the trainer computes for every token of prompt and sequence but the first."""
    return trainer.forward(model_id, [row_of(prompt, sequence)], "cross_entropy").logprobs[0]


async def mismatch(trainer, model_id, sampler, weights, family):
    """The largest difference of sampled log-probabilities, and of those of prompts, from the trainer's."""
    largest = 0.0
    asked = [SampleRequest(prompt, max_tokens=8, seed=3, stop=(), prompt_logprobs=True) for prompt in prompts(family)]
    for request, result in zip(
        asked, await asyncio.gather(*(sampler.sample(weights, each) for each in asked)), strict=True
    ):
        (sequence,) = result.sequences
        assert len(sequence.token_ids) == 8
        assert not sequence.stopped
        assert np.isnan(result.prompt_logprobs[0])
        assert len(result.prompt_logprobs) == len(request.prompt.token_ids)
        reported = np.concatenate([result.prompt_logprobs[1:], sequence.logprobs])
        expected = await asyncio.to_thread(scored, trainer, model_id, request.prompt, sequence)
        largest = max(largest, float(np.abs(reported - expected).max()))
    return largest


@pytest.mark.slow
async def test_the_base_model_and_saved_weights_are_sampled_while_the_model_of_the_trainer_is_trained_as_a_whole(
    family, data, trainer, tmp_path
):
    sampler = LocalSampler(trainer, max_models=1)
    with_nonzero_adapter(trainer, "a", data, EVERYWHERE)
    trainer.save_for_sampler("a", tmp_path / "a")
    request = SampleRequest(TEXT, max_tokens=8, seed=3, stop=(), prompt_logprobs=True)
    before = [await sampler.sample(weights, request) for weights in (None, tmp_path / "a")]
    trainer.unload("a")
    trainer.create_model("all", lora=None)
    for version in ("1", "2"):
        trainer.forward_backward("all", data, "cross_entropy")
        trainer.optim_step("all", AdamParams(learning_rate=0.01))
        trainer.save_for_sampler("all", tmp_path / version)
    assert await mismatch(trainer, "all", sampler, tmp_path / "2", family) < 1e-4
    assert await mismatch(trainer, "all", sampler, tmp_path / "1", family) > 1e-2, "the detector"
    during = [await sampler.sample(weights, request) for weights in (None, tmp_path / "a")]
    for one, other in zip(before, during, strict=True):
        assert one.sequences[0].token_ids.tolist() == other.sequences[0].token_ids.tolist()
        np.testing.assert_allclose(one.prompt_logprobs, other.prompt_logprobs, atol=1e-4)
    await sampler.close()


@pytest.mark.slow
async def test_many_requests_beside_training_steps_each_have_the_weights_that_they_name(tmp_path):
    family = loaded_family("qwen3_vl")
    trainer = Trainer.from_pretrained(family.directory, device="cpu")
    data = [random_weights(row.sample, seed) for seed, row in enumerate(family.rows())]
    sampler = LocalSampler(trainer, max_adapters=2)  # fewer than there are
    with_nonzero_adapter(trainer, "a", data, EVERYWHERE)
    versions, expected = [], {}
    for version in range(4):
        trainer.save_for_sampler("a", tmp_path / str(version))
        versions.append(tmp_path / str(version))
        ids = np.concatenate([TEXT.token_ids, [65]])
        expected[version] = trainer.forward("a", [Datum(ids[:-1], ids[1:])], "cross_entropy").logprobs[0]
        trainer.forward_backward("a", data, "cross_entropy")
        trainer.optim_step("a", AdamParams(learning_rate=0.05))
    assert np.abs(expected[0] - expected[1]).max() > 1e-2, "the detector"
    steps = 0

    async def train():
        nonlocal steps
        while not sampling.done():
            async with sampler.asleep():
                await asyncio.to_thread(trainer.forward_backward, "a", data, "cross_entropy")
                await asyncio.to_thread(trainer.optim_step, "a", AdamParams(learning_rate=0.05))
            steps += 1

    request = SampleRequest(TEXT, max_tokens=1, prompt_logprobs=True)
    sampling = asyncio.gather(*(sampler.sample(versions[number % 4], request) for number in range(40)))
    await asyncio.wait_for(asyncio.gather(sampling, train()), 120)
    assert steps
    for number, result in enumerate(sampling.result()):
        np.testing.assert_allclose(result.prompt_logprobs[1:], expected[number % 4][:-1], atol=1e-4)
    await sampler.close()


async def test_no_batch_begins_before_the_training_step_has_ended_and_one_goes_on_between_two(monkeypatch):
    trainer = Trainer.from_pretrained(loaded_family("qwen3_vl").directory, device="cpu")
    sampler = LocalSampler(trainer)
    began, asked = threading.Event(), threading.Event()
    run, wait = Batch.run, sampler._steps.wait
    request = SampleRequest(TEXT, max_tokens=2)
    await sampler.sample(None, request)
    monkeypatch.setattr(Batch, "run", lambda self, version: (began.set(), run(self, version))[1])
    monkeypatch.setattr(sampler._steps, "wait", lambda: (asked.set(), wait()))
    async with sampler.asleep():  # a second step that is there already when the first one ends
        async with sampler.asleep():
            sampling = asyncio.ensure_future(sampler.sample(None, request))
            assert await asyncio.to_thread(asked.wait, 60)
            assert await asyncio.to_thread(lambda: trainer.models() == {}), "the trainer does not wait for the sampler"
            assert not began.is_set()
        assert (await asyncio.wait_for(sampling, 60)).sequences
    await sampler.close()


@pytest.mark.slow
async def test_a_path_that_is_written_again_stands_for_the_new_weights(data, family, trainer, sampler, tmp_path):
    with_nonzero_adapter(trainer, "a", data, EVERYWHERE)
    for _ in range(2):
        trainer.save_for_sampler("a", tmp_path / "a")
        assert await mismatch(trainer, "a", sampler, tmp_path / "a", family) < 1e-4
        shutil.rmtree(tmp_path / "a")
        trainer.forward_backward("a", data, "cross_entropy")
        trainer.optim_step("a", AdamParams(learning_rate=0.05))


async def test_weights_that_are_missing_or_broken_are_errors_and_the_sampler_goes_on(trainer, sampler, data, tmp_path):
    request = SampleRequest(TEXT, max_tokens=2)
    with pytest.raises(ArgumentError, match=r"no adapter_config.json and no config.json"):
        await sampler.sample(tmp_path / "none", request)
    with_nonzero_adapter(trainer, "a", data, EVERYWHERE)
    trainer.save_for_sampler("a", tmp_path / "a")
    whole = (tmp_path / "a" / "adapter_model.safetensors").read_bytes()
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(whole[:-8])
    for _ in range(2):
        with pytest.raises(WeightUpdateError, match="no complete safetensors file"):
            await sampler.sample(tmp_path / "a", request)
    (tmp_path / "a" / "adapter_model.safetensors").write_bytes(whole)
    assert (await sampler.sample(tmp_path / "a", request)).sequences
    await sampler.close()
    with pytest.raises(EngineClosedError):
        await sampler.sample(None, request)
