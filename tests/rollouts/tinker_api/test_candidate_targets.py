"""Several targets a token: `target_tokens` and `weights` (N, K) of `cross_entropy`, with (N, K) log-probabilities."""

import json
from dataclasses import replace

import numpy as np
import pytest
import tinker
import torch
from tinker import types
from tinker_clients import Gradients, datum_of, weighted

#: Targets of a row for each token; None: one, without the second axis.
WIDTHS = (4, 1, None, 3)


@pytest.fixture(scope="module")
def data(server):
    """Rows of text and images with random targets and weights, negative ones and zeros too."""
    random = np.random.default_rng(0)
    rows = [*(row for row in server.family.rows() if not row.videos), server.family.row("text")][: len(WIDTHS)]
    found = []
    for row, datum, width in zip(rows, weighted(rows), WIDTHS, strict=True):
        shape = (len(datum),) if width is None else (len(datum), width)
        targets = random.integers(0, 200, shape)
        weights = np.where(random.random(shape) < 0.2, random.normal(size=shape), 0).astype(np.float32)
        found.append((row, replace(datum, target_ids=targets, inputs={"weights": weights})))
    return found


def dense(datum):
    return datum


def sparse(datum):
    """As the client sends tensors of torch: without the zeros, where that is shorter."""
    inputs = {name: torch.from_numpy(value.to_numpy().copy()) for name, value in datum.loss_fn_inputs.items()}
    return types.Datum(datum.model_input, inputs)


def columns(row, datum):
    """A row for each of its targets."""
    wide = datum.target_ids.reshape(len(datum), -1)
    weights = datum.inputs["weights"].reshape(len(datum), -1)
    return [
        datum_of(row, replace(datum, target_ids=wide[:, k], inputs={"weights": weights[:, k]}))
        for k in range(wide.shape[1])
    ]


@pytest.mark.parametrize("form", [dense, sparse])
def test_gradients_and_log_probabilities_are_those_of_a_row_for_each_target(server, data, form):
    training, other = server.training(), server.training()  # of one seed: equal
    sent = [form(datum_of(*each)) for each in data]
    is_sparse = [each.loss_fn_inputs["weights"].sparse_crow_indices is not None for each in sent]
    assert any(is_sparse) == (form is sparse)
    with Gradients(server, training) as found:
        result = training.forward_backward(sent, "cross_entropy").result()
    with Gradients(server, other) as expected:
        alone = [other.forward_backward(columns(*each), "cross_entropy").result() for each in data]
    for name, value in expected.found.items():
        np.testing.assert_allclose(found.found[name], value, atol=1e-5 * max(1, np.abs(value).max()), err_msg=name)
    assert result.metrics["loss:sum"] == pytest.approx(sum(each.metrics["loss:sum"] for each in alone), abs=1e-3)
    (log,) = server.directory.glob(f"user-*/{training.model_id}/training.jsonl")
    weights = [datum.inputs["weights"].reshape(len(datum), -1) for _, datum in data]
    trained = json.loads(log.read_text().splitlines()[-1])["metrics"]["trained_tokens"]
    assert trained == sum(int(each.any(axis=1).sum()) for each in weights)
    for (_, datum), output, each in zip(data, result.loss_fn_outputs, alone, strict=True):
        logprobs = np.stack([one["logprobs"].to_numpy() for one in each.loss_fn_outputs], axis=1)
        assert output["logprobs"].shape == list(datum.target_ids.shape)
        np.testing.assert_allclose(output["logprobs"].to_numpy(), logprobs.reshape(datum.target_ids.shape), atol=1e-5)


def test_a_loss_of_the_client_over_several_targets_has_the_gradients_of_its_linear_form(server, data):
    """Its weights are the derivatives, zeros among them, which the client sends as a sparse tensor."""
    training, other = server.training(), server.training()
    chosen = [each for each in data if each[1].target_ids.ndim == 2]
    factors = [torch.from_numpy(datum.inputs["weights"]) for _, datum in chosen]

    def loss(_, logprobs):
        return -sum((each * factor).sum() for each, factor in zip(logprobs, factors, strict=True)), {}

    with Gradients(server, training) as found:
        result = training.forward_backward_custom([datum_of(*each) for each in chosen], loss).result()
    with Gradients(server, other) as expected:
        plain = other.forward_backward([datum_of(*each) for each in chosen], "cross_entropy").result()
    assert result.metrics["loss:sum"] == pytest.approx(plain.metrics["loss:sum"], abs=1e-3)
    for name, value in expected.found.items():
        np.testing.assert_allclose(found.found[name], value, atol=1e-5 * max(1, np.abs(value).max()), err_msg=name)


IDS = list(range(5, 25))
TARGETS = np.tile(np.arange(20, dtype=np.int64)[:, None], (1, 2))
ONES = np.ones((20, 2), np.float32)


def sparse_ones(crow, columns, shape):
    return types.TensorData([1.0] * len(columns), "float32", shape, crow, columns)


@pytest.mark.parametrize(
    ("targets", "weights", "text"),
    [
        (TARGETS, ONES[:, 0], r"pass numbers \(20, 2\)"),
        (TARGETS[:, 0], ONES, r"pass numbers \(20,\)"),
        (TARGETS[:, :0], ONES[:, :0], r"shape \[20, 0\]"),
        (TARGETS + 10**6, ONES, "target 0, 0 is 1000000"),
        (np.zeros((20, 9999), np.int64), np.zeros((20, 9999), np.float32), "9999 targets for each token"),
        (TARGETS, sparse_ones([0] * 20 + [1], [2], [20, 2]), "column 2"),
        (TARGETS, sparse_ones([0, 1], [0], [20, 2]), "2 ends of rows"),
        (TARGETS, sparse_ones([0, 1], [0], [1, 10**12]), "1000000000000 values"),
    ],
)
def test_several_targets_in_another_form_fail_by_their_place(training, targets, weights, text):
    with pytest.raises(tinker.RequestFailedError, match=rf"data(\[0\]|:).*{text}"):
        training.forward([row(targets, weights=weights)], "cross_entropy").result()


def test_other_losses_have_one_target_a_token(training):
    with pytest.raises(tinker.RequestFailedError, match=r"data\[0\].*target_ids is int64 \(20, 2\)"):
        training.forward([row(TARGETS, logprobs=ONES, advantages=ONES)], "ppo").result()


def row(targets, **inputs):
    return types.Datum(types.ModelInput.from_ints(IDS), {"target_tokens": targets, **inputs})


@pytest.fixture(scope="module")
def training(server):
    return server.client().create_lora_training_client("tiny", rank=4).result()
