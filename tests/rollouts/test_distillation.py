"""Losses with a teacher: each is its formula, worked out in numpy, and its gradient is the derivative of that."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from family_rows import loaded_family
from trainer_checks import SMALL

from rollouts.errors import ArgumentError, SampleError
from rollouts.training import (
    TrainingBatch,
    candidate_logprobs,
    forward_kl_loss,
    generalised_jsd_loss,
    reverse_kl_loss,
    token_logprobs,
)
from rollouts.training.trainer import AdamParams, Trainer, datum_from_sample

VOCABULARY, K, SHAPE = 11, 3, (2, 5)
MASK = torch.tensor([[False, True, True, True, False], [False, False, True, True, True]])


def distributions(seed):
    """Log-probabilities over a small vocabulary at each token, float64 (2, 5, 11)."""
    logits = np.random.default_rng(seed).normal(size=(*SHAPE, VOCABULARY)) * 1.5
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def merged(logprobs, ids):
    """The probabilities of `ids`, and that of all other tokens together."""
    top = np.take_along_axis(np.exp(logprobs), ids, -1)
    others = np.exp(logprobs).sum(-1, keepdims=True) - top.sum(-1, keepdims=True)
    return np.concatenate([top, others], -1)


def forward_kl(p, q):
    return (p * np.log(p / q)).sum(-1)


def jsd(p, q, beta):
    m = beta * p + (1 - beta) * q
    return beta * (p * np.log(p / m)).sum(-1) + (1 - beta) * (q * np.log(q / m)).sum(-1)


DIVERGENCES = {
    "forward KL": (forward_kl_loss, forward_kl),
    "JSD 0.5": (generalised_jsd_loss, lambda p, q: jsd(p, q, 0.5)),
    "JSD 0.1": (lambda *tensors: generalised_jsd_loss(*tensors, beta=0.1), lambda p, q: jsd(p, q, 0.1)),
}


def teacher_and_student():
    teacher, student = distributions(0), distributions(1)
    ids = np.argsort(-teacher, axis=-1)[..., :K]
    return teacher, student, ids


@pytest.mark.parametrize("name", DIVERGENCES)
def test_a_divergence_on_the_likeliest_tokens_and_its_gradient_are_those_of_its_formula(name):
    loss, formula = DIVERGENCES[name]
    teacher, student, ids = teacher_and_student()
    mask = MASK.numpy()

    def plain(logits):
        normal = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        return formula(merged(teacher, ids), merged(normal, ids))[mask].mean()

    logits = torch.from_numpy(student.copy()).requires_grad_()
    top = torch.log_softmax(logits, -1).gather(-1, torch.from_numpy(ids))
    value = loss(top, torch.from_numpy(np.take_along_axis(teacher, ids, -1)), MASK)
    value.backward()
    assert value.item() == pytest.approx(plain(student), rel=1e-9)
    expected = np.zeros_like(student)
    for place in np.ndindex(student.shape):
        moved = [student.copy(), student.copy()]
        moved[0][place] += 1e-6
        moved[1][place] -= 1e-6
        expected[place] = (plain(moved[0]) - plain(moved[1])) / 2e-6
    np.testing.assert_allclose(logits.grad.numpy(), expected, atol=1e-8)
    assert np.abs(expected).max() > 1e-3


def test_the_mass_of_the_rest_counts_and_a_mass_within_rounding_does_not():
    """Two distributions alike on the likeliest tokens cannot differ; with other likeliest tokens the rest does."""
    certain = torch.tensor([[[0.0, -30.0]]])
    mask = torch.tensor([[True]])
    assert forward_kl_loss(certain, certain, mask).item() == 0
    spread = torch.log(torch.tensor([[[0.5, 1e-9]]]))  # half of the student's mass is elsewhere
    assert forward_kl_loss(spread, certain, mask).item() == pytest.approx(math.log(2), abs=1e-4)
    assert math.isfinite(forward_kl_loss(certain, spread, mask).item())


# Reverse KL from sampled tokens.


def sampled_columns():
    """The student's, the sampler's and the teacher's log-probabilities of the sampled tokens, float64 (2, 5)."""
    random = np.random.default_rng(2)
    student = -random.random(SHAPE) * 3 - 0.1
    return student, student + random.normal(0, 0.1, SHAPE), student + random.normal(0, 1.0, SHAPE)


def test_reverse_kl_of_sampled_tokens_is_its_formula_and_has_its_derivative():
    student, old, teacher = sampled_columns()
    mask = MASK.numpy()

    def plain(new):
        return (np.exp(new - old) * (old - teacher))[mask].mean()

    logprobs = torch.from_numpy(student.copy()).requires_grad_()
    result = reverse_kl_loss(logprobs, torch.from_numpy(old), torch.from_numpy(teacher), MASK)
    result.loss.backward()
    assert result.loss.item() == pytest.approx(plain(student), rel=1e-9)
    step = np.zeros_like(student)
    step[1, 2] = 1e-6
    derivative = (plain(student + step) - plain(student - step)) / 2e-6
    assert logprobs.grad[1, 2].item() == pytest.approx(derivative, rel=1e-6)
    assert not logprobs.grad[~MASK].any()


# With a model: the log-probabilities of a teacher's tokens, and the losses of a Trainer.


def taught(sample, *, k=K, seed=0):
    random, count = np.random.default_rng(seed), len(sample)
    logits = random.normal(size=(count, 300)).astype(np.float32)
    logprobs = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    ids = np.argsort(-logprobs, axis=-1)[:, :k].astype(np.int32)
    own = np.take_along_axis(logprobs, sample.token_ids[:, None].astype(np.int64), -1)[:, 0]
    return replace(
        sample,
        logprobs=np.where(sample.loss_mask, -1.0, 0).astype(np.float32),
        advantages=np.where(sample.loss_mask, random.normal(size=count), 0).astype(np.float32),
        teacher_logprobs=own,
        teacher_top_ids=ids,
        teacher_top_logprobs=np.take_along_axis(logprobs, ids.astype(np.int64), -1),
    )


@pytest.fixture(scope="module")
def family():
    return loaded_family("qwen3_vl")


@pytest.fixture(scope="module")
def samples(family):
    rows = [family.row("one", [family.pixels(32, 48)]), family.row("only text"), family.row("two more")]
    return [taught(row.sample, seed=seed) for seed, row in enumerate(rows)]


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_candidates_have_the_log_probabilities_of_sampled_tokens_in_the_same_place(family, samples, layout):
    batch = TrainingBatch.from_samples(samples, pad_id=0, layout=layout)
    ids = torch.cat([batch.column("teacher_top_ids"), batch.input_ids[..., None]], -1)
    with torch.no_grad():
        found = candidate_logprobs(family.model, batch, ids)
        torch.testing.assert_close(found[..., -1], token_logprobs(family.model, batch), atol=1e-5, rtol=0)
        assert not found[~batch.loss_mask].any()
        one = replace(batch, input_ids=torch.where(_last_trained(batch), ids[..., 0], batch.input_ids))
        changed = token_logprobs(family.model, one)[_last_trained(batch)]  # what follows a token does not change it
    torch.testing.assert_close(found[..., 0][_last_trained(batch)], changed, atol=1e-5, rtol=0)


def _last_trained(batch):
    """The last token of each sample, which no other token reads."""
    last = torch.zeros_like(batch.loss_mask)
    ends = batch.starts[:, 1] + batch.lengths - 1
    last[batch.starts[:, 0], ends] = True
    return last & batch.loss_mask


def test_candidates_of_another_shape_are_refused(family, samples):
    batch = TrainingBatch.from_samples(samples, pad_id=0)
    with pytest.raises(ArgumentError, match=r"candidates is .*; pass integers \(3, \d+, 'K'\)"):
        candidate_logprobs(family.model, batch, batch.input_ids)


LOSSES = {
    "reverse_kl": lambda batch, new, top: (
        reverse_kl_loss(new, batch.logprobs, batch.column("teacher_logprobs"), batch.loss_mask, normaliser=1.0).loss
    ),
    "forward_kl": lambda batch, new, top: forward_kl_loss(
        top, batch.column("teacher_top_logprobs"), batch.loss_mask, normaliser=1.0
    ),
    "jsd": lambda batch, new, top: generalised_jsd_loss(
        top, batch.column("teacher_top_logprobs"), batch.loss_mask, normaliser=1.0
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOSSES)
def test_a_trainer_mixes_a_loss_with_a_teacher_and_the_policy_gradient_by_a_coefficient(family, samples, name):
    trainer = Trainer.from_pretrained(family.directory, device="cpu", tokens_per_pass=40)
    trainer.create_model("policy", lora=SMALL)
    data = [datum_from_sample(sample, name) for sample in samples]
    result = trainer.forward_backward("policy", data, name, {"coefficient": 0.25})
    batch = TrainingBatch.from_samples(samples, pad_id=0)
    with torch.no_grad():
        top = candidate_logprobs(family.model, batch, batch.column("teacher_top_ids"))
        new = token_logprobs(family.model, batch)
    policy = -(torch.exp(new - batch.logprobs) * batch.advantages)[batch.loss_mask].sum()
    expected = policy + 0.25 * LOSSES[name](batch, new, top)
    assert result.metrics["loss:sum"] == pytest.approx(expected.item(), rel=1e-4)
    for values, sample, row in zip(result.logprobs, samples, new, strict=True):
        mask = sample.loss_mask
        np.testing.assert_allclose(values[mask[1:]], row[: len(sample)][mask].numpy(), atol=1e-5)
    assert trainer.optim_step("policy", AdamParams())["grad_norm"] > 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda inputs: {"teacher_top_ids": inputs["teacher_top_ids"][:, :1]}, "with the k of the first row"),
        (lambda inputs: {"teacher_top_ids": inputs["teacher_top_ids"] + 9999}, "the ids of the model are from 0"),
        (lambda inputs: {"teacher_top_logprobs": inputs["teacher_top_logprobs"] * np.nan}, r"\[0, 0\] is nan"),
        (lambda inputs: {"teacher_top_ids": inputs["teacher_top_ids"][:, 0]}, r"pass numbers \(\d+, k\)"),
    ],
)
def test_a_trainer_refuses_candidates_that_it_cannot_use(family, samples, change, message):
    trainer = Trainer.from_pretrained(family.directory, device="cpu")
    trainer.create_model("policy", lora=SMALL)
    data = [datum_from_sample(sample, "jsd") for sample in samples[:2]]
    wrong = replace(data[1], inputs={**data[1].inputs, **change(data[1].inputs)})
    with pytest.raises(SampleError, match=message):
        trainer.forward("policy", [data[0], wrong], "jsd")


def test_a_datum_of_a_sample_without_a_teacher_is_refused(family):
    with pytest.raises(SampleError, match="the loss 'jsd' needs its teacher_top_ids; add them with with_teacher"):
        datum_from_sample(family.row("one").sample, "jsd")
