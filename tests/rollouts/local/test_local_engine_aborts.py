"""`LocalEngine`: requests that end early, tokens as they are sampled, log-probabilities of prompts."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from rollouts import FinishReason, GenerateRequest, SamplingParams
from rollouts.errors import ArgumentError

LONG = 300


def request(name="r", prompt=(5, 6, 7), **sampling):
    return GenerateRequest(list(prompt), SamplingParams(**{"max_tokens": 8, "seed": 3, **sampling}), request_id=name)


@pytest.mark.slow
async def test_an_aborted_request_ends_and_the_others_of_its_batch_go_on(engine):
    begun = asyncio.Event()
    streamed = engine.generate(request("long", max_tokens=LONG, n=2), lambda delta: begun.set())
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
    first = asyncio.ensure_future(engine.generate(request("first", max_tokens=LONG), lambda delta: begun.set()))
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
    task = asyncio.ensure_future(engine.generate(request("long", max_tokens=2000), lambda delta: begun.set()))
    await asyncio.wait_for(begun.wait(), 30)
    weights = {name: tensor.clone() for name, tensor in engine._model.state_dict().items()}
    await engine.update_weights(weights, "1")
    await engine.abort(["long"])
    (completion,) = (await asyncio.wait_for(task, 60)).completions
    assert completion.finish_reason is FinishReason.ABORT
    assert completion.weight_spans[-1].end == len(completion.token_ids) < 2000


async def test_weights_can_get_another_label_without_being_replaced(engine):
    await engine.update_weight_version("seven")
    (completion,) = (await engine.generate(request())).completions
    assert [span.version for span in completion.weight_spans] == ["seven"]
    with pytest.raises(ArgumentError, match="version"):
        await engine.update_weight_version("")
