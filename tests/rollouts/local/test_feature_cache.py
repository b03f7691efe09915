"""An engine encodes each image, video and sound once, and places its features wherever a later prompt has it."""

import asyncio
import copy
from unittest import mock

import numpy as np
import pytest
import torch
from audio_models import AUDIO_MODELS
from family_rows import loaded_family
from model_families import VIDEO_FAMILIES

from renderers import MultiModalData
from rollouts import LocalEngine, SamplingParams
from rollouts.engines.protocol import GenerateRequest
from rollouts.models.item_features import FeatureCache

FAST = ("qwen2_5_vl", "gemma3", "gemma3n")
SLOW = (
    "qwen3_vl",
    "qwen3_5",
    "gemma4",
    "glm4v",
    "llava_next",
    "internvl",
    "idefics3",
    "pixtral",
    "qwen3_omni",
    "glm_asr",
)


def scored(engine, sample):
    """float32 (tokens,): log-probabilities of a prompt, and how many items were encoded for it."""
    media = MultiModalData.from_items(sample.media) if sample.media else None
    asked = GenerateRequest(
        sample.token_ids.tolist(), SamplingParams(max_tokens=1, seed=0), media, prompt_logprobs=True
    )
    with mock.patch.object(FeatureCache, "put", autospec=True, side_effect=FeatureCache.put) as kept:
        result = asyncio.run(engine.generate(asked))
    return result.prompt_logprobs[1:], kept.call_count


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_items_of_earlier_prompts_pass_no_tower_again_and_prompts_have_the_same_log_probabilities(name):
    family = loaded_family(name)
    if name in AUDIO_MODELS:
        first, second, third = (family.sound(seconds) for seconds in (0.5, 0.7, 0.9))
        kinds = "sounds"
    else:
        first, second, third = family.pixels(32, 48), family.pixels(40, 40), family.pixels(24, 64)
        kinds = "images"
    rows = [family.row("x", **{kinds: each}) for each in ([third], [first, second], [second, third, first], [first])]
    if name in VIDEO_FAMILIES:
        video = family.pixels(4, 32, 32)
        rows += [family.row("x", [first], [video]), family.row("x", [third], [video])]
    engine, encoded = LocalEngine(family.model), []
    for row in rows:
        logprobs, count = scored(engine, row.sample)
        encoded.append(count)
        np.testing.assert_allclose(logprobs, scored(LocalEngine(family.model), row.sample)[0], atol=1e-5)
    assert encoded == [1, 2, 0, 0, 1, 0][: len(rows)]


def test_kept_features_hold_no_memory_of_the_batch_that_they_were_encoded_in():
    family = loaded_family("qwen2_5_vl")
    engine = LocalEngine(family.model)
    scored(engine, family.row("x", [family.pixels(32, 48), family.pixels(40, 40)]).sample)
    entries = [features for features, _ in engine._features._entries.values()]
    parts = [part for features in entries for output in features.values() for part in output.pooler_output]
    assert [part.untyped_storage().nbytes() for part in parts] == [part.nbytes for part in parts]


def test_weights_that_change_in_place_encode_an_image_again():
    """As those of a `Trainer` that has the same model."""
    family = loaded_family("qwen2_5_vl")
    model = copy.deepcopy(family.model)
    engine, sample = LocalEngine(model), family.row("x", [family.pixels(32, 48)]).sample
    before, _ = scored(engine, sample)
    with torch.no_grad():
        next(model.model.visual.parameters()).mul_(2)
    after, _ = scored(engine, sample)
    np.testing.assert_allclose(after, scored(LocalEngine(model), sample)[0], atol=1e-5)
    assert np.abs(after - before).max() > 1e-3
