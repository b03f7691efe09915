"""`SimulatedEngine` returns valid results, keeps its rates, and treats running requests as the arguments say."""

import asyncio
import math

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_engine import SimulatedEngine

from rollouts import FinishReason, GenerateRequest, SamplingParams
from rollouts.engines.protocol import UpdatableEngine, check_result
from rollouts.errors import ServerUnreachableError


def request(seed=None, request_id="r", **sampling):
    sampling = {"max_tokens": 32, "stop_token_ids": (999,), **sampling}
    return GenerateRequest([1, 2, 3], SamplingParams(seed=seed, **sampling), request_id=request_id)


def test_it_is_an_updatable_engine():
    assert isinstance(SimulatedEngine(), UpdatableEngine)


@settings(max_examples=60)
@given(
    seed=st.integers(0, 99),
    n=st.integers(1, 4),
    max_tokens=st.integers(1, 20),
    longest=st.integers(1, 20),
    stops=st.sampled_from([(), (5,), (999, 5)]),
)
def test_a_result_is_valid_and_depends_on_the_seeds_alone(seed, n, max_tokens, longest, stops):
    async def results():
        engine = SimulatedEngine(seed=seed, tokens=(1, longest))
        asked = request(3, n=n, max_tokens=max_tokens, stop_token_ids=stops)
        alone = await engine.generate(asked)
        among = (await asyncio.gather(*(engine.generate(each) for each in (request(1), asked, request(2)))))[1]
        assert engine.running == 0
        return asked, alone, among

    asked, alone, among = asyncio.run(results())
    check_result(asked, alone, vocab_size=1000)
    for one, other in zip(alone.completions, among.completions, strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()
        assert len(one.token_ids) <= min(max_tokens, longest)
        assert (one.finish_reason is FinishReason.STOP) == (one.token_ids[-1] in stops)
        assert np.allclose(one.logprobs, -math.log(256))
        assert [(span.version, span.start, span.end) for span in one.weight_spans] == [("0", 0, len(one.token_ids))]


async def test_errors_and_aborts_come_at_their_rates():
    engine = SimulatedEngine(error_rate=0.25, abort_rate=0.25)
    results = await asyncio.gather(*(engine.generate(request(seed)) for seed in range(1000)), return_exceptions=True)
    failed = [result for result in results if isinstance(result, ServerUnreachableError)]
    aborted = [
        result
        for result in results
        if not isinstance(result, BaseException) and result.completions[0].finish_reason is FinishReason.ABORT
    ]
    assert 200 < len(failed) < 300
    assert 130 < len(aborted) < 240  # a quarter of those that do not fail
    assert (engine.started, engine.failed, engine.finished) == (1000, len(failed), 1000 - len(failed))
    assert (engine.running, engine.peak_running) == (0, 1000)


def test_a_request_may_be_cancelled_in_any_round_of_the_event_loop():
    """Also in the round of its last token, when the engine's event comes before the task that waits for it."""

    async def cancel_after(rounds):
        engine = SimulatedEngine(seed=1, tokens=(3, 3))
        task = asyncio.ensure_future(engine.generate(request(1)))
        for _ in range(rounds):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.wait([task])
        if (driver := engine._driver) is not None:
            await driver  # raises what an event raised
        assert engine.running == 0

    for rounds in range(12):
        asyncio.run(cancel_after(rounds))
