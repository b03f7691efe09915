"""`SimulatedEngine` returns valid results, keeps its rates, and treats running requests as the arguments say."""

import asyncio
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from simulated_engine import SimulatedEngine

from rollouts import FinishReason, GenerateRequest, SamplingParams
from rollouts.engines.protocol import UpdatableEngine, check_result
from rollouts.errors import ArgumentError, EngineClosedError, ServerUnreachableError, WeightUpdateError


def request(seed=None, request_id="r", **sampling):
    sampling = {"max_tokens": 32, "stop_token_ids": (999,), **sampling}
    return GenerateRequest([1, 2, 3], SamplingParams(seed=seed, **sampling), request_id=request_id)


def versions(completion):
    return [span.version for span in completion.weight_spans]


async def sampling(engine, count=1, tokens=3):
    """`count` running requests that have at least `tokens` tokens."""
    tasks = [asyncio.ensure_future(engine.generate(request(seed))) for seed in range(count)]
    async with asyncio.timeout(60):
        while not (held := engine._requests) or any(len(each.tokens) < tokens for each in held):  # noqa: ASYNC110
            await asyncio.sleep(0)
    return tasks


def long_engine(**arguments):
    return SimulatedEngine(tokens=(30, 30), queue_seconds=(0, 0.01), **arguments)


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


async def test_different_requests_have_different_tokens():
    engine = SimulatedEngine(tokens=(8, 8))
    by_seed = [await engine.generate(request(seed)) for seed in range(4)]
    by_id = [await engine.generate(request(None, name)) for name in "abcd"]
    texts = {tuple(result.completions[0].token_ids.tolist()) for result in (*by_seed, *by_id)}
    assert len(texts) == 8


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


async def test_a_cancelled_request_is_removed():
    engine = long_engine()
    first, second = await sampling(engine, 2)
    first.cancel()
    with pytest.raises(asyncio.CancelledError):
        await first
    assert (engine.running, engine.cancelled) == (1, 1)
    await second
    assert engine.running == 0


async def test_requests_that_are_cancelled_in_any_round_do_not_stop_the_others():
    engine = SimulatedEngine(queue_seconds=(0, 0.1), tokens=(1, 4))
    tasks = [asyncio.ensure_future(engine.generate(request(seed))) for seed in range(100)]
    for cancelled in tasks[::2]:
        await asyncio.sleep(0)
        cancelled.cancel()
    for other in tasks[1::2]:
        assert len((await asyncio.wait_for(other, 60)).completions) == 1
    assert engine.running == 0


@pytest.mark.parametrize("mode", ["abort", "keep"])
async def test_running_requests_continue_with_the_new_version(mode):
    engine = long_engine()
    running = await sampling(engine, 3)
    await engine.update_weights(None, "1", in_flight=mode)
    for task in running:
        (completion,) = (await task).completions
        assert versions(completion) == ["0", "1"]
        first, second = completion.weight_spans
        assert 3 <= first.end == second.start < second.end == 30


async def test_with_wait_running_requests_finish_first_and_new_ones_get_the_new_version():
    engine = long_engine()
    running = await sampling(engine, 3)
    updating = asyncio.ensure_future(engine.update_weights(None, "1", in_flight="wait"))
    await asyncio.sleep(0)
    late = asyncio.ensure_future(engine.generate(request(9)))
    assert [versions((await task).completions[0]) for task in running] == [["0"]] * 3
    await updating
    assert versions((await late).completions[0]) == ["1"]


@pytest.mark.parametrize("mode", ["abort", "wait", "keep"])
async def test_a_failed_update_leaves_the_version_and_the_requests(mode):
    engine = long_engine(update_failure_rate=1.0)
    running = await sampling(engine)
    with pytest.raises(WeightUpdateError, match="version '0' is in use"):
        await engine.update_weights(None, "1", in_flight=mode)
    assert engine.weight_version == "0"
    assert versions((await running[0]).completions[0]) == ["0"]


async def test_a_cancelled_update_lets_requests_go_on():
    engine = long_engine(update_seconds=(1e6, 1e6))
    running = await sampling(engine)
    updating = asyncio.ensure_future(engine.update_weights(None, "1", in_flight="keep"))
    await asyncio.sleep(0)
    updating.cancel()
    with pytest.raises(asyncio.CancelledError):
        await updating
    assert versions((await running[0]).completions[0]) == ["0"]


async def test_two_updates_at_once_are_refused():
    engine = SimulatedEngine()
    first = asyncio.ensure_future(engine.update_weights(None, "1"))
    await asyncio.sleep(0)
    with pytest.raises(WeightUpdateError, match="under way"):
        await engine.update_weights(None, "2")
    await first
    assert engine.weight_version == "1"


async def test_no_token_is_sampled_during_a_pause():
    engine = long_engine()
    (running,) = await sampling(engine)
    engine.pause()
    engine.pause()
    (held,) = engine._requests
    before = len(held.tokens)
    while engine._events:  # noqa: ASYNC110  its rounds are the simulated time
        await asyncio.sleep(0)
    assert len(held.tokens) == before
    assert not running.done()
    engine.resume()
    assert len((await running).completions[0].token_ids) == 30


@pytest.mark.parametrize("mode", ["abort", "wait"])
async def test_closing_ends_requests_and_updates(mode):
    engine = long_engine(update_seconds=(1e6, 1e6))
    (running,) = await sampling(engine)
    updating = asyncio.ensure_future(engine.update_weights(None, "1", in_flight=mode))
    await asyncio.sleep(0)
    await engine.close()
    for ended in (running, updating):
        with pytest.raises(EngineClosedError):
            await ended
    with pytest.raises(EngineClosedError):
        await engine.generate(request())
    with pytest.raises(EngineClosedError):
        await engine.update_weights(None, "2")


async def test_the_clock_advances_by_the_durations():
    engine = SimulatedEngine(tokens=(5, 5), queue_seconds=(2, 2), token_seconds=(0.5, 0.5))
    await engine.generate(request())
    assert engine.clock == pytest.approx(2 + 4 * 0.5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tokens", (0, 3)),
        ("tokens", (1.5, 3)),
        ("tokens", 3),
        ("token_ids", ()),
        ("token_ids", (-1,)),
        ("queue_seconds", (2, 1)),
        ("token_seconds", (0, float("inf"))),
        ("update_seconds", ("a", "b")),
        ("error_rate", 1.5),
        ("abort_rate", None),
        ("update_failure_rate", -0.1),
        ("time_scale", -1),
    ],
)
def test_an_argument_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(ArgumentError, match=f"^{name} is"):
        SimulatedEngine(**{name: value})


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
