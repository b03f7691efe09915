"""`VLLMEngine`: requests as sent, completions and streams as returned, weight versions and cache salts."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from engine_inputs import expected, generate_one, image, request
from fake_responses import hold
from fake_server import GENERATE

from rollouts.engines.vllm import VLLMEngine
from rollouts.errors import EngineError


async def test_every_sampling_parameter_is_in_the_request(engine, server):
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "n": 2, "stop_token_ids": (9,), "extra": {"min_p": 0.1}}
    await engine.generate(request(sampling=sampling, session_id="s", request_id="mine"))
    (seen,) = server.generations
    sent = seen.json
    assert sent["sampling_params"] == {
        "n": 2,
        "max_tokens": 6,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "seed": 1,
        "stop_token_ids": [9],
        "logprobs": 0,
        "detokenize": False,
        "min_p": 0.1,
    }
    assert (sent["model"], sent["request_id"]) == ("tiny-qwen3vl", "mine")
    assert seen.headers["x-session-id"] == "s"


async def test_streamed_tokens_are_the_tokens_of_the_whole_response(engine):
    generate_request = request(image())
    deltas = []
    await engine.generate(generate_request, deltas.append)
    assert np.concatenate([delta.token_ids for delta in deltas]).tolist() == expected(generate_request)


async def test_cache_salts_differ_per_weight_version_and_stay_within_a_session(engine, server):
    await generate_one(engine, request(session_id="a"))
    await engine.control.update_weight_version("v2")
    for session in ("a", "b", None):
        await generate_one(engine, request(session_id=session))
    old, stays, new, without = [seen.json["cache_salt"] for seen in server.generations]
    assert old == stays
    assert new == without != old


async def test_one_engine_serves_one_event_loop_after_another(server):
    engine = VLLMEngine(server.base_url)
    requests = [request(image()), request(image()), request()]
    results = [await asyncio.to_thread(asyncio.run, generate_one(engine, each)) for each in requests]
    assert [result.token_ids.tolist() for result in results] == [expected(each) for each in requests]


async def test_another_event_loop_may_not_use_close_or_abort_an_engine(server, engine):
    await generate_one(engine, request())
    for call in (engine.close, lambda: engine.abort(["r"]), lambda: generate_one(engine, request())):
        with pytest.raises(EngineError, match="belongs to another event loop"):
            await asyncio.to_thread(asyncio.run, call())
    assert (await generate_one(engine, request())).token_ids.size


async def test_an_image_that_a_closed_loop_was_sending_is_sent_again_on_the_next_one(server):
    engine, sent = VLLMEngine(server.base_url), request(image())
    server.script[GENERATE] = [hold(asyncio.Event())]

    def careless():
        loop = asyncio.new_event_loop()
        task = loop.create_task(generate_one(engine, sent))
        while not server.generations:
            loop.run_until_complete(asyncio.sleep(0.01))
        loop.close()
        task._log_destroy_pending = False  # it is never run again

    await asyncio.to_thread(careless)
    result = await asyncio.wait_for(generate_one(engine, sent), 30)
    assert result.token_ids.tolist() == expected(sent)
    await engine.close()
