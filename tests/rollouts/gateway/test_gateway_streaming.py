"""Text is sent while the engine samples it; an error before the first text has its status."""

from __future__ import annotations

import asyncio

import openai
import pytest
from gateway_server import SteppedEngine, serving, user

from rollouts.errors import ServerUnreachableError


async def test_text_arrives_before_the_completion_is_finished(renderer):
    engine = SteppedEngine(["one two three"], renderer, pause_after=4)
    async with serving(engine, renderer) as server, server.async_client("s") as client:
        stream = await client.chat.completions.create(model="m", messages=[user("a")], stream=True)
        texts = []
        async for chunk in stream:
            texts.append(chunk.choices[0].delta.content or "")
            if "".join(texts) == "one ":
                assert server.trajectory("s").num_turns == 0
                engine.continued.set()
        assert "".join(texts) == "one two three"
        assert server.trajectory("s").num_turns == 1


@pytest.mark.slow
def test_an_error_before_the_first_text_has_its_status_and_a_later_one_ends_the_stream(renderer):
    async def play(pause_after):
        engine = SteppedEngine(
            ["one two"], renderer, pause_after=pause_after, error=ServerUnreachableError("r", "it is gone")
        )
        engine.continued.set()
        async with serving(engine, renderer) as server, server.async_client("s") as client:
            try:
                stream = await client.chat.completions.create(model="m", messages=[user("a")], stream=True)
                async for chunk in stream:
                    assert chunk.choices[0].delta.content in "one two"
            finally:
                assert server.trajectory("s").num_turns == 0

    with pytest.raises(openai.InternalServerError, match="it is gone") as early:
        asyncio.run(play(0))
    assert early.value.status_code == 503
    with pytest.raises(openai.APIError, match="it is gone"):
        asyncio.run(play(3))
