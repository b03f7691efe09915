"""Pauses of the server, as a trainer makes for new weights: the completion of a chat continues after them."""

from __future__ import annotations

import asyncio
import threading

import pytest
from gateway_server import serving, user

from rollouts import FinishReason, GenerateRequest, SamplingParams
from rollouts.engines.local import LocalEngine
from rollouts.serve.pausable_engine import PausableEngine

TOKENS = 60


class HeldEngine(LocalEngine):
    """Waits after the first token of its first batch until a pause has ended the requests."""

    def hold(self):
        """Returns an event that is set when the engine has sampled a token."""
        loop, begun, released = asyncio.get_running_loop(), asyncio.Event(), threading.Event()
        step, end = self._forward.next_hidden_states, super().abort

        def held_step(*arguments):
            loop.call_soon_threadsafe(begun.set)
            assert released.wait(60)
            return step(*arguments)

        async def abort_and_release(request_ids):
            await end(request_ids)
            released.set()

        self._forward.next_hidden_states, self.abort = held_step, abort_and_release
        return begun


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_a_chat_that_a_pause_cuts_off_continues_after_it_and_the_tree_has_all_its_tokens(
    tiny_model_dir, renderer, mode
):
    local = HeldEngine.from_pretrained(tiny_model_dir)
    engine = PausableEngine(local, max_model_len=local.max_model_len)
    begun = local.hold()
    async with serving(engine.continuing(), renderer) as server, server.async_client("s") as client:

        async def chat():
            options = {"model": "m", "messages": [user("a")], "seed": 5, "max_tokens": TOKENS}
            stream = await client.chat.completions.create(**options, stream=True)
            return [choice.finish_reason async for chunk in stream for choice in chunk.choices]

        chatting = asyncio.create_task(chat())
        await asyncio.wait_for(begun.wait(), 60)
        await engine.pause(mode)
        assert not chatting.done()
        await local.update_weight_version("next")
        engine.resume()
        finish_reason = (await asyncio.wait_for(chatting, 60))[-1]
        trajectory = server.trajectory("s")
    (turn,) = trajectory.turns
    node = trajectory.nodes[turn.node]
    assert finish_reason in ("stop", "length")
    assert turn.finish_reason in (FinishReason.STOP, FinishReason.LENGTH)
    assert len(node) == TOKENS or int(node.token_ids[-1]) in renderer.get_stop_token_ids()
    assert [span.version for span in node.weight_spans] == ["0", "next"]
    await engine.close()


async def test_a_pause_ends_the_requests_of_the_generate_route_and_no_chat(tiny_model_dir):
    local = HeldEngine.from_pretrained(tiny_model_dir)
    engine = PausableEngine(local, max_model_len=local.max_model_len)
    begun = local.hold()

    def request(name):
        return GenerateRequest([5, 6, 7], SamplingParams(max_tokens=TOKENS, seed=1), request_id=name)

    ended = asyncio.create_task(engine.generate(request("ended")))
    continued = asyncio.create_task(engine.continuing().generate(request("continued")))
    await asyncio.wait_for(begun.wait(), 60)
    await engine.pause("abort")
    (completion,) = (await asyncio.wait_for(ended, 60)).completions
    assert completion.finish_reason is FinishReason.ABORT
    assert not continued.done()
    engine.resume()
    (completion,) = (await asyncio.wait_for(continued, 60)).completions
    assert completion.finish_reason is FinishReason.LENGTH
    assert len(completion.token_ids) == TOKENS
    await engine.close()
