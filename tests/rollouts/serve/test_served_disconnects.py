"""A client of `rollouts serve` that goes away: its request ends in the engine, streamed or not."""

from __future__ import annotations

import asyncio
import json
from urllib.parse import urlsplit

import pytest

from rollouts.engines.vllm import VLLMEngine

SECONDS = 60


async def until_running(engine, count):
    async with asyncio.timeout(SECONDS):
        while (await engine.control.metrics()).running != count:  # noqa: ASYNC110 a state that can only be asked for
            await asyncio.sleep(0.01)


async def until_waiting(engine, count):
    async with asyncio.timeout(SECONDS):
        while (await engine.control.metrics()).waiting != count:  # noqa: ASYNC110 a state that can only be asked for
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("stream", [False, True])
async def test_the_request_of_a_client_that_goes_away_ends(tiny_server, stream):
    sampling = {"max_tokens": 4000, "ignore_eos": True}
    body = json.dumps({"token_ids": [5, 6], "sampling_params": sampling, "stream": stream}).encode()
    head = f"POST /inference/v1/generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    url = urlsplit(tiny_server.base_url)
    async with VLLMEngine(tiny_server.base_url) as engine:
        reader, writer = await asyncio.open_connection(url.hostname, url.port)
        writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
        await until_running(engine, 1)
        if stream:
            await asyncio.wait_for(reader.readuntil(b"data: {"), SECONDS)
        writer.close()
        await until_running(engine, 0)


async def test_a_streamed_request_that_waits_for_the_end_of_a_pause_ends_with_its_client(tiny_server):
    body = json.dumps({"token_ids": [5, 6], "sampling_params": {"max_tokens": 4}, "stream": True}).encode()
    head = f"POST /inference/v1/generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(body)}\r\n"
    url = urlsplit(tiny_server.base_url)
    async with VLLMEngine(tiny_server.base_url) as engine:
        await engine.control.pause("keep")
        try:
            _, writer = await asyncio.open_connection(url.hostname, url.port)
            writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + body)
            await until_waiting(engine, 1)
            writer.close()
            await until_waiting(engine, 0)
        finally:
            await engine.control.resume()
