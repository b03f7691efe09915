"""Text is sent while the engine samples it; what is recorded is the same as without a stream."""

from __future__ import annotations

import asyncio

import openai
import pytest
from gateway_server import CALL, TOOLS, SteppedEngine, plain_tree, served, serving, user

from rollouts.errors import ServerUnreachableError
from rollouts.testing import ScriptedEngine

SCRIPT = ["<think>\nhm\n</think>\n\nI look.\n" + CALL, "Ends é 🙂."]


@pytest.mark.slow
def test_the_chunks_of_a_live_stream_joined_are_the_message(renderer):
    with served(ScriptedEngine(SCRIPT, renderer=renderer), renderer) as server:
        client = server.client("s")
        whole = client.chat.completions.create(model="m", messages=[user("a")], tools=TOOLS, n=2)
        expected = server.trajectory("s")
    with served(SteppedEngine(SCRIPT, renderer), renderer) as server:
        client = server.client("s")
        chunks = list(client.chat.completions.create(model="m", messages=[user("a")], tools=TOOLS, n=2, stream=True))
        assert plain_tree(server.trajectory("s")) == plain_tree(expected)
    assert len({chunk.id for chunk in chunks}) == 1
    for index, choice in enumerate(whole.choices):
        parts = [one for chunk in chunks for one in chunk.choices if one.index == index]
        deltas = [part.delta for part in parts]
        assert [delta.role for delta in deltas if delta.role] == ["assistant"]
        assert "".join(delta.content or "" for delta in deltas) == (choice.message.content or "")
        reasoning = "".join(getattr(delta, "reasoning_content", None) or "" for delta in deltas)
        assert reasoning == (getattr(choice.message, "reasoning_content", None) or "")
        calls = [call for delta in deltas for call in delta.tool_calls or ()]
        arguments = "".join(call.function.arguments or "" for call in calls)
        assert arguments == "".join(call.function.arguments for call in choice.message.tool_calls or ())
        assert [part.finish_reason for part in parts if part.finish_reason] == [choice.finish_reason]
        assert len(deltas) > 5


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
