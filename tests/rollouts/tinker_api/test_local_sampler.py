"""Sampling over the model of a trainer: log-probabilities of `Trainer.forward`, ends of sequences, snapshots, top-k."""

import asyncio
import shutil
import threading

import numpy as np
import pytest
from family_rows import loaded_family
from trainer_checks import random_weights, with_nonzero_adapter

from rollouts.engines.local.batch import Batch
from rollouts.errors import ArgumentError, EngineClosedError, WeightUpdateError
from rollouts.models.forward_pass import ForwardPass
from rollouts.models.lora_modules import LoraOptions
from rollouts.tinker import device_turns
from rollouts.tinker.device_turns import DeviceTurns
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
    run, enter = Batch.run, DeviceTurns.__enter__
    request = SampleRequest(TEXT, max_tokens=1)
    await sampler.sample(None, request)
    monkeypatch.setattr(Batch, "run", lambda self, version: (began.set(), run(self, version))[1])
    monkeypatch.setattr(DeviceTurns, "__enter__", lambda self: (asked.set(), enter(self))[1])
    sampler._turns._until = 0.0
    async with sampler.asleep():  # a second step that is there already when the first one ends
        async with sampler.asleep():
            sampling = asyncio.ensure_future(sampler.sample(None, request))
            assert await asyncio.to_thread(asked.wait, 60)
            assert await asyncio.to_thread(lambda: trainer.models() == {}), "the trainer does not wait for the sampler"
            assert not began.is_set()
        assert (await asyncio.wait_for(sampling, 60)).sequences
    await sampler.close()


class Steps:
    """Which share each decoding step computes for, by the number of its rows."""

    def __init__(self, monkeypatch):
        self.rows = []
        self.first = threading.Event()
        step = ForwardPass.next_hidden_states

        def noted(forward, ids, *args):
            self.rows.append(len(ids))
            self.first.set()
            return step(forward, ids, *args)

        monkeypatch.setattr(ForwardPass, "next_hidden_states", noted)


async def test_a_short_request_of_another_share_has_its_turn_beside_a_long_one(trainer, monkeypatch):
    monkeypatch.setattr(device_turns, "SLICE_SECONDS", 0.0)
    sampler = LocalSampler(trainer)
    await sampler.sample(None, SampleRequest(TEXT, max_tokens=2, stop=()))  # an engine tries a step before its first
    steps = Steps(monkeypatch)
    long = asyncio.ensure_future(
        sampler.sample(None, SampleRequest(TEXT, num_samples=8, max_tokens=400, stop=()), share="killed")
    )
    assert await asyncio.to_thread(steps.first.wait, 60)
    short = SampleRequest(TEXT, max_tokens=8, stop=())
    await asyncio.gather(*(sampler.sample(None, short, share=share) for share in "abc"))
    assert not long.done()
    last = len(steps.rows) - steps.rows[::-1].index(1)
    between = steps.rows[steps.rows.index(1) : last]
    assert between.count(1) == 3 * 7
    assert between.count(8) <= 3 * 7 + 1, "a token of the long one for each of theirs at most"
    long.cancel()
    await asyncio.wait([long])
    await sampler.close()
    assert steps.rows.count(8) < 399, "what nobody waits for ends"


@pytest.mark.slow
async def test_shares_that_take_turns_beside_training_get_what_each_gets_alone(data, trainer, tmp_path, monkeypatch):
    for name in "ab":
        with_nonzero_adapter(trainer, name, data, LoraOptions(rank=4, alpha=8, seed=ord(name)))
        trainer.save_for_sampler(name, tmp_path / name)
    asked = [
        (weights, SampleRequest(prompt, num_samples=2, max_tokens=24, seed=seed, stop=(), prompt_logprobs=True))
        for seed, prompt in enumerate(prompts(loaded_family("qwen3_vl")))
        for weights in (None, tmp_path / "a", tmp_path / "b")
    ]
    sampler = LocalSampler(trainer)
    alone = [await sampler.sample(weights, request) for weights, request in asked]
    monkeypatch.setattr(device_turns, "SLICE_SECONDS", 0.0)
    steps, trained = Steps(monkeypatch), 0

    async def train():
        nonlocal trained
        while not sampling.done():
            async with sampler.asleep():
                await asyncio.to_thread(trainer.forward_backward, "a", data, "cross_entropy")
            trained += 1

    sampling = asyncio.gather(
        *(sampler.sample(weights, request, share=str(number)) for number, (weights, request) in enumerate(asked))
    )
    await asyncio.wait_for(asyncio.gather(sampling, train()), 120)
    assert trained > 2
    assert len(steps.rows) == 23 * len(asked), "a batch for each, none of which was computed again"
    for one, other in zip(alone, sampling.result(), strict=True):
        np.testing.assert_array_equal(one.prompt_logprobs, other.prompt_logprobs)
        for ours, theirs in zip(one.sequences, other.sequences, strict=True):
            np.testing.assert_array_equal(ours.token_ids, theirs.token_ids)
            np.testing.assert_array_equal(ours.logprobs, theirs.logprobs)
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
