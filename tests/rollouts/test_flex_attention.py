"""Prefix trees of models that are loaded with FlexAttention: block masks, and the values of separate rows with SDPA.

torch has no backward pass of the compiled kernel on a CPU. The plain implementation of `flex_attention`, which computes
the same formula, has one; the check that refuses it is taken away here.
"""

import copy
from unittest import mock

import numpy as np
import pytest
from family_rows import loaded_family
from model_families import text_config, with_seed
from prefix_trees import computed, difference, distinct_items, distinct_tokens, media_group, of_a_wide_model, text_group
from torch.nn.attention import flex_attention
from transformers import AutoModelForCausalLM, masking_utils
from transformers.integrations import flex_attention as integration

from rollouts.models import packed_masks
from rollouts.models.forward_pass import ForwardPass
from rollouts.models.packing_support import packing_of

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")


def plain_attention(query, key, value, training=False, **options):
    return flex_attention.flex_attention(query, key, value, **options)


def plain_block_mask(*arguments, **options):
    return flex_attention.create_block_mask(*arguments, **{**options, "_compile": False})


@pytest.fixture
def differentiable(monkeypatch):
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *tensors: None)
    monkeypatch.setattr(integration, "compile_friendly_flex_attention", plain_attention)
    monkeypatch.setattr(masking_utils, "create_block_mask", plain_block_mask)


def text_model(name):
    return with_seed(lambda: AutoModelForCausalLM.from_config(text_config(name)))


def with_flex_attention(model):
    """A copy whose text model has FlexAttention; the towers keep theirs."""
    model = copy.deepcopy(model)
    text = {name: "flex_attention" for name in model.config.sub_configs if name == "text_config"}
    model.set_attn_implementation(text or "flex_attention")
    return model


def media_samples(name):
    family = loaded_family(name)
    return family.model, media_group(family)


def assert_shared(model, samples):
    separate = computed(model, samples, share_prefixes=False)
    with of_a_wide_model():
        tree = computed(with_flex_attention(model), samples)
    assert difference(tree, separate) < 1e-5
    assert (tree.tokens, tree.items) == (distinct_tokens(samples), distinct_items(samples))


SLIDING, CHUNKS, CAPPED = "gemma3_text", "llama4_text", "gemma2"


@pytest.mark.parametrize("name", [SLIDING, *(pytest.param(each, marks=pytest.mark.slow) for each in (CHUNKS, CAPPED))])
def test_a_text_model_computes_each_distinct_token_once(name, differentiable):
    assert_shared(text_model(name), text_group())


@pytest.mark.parametrize(
    "name", ["qwen3_vl_moe", *(pytest.param(each, marks=pytest.mark.slow) for each in ("idefics3", "glm_asr"))]
)
def test_a_model_computes_each_distinct_image_and_sound_once(name, differentiable):
    assert_shared(*media_samples(name))


@pytest.mark.parametrize("layout", [pytest.param("padded", marks=pytest.mark.slow), "packed"])
def test_images_attended_in_both_directions_are_computed_in_separate_rows(layout, differentiable):
    model, samples = media_samples("gemma3")
    flex = with_flex_attention(model)
    assert packing_of(ForwardPass(flex).architecture, with_media=True) != "masks"
    separate = computed(model, samples, layout, share_prefixes=False)
    assert difference(computed(flex, samples, layout), separate) < 1e-5


@pytest.mark.parametrize("planted", ["_ends", "position_ids"])
def test_a_visible_sibling_and_a_window_along_the_row_are_found(planted, differentiable, monkeypatch):
    model, samples = text_model(SLIDING), text_group()
    separate, flex = computed(model, samples, share_prefixes=False), with_flex_attention(model)
    with of_a_wide_model():
        assert difference(computed(flex, samples), separate) < 1e-5
        if planted == "_ends":
            monkeypatch.setattr(packed_masks, "_ends", lambda rows: np.full(rows.input_ids.shape, rows.input_ids.size))
        else:
            block_masks = packed_masks._block_masks

            def along_the_row(architecture, rows):
                columns = np.arange(rows.input_ids.size).reshape(rows.input_ids.shape)
                placed = mock.Mock(input_ids=rows.input_ids, position_ids=columns, paths=rows.paths)
                return block_masks(architecture, placed)

            monkeypatch.setattr(packed_masks, "_block_masks", along_the_row)
        assert difference(computed(flex, samples), separate) > 1e-3
