"""Gradients through the server are those of a plain loop, whatever the order and the number of clients."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from tinker import types
from tinker_clients import FIRST_STEP, Gradients, datum_of, post, request_of, weighted, weights

FAMILIES = ("qwen3_vl", "gemma3")


@pytest.fixture
def rows(server):
    """Text, one image, several images, and one image twice."""
    family = server.family
    image = family.pixels(32, 32)
    rows = [row for row in family.rows() if not row.videos]
    return [*rows, family.row("again", [image, family.pixels(24, 40), image]), family.row("other text")]


def sent(rows, data):
    return [datum_of(row, datum) for row, datum in zip(rows, data, strict=True)]


@pytest.mark.parametrize(
    "server",
    [name if name == "qwen3_vl" else pytest.param(name, marks=pytest.mark.slow) for name in FAMILIES],
    indirect=True,
)
@pytest.mark.parametrize("chosen", [slice(0, 1), slice(1, 4), slice(0, 5)], ids=["text", "one image and many", "mixed"])
def test_gradients_are_those_of_a_plain_loop(server, rows, chosen):
    rows = rows[chosen]
    data = weighted(rows)
    training = server.training()
    with Gradients(server, training) as gradients:
        result = training.forward_backward(sent(rows, data), "cross_entropy").result()
    gradients.assert_are_those_of(rows, data)
    logprobs = [output["logprobs"].to_numpy() for output in result.loss_fn_outputs]
    assert [len(each) for each in logprobs] == [len(datum) for datum in data]
    loss = -sum(float(each @ datum.inputs["weights"]) for each, datum in zip(logprobs, data, strict=True))
    assert result.metrics["loss:sum"] == pytest.approx(loss, abs=1e-3)


@pytest.mark.slow
def test_gradients_of_several_calls_and_of_several_chunks_of_a_call_add_up(server, rows):
    data = weighted(rows)
    training = server.training()
    limits = {"fwdbwd_max_chunk_len": 2}  # the first chunk is sent after the others
    training.holder._client_config = training.holder._client_config.model_copy(update=limits)
    with Gradients(server, training) as gradients:
        training.forward_backward(sent(rows, data)[:1], "cross_entropy")
        result = training.forward_backward(sent(rows, data)[1:], "cross_entropy").result()
    assert len(result.loss_fn_outputs) == len(rows) - 1
    gradients.assert_are_those_of(rows, data)


@pytest.mark.slow
def test_a_loss_of_the_client_has_the_gradients_that_it_would_have_in_a_plain_loop(server, rows):
    data = weighted(rows)
    training = server.training()

    def loss(_, logprobs):
        pairs = zip(logprobs, data, strict=True)
        return -sum((each * each.new_tensor(datum.inputs["weights"])).sum() for each, datum in pairs), {}

    with Gradients(server, training) as gradients:
        training.forward_backward_custom(sent(rows, data), loss).result()
    gradients.assert_are_those_of(rows, data)


@pytest.mark.slow
def test_two_clients_at_once_do_not_change_each_others_gradients(server, rows):
    parts = [rows[:3], rows[2:]]

    def train(user):
        training = server.training(user, server.client(user))
        with Gradients(server, training) as gradients:
            for row in parts[user]:
                training.forward_backward(sent([row], [_weights_of(row)]), "cross_entropy")
        return gradients

    with ThreadPoolExecutor(2) as threads:
        found = list(threads.map(train, range(2)))
    for gradients, part in zip(found, parts, strict=True):
        gradients.assert_are_those_of(part, [_weights_of(row) for row in part])


def _weights_of(row):
    return weighted([row])[0]


@pytest.mark.slow
def test_requests_that_arrive_in_another_order_are_computed_in_theirs(server, rows):
    """A step between two parts of a batch: the gradients of the second are those after the step."""
    data = weighted(rows)
    training, other = server.training(), server.training()  # of the same seed: equal
    training.forward_backward(sent(rows, data)[:2], "cross_entropy").result()
    training.optim_step(FIRST_STEP).result()
    with Gradients(server, training) as gradients:
        training.forward_backward(sent(rows, data)[2:], "cross_entropy").result()

    step = types.OptimStepRequest(optim_params=FIRST_STEP, model_id=other.model_id, seq_id=4)
    futures = [post(other, request_of(other, 5, sent(rows, data)[2:])), post(other, step)]
    futures.append(post(other, request_of(other, 3, sent(rows, data)[:2])))
    for future in futures:
        future.result()
    other._request_id_counter = other._turn_counter = 5
    before = gradients.before
    again = Gradients(server, other)
    again.before = server.adapter(other, "before")
    again.__exit__(None)
    for name, value in weights(before).items():
        np.testing.assert_allclose(weights(again.before)[name], value, atol=1e-6, rtol=0)
    gradients.assert_are_those_of(rows[2:], data[2:])
    again.assert_are_those_of(rows[2:], data[2:])


@pytest.mark.slow
def test_a_request_that_is_sent_again_is_not_trained_again(server, rows):
    data = weighted(rows)
    training = server.training()
    with Gradients(server, training) as gradients:
        request = request_of(training, 4, sent(rows, data))  # after the first two and "before"
        futures = [post(training, request) for _ in range(3)]
        results = [future.result() for future in futures]
        results.append(post(training, request).result())  # also after it was done
        training._request_id_counter = training._turn_counter = 4
    gradients.assert_are_those_of(rows, data)
    assert all(result.metrics == results[0].metrics for result in results)
