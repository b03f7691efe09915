"""`LocalEngine`: requests that end early, tokens as they are sampled, log-probabilities of prompts."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from rollouts import FinishReason, GenerateRequest, SamplingParams
from rollouts.engines.protocol import AbortableEngine, StreamingEngine
from rollouts.errors import ArgumentError, InvalidRequestError
from rollouts.training import TrainingBatch, TrainingSample, token_logprobs

LONG = 300


def request(name="r", prompt=(5, 6, 7), **sampling):
    return GenerateRequest(list(prompt), SamplingParams(**{"max_tokens": 8, "seed": 3, **sampling}), request_id=name)


@pytest.mark.slow
async def test_an_aborted_request_ends_and_the_others_of_its_batch_go_on(engine):
    assert isinstance(engine, AbortableEngine)
    begun = asyncio.Event()
    streamed = engine.generate_streamed(request("long", max_tokens=LONG, n=2), lambda delta: begun.set())
    tasks = [asyncio.ensure_future(each) for each in (streamed, engine.generate(request("other", max_tokens=LONG)))]
    await asyncio.wait_for(begun.wait(), 30)
    await engine.abort(["long", "unknown"])
    aborted, other = await asyncio.wait_for(asyncio.gather(*tasks), 60)
    for completion in aborted.completions:
        assert completion.finish_reason is FinishReason.ABORT
        assert 0 < len(completion.token_ids) == len(completion.logprobs) < LONG
    assert len(other.completions[0].token_ids) == LONG
    (alone,) = (await engine.generate(request("other", max_tokens=LONG))).completions
    np.testing.assert_array_equal(other.completions[0].token_ids, alone.token_ids)


@pytest.mark.slow
async def test_a_waiting_request_ends_without_tokens(engine):
    begun = asyncio.Event()
    first = asyncio.ensure_future(
        engine.generate_streamed(request("first", max_tokens=LONG), lambda delta: begun.set())
    )
    await asyncio.wait_for(begun.wait(), 30)
    second = asyncio.ensure_future(engine.generate(request("second", n=2)))
    await asyncio.sleep(0)
    await engine.abort(["second"])
    completions = (await asyncio.wait_for(second, 30)).completions
    assert [len(each.token_ids) for each in completions] == [0, 0]
    assert {each.finish_reason for each in completions} == {FinishReason.ABORT}
    assert len((await first).completions[0].token_ids) == LONG


async def test_an_abort_ends_what_an_update_of_the_weights_has_cut_off(engine):
    begun = asyncio.Event()
    task = asyncio.ensure_future(engine.generate_streamed(request("long", max_tokens=2000), lambda delta: begun.set()))
    await asyncio.wait_for(begun.wait(), 30)
    weights = {name: tensor.clone() for name, tensor in engine._model.state_dict().items()}
    await engine.update_weights(weights, "1")
    await engine.abort(["long"])
    (completion,) = (await asyncio.wait_for(task, 60)).completions
    assert completion.finish_reason is FinishReason.ABORT
    assert completion.weight_spans[-1].end == len(completion.token_ids) < 2000


async def test_tokens_are_reported_as_they_are_sampled_and_are_those_of_the_result(engine):
    assert isinstance(engine, StreamingEngine)
    deltas = {0: [], 1: []}
    counts = []

    def listen(delta):
        deltas[delta.index] += zip(delta.token_ids.tolist(), delta.logprobs.tolist(), strict=True)
        counts.append(len(delta.token_ids))

    result = await engine.generate_streamed(request(n=2), listen)
    for completion in result.completions:
        whole = list(zip(completion.token_ids.tolist(), completion.logprobs.tolist(), strict=True))
        assert deltas[completion.index] == whole
    assert counts == [1] * 16
    with pytest.raises(InvalidRequestError, match="use generate"):
        await engine.generate_streamed(replace(request(), prompt_logprobs=True), listen)


async def test_the_log_probabilities_of_a_prompt_are_those_of_the_trainer(engine, prompt):
    requests = [
        replace(request("text", np.random.default_rng(1).integers(0, 250, 600).tolist()), prompt_logprobs=True),
        GenerateRequest(prompt.token_ids, SamplingParams(max_tokens=2), prompt.multi_modal_data, prompt_logprobs=True),
    ]
    results = await asyncio.gather(*(engine.generate(each) for each in (*requests, request("without"))))
    assert results[2].prompt_logprobs is None
    for each, result in zip(requests, results, strict=False):
        ids = np.array(each.prompt_ids, np.int32)
        zeros = np.zeros(len(ids), np.float32)
        sample = TrainingSample(ids, np.arange(len(ids)) > 0, zeros, zeros, tuple(each.media))
        with torch.no_grad():
            expected = token_logprobs(engine._model, TrainingBatch.from_samples([sample], pad_id=0))[0].numpy()
        assert result.prompt_logprobs.shape == (len(ids),)
        assert np.isnan(result.prompt_logprobs[0])
        np.testing.assert_allclose(result.prompt_logprobs[1:], expected[1:], atol=1e-4)


async def test_weights_can_get_another_label_without_being_replaced(engine):
    await engine.update_weight_version("seven")
    (completion,) = (await engine.generate(request())).completions
    assert [span.version for span in completion.weight_spans] == ["seven"]
    with pytest.raises(ArgumentError, match="version"):
        await engine.update_weight_version("")
