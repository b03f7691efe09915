"""The comparison on a real vLLM finds what it must find, and its proxy counts what is sent."""

from __future__ import annotations

import dataclasses
import json
import re

import aiohttp
import numpy as np
import pytest
from aiohttp import web
from counting_proxy import CountingProxy, Sent
from vllm_comparison import Side, table, violations

IMAGE = "data:image/png;base64," + "A" * 1000


def rollout(*nodes):
    return {"ok": True, "errors": [], "nodes": [{"token_ids": token_ids, "mask": mask} for token_ids, mask in nodes]}


def side(*records, times_sent=1, mismatch=1e-6):
    sent = Sent()
    for _ in range(times_sent):
        sent.add(json.dumps({"content_parts": [{"type": "image_url", "url": IMAGE}]}).encode())
    return Side(records, sent, np.array([0.0, mismatch], np.float32))


RECORD = rollout(([1, 2], [False, False]), ([3, 4, 5], [False, True, True]), ([6], [False]))


def test_equal_tokens_with_other_boundaries_of_messages_are_no_violation():
    stock = side(rollout(([1, 2, 3], [False] * 3), ([4, 5, 6], [True, True, False])), times_sent=4)
    assert list(violations(stock, side(RECORD))) == []
    assert "2 of 2" in table(stock, side(RECORD))


@pytest.mark.parametrize(
    ("ours", "found"),
    [
        (side(RECORD, mismatch=2e-4), "the largest mismatch is 2.0e-04 nats"),
        (side(RECORD, mismatch=float("nan")), "the largest mismatch is nan nats"),
        (dataclasses.replace(side(RECORD), mismatches=np.zeros(0, np.float32)), "no token was sampled"),
        (side(RECORD, times_sent=2), "2.1"),
        (side({**RECORD, "ok": False, "errors": ["the server went away"]}), "went away"),
        (side(rollout(([1, 9, 3], [False] * 3), ([4, 5, 6], [True, True, False]))), r"other tokens in 1, .* \[0\]"),
        (side(), "PyPI's renderers rendered 2 turns, this project 0"),
    ],
    ids=["mismatch", "nan", "no tokens", "images twice", "failed rollout", "other tokens", "missing rollout"],
)  # fmt: skip
def test_each_violation_is_found(ours, found):
    (line,) = violations(side(RECORD), ours)
    assert re.search(found, line)


async def exchange(*bodies, **options):
    """What a proxy has counted, and the responses that passed it."""

    async def generate(request):
        await request.read()
        content = [{"token_id": 7, "logprob": -0.5}]
        return web.json_response({"choices": [{"token_ids": [7], "logprobs": {"content": content}}]})

    app = web.Application()
    app.router.add_post("/inference/v1/generate", generate)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        async with (
            CountingProxy(f"http://127.0.0.1:{runner.addresses[0][1]}", **options) as proxy,
            aiohttp.ClientSession() as session,
        ):
            responses = []
            for body in bodies:
                async with session.post(f"{proxy.url}/inference/v1/generate", json=body) as response:
                    responses.append(await response.json())
            async with session.get(f"{proxy.url}/missing") as response:
                assert response.status == 404
            return proxy.sent, responses
    finally:
        await runner.cleanup()


async def test_the_proxy_counts_each_time_that_the_data_of_an_image_are_sent():
    with_data, named = ({"content_parts": [{"type": "image_url", "url": url}]} for url in (IMAGE, None))
    sent, _ = await exchange(with_data, named, with_data, {}, names_tokens_by_text=False)
    assert sent.requests == 4
    assert sent.images == {IMAGE: 2}
    assert sent.bytes == sum(len(json.dumps(body)) for body in (with_data, named, with_data, {}))
    assert sent.times_each_image_once() == sent.bytes / len(IMAGE)


@pytest.mark.parametrize(("names_tokens_by_text", "named"), [(True, "token_id:7"), (False, None)])
async def test_the_proxy_names_tokens_by_text_for_clients_that_read_nothing_else(names_tokens_by_text, named):
    _, (response,) = await exchange({}, names_tokens_by_text=names_tokens_by_text)
    (entry,) = response["choices"][0]["logprobs"]["content"]
    assert entry["token_id"] == 7
    assert entry.get("token") == named
