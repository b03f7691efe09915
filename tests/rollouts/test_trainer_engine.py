"""LocalEngine over the model of a Trainer: one copy of the weights, and the log-probabilities of `Trainer.forward`."""

import asyncio
import threading

import numpy as np
import pytest
from family_rows import loaded_family
from trainer_checks import random_weights, with_nonzero_adapter

from renderers import MultiModalData
from rollouts import GenerateRequest, SamplingParams
from rollouts.engines.local import LocalEngine
from rollouts.engines.local.batch import Batch
from rollouts.models.lora_modules import LoraOptions
from rollouts.training.trainer import AdamParams, Datum, Trainer

EVERYWHERE = LoraOptions(rank=4, alpha=8, seed=1)


@pytest.fixture(params=["qwen3_vl", "gemma3"])
def family(request):
    return loaded_family(request.param)


@pytest.fixture
def data(family):
    return [random_weights(row.sample, seed) for seed, row in enumerate(family.rows())]


def requests(family, adapter):
    found = []
    for seed, row in enumerate(family.rows()):
        ids = row.sample.token_ids[~row.sample.loss_mask].tolist()
        sampling = SamplingParams(max_tokens=8, seed=seed)
        media = MultiModalData.from_items(row.sample.media)
        found.append(GenerateRequest(ids, sampling, media, adapter=adapter))
    return found


async def difference(trainer, model_id, engine, family, adapter):
    """The largest difference of the log-probabilities that the engine samples from those of `forward`."""
    asked = requests(family, adapter)
    results = await asyncio.gather(*map(engine.generate, asked))
    data, reported = [], []
    for request, result in zip(asked, results, strict=True):
        (completion,) = result.completions
        ids = np.array([*request.prompt_ids, *completion.token_ids], np.int64)
        data.append(Datum(ids[:-1], ids[1:], {}, list(request.media)))
        reported.append(completion.logprobs)
    scored = (await asyncio.to_thread(trainer.forward, model_id, data, "cross_entropy")).logprobs
    return max(np.abs(one[-len(other) :] - other).max() for one, other in zip(scored, reported, strict=True))


@pytest.mark.slow
async def test_adapters_of_a_trainer_are_sampled_over_its_own_weights(family, data, tmp_path):
    trainer = Trainer.from_pretrained(family.directory, device="cpu")
    for name in ("a", "b"):
        with_nonzero_adapter(trainer, name, data[::2] if name == "a" else data[1:], EVERYWHERE)
        trainer.save_for_sampler(name, tmp_path / name)
    engine = LocalEngine(trainer.model, lock=trainer.lock)
    assert engine._model is trainer.model
    own = [parameter.data_ptr() for parameter in trainer.model.parameters()]
    for name in ("a", "b"):
        await engine.load_adapter(name, tmp_path / name)
    for name in ("a", "b"):
        assert await difference(trainer, name, engine, family, name) < 1e-4
    assert await difference(trainer, "a", engine, family, "b") > 1e-2, "the detector"
    assert [parameter.data_ptr() for parameter in trainer.model.parameters()] == own

    trainer.forward_backward("a", data, "cross_entropy")
    trainer.optim_step("a", AdamParams(learning_rate=0.05))
    assert await difference(trainer, "a", engine, family, "a") > 1e-2, "the sampler keeps what was saved for it"
    trainer.save_for_sampler("a", tmp_path / "a@2")
    await engine.load_adapter("a@2", tmp_path / "a@2")
    assert await difference(trainer, "a", engine, family, "a@2") < 1e-4
    await engine.close()


@pytest.mark.slow
async def test_a_fully_trained_model_is_sampled_as_it_is_once_its_version_is_named(family, data, tmp_path):
    trainer = Trainer.from_pretrained(family.directory, device="cpu")
    trainer.create_model("all", lora=None)
    engine = LocalEngine(trainer.model, lock=trainer.lock)
    for version in ("1", "2"):
        trainer.forward_backward("all", data, "cross_entropy")
        trainer.optim_step("all", AdamParams(learning_rate=0.01))
        await engine.update_weight_version(version)
        assert await difference(trainer, "all", engine, family, None) < 1e-4
    trainer.save_for_sampler("all", tmp_path / "model")
    other = LocalEngine.from_pretrained(tmp_path / "model")
    assert await difference(trainer, "all", other, family, None) < 1e-4
    assert (tmp_path / "model" / "tokenizer.json").is_file()
    await engine.close()
    await other.close()


class RecordedLock:
    """A lock that says when somebody asks for it."""

    def __init__(self, lock):
        self.lock, self.asked = lock, threading.Event()

    def __enter__(self):
        self.asked.set()
        self.lock.acquire()

    def __exit__(self, *error):
        self.lock.release()


async def test_the_engine_and_the_trainer_wait_for_each_other(monkeypatch):
    family = loaded_family("qwen3_vl")
    trainer = Trainer.from_pretrained(family.directory, device="cpu")
    lock = RecordedLock(trainer.lock)
    engine = LocalEngine(trainer.model, lock=lock)
    running, go_on = threading.Event(), threading.Event()
    run = Batch.run

    def held(self, version):
        running.set()
        assert go_on.wait(60)
        return run(self, version)

    monkeypatch.setattr(Batch, "run", held)
    request = requests(family, None)[0]
    sampling = asyncio.ensure_future(engine.generate(request))
    assert await asyncio.to_thread(running.wait, 60)
    assert not await asyncio.to_thread(trainer.lock.acquire, blocking=False), "the trainer waits for the batch"
    go_on.set()
    await sampling

    lock.asked.clear()
    running.clear()
    with trainer.lock:
        sampling = asyncio.ensure_future(engine.generate(request))
        assert await asyncio.to_thread(lock.asked.wait, 60)
        assert not running.is_set(), "the batch waits for the trainer"
    assert len((await sampling).completions) == 1
    await engine.close()
