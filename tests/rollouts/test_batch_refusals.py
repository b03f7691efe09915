"""What a batch, a sample and a packing plan refuse, or compute as nothing, before a model sees it."""

from dataclasses import replace

import pytest
import torch
from training_samples import PAD, sample, samples_of
from transformers import GPT2Config, GPT2LMHeadModel

from rollouts.errors import ArgumentError, SampleError
from rollouts.training import (
    TrainingBatch,
    model_inputs,
    token_logprobs,
    token_logprobs_and_entropy,
)

LAYOUTS = pytest.mark.parametrize("layout", ["padded", "packed"])
SCORES = pytest.mark.parametrize("score", [token_logprobs, token_logprobs_and_entropy])


def small_model(vocabulary=1000, **options):
    config = GPT2Config(
        vocab_size=vocabulary, n_embd=16, n_layer=1, n_head=2, n_positions=32, bos_token_id=0, eos_token_id=0, **options
    )
    torch.manual_seed(0)
    return GPT2LMHeadModel(config)


@pytest.fixture(scope="module")
def model():
    return small_model().eval()


# Masks.


@SCORES
@pytest.mark.parametrize(
    ("layout", "row", "column", "token"),
    [
        ("padded", 0, 0, "the first token of sample 0 (s0)"),
        ("padded", 1, 3, "padding"),
        ("packed", 0, 4, "the first token of sample 1 (s1)"),
        ("packed", 0, 6, "padding"),
    ],
)
def test_a_mask_that_trains_padding_or_a_first_token_is_refused_by_batches_and_log_probabilities(
    model, score, layout, row, column, token
):
    batch = TrainingBatch.from_samples(samples_of([4, 2]), pad_id=PAD, layout=layout, multiple_of=4)
    mask = batch.loss_mask.clone()
    mask[row, column] = True
    with pytest.raises(SampleError) as refused:
        replace(batch, loss_mask=mask)
    words = f"loss_mask is True at row {row} and column {column}, which is {token}; "
    assert words in str(refused.value)
    assert "Set loss_mask to False wherever position_ids is 0" in str(refused.value)
    batch.loss_mask[row, column] = True
    with pytest.raises(SampleError) as refused:
        score(model, batch)
    assert words in str(refused.value)


# Samples without tokens.


@LAYOUTS
@pytest.mark.parametrize("count", [1, 2])
def test_a_batch_of_samples_without_tokens_has_empty_log_probabilities_and_no_model_inputs(model, layout, count):
    batch = TrainingBatch.from_samples(samples_of([0] * count), pad_id=PAD, layout=layout, multiple_of=4)
    scored = token_logprobs_and_entropy(model, batch)
    assert scored.logprobs.shape == scored.entropy.shape == batch.loss_mask.shape
    assert not scored.logprobs.numel()
    with pytest.raises(SampleError, match="a batch without tokens has no model inputs; leave it out"):
        model_inputs(batch, model)


# Token ids.


@LAYOUTS
@pytest.mark.parametrize("compute", [token_logprobs, lambda model, batch: model_inputs(batch, model)])
def test_an_id_beyond_the_embeddings_is_refused_with_sample_position_and_id(model, layout, compute):
    wrong = sample(4, name="e7/3")
    wrong.token_ids[2] = 1000
    batch = TrainingBatch.from_samples([sample(3), wrong], pad_id=PAD, layout=layout)
    text = "sample e7/3: the token at position 2 has id 1000, and the embeddings of gpt2 have ids from 0 to 999"
    with pytest.raises(SampleError, match=text):
        compute(model, batch)


def test_a_padding_id_beyond_the_embeddings_is_refused(model):
    batch = TrainingBatch.from_samples(samples_of([3, 2]), pad_id=1000)
    with pytest.raises(ArgumentError, match="pad_id is 1000; the embeddings of gpt2 have ids from 0 to 999"):
        token_logprobs(model, batch)


# Random numbers.


@LAYOUTS
def test_the_first_use_of_a_model_with_dropout_draws_the_random_numbers_of_a_later_one(layout):
    model = small_model(resid_pdrop=0.5).train()
    batch = TrainingBatch.from_samples(samples_of([5, 3]), pad_id=PAD, layout=layout)
    scored = []
    for _ in range(2):
        torch.manual_seed(3)
        scored.append(token_logprobs(model, batch))
    assert torch.equal(*scored)
