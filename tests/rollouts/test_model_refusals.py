"""Rows and models that a forward pass cannot take: errors with row, key and cure; the checks find planted faults."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from family_rows import loaded_family
from hypothesis import given, settings
from hypothesis import strategies as st
from model_families import text_config, with_seed
from training_samples import Block
from transformers import (
    AutoModelForCausalLM,
    BertGenerationConfig,
    BertGenerationDecoder,
    LlamaForCausalLM,
    OPTConfig,
    T5Config,
    T5ForConditionalGeneration,
)

from renderers import PlaceholderRange
from rollouts.errors import SampleError, UnsupportedModelError
from rollouts.models.architecture import architecture
from rollouts.models.placed_rows import TokenRow, placed_rows
from rollouts.models.positions import media_positions, mrope_positions, row_positions
from rollouts.training import TrainingBatch, TrainingSample, diagnose_mismatch, model_inputs, token_logprobs


@pytest.fixture(scope="module")
def qwen():
    return loaded_family("qwen2_5_vl")


def text_model(name="llama"):
    return with_seed(lambda: AutoModelForCausalLM.from_config(text_config(name)))


def text_batch():
    zeros = np.zeros(4, np.float32)
    sample = TrainingSample(
        np.array([5, 6, 7, 8], np.int32), np.array([False, True, True, True]), zeros, zeros, name="r"
    )
    return TrainingBatch.from_samples([sample], pad_id=0)


# Rows.


def with_item(sample, **changes):
    (item, placeholder), *rest = sample.media
    return replace(sample, media=((replace(item, **changes), placeholder), *rest))


def refusal(model, sample):
    with pytest.raises(SampleError) as caught:
        token_logprobs(model, TrainingBatch.from_samples([sample], pad_id=0))
    return str(caught.value)


def test_patches_that_contradict_their_grid_are_refused(qwen):
    sample = qwen.row("x", [qwen.pixels(32, 48)]).sample
    item = sample.media[0][0]
    short = with_item(sample, tensors={**item.tensors, "pixel_values": item["pixel_values"][:-4]})
    text = refusal(qwen.model, short)
    assert (
        f"sample x: image {item.mm_hash[:12]} has 20 rows of pixel_values for the grid [1, 4, 6], which has 24 patches"
        in text
    )


def test_a_tensor_that_the_model_does_not_take_is_refused_by_name(qwen):
    sample = qwen.row("x", [qwen.pixels(32, 48)]).sample
    item = sample.media[0][0]
    foreign = with_item(
        sample,
        tensors={**item.tensors, "image_sizes": np.array([32, 48])},
        fields={**item.fields, "image_sizes": item.fields["image_grid_thw"]},
    )
    assert "has the tensor 'image_sizes', which Qwen2_5_VLModel.forward does not take; it takes" in refusal(
        qwen.model, foreign
    )


def test_raw_pixels_without_a_scale_are_refused(qwen):
    sample = qwen.row("x", [qwen.pixels(32, 48)]).sample
    assert "raw uint8 pixels without a scale" in refusal(qwen.model, with_item(sample, scale=None))


def test_a_range_over_tokens_that_are_no_placeholders_is_refused(qwen):
    sample = qwen.row("x", [qwen.pixels(32, 48)]).sample
    (item, placeholder), *_ = sample.media
    moved = replace(sample, media=((item, PlaceholderRange(placeholder.offset - 1, placeholder.length)),))
    text = refusal(qwen.model, moved)
    assert f"the token at position {placeholder.offset - 1} has id" in text
    assert "in the range of an image, video or sound" in text
    assert f"the placeholder ids of {qwen.name} are: " in text


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_the_padding_id_may_be_that_of_a_placeholder(qwen, layout):
    samples = [qwen.row("x", [qwen.pixels(32, 48)]).sample, qwen.row("a longer text").sample]
    placeholder = min(architecture(qwen.model).placeholder_ids)
    usual, unusual = (
        token_logprobs(qwen.model, TrainingBatch.from_samples(samples, pad_id=pad, layout=layout, multiple_of=64))
        for pad in (0, placeholder)
    )
    assert torch.allclose(usual, unusual, atol=1e-6)


# Models.


class DoublesItsLogits(LlamaForCausalLM):
    """The planted fault: its forward does something after the output layer that no configuration names."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = output.logits * 2
        return output


def test_an_output_layer_whose_logits_are_changed_afterwards_is_refused_with_what_was_tried():
    model = with_seed(lambda: DoublesItsLogits(text_config("llama")))
    with pytest.raises(UnsupportedModelError, match=r"'llama': the logits of DoublesItsLogits differ .* Tried: weight"):
        token_logprobs(model, text_batch())


class Changed(LlamaForCausalLM):
    """Its output layer does more than those of other models."""

    def forward(self, *args, **kwargs):
        output = super().forward(*args, **kwargs)
        output.logits = self.change(output.logits)
        return output


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        (lambda logits: logits[..., :290], {}),  # Inkling's weight has rows of padding
        (lambda logits: logits / 4, {"logits_mup_width_multiplier": 4.0}),
        (lambda logits: logits * 3, {"output_multiplier": 3.0}),  # Muse
        (lambda logits: 0.5 * torch.tanh(logits / 0.5), {"logits_soft_cap": 0.5}),  # RecurrentGemma
    ],
    ids=["rows of padding", "divisor", "factor", "softcap"],
)
def test_an_output_layer_that_does_more_has_the_log_probabilities_of_the_forward(change, settings):
    model = with_seed(lambda: Changed(text_config("llama")))
    model.change = change
    vars(model.config).update(settings)
    batch = text_batch()
    with torch.no_grad():
        expected = torch.log_softmax(model(batch.input_ids).logits[0, :-1], -1)
        expected = expected.gather(1, batch.input_ids[0, 1:, None])[:, 0]
        assert torch.allclose(token_logprobs(model, batch)[0, 1:], expected, atol=1e-5)


def test_a_model_whose_tokens_attend_to_later_ones_is_refused():
    def bert(**settings):
        sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        return with_seed(lambda: BertGenerationDecoder(BertGenerationConfig(vocab_size=300, **sizes, **settings)))

    with pytest.raises(UnsupportedModelError, match="depend on later tokens"):
        token_logprobs(bert(), text_batch())
    assert token_logprobs(bert(is_decoder=True), text_batch()).isfinite().all()


def test_token_types_of_an_unknown_meaning_are_refused_for_images_and_left_out_for_text(monkeypatch):
    """As PaliGemma's, which tell the prefix from the suffix."""
    gemma3 = loaded_family("gemma3")
    monkeypatch.setattr("rollouts.models.architecture._IMAGE_TOKEN_TYPES", frozenset())
    shown, text = gemma3.row("x", [gemma3.pixels(32, 32)]).sample, gemma3.row("x").sample
    with pytest.raises(
        UnsupportedModelError, match=r"'gemma3': Gemma3Model\.forward takes token_type_ids, whose meaning"
    ):
        token_logprobs(gemma3.model, TrainingBatch.from_samples([shown], pad_id=0))
    assert "token_type_ids" not in model_inputs(TrainingBatch.from_samples([text], pad_id=0), gemma3.model)


class StartsAtOne(LlamaForCausalLM):
    """The planted fault: its positions begin at 1, if it computes them itself."""

    def __init__(self, config):
        super().__init__(config)
        plain = self.model.forward

        def forward(input_ids=None, attention_mask=None, position_ids=None, **kwargs):
            shown = torch.arange(1, input_ids.shape[1] + 1)[None] ** 2 if position_ids is None else position_ids
            return plain(input_ids=input_ids, attention_mask=attention_mask, position_ids=shown, **kwargs)

        self.model.forward = forward


def test_a_model_whose_positions_mean_something_else_is_refused():
    with pytest.raises(
        UnsupportedModelError, match=r"with explicit positions differ by .* \(tried: position_ids from 0"
    ):
        token_logprobs(with_seed(lambda: StartsAtOne(text_config("llama"))), text_batch())


class Wrapper(torch.nn.Module):
    """Keeps a model under `module`, as DistributedDataParallel does."""

    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)


@pytest.mark.parametrize("refused", [token_logprobs, lambda model, batch: diagnose_mismatch(model, batch)])
def test_a_wrapper_around_a_model_is_refused_with_the_model_to_pass(refused):
    with pytest.raises(UnsupportedModelError, match=r"Wrapper.*It wraps one: pass model\.module"):
        refused(Wrapper(text_model()), text_batch())
    with pytest.raises(UnsupportedModelError, match="Pass one that an Auto class loads"):
        refused(Wrapper(torch.nn.Linear(1, 1)), text_batch())


def test_a_model_without_an_output_layer_or_with_an_encoder_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"LlamaModel has no output layer for tokens"):
        token_logprobs(text_model().model, text_batch())
    sizes = {"d_model": 32, "d_ff": 32, "d_kv": 16, "num_layers": 1, "num_heads": 2}
    t5 = with_seed(lambda: T5ForConditionalGeneration(T5Config(vocab_size=300, **sizes)))
    with pytest.raises(UnsupportedModelError, match=r"has an encoder and a decoder"):
        token_logprobs(t5, text_batch())


def test_a_model_whose_forward_does_not_call_its_base_model_is_refused():
    sizes = {"hidden_size": 32, "word_embed_proj_dim": 32, "ffn_dim": 32, "num_hidden_layers": 1}
    config = OPTConfig(vocab_size=300, num_attention_heads=2, **sizes)
    with pytest.raises(UnsupportedModelError, match="does not call its base model OPTModel once"):
        token_logprobs(AutoModelForCausalLM.from_config(config), text_batch())


# Positions.


BLOCKS = st.lists(st.tuples(st.integers(0, 4), st.integers(1, 3), st.integers(1, 3)), min_size=1, max_size=4)


@settings(max_examples=50, deadline=None)
@given(BLOCKS, st.integers(0, 4))
def test_positions_of_adjacent_images_are_those_of_separate_images(qwen, blocks, tail):
    """`get_rope_index` alone would take two adjacent images for one."""
    placed, length = [], 0
    for gap, height, width in blocks:
        item = Block(2 * height, 2 * width)
        placed.append((item, PlaceholderRange(length + gap, item.num_tokens)))
        length += gap + item.num_tokens
    length += tail
    positions, following = media_positions(architecture(qwen.model), TokenRow(np.full(length, 9), placed))
    expected, after = mrope_positions(length, placed, 2)
    assert positions.tolist() == expected.tolist()
    assert following == after


def test_images_with_as_many_tokens_and_other_sides_have_positions_of_their_own(qwen):
    sides = [(2, 8), (4, 4), (2, 8)]
    rows = [TokenRow(np.full(5, 9), [(Block(*each), PlaceholderRange(0, 4))]) for each in sides]
    positions, following = row_positions(architecture(qwen.model), placed_rows(rows, pad_id=0))
    expected = [mrope_positions(5, row.media, 2) for row in rows]
    assert positions.tolist() == np.stack([each for each, _ in expected], axis=1).tolist()
    assert following.tolist() == [after for _, after in expected]
