"""What a request asks for in the places of its prompt: log-probabilities of chosen tokens, and drawn ones."""

import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tinker import types
from tinker_clients import datum_of, weighted

from rollouts.errors import ArgumentError
from rollouts.tinker.requests import ModelInput, SampleRequest
from rollouts.tinker.vllm_sampler import VLLMSampler


@pytest.fixture(scope="module")
def client(server):
    """A sampler with an adapter."""
    return server.training().save_weights_and_get_sampling_client().result()


@pytest.fixture(scope="module", params=["text", "image"])
def prompt(request, server):
    rows = [row for row in server.family.rows() if not row.videos][:2]
    row = rows[request.param == "image"]
    return datum_of(row, weighted([row])[0]).model_input


ONE = types.SamplingParams(max_tokens=1, seed=3)


def asked(client, prompt, params=ONE, **options):
    return client.sample(prompt, 1, params, **options).result()


def target(ids):
    return {"target_prompt_logprobs": types.TensorData.from_numpy(ids)}


def test_chosen_tokens_have_the_log_probabilities_of_the_likeliest_ones_and_of_the_prompt(client, prompt):
    whole = asked(client, prompt, include_prompt_logprobs=True, topk_prompt_logprobs=5)
    top, own = whole.topk_prompt_logprobs_np, whole.prompt_logprobs_np
    ids = top.token_ids[1:].astype(np.int64)
    found = asked(client, prompt, **target(ids))
    assert found.target_prompt_logprobs.shape == list(ids.shape) == [prompt.length - 1, 5]
    np.testing.assert_allclose(found.target_prompt_logprobs.to_numpy(), top.logprobs[1:], atol=1e-5)
    assert (found.prompt_logprobs, found.topk_prompt_logprobs) == (None, None)
    assert found.sequences[0].tokens == whole.sequences[0].tokens

    some = np.where(np.arange(ids.size).reshape(ids.shape) % 3 == 1, ids, -1)
    scored = np.where(some >= 0, top.logprobs[1:], 0)
    found = asked(
        client, prompt, include_prompt_logprobs=True, target_prompt_logprobs=types.TensorData.from_numpy(some)
    )
    np.testing.assert_allclose(found.target_prompt_logprobs.to_numpy(), scored, atol=1e-5)
    np.testing.assert_allclose(found.prompt_logprobs_np, own, atol=1e-5)

    last = np.full_like(ids, -1)
    last[-1, 3] = ids[-1, 3]
    sparse = types.TensorData.from_torch_sparse(torch.from_numpy(last), pad_value=-1)
    found = asked(client, prompt, target_prompt_logprobs=sparse).target_prompt_logprobs
    assert found.sparse_crow_indices == sparse.sparse_crow_indices
    assert found.sparse_col_indices == sparse.sparse_col_indices == [3]
    assert found.data == [pytest.approx(float(top.logprobs[-1, 3]), abs=1e-5)]


def test_drawn_tokens_are_those_of_the_distribution_with_its_log_probabilities(client, prompt):
    found = asked(client, prompt, prompt_alt_tokens_k=1000)
    tokens, logprobs = (each.to_numpy() for each in (found.prompt_alt_tokens.tokens, found.prompt_alt_tokens.logprobs))
    assert tokens.shape == logprobs.shape == (prompt.length - 1, 1000)
    again = asked(client, prompt, prompt_alt_tokens_k=1000, **target(tokens))
    np.testing.assert_array_equal(again.prompt_alt_tokens.tokens.to_numpy(), tokens)
    np.testing.assert_allclose(again.target_prompt_logprobs.to_numpy(), logprobs, atol=1e-5)
    top = asked(client, prompt, include_prompt_logprobs=True, topk_prompt_logprobs=1).topk_prompt_logprobs_np
    likeliest, chance = top.token_ids[1:], np.exp(top.logprobs[1:])
    share = (tokens == likeliest).mean(axis=1, keepdims=True)
    assert np.abs(share - chance).max() < 5 * np.sqrt(0.25 / 1000)
    assert len(np.unique(tokens)) > 100

    other = types.SamplingParams(max_tokens=1, seed=4)
    assert (asked(client, prompt, other, prompt_alt_tokens_k=1000).prompt_alt_tokens.tokens.to_numpy() != tokens).any()
    greedy = types.SamplingParams(max_tokens=1, temperature=0.0)
    drawn = asked(client, prompt, greedy, prompt_alt_tokens_k=2).prompt_alt_tokens.tokens.to_numpy()
    np.testing.assert_array_equal(drawn, np.repeat(likeliest, 2, axis=1))
    cold = types.SamplingParams(max_tokens=1, temperature=0.02, seed=3)
    drawn = asked(client, prompt, cold, prompt_alt_tokens_k=100).prompt_alt_tokens
    assert (drawn.tokens.to_numpy() == likeliest).mean() > share.mean() + 0.2
    assert drawn.logprobs.to_numpy().min() > logprobs.min(), "as the model gives them, whatever the temperature"


IDS = list(range(5, 15))


def targets(**change):
    return {"target_prompt_logprobs": {"dtype": "int64", "shape": [9, 1], "data": [7] * 9, **change}}


def sparse(crow, columns, shape=(9, 1)):
    return targets(data=[7], sparse_crow_indices=crow, sparse_col_indices=columns, shape=shape)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (targets(data=[7] * 10, shape=[10, 1]), "the number of rows of target_prompt_logprobs is 10; .* send 9"),
        (targets(data=[-1] * 9), "name at least one token"),
        (targets(data=[10**6] * 9), "target_prompt_logprobs is 1000000"),
        (targets(data=[2**70] * 9), "below 2"),
        (targets(data=[1.0] * 9, dtype="float32"), "float32"),
        (targets(shape=[9]), r"\[9\]"),
        (sparse([0] * 9 + [1], [2**61], [9, 2**60]), "column 2305843009213693952"),
        (sparse([0, 1], [0]), "2 ends of rows"),
        (sparse([0] * 9 + [1], [0], [9, 2**70]), "sparse, "),
        (sparse([0] * 9 + [2**64], [0]), "below 2"),
        ({"prompt_alt_tokens_k": -1}, "prompt_alt_tokens_k is -1; pass 0 to 1024"),
    ],
)
def test_other_targets_are_refused_with_the_place(server, options, text):
    prompt = {"chunks": [{"type": "encoded_text", "tokens": IDS}]}
    body = {"base_model": "tiny", "prompt": prompt, "sampling_params": {"max_tokens": 1}, **options}
    answer = server.post("asample", body)
    if answer.status == 200:
        answer = server.post("retrieve_future", {"request_id": answer.json["request_id"]})
    assert answer.json["category"] == "user"
    assert re.search(text, answer.json["error"]), answer.json


async def test_vllm_servers_do_not_score_them(server):
    sampler = VLLMSampler(["http://127.0.0.1:9"], Path(server.family.directory))
    with pytest.raises(ArgumentError, match="without --engine vllm"):
        await sampler.sample(None, SampleRequest(ModelInput(np.arange(5, 15), ()), max_tokens=1, alternatives=2))
    await sampler.close()
