"""The connection against a real vLLM, and the responses of the scripted server of other tests against the real ones."""

import asyncio
import json
from typing import Any

import pytest
from fake_server import ABORT, GENERATE, RENDER, FakeVLLM
from images import png_url
from vllm_server import VLLMServer

from rollouts.engines.http.connection import ServerConnection
from rollouts.engines.http.responses import HttpResponse


def ids_and(**sampling: Any) -> dict[str, Any]:
    return {
        "request_id": "x",
        "token_ids": [5, 6, 7],
        "sampling_params": {"temperature": 0, "max_tokens": 3} | sampling,
    }


IMAGE = {
    "role": "user",
    "content": [
        {"type": "image_url", "image_url": {"url": png_url((9, 80, 7), (64, 96))}},
        {"type": "text", "text": "?"},
    ],
}
NEVER_SENT = {
    "mm_hashes": {"image": ["never sent"]},
    "mm_placeholders": {"image": [{"offset": 1, "length": 1}]},
    "kwargs_data": None,
}

# Exchanges without side effects; other tests cover pauses and other control calls.
EXCHANGES: dict[str, tuple[str, str, Any]] = {
    "version": ("GET", "/version", None),
    "models": ("GET", "/v1/models", None),
    "health": ("GET", "/health", None),
    "paused": ("GET", "/is_paused", None),
    "weight version": ("GET", "/weight_info", None),
    "unknown route": ("GET", "/nope", None),
    "wrong method": ("GET", GENERATE, None),
    "completion": ("POST", GENERATE, ids_and(logprobs=1)),
    "without log-probabilities": ("POST", GENERATE, ids_and()),
    "two samples": ("POST", GENERATE, ids_and(logprobs=0, n=2, temperature=1)),
    "prompt log-probabilities": ("POST", GENERATE, ids_and(logprobs=0, prompt_logprobs=0)),
    "no ids": ("POST", GENERATE, ids_and() | {"token_ids": []}),
    "no sampling": ("POST", GENERATE, {"token_ids": [1]}),
    "unknown model": ("POST", GENERATE, ids_and() | {"model": "nope"}),
    "image that is not there": ("POST", GENERATE, ids_and() | {"features": NEVER_SENT}),
    "abort of nothing": ("POST", ABORT, {"request_ids": ["generate-tokens-nobody"]}),
    "abort without ids": ("POST", ABORT, {}),
    "rendered image": ("POST", RENDER, {"messages": [IMAGE]}),
    "rendered text": ("POST", RENDER, {"messages": [{"role": "user", "content": "?"}]}),
}


async def exchange(connection: ServerConnection, method: str, path: str, content: Any) -> HttpResponse:
    body = None if content is None else [json.dumps(content).encode()]
    return await connection.request(method, path, name="exchange", body=body)


def missing(real: Any, fake: Any, place: str = "") -> list[str]:
    """The paths of fields of `fake` that `real` lacks or has with another type. `fake` may lack fields."""
    if isinstance(real, dict) and isinstance(fake, dict):
        if place.endswith(("prompt_logprobs[1]",)):  # keyed by token id
            real, fake = {"id": next(iter(real.values()))}, {"id": next(iter(fake.values()))}
        return [
            problem
            for key, value in fake.items()
            for problem in ([f"{place}.{key}"] if key not in real else missing(real[key], value, f"{place}.{key}"))
        ]
    if isinstance(real, list) and isinstance(fake, list) and real and fake:
        return [
            problem
            for number, (one, other) in enumerate(zip(real, fake, strict=False))
            for problem in missing(one, other, f"{place}[{number}]")
        ]
    same = type(real) is type(fake) or real is None or fake is None
    return [] if same else [f"{place}: {type(real).__name__}, not {type(fake).__name__}"]


@pytest.mark.parametrize("name", EXCHANGES)
async def test_responses_of_the_scripted_server_have_the_shapes_of_the_real_one(
    vllm_server: VLLMServer, name: str
) -> None:
    method, path, content = EXCHANGES[name]
    real = ServerConnection(vllm_server.base_url)
    async with FakeVLLM() as server:
        fake = ServerConnection(server.base_url)
        theirs, ours = await exchange(real, method, path, content), await exchange(fake, method, path, content)
        await fake.close()
    await real.close()
    assert ours.status == theirs.status
    assert ours.headers.get("content-type") == theirs.headers.get("content-type")
    if theirs.body:
        assert missing(theirs.json(), ours.json()) == []
    else:
        assert ours.body == b""


async def test_streams_of_the_scripted_server_have_the_shape_of_the_real_one(vllm_server: VLLMServer) -> None:
    # The server joins tokens that it has not sent yet: many are between the first, sent alone, and the end.
    options = {"max_tokens": 300, "ignore_eos": True, "stream_interval": 1_000_000}
    body = [json.dumps(ids_and(logprobs=0, **options) | {"stream": True}).encode()]
    async with FakeVLLM() as server:
        streams = []
        for url in (vllm_server.base_url, server.base_url):
            connection = ServerConnection(url)
            async with connection.stream(GENERATE, name="s", body=body) as events:
                streams.append([json.loads(event) async for event in events])
            await connection.close()
    real, fake = streams
    assert [len(event["choices"][0]["token_ids"]) for event in real] == [1, 299]
    assert [len(event["choices"][0]["token_ids"]) for event in fake] == [1, 299]
    assert missing(real, fake) == []


async def test_connections_that_the_server_closes_when_idle_cause_no_error(vllm_server: VLLMServer) -> None:
    losses: list[int] = []
    connection = ServerConnection(vllm_server.base_url, on_lost=lambda: losses.append(1))
    for pause in (0.0, 0.0, 5.5):  # the server closes an idle connection after 5 s, the client after 3
        await asyncio.sleep(pause)
        assert (await connection.request("GET", "/version", name="v")).status == 200
    assert losses == []
    await connection.close()


@pytest.mark.parametrize(
    ("real", "fake", "problems"),
    [
        ({"a": 1, "b": 2}, {"a": 3}, []),
        ({"a": 1}, {"b": 1}, [".b"]),
        ({"a": [{"b": 1}]}, {"a": [{"b": "1"}]}, [".a[0].b: int, not str"]),
        ({"a": {"b": 1}}, {"a": [1]}, [".a: dict, not list"]),
        ({"a": None}, {"a": 1}, []),
    ],
)
def test_a_difference_in_shape_is_found(real: Any, fake: Any, problems: list[str]) -> None:
    assert missing(real, fake) == problems
