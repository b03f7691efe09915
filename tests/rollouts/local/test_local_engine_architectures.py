"""LocalEngine samples from models of many architectures: its log-probabilities are those of the trainer."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch
from audio_models import AUDIO_MODELS, EACH
from family_rows import loaded_family
from model_families import text_config, with_seed
from transformers import AutoModelForCausalLM, RwkvConfig

from renderers import MultiModalData
from rollouts import GenerateRequest, SamplingParams
from rollouts.engines.local import LocalEngine
from rollouts.errors import UnsupportedModelError
from rollouts.models.architecture import architecture
from rollouts.training import TrainingBatch, TrainingSample, token_logprobs

# An argument that a release of transformers calls deprecated is missing from a later one.
pytestmark = pytest.mark.filterwarnings("error::FutureWarning")

MEDIA = ("qwen2_5_vl", "qwen3_5", "gemma3", "glm4v", "internvl", "idefics3")
TEXT = ("qwen3", "gemma2", "gemma3_text", "gpt_oss", "cohere", "codegen", "llama4_text", "mamba")


@pytest.fixture
def family(request):
    return loaded_family(request.param)


def generate(engine, requests):
    async def run():
        return await asyncio.gather(*(engine.generate(request) for request in requests))

    return asyncio.run(run())


def sampling(seed, **options):
    return SamplingParams(**{"max_tokens": 12, "n": 2, "seed": seed, "temperature": 1.0, **options})


def largest_difference(model, requests, results):
    """Over all completions: |log p of the engine - log p of the trainer|."""
    samples, reported = [], []
    for request, result in zip(requests, results, strict=True):
        for completion in result.completions:
            ids = np.array([*request.prompt_ids, *completion.token_ids], np.int32)
            mask = np.arange(len(ids)) >= len(request.prompt_ids)
            zeros = np.zeros(len(ids), np.float32)
            samples.append(TrainingSample(ids, mask, zeros, zeros, tuple(request.media)))
            reported.append(completion.logprobs)
    batch = TrainingBatch.from_samples(samples, pad_id=0)
    with torch.no_grad():
        scored = token_logprobs(model, batch)
    return float(np.abs(scored[batch.loss_mask].numpy() - np.concatenate(reported)).max())


def test_a_model_that_takes_no_cache_is_refused():
    """RWKV would sample each token without those before it."""
    config = RwkvConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2)
    config.max_position_embeddings = 64
    with pytest.raises(UnsupportedModelError, match=r"RwkvModel for a token after a cache of three differ by"):
        LocalEngine(with_seed(lambda: AutoModelForCausalLM.from_config(config)))


@pytest.mark.parametrize("family", MEDIA, indirect=True)
def test_sampled_log_probabilities_of_a_model_that_reads_images_are_those_of_the_trainer(family):
    """Prompts of different lengths, some with images, padded on the left in one batch; each with two samples."""
    engine = LocalEngine(family.model)
    requests = []
    for seed, row in enumerate(family.rows()):
        prompt = row.sample.token_ids[~row.sample.loss_mask].tolist()
        media = MultiModalData.from_items(row.sample.media)
        requests.append(GenerateRequest(prompt, sampling(seed), media))
    results = generate(engine, requests)
    assert all(len(result.completions) == 2 for result in results)
    assert largest_difference(family.model, requests, results) < 1e-5
    asyncio.run(engine.close())


@pytest.mark.slow
@pytest.mark.parametrize("family", EACH, indirect=True)
def test_sampled_log_probabilities_of_a_model_that_hears_are_those_of_the_trainer(family):
    """Two turns: each of the second continues one of the first, with another sound."""
    engine = LocalEngine(family.model)
    requests = []
    for seed, row in enumerate(family.rows_with_sounds()):
        prompt = row.sample.token_ids[~row.sample.loss_mask].tolist()
        requests.append(GenerateRequest(prompt, sampling(seed), MultiModalData.from_items(row.sample.media)))
    results = generate(engine, requests)
    assert largest_difference(family.model, requests, results) < 1e-5
    turn = family.row("and now", sounds=[family.sound(0.4)]).sample
    added = turn.token_ids[~turn.loss_mask].tolist()
    following = []
    for request, result in zip(requests, results, strict=True):
        ids = [*request.prompt_ids, *result.completions[0].token_ids.tolist()]
        media = [(item, placeholder.shifted(len(ids))) for item, placeholder in turn.media]
        following.append(
            GenerateRequest([*ids, *added], sampling(1), MultiModalData.from_items([*request.media, *media]))
        )
    assert largest_difference(family.model, following, generate(engine, following)) < 1e-5
    asyncio.run(engine.close())


@pytest.mark.parametrize("name", TEXT)
def test_sampled_log_probabilities_of_a_text_model_are_those_of_the_trainer(name):
    """Completions longer than the sliding window of eight tokens; prompts shorter and longer than it."""
    model = with_seed(lambda: AutoModelForCausalLM.from_config(text_config(name)))
    if name == "mamba":
        model.config.max_position_embeddings = 2048  # the name of no limit there
    engine = LocalEngine(model)
    rng = np.random.default_rng(1)
    prompts = [rng.integers(3, 300, length).tolist() for length in (1, 5, 30)]
    requests = [GenerateRequest(prompt, sampling(seed, max_tokens=20)) for seed, prompt in enumerate(prompts)]
    assert largest_difference(model, requests, generate(engine, requests)) < 1e-5
    asyncio.run(engine.close())


@pytest.mark.parametrize("family", ["gemma4", "qwen2_5_vl", "qwen2_audio", "qwen2_5_omni"], indirect=True)
def test_a_placeholder_token_that_the_engine_samples_is_text_for_engine_and_trainer(family):
    hears = family.name in AUDIO_MODELS
    row = family.row("x", sounds=[family.sound(0.3)]) if hears else family.row("x", [family.pixels(32, 32)])
    prompt = row.sample.token_ids[~row.sample.loss_mask].tolist()
    engine = LocalEngine(family.model)
    media = MultiModalData.from_items(row.sample.media)
    requests = [GenerateRequest(prompt, sampling(1, max_tokens=8, n=512), media)]
    (result,) = generate(engine, requests)
    placeholders = sorted(architecture(family.model).placeholder_ids)
    literal = [each for each in result.completions if np.isin(each.token_ids[:-1], placeholders).any()]
    assert literal
    assert largest_difference(family.model, requests, [replace(result, completions=literal)]) < 1e-5
    asyncio.run(engine.close())
