"""What a batch, a sample and a packing plan refuse, or compute as nothing, before a model sees it."""

import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from training_samples import PAD, sample, samples_of
from transformers import GPT2Config, GPT2LMHeadModel

from rollouts.errors import ArgumentError, BatchError, SampleError
from rollouts.training import (
    TrainingBatch,
    model_inputs,
    pack_samples,
    token_logprobs,
    token_logprobs_and_entropy,
    truncate_sample,
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
        ("padded", 1, 0, "the first token of sample 1 (s1)"),
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
    with pytest.raises(BatchError) as refused:
        replace(batch, loss_mask=mask)
    words = f"loss_mask is True at row {row} and column {column}, which is {token}; "
    assert words in str(refused.value)
    assert "Set loss_mask to False wherever position_ids is 0" in str(refused.value)
    batch.loss_mask[row, column] = True
    with pytest.raises(BatchError) as refused:
        score(model, batch)
    assert words in str(refused.value)


def test_the_cure_of_the_error_is_accepted(model):
    batch = TrainingBatch.from_samples(samples_of([4, 2]), pad_id=PAD, multiple_of=4)
    batch.loss_mask[:] = True
    batch.loss_mask[batch.position_ids == 0] = False
    assert (token_logprobs(model, batch) != 0).tolist() == [[False, True, True, True], [False, True, False, False]]


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


@LAYOUTS
def test_samples_without_tokens_do_not_change_the_log_probabilities_of_others(model, layout):
    alone, among = (
        TrainingBatch.from_samples(samples, pad_id=PAD, layout=layout)
        for samples in ([sample(5)], [sample(0), sample(5), sample(0)])
    )
    expected, scored = token_logprobs(model, alone), token_logprobs(model, among)
    torch.testing.assert_close(scored[among.loss_mask], expected[alone.loss_mask])


# Token ids.


@pytest.mark.parametrize("wrong", [-1, -100, 2**31])
def test_a_sample_refuses_what_is_no_token_id_and_names_its_position(wrong):
    good = sample(4, name="e7/3")
    ids = good.token_ids.astype(np.int64)
    ids[2] = wrong
    with pytest.raises(SampleError, match=rf"sample e7/3: token 2 has id {wrong}; token ids are from 0 to 2147483647"):
        replace(good, token_ids=ids)


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


# Plans without rows.


@pytest.mark.parametrize(
    ("samples", "options"),
    [
        ([sample(6)], {"max_tokens": 5, "too_long": "drop"}),
        ([sample(6)], {"max_tokens": 5, "too_long": "truncate"}),
        ([sample(6)], {"max_tokens": 5, "too_long": "drop", "uniform_modality": True}),
        ([], {"max_tokens": 5}),
    ],
)
def test_a_plan_without_rows_has_no_batches_for_each_of_its_ranks(samples, options):
    plan = pack_samples(samples, ranks=2, **options)
    assert [list(plan.batches(rank, pad_id=PAD)) for rank in range(2)] == [[], []]
    with pytest.raises(ArgumentError, match="rank is 2; pass a rank from 0 to 1"):
        plan.batches(2, pad_id=PAD)
    assert plan.filled == 0
    assert plan.summary().startswith("0 steps; 0 samples truncated")


# Arguments.


@pytest.mark.parametrize("limit", [-2, -200, 0, 1.5, True, None, "8"])
def test_truncation_refuses_a_number_of_tokens_below_one(limit):
    with pytest.raises(ArgumentError, match=r"max_tokens is .*; pass an integer of at least 1"):
        truncate_sample(sample(10), limit)


@pytest.mark.parametrize("limit", [-1, 1.5])
def test_truncation_refuses_a_number_of_patches_below_zero(limit):
    with pytest.raises(ArgumentError, match=r"max_patches is .*; pass an integer of at least 0, or None"):
        truncate_sample(sample(10), 5, limit)


def test_truncation_refuses_what_is_no_sample():
    with pytest.raises(ArgumentError, match="pass a TrainingSample"):
        truncate_sample([1, 2, 3], 2)


def test_saving_to_a_directory_is_refused_and_leaves_nothing_behind(tmp_path):
    directory = tmp_path / "batches"
    directory.mkdir()
    with pytest.raises(ArgumentError, match="this is a directory; pass the path of a file"):
        TrainingBatch.from_samples(samples_of([2]), pad_id=PAD).save(directory)
    assert os.listdir(tmp_path) == ["batches"]


def test_a_failed_save_leaves_no_unfinished_file(tmp_path, monkeypatch):
    def no_space(source, target):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", no_space)
    with pytest.raises(OSError, match="No space left"):
        TrainingBatch.from_samples(samples_of([2]), pad_id=PAD).save(tmp_path / "batch")
    assert os.listdir(tmp_path) == []


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


@LAYOUTS
def test_the_first_use_of_a_model_on_the_cpu_seeds_no_gpu(layout, monkeypatch):
    batch = TrainingBatch.from_samples(samples_of([5, 3]), pad_id=PAD, layout=layout)
    model, seeds = small_model(), []
    monkeypatch.setattr(torch.cuda, "manual_seed_all", seeds.append)
    token_logprobs(model, batch)
    assert seeds == []
