"""Corrections by name: a `Trainer` corrects all rows of a call at once, with the log-probabilities of its model."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from trainer_checks import gradients, with_nonzero_adapter

from rollouts.errors import ArgumentError, SampleError
from rollouts.training import (
    TrainingBatch,
    TrainingSample,
    cispo_loss,
    importance_sampling_loss,
    policy_gradient_loss,
    rollout_correction,
    sequence_ratio_loss,
)
from rollouts.training.trainer import Trainer, datum_from_sample


@pytest.fixture(scope="module")
def trainer(tiny_model_dir):
    """Passes of few tokens, so that the rows of a call are in several."""
    return Trainer.from_pretrained(tiny_model_dir, device="cpu", tokens_per_pass=24)


@pytest.fixture
def model_id(trainer):
    with_nonzero_adapter(trainer, "policy", [datum_from_sample(each, "cross_entropy") for each in samples()])
    yield "policy"
    trainer.unload("policy")


def samples(seed=0):
    """Three rows, two of which begin alike; the sampler's log-probabilities are set by `sampled`."""
    random = np.random.default_rng(seed)
    ids = [random.integers(3, 250, length).astype(np.int32) for length in (9, 14, 6)]
    ids[1][:5] = ids[0][:5]
    masks = [np.arange(len(each)) > 2 for each in ids]
    advantages = [np.where(mask, random.normal(size=len(mask)), 0).astype(np.float32) for mask in masks]
    return [
        TrainingSample(i, m, np.zeros(len(i), np.float32), a) for i, m, a in zip(ids, masks, advantages, strict=True)
    ]


def sampled(trainer, model_id, loss, spread=0.8):
    """Rows for a loss whose sampler is near the model, and the tensors of them: log p, the sampler's, mask, ids."""
    data = [datum_from_sample(each, loss) for each in samples()]
    now = trainer.forward(model_id, data, loss).logprobs
    random = np.random.default_rng(1)
    mask_name = "sequence_ratio_mask" if loss == "gspo" else "mask"
    rows = []
    for datum, logprobs in zip(data, now, strict=True):
        sampler = np.where(datum.inputs[mask_name] != 0, logprobs + random.normal(0, spread, len(datum)), 0)
        rows.append(replace(datum, inputs={**datum.inputs, "logprobs": sampler.astype(np.float32)}))
    joined = [now, [row.inputs["logprobs"] for row in rows], [row.inputs[mask_name] for row in rows]]
    tensors = [torch.from_numpy(np.concatenate(each))[None] for each in joined]
    ids = torch.from_numpy(np.repeat(np.arange(3), [len(row) for row in rows]))[None]
    advantages = torch.from_numpy(np.concatenate([row.inputs["advantages"] for row in rows]))[None]
    return rows, (tensors[0], tensors[1], tensors[2] != 0, ids), advantages


WEIGHTS = {"token_weights": 1.5, "normalise": True, "veto": 0.3}
REJECTIONS = {"token_low": 0.5, "token_high": 2.0, "token_weights": None}


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("importance_sampling", importance_sampling_loss),
        ("ppo", policy_gradient_loss),
        ("cispo", lambda *tensors, **o: cispo_loss(*tensors, clip=0.2, **o)),
        ("gspo", lambda *tensors, **o: sequence_ratio_loss(*tensors, **{**o, "mean_over": "tokens"})),
    ],
)
@pytest.mark.parametrize("options", [WEIGHTS, {"sequence_weights": 3.0, "mean_low": 0.9}, REJECTIONS, {}])
def test_the_loss_is_that_of_the_function_with_the_correction_of_all_rows(trainer, model_id, name, loss, options):
    rows, tensors, advantages = sampled(trainer, model_id, name)
    correction = rollout_correction(*tensors, options)
    # With weights the ratio of the loss is to the policy itself; without, to the sampler.
    old = tensors[0 if options.get("token_weights") or options.get("sequence_weights") else 1]
    expected = loss(tensors[0], old, advantages, correction, sequence_ids=tensors[3], normaliser=1.0).loss
    found = trainer.forward(model_id, rows, name, correction=options).metrics
    assert found["loss:sum"] == pytest.approx(float(expected), rel=1e-4)
    figures = {key[11:-5]: value for key, value in found.items() if key.startswith("correction_")}
    assert figures == pytest.approx(correction.figures, rel=1e-4, abs=1e-6)
    if options:
        plain = trainer.forward(model_id, rows, name).metrics["loss:sum"]
        assert found["loss:sum"] != pytest.approx(plain, rel=1e-3)
    assert trainer.forward_backward(model_id, rows, name, correction=options).metrics == pytest.approx(found, rel=1e-5)


def test_rows_with_the_sampler_s_and_the_old_log_probabilities_are_corrected_between_these(trainer, model_id):
    rows, (now, sampler, mask, ids), advantages = sampled(trainer, model_id, "ppo")
    old = now + 0.05
    parts = torch.split(old[0], [len(row) for row in rows])
    rows = [
        replace(row, inputs={**row.inputs, "sampler_logprobs": row.inputs["logprobs"], "logprobs": part.numpy()})
        for row, part in zip(rows, parts, strict=True)
    ]
    correction = rollout_correction(old, sampler, mask, ids, WEIGHTS)
    expected = policy_gradient_loss(now, old, advantages, correction, normaliser=1.0).loss
    found = trainer.forward(model_id, rows, "ppo", correction=WEIGHTS).metrics["loss:sum"]
    assert found == pytest.approx(float(expected), rel=1e-4)
    with pytest.raises(SampleError, match=r"data\[0\]: the loss has no input 'sampler_logprobs'"):
        trainer.forward(model_id, rows, "ppo")
    lacking = replace(rows[1], inputs={key: rows[1].inputs[key] for key in ("logprobs", "advantages", "mask")})
    with pytest.raises(SampleError, match=r"data\[1\]: the loss needs the input 'sampler_logprobs'"):
        trainer.forward(model_id, [rows[0], lacking], "ppo", correction={})


def test_lags_of_rows_reject_older_tokens(trainer, model_id):
    rows, (now, sampler, mask, _), advantages = sampled(trainer, model_id, "ppo")
    lags = [np.arange(len(row)) % 3 for row in rows]
    rows = [replace(row, inputs={**row.inputs, "lags": each}) for row, each in zip(rows, lags, strict=True)]
    fresh = mask & (torch.from_numpy(np.concatenate(lags))[None] <= 1)
    expected = policy_gradient_loss(now, sampler, advantages, fresh, normaliser=1.0).loss
    found = trainer.forward(model_id, rows, "ppo", correction={"max_lag": 1}).metrics
    assert found["loss:sum"] == pytest.approx(float(expected), rel=1e-4)


def test_gradients_of_a_correction_are_those_of_rows_apart_with_shared_prefixes_too(trainer, tiny_model_dir, tmp_path):
    apart = Trainer(trainer.model, tiny_model_dir, tokens_per_pass=10_000, share_prefixes=False)
    found = []
    for number, each in enumerate((trainer, apart)):
        with_nonzero_adapter(each, "policy", [datum_from_sample(one, "cross_entropy") for one in samples()])
        rows, _, _ = sampled(each, "policy", "ppo")
        each.forward_backward("policy", rows, "ppo", correction=WEIGHTS)
        found.append(gradients(each, "policy", tmp_path / str(number)))
        each.unload("policy")
    assert max(np.abs(value).max() for value in found[0].values()) > 1e-2
    for name, value in found[0].items():
        np.testing.assert_allclose(value, found[1][name], atol=1e-5)


def test_a_correction_that_cannot_be_made_is_refused_before_anything_is_computed(trainer, model_id, tmp_path):
    rows, _, _ = sampled(trainer, model_id, "ppo")
    with pytest.raises(ArgumentError, match=r"'limit'.*there is no such option"):
        trainer.forward_backward(model_id, rows, "ppo", correction={"limit": 2.0})
    supervised = [datum_from_sample(each, "cross_entropy") for each in samples()]
    with pytest.raises(ArgumentError, match="no log-probabilities of a sampler; leave it out, or pass importance"):
        trainer.forward_backward(model_id, supervised, "cross_entropy", correction={"token_weights": 2.0})
    with pytest.raises(ArgumentError, match="it has no gradients"):
        trainer.optim_step(model_id, None)


def test_weights_leave_dro_its_distance_to_the_sampler_and_are_refused_where_a_teacher_is_compared_with_it(
    trainer, model_id
):
    rows, *_ = sampled(trainer, model_id, "importance_sampling")
    weights = {"token_weights": 1e30}
    losses = [
        trainer.forward(model_id, rows, "dro", {"beta": beta}, correction=weights).metrics["loss:sum"]
        for beta in (1.0, 2.0, 3.0)
    ]
    assert losses[1] - losses[0] == pytest.approx(losses[2] - losses[1], rel=1e-4)
    assert losses[1] - losses[0] > 0.1
    with pytest.raises(ArgumentError, match="no weights"):
        trainer.forward(model_id, rows, "reverse_kl", correction=weights)


def test_samples_among_kept_ids_are_refused_where_a_teacher_is_compared_with_the_sampler():
    given = samples()[0]
    kept = np.where(given.loss_mask, given.token_ids, -1)[:, None].astype(np.int32)
    sample = replace(given, sampling_mask=kept, teacher_logprobs=np.zeros(len(given), np.float32))
    with pytest.raises(SampleError, match="a teacher's are not"):
        datum_from_sample(sample, "reverse_kl")
    with pytest.raises(SampleError, match="a teacher's are not"):
        TrainingBatch.from_samples([sample], pad_id=0).column("teacher_logprobs")
