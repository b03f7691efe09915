"""What samples, batches, plans, losses and reports refuse: an error that names the argument, its value and the cure."""

import math
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from training_samples import PAD, image, sample, samples_of

from rollouts.engines.protocol import WeightSpan
from rollouts.errors import ArgumentError, SampleError
from rollouts.training import (
    MismatchReport,
    TrainingBatch,
    check_mismatch,
    cispo_loss,
    degenerate_groups,
    distillation_advantages,
    forward_kl_loss,
    generalised_jsd_loss,
    group_advantages,
    kl_loss,
    micro_batches,
    mismatch_report,
    pack_samples,
    policy_gradient_loss,
    sample_staleness,
    sequence_logprobs,
    sequence_ratio_loss,
    sft_loss,
    split_by_staleness,
    truncate_sample,
)
from rollouts.training.named_losses import loss_options
from rollouts.training.trainer import AdamParams, LoraOptions, datum_from_sample

ROWS, BOTH, IDS = torch.zeros(1, 2), torch.ones(1, 2, dtype=torch.bool), torch.zeros(1, 2, dtype=torch.int32)
POLICY = (ROWS, ROWS, ROWS, BOTH)
TOP = torch.zeros(1, 2, 3)
HEAD = (torch.zeros(3, 4), torch.zeros(5, 4))
TARGETS = torch.tensor([0, 1, 2])


def batch(**changes):
    return replace(TrainingBatch.from_samples(samples_of([2, 3]), pad_id=PAD), **changes)


def row(**columns):
    """A sample of three tokens of which the last two are trained."""
    return replace(sample(3, trained=(1, 3)), **columns)


def versioned(*versions):
    spans = tuple(WeightSpan(version, index, index + 1) for index, version in enumerate(versions))
    return replace(sample(len(versions) + 1, trained=(1, len(versions) + 1)), weight_spans=spans)


def laid_out(count=1, **options):
    return TrainingBatch.from_samples(samples_of([2] * count), **{"pad_id": PAD, **options})


SAMPLES = [
    (lambda: row(logprobs=np.zeros(2, np.float32)), "logprobs is float32 (2,); pass floats (3,)"),
    (lambda: row(logprobs=np.array([0, np.nan, 0], np.float32)), "token 1 is trained and its log-probability nan"),
    (lambda: row(advantages=np.array([0, 1, np.nan], np.float32)), "token 2 is trained and its advantage nan is not"),
    (lambda: row(loss_mask=np.ones(3, bool)), "no token before it predicts it"),
    (lambda: row(token_ids=[1, 2, 3]), "token_ids is a list; pass integers (n,)"),
    (lambda: row(token_ids=np.array([1, 2, -100])), "token 2 has id -100; token ids are from 0 to 2147483647"),
    (lambda: row(loss_mask=np.array([0, 1, 1])), "loss_mask is int64 (3,); pass bools (3,)"),
    (lambda: row(weight_spans=(WeightSpan("0", 0, 3),)), "spans count the 2 trained tokens"),
    (lambda: row(weight_spans=("0",)), "weight_spans are not WeightSpans; pass a tuple of them"),
    (lambda: datum_from_sample(sample(1), "ppo"), "it has 1 tokens, and a target needs two; leave it out"),
    (lambda: TrainingBatch.from_samples([], pad_id=0), "look at `episode.error`"),
    (lambda: sample_staleness(versioned("6"), 5), "weight version '6' is newer than the trainer's, '5'"),
    (lambda: sample_staleness(versioned("9" * 5000), 5), "has no known place; pass versions="),
    (lambda: sample_staleness(versioned("b"), "a", versions=["a"]), "'b' has no known place; add it to versions"),
    (lambda: pack_samples(samples_of([9]), max_tokens=8), "sample s0: it has 9 tokens, and a row has room for 8"),
    (
        lambda: pack_samples([sample(9, images=[image(16)])], max_tokens=16, max_patches=8),
        "9 tokens and 16 patches and frames, and a row has room for 16 tokens and 8 patches",
    ),
]

BATCHES = [
    (lambda: batch(input_ids=[1, 2, 3]), "input_ids is [1, 2, 3]; 2 samples of 5 tokens in this layout need"),
    (lambda: batch(logprobs=torch.zeros(2, 3, dtype=torch.float64)), "logprobs is torch.float64 (2, 3) on cpu; 2"),
    (lambda: TrainingBatch.concat([]), "at least one TrainingBatch"),
    (lambda: TrainingBatch.concat([laid_out(), laid_out(side="left")]), "side is 'right' in batch 0 and 'left' in"),
    (lambda: batch().with_extras(advantages=ROWS), "change it with dataclasses.replace(batch, advantages=...)"),
    (lambda: batch().with_extras(values=torch.zeros(3, 3)), "'values' is of shape (3, 3); pass a tensor (2, 3, '...')"),
    (lambda: batch().column("values"), "there is no extra 'values'; this batch has []"),
]

ARGUMENTS = [
    # Advantages.
    (lambda: group_advantages([1.0, 2.0], ["a"]), "pass a list with the group of each of the 2 rewards"),
    (lambda: group_advantages([1.0, math.nan], ["a", "a"]), "reward 1 is nan; pass finite numbers"),
    (lambda: degenerate_groups([1.0, 1e300], ["a", "a"]), "reward 1 is 1e+300; pass finite numbers from -1e+18"),
    (lambda: group_advantages([[1.0], [2.0]], ["a", "a"]), "pass one number for each episode"),
    (lambda: group_advantages([1.0], ["a"], scale="std"), "scale is 'std'; pass one of group, batch, none"),
    (lambda: group_advantages([1.0], ["a"], baseline="median"), "baseline is 'median'; pass one of mean"),
    (lambda: group_advantages([1.0, 2.0], "aa", lengths=[1]), "lengths is [1]; pass one number of tokens"),
    (
        lambda: group_advantages([1.0, 2.0], "aa", lengths=[5, 0]),
        "lengths is [5, 0]; pass one number of tokens",
    ),
    (lambda: group_advantages([1.0], [object()]), "its hash is its identity, or it equals no group; pass"),
    (lambda: group_advantages([1.0], [math.nan]), "group 0 is nan; its hash is its identity, or it equals no group"),
    (lambda: group_advantages([1.0, 2.0], {"a", "b"}), "a list with the group of each of the 2 rewards"),
    # Batches and plans.
    (lambda: batch(pad_id=-1), "pad_id is -1; pass a token id"),
    (lambda: laid_out(layout="ragged"), "layout is 'ragged'; pass one of padded, packed"),
    (lambda: laid_out(side="up"), "side is 'up'; pass one of left, right"),
    (lambda: laid_out(multiple_of=0), "multiple_of is 0; pass an integer of at least 1"),
    (lambda: laid_out(layout="packed", side="left"), "a packed row is padded on the right"),
    (lambda: batch().chunk(0), "count is 0"),
    (lambda: list(micro_batches(samples_of([2]), rows=0, pad_id=0)), "rows is 0; pass an integer of at least 1"),
    (lambda: truncate_sample(sample(10), 0), "max_tokens is 0; pass an integer of at least 1"),
    (lambda: truncate_sample(sample(10), 5, -1), "max_patches is -1; pass an integer of at least 0, or None"),
    (lambda: pack_samples([], max_tokens=8, max_patches=0), "max_patches is 0"),
    (lambda: pack_samples([], max_tokens=8, too_long="cut"), "too_long is 'cut'; pass one of error, drop, truncate"),
    (lambda: pack_samples([], max_tokens=8, ranks=2).batches(2, pad_id=0), "rank is 2; pass a rank from 0 to 1"),
    # Losses.
    (lambda: sft_loss(ROWS, BOTH, mean_over="rows"), "mean_over is 'rows'; pass one of tokens, sequences"),
    (lambda: sft_loss(ROWS, BOTH, mean_over="sequences"), "sequence_ids is None; pass batch.sequence_ids"),
    (lambda: sft_loss(ROWS, BOTH.long()), "the dtype of mask is 'torch.int64'; pass torch.bool"),
    (lambda: sft_loss(ROWS, BOTH, normaliser=0), "normaliser is 0; pass a number above 0, or None"),
    (lambda: sequence_ratio_loss(*POLICY, sequence_ids=IDS[0]), "'torch.int32 (2,)'; pass integers (1, 2)"),
    (lambda: sequence_ratio_loss(*POLICY, sequence_ids=IDS - 1), "sequence_ids[0, 0] is -1; the mask trains this"),
    (lambda: policy_gradient_loss(ROWS, ROWS.T, ROWS, BOTH), "the shape of old_logprobs is (2, 1); pass the tensors"),
    (lambda: kl_loss(ROWS, ROWS.long(), BOTH), "the dtype of reference_logprobs is 'torch.int64'; pass float32"),
    (lambda: policy_gradient_loss(*POLICY, clip=-0.1), "clip is -0.1; pass a number from 0 to 1, or (low, high)"),
    (lambda: cispo_loss(*POLICY, clip=(1.5, 2.0)), "clip is (1.5, 2.0); pass"),
    (lambda: generalised_jsd_loss(TOP, TOP, BOTH, beta=1.0), "beta is 1.0; pass a number above 0 and below 1"),
    (lambda: forward_kl_loss(TOP, TOP[..., :2], BOTH), "teacher_top_logprobs is 'torch.float32 (1, 2, 2)'; pass two"),
    (lambda: distillation_advantages(ROWS, ROWS, BOTH, coefficient=0), "coefficient is 0"),
    (lambda: loss_options("ppo", {"beta": 1}), "ppo has no such option; it takes clip_low_threshold"),
    (lambda: loss_options("ppo", {"clip_low_threshold": 1.2}), "is 1.2; pass the smallest ratio"),
    (lambda: loss_options("gspo", {"clip_high_threshold": "x"}), "pass the largest ratio"),
    (lambda: loss_options("dro", None), "options['beta'] is None"),
    (lambda: loss_options(["ppo"], None), "loss is ['ppo']; pass one of cross_entropy"),
    # Log-probabilities.
    (lambda: sequence_logprobs(*HEAD, TARGETS[:2]), "targets is 'torch.int64 (2,)'; pass integers (3,)"),
    (
        lambda: sequence_logprobs(*HEAD, TARGETS + 3),
        "targets[2] is 5; pass trained positions only, and ids from 0",
    ),
    (lambda: sequence_logprobs(*HEAD, TARGETS, temperature=0), "temperature is 0; pass a finite number above 0"),
    (lambda: sequence_logprobs(*HEAD, TARGETS, softcap=-1.0), "softcap is -1.0; pass a finite number above 0"),
    (lambda: sequence_logprobs(*HEAD, TARGETS, scale=math.nan), "scale is nan; pass a finite number above 0"),
    (lambda: sequence_logprobs(*HEAD, TARGETS, chunk_positions=0), "chunk_positions is 0; pass an integer of at least"),
    # Versions.
    (lambda: sample_staleness(sample(2), "new"), "current is 'new'; pass the version of the trainer's"),
    (lambda: sample_staleness(sample(2), "c", versions=["a"]), "current is 'c'; pass the version of"),
    (lambda: sample_staleness(sample(2), "a", versions="abc"), "versions is 'abc'; pass a list"),
    (
        lambda: sample_staleness(sample(2), "a", versions=["a", "a"]),
        "versions[1] is 'a'; versions[0] is the same",
    ),
    (lambda: split_by_staleness([], 5, max_lag=-1), "max_lag is -1; pass an integer of at least 0"),
    # Mismatch.
    (lambda: mismatch_report(batch(), torch.zeros(1, 3)), "shape of logprobs is (1, 3); pass the log-probabilities of"),
    (lambda: check_mismatch(MismatchReport()), "pass at least one of max_abs, mean_abs and k3"),
    (lambda: check_mismatch(MismatchReport(), max_abs=0), "max_abs is 0; pass a number of nats above 0"),
    # The trainer's options.
    (lambda: LoraOptions(rank=513), "rank is 513; pass an integer of at least 1 and of at most 512"),
    (lambda: LoraOptions(alpha=math.nan), "alpha is nan"),
    (lambda: LoraOptions(seed=-1), "seed is -1"),
    (lambda: LoraOptions(train_mlp=False, train_attn=False, train_unembed=False), "train_mlp, train_attn"),
    (lambda: AdamParams(learning_rate=1e38), "learning_rate is 1e+38; pass a finite number of at least 0"),
    (lambda: AdamParams(grad_clip_norm=-1.0), "grad_clip_norm is -1.0"),
    (lambda: AdamParams(beta2=1.0), "beta2 is 1.0"),
    (lambda: AdamParams(eps=0), "eps is 0"),
]

ALL = [
    *((call, SampleError, text) for call, text in SAMPLES),
    *((call, SampleError, text) for call, text in BATCHES),
    *((call, ArgumentError, text) for call, text in ARGUMENTS),
]


@pytest.mark.parametrize(("call", "error", "text"), ALL, ids=[text for *_, text in ALL])
def test_what_does_not_fit_is_refused_with_its_name_its_value_and_the_cure(call, error, text):
    with pytest.raises(error, match=re.escape(text)):
        call()
