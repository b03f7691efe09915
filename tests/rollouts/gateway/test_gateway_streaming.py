"""Text is sent while the engine samples it."""

from gateway_server import SteppedEngine, serving, user


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
