"""Prefix trees: each distinct token, image and sound is computed once, and the results are those of separate rows."""

import functools

import numpy as np
import pytest
from audio_models import AUDIO_MODELS
from family_rows import loaded_family
from model_families import MEDIA_FAMILIES, TEXT_MODELS, text_config, with_seed
from prefix_trees import (
    computed,
    difference,
    distinct_items,
    distinct_tokens,
    media_group,
    of_a_wide_model,
    sample,
    text_group,
)
from transformers import AutoModelForCausalLM

#: Models with layers that carry a state along the row, or whose positions are not given.
WITHOUT_TREES = ("bloom", "mamba", "qwen3_5")
#: Models that attend in both directions within items, which touch in their prompts: what shares one shares both.
JOINING = ("gemma4", "hearing_gemma4")
LAYOUTS = pytest.mark.parametrize("layout", ["padded", "packed"])


@functools.cache
def text_model(name):
    return with_seed(lambda: AutoModelForCausalLM.from_config(text_config(name)))


def assert_equal_and_once(model, samples, layout, shares=True):
    """`share_prefixes` changes only what is computed; with `shares` it is every distinct token and item once."""
    with of_a_wide_model():
        tree = computed(model, samples, layout)
    separate = computed(model, samples, layout, share_prefixes=False)
    assert difference(tree, separate) < 1e-5
    assert separate.tokens == sum(map(len, samples))
    assert tree.tokens < separate.tokens
    if shares:
        assert tree.tokens == distinct_tokens(samples)
        assert tree.items == distinct_items(samples)


@LAYOUTS
@pytest.mark.parametrize("name", TEXT_MODELS)
def test_a_text_model_computes_each_distinct_token_once_with_the_values_and_gradients_of_separate_rows(name, layout):
    assert_equal_and_once(text_model(name), text_group(), layout, shares=name not in WITHOUT_TREES)


SEEN = [
    pytest.param(name, marks=() if name in ("qwen2_5_vl", "gemma3") else pytest.mark.slow) for name in MEDIA_FAMILIES
]
HEARD = [pytest.param(name, marks=pytest.mark.slow) for name in AUDIO_MODELS]


@LAYOUTS
@pytest.mark.parametrize("name", [*SEEN, *HEARD])
def test_a_model_computes_each_distinct_image_and_sound_once_with_the_values_of_separate_rows(name, layout):
    family = loaded_family(name)
    assert_equal_and_once(family.model, media_group(family), layout, shares=name not in WITHOUT_TREES + JOINING)


def test_a_model_without_trees_computes_samples_that_begin_others_in_the_rows_of_these():
    """Equal samples and turns of one conversation: that needs no mask, so that layers with a state can do it."""
    model, ids = text_model("mamba"), np.random.default_rng(0).integers(3, 300, 40)
    turns = [sample(ids[:end], trained=begin) for begin, end in ((5, 12), (15, 30), (32, 40), (32, 40))]
    assert_equal_and_once(model, turns, "padded")
