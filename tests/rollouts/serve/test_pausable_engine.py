"""`PausableEngine` over an engine whose next token depends on the tokens before: a cut leaves no trace."""

from __future__ import annotations

import asyncio
from collections import defaultdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts import FinishReason, GenerateRequest, SamplingParams
from rollouts.engines.protocol import Completion, GenerateResult, TokenDelta
from rollouts.serve.pausable_engine import PausableEngine

LENGTH = 12


def next_token(ids):
    return sum(ids) * 31 % 97


def whole(prompt, count=LENGTH):
    ids = list(prompt)
    for _ in range(count):
        ids.append(next_token(ids))
    return ids[len(prompt) :]


class PlainEngine:
    """Samples one token in each round of the event loop; has neither aborts nor streams."""

    def __init__(self):
        self.running = {}
        self.closed = False

    async def generate(self, request):
        return await self.sample(request, None)

    async def sample(self, request, listen):
        assert request.request_id not in self.running
        self.running[request.request_id] = False
        ids = []
        try:
            while len(ids) < request.sampling.max_tokens and not self.running[request.request_id]:
                await asyncio.sleep(0)
                ids.append(next_token([*request.prompt_ids, *ids]))
                for index in range(request.sampling.n) if listen is not None else ():
                    listen(TokenDelta(index, np.array(ids[-1:], np.int32), np.zeros(1, np.float32)))
        finally:
            del self.running[request.request_id]
        reason = FinishReason.LENGTH if len(ids) == request.sampling.max_tokens else FinishReason.ABORT
        array, logprobs = np.array(ids, np.int32), np.zeros(len(ids), np.float32)
        completions = [Completion(index, array, logprobs, reason) for index in range(request.sampling.n)]
        return GenerateResult(request.request_id, completions)

    async def close(self):
        self.closed = True


class AbortableEngine(PlainEngine):
    async def generate_streamed(self, request, listen):
        return await self.sample(request, listen)

    async def abort(self, request_ids):
        for request_id in request_ids:
            if request_id in self.running:
                self.running[request_id] = True


def request(number, n=1):
    return GenerateRequest([number, 3], SamplingParams(max_tokens=LENGTH, n=n), request_id=f"r{number}")


async def rounds(count):
    for _ in range(count):
        await asyncio.sleep(0)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("pause"), st.sampled_from(["wait", "keep"])),
        st.tuples(st.just("resume"), st.none()),
        st.tuples(st.just("rounds"), st.integers(1, 8)),
        st.tuples(st.just("request"), st.integers(1, 2)),
        st.tuples(st.just("abort"), st.integers(0, 3)),
    ),
    max_size=12,
)


@given(steps=STEPS, engine_class=st.sampled_from([PlainEngine, AbortableEngine]))
def test_whatever_is_paused_and_resumed_completions_are_those_of_an_engine_without_pauses(steps, engine_class):
    async def run():
        inner = engine_class()
        engine = PausableEngine(inner, max_model_len=100)
        deltas = defaultdict(list)
        tasks, aborted = [], set()

        def started(number, n):
            def listen(delta):
                deltas[number, delta.index] += delta.token_ids.tolist()

            return asyncio.ensure_future(engine.generate_streamed(request(number, n), listen))

        for step, value in steps:
            match step:
                case "request":
                    tasks.append(started(len(tasks), value))
                case "rounds":
                    await rounds(value)
                case "pause":
                    await engine.pause(value)
                    assert not inner.running
                    assert engine.running == 0
                case "resume":
                    engine.resume()
                case "abort":
                    aborted.add(value)
                    await engine.abort([f"r{value}"])
        engine.resume()
        for number, task in enumerate(tasks):
            for completion in (await asyncio.wait_for(task, 30)).completions:
                expected = whole([number, 3])
                ids = completion.token_ids.tolist()
                assert ids == expected[: len(ids)]
                assert completion.finish_reason is FinishReason.LENGTH or number in aborted
                assert len(ids) == LENGTH or completion.finish_reason is FinishReason.ABORT
                if engine_class is AbortableEngine:  # the other one begins again after it is cut off
                    assert deltas[number, completion.index] == ids
        assert engine.running == engine.waiting == 0

    asyncio.run(run())


async def test_a_pause_that_aborts_ends_running_and_waiting_requests_with_what_they_have():
    engine = PausableEngine(AbortableEngine(), max_model_len=100)
    running = asyncio.ensure_future(engine.generate(request(1)))
    await rounds(5)
    await engine.pause("keep")
    waiting = asyncio.ensure_future(engine.generate(request(2)))
    await rounds(2)
    assert engine.waiting == 2
    await engine.pause("abort")
    for task, least in ((running, 1), (waiting, 0)):
        (completion,) = (await asyncio.wait_for(task, 30)).completions
        assert completion.finish_reason is FinishReason.ABORT
        assert least <= len(completion.token_ids) < LENGTH


async def test_a_pause_ends_no_request_after_the_engine_is_resumed():
    released, ends = asyncio.Event(), []

    class SlowEngine(PlainEngine):
        """Ends no request before it is released."""

        async def generate(self, request):
            await released.wait()
            return await super().generate(request)

        async def abort(self, request_ids):
            ends.append(list(request_ids))

    engine = PausableEngine(SlowEngine(), max_model_len=100)
    running = asyncio.ensure_future(engine.generate(request(1)))
    await rounds(2)
    pause = asyncio.ensure_future(engine.pause("keep"))
    await rounds(2)
    engine.resume()
    await asyncio.wait_for(pause, 30)
    assert ends == [["r1"]]
    released.set()
    assert (await running).completions[0].token_ids.tolist() == whole([1, 3])


async def test_two_running_requests_may_have_one_id():
    engine = PausableEngine(AbortableEngine(), max_model_len=100)
    results = await asyncio.gather(engine.generate(request(1)), engine.generate(request(1)))
    assert [result.request_id for result in results] == ["r1", "r1"]
    assert [result.completions[0].token_ids.tolist() for result in results] == [whole([1, 3])] * 2


@pytest.mark.parametrize("engine_class", [PlainEngine, AbortableEngine])
async def test_a_cancelled_request_leaves_the_engine(engine_class):
    inner = engine_class()
    engine = PausableEngine(inner, max_model_len=100)
    task = asyncio.ensure_future(engine.generate(request(1)))
    await rounds(3)
    assert inner.running
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await rounds(2)
    assert not inner.running
    assert engine.running == 0
    await engine.close()
    assert inner.closed
