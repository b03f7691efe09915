"""`VLLMEngine` against a scripted server: media once, cut completions, typed errors, aborts, old versions."""

from __future__ import annotations

import asyncio
import json
import tracemalloc
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
from fake_server import (
    ABORT,
    GENERATE,
    FakeVLLM,
    answer,
    busy,
    change,
    clamped_logprob,
    completion_of,
    error_response,
    finished_by,
    half,
    hold,
    logprob_of,
    malformed,
    one_choice_short,
    one_logprob_short,
    reset,
    stream_pieces,
    without_logprobs,
)

from renderers import MediaItem, MediaSource, MultiModalData, PlaceholderRange
from renderers.media.item import TensorField
from renderers.media.pixel_scale import PixelScale
from rollouts import FinishReason, GenerateRequest, SamplingParams
from rollouts.engines.limits import EngineLimits
from rollouts.engines.vllm import ExpectedCapabilities, HttpLimits, ResumePolicy, VLLMEngine
from rollouts.engines.vllm.media.media_payload import ContentPartsPayload
from rollouts.errors import (
    CapabilityError,
    EngineClosedError,
    EngineError,
    InvalidRequestError,
    MalformedResultError,
    MissingLogProbsError,
    OverlongPromptError,
    ServerError,
    ServerTimeoutError,
    ServerUnreachableError,
)

PAD = 397
QUICK = HttpLimits(retries=3, backoff_seconds=0, longest_backoff_seconds=0)
FIELDS = {"pixel_values": TensorField("flat"), "image_grid_thw": TensorField("batched")}


@pytest.fixture
async def server():
    async with FakeVLLM() as server:
        yield server


@pytest.fixture
async def engine(server):
    async with introduced(VLLMEngine(server.base_url, limits=QUICK), server) as engine:
        yield engine


@asynccontextmanager
async def introduced(engine, server):
    """An engine that knows its server; what it asked to get there is forgotten."""
    async with engine:
        await engine.capabilities()
        server.requests.clear()
        yield engine


def image(name="cat"):
    tensors = {"pixel_values": np.zeros((16, 1536), np.uint8), "image_grid_thw": np.array([1, 4, 4])}
    return MediaItem("image", name, MediaSource.of(name.encode()), tensors, 4, PixelScale(fused=True), FIELDS)


def request(*images, **more):
    ids, placed = [5, 6], []
    for item in images:
        ids.append(394)
        placed.append((item, PlaceholderRange(len(ids), item.num_tokens)))
        ids += [PAD] * item.num_tokens + [395]
    sampling = SamplingParams(**{"max_tokens": 6, "seed": 1, **more.pop("sampling", {})})
    media = MultiModalData.from_items(placed) if placed else None
    return GenerateRequest([*ids, 7], sampling, media, **more)


async def sampled(engine, asked):
    (completion,) = (await engine.generate(asked)).completions
    return completion


def expected(asked, index=0):
    return completion_of(asked.prompt_ids, asked.sampling.max_tokens, index, asked.sampling.stop_token_ids)


# Asking and answering.


@pytest.mark.parametrize("version", ["0.31.0", "0.32.0", "0.20.2"])
async def test_ids_and_log_probabilities_come_back_from_every_version(version):
    async with FakeVLLM(version=version) as server, VLLMEngine(server.base_url) as engine:
        asked = request()
        completion = await sampled(engine, asked)
        assert completion.token_ids.tolist() == expected(asked)
        assert completion.logprobs.tolist() == [logprob_of(token) for token in expected(asked)]


async def test_everything_that_decides_a_sample_is_said_outright(engine, server):
    sampling = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "n": 2, "stop_token_ids": (9,), "extra": {"min_p": 0.1}}
    await engine.generate(request(sampling=sampling, session_id="s", priority=3, request_id="mine"))
    (seen,) = server.generations
    sent = seen.json
    assert sent["sampling_params"] == {
        "n": 2,
        "max_tokens": 6,
        "temperature": 0.7,
        "top_p": 0.9,
        "top_k": 5,
        "seed": 1,
        "stop_token_ids": [9],
        "logprobs": 0,
        "detokenize": False,
        "min_p": 0.1,
    }
    assert (sent["model"], sent["priority"], sent["request_id"]) == ("tiny-qwen3vl", 3, "mine")
    assert seen.headers["x-session-id"] == "s"


async def test_samples_of_one_request_come_back_by_index(engine):
    asked = request(sampling={"n": 3})
    result = await engine.generate(asked)
    assert [completion.token_ids.tolist() for completion in result.completions] == [
        expected(asked, i) for i in range(3)
    ]


async def test_prompt_log_probabilities_come_with_a_new_image_too(engine):
    asked = request(image(), prompt_logprobs=True)
    result = await engine.generate(asked)
    assert result.prompt_logprobs.shape == (len(asked.prompt_ids),)


async def test_streamed_tokens_add_up_to_the_whole_answer(engine):
    asked = request(image())
    deltas = [delta async for delta in engine.stream(asked)]
    assert np.concatenate([delta.token_ids for delta in deltas]).tolist() == expected(asked)


async def test_leaving_a_stream_early_aborts_it_on_the_server(engine, server):
    never = asyncio.Event()
    logprobs = b'{"content":[{"token_id":3,"logprob":-1}]}'
    first = b'{"choices":[{"index":0,"finish_reason":null,"token_ids":[3],"logprobs":' + logprobs + b"}]}"
    server.script[GENERATE] = [stream_pieces(b"data: " + first + b"\n\n", never)]
    stream = engine.stream(request(request_id="left"))
    assert (await anext(stream)).token_ids.tolist() == [3]
    await stream.aclose()
    (aborted,) = await server.requests_seen(1, ABORT)
    assert aborted.json == {"request_ids": ["generate-tokens-left"]}


# Media.


async def test_an_image_is_sent_with_its_first_use_only(engine, server):
    for _ in range(3):
        await sampled(engine, request(image()))
    await sampled(engine, request(image(), image("dog")))
    assert [seen.shipped for seen in server.generations] == [["cat"], [], [], ["dog"]]


async def test_of_many_first_uses_at_once_one_carries_the_image_and_nobody_waits_for_its_last_token(engine, server):
    release, arrived = asyncio.Event(), asyncio.Event()
    server.script[GENERATE] = [hold(release, arrived)]
    calls = [asyncio.ensure_future(sampled(engine, request(image()))) for _ in range(20)]
    await arrived.wait()
    release.set()
    await asyncio.gather(*calls)
    assert sorted(len(seen.shipped) for seen in server.generations) == [0] * 19 + [1]


async def test_followers_go_once_the_carriers_first_token_has_come(engine, server):
    """The carrier is held behind its first token for as long as it takes the follower to finish."""
    carrier_may_end = asyncio.Event()
    asked = request(image())

    async def first_then_wait(server, seen, channel):
        server._take_images(seen.json)
        response = server.generated(seen)
        response.chunks.insert(1, carrier_may_end)
        return response

    server.script[GENERATE] = [first_then_wait]
    carrier = asyncio.ensure_future(sampled(engine, asked))
    await server.requests_seen(1, GENERATE)
    async with asyncio.timeout(10):
        follower = await sampled(engine, request(image()))
    assert not carrier.done()
    carrier_may_end.set()
    assert (await carrier).token_ids.tolist() == follower.token_ids.tolist()


async def test_a_server_that_dropped_an_image_gets_it_again(engine, server):
    asked = request(image())
    await sampled(engine, asked)
    server.forget_images()
    assert (await sampled(engine, replace(asked, request_id="second"))).token_ids.tolist() == expected(asked)
    assert [seen.shipped for seen in server.generations] == [["cat"], [], ["cat"]]


async def test_when_twenty_requests_miss_at_once_the_image_still_travels_once_more(engine, server):
    await sampled(engine, request(image()))
    server.forget_images()
    await asyncio.gather(*(sampled(engine, request(image())) for _ in range(20)))
    assert sum(len(seen.shipped) for seen in server.generations) == 2


async def test_a_group_that_shows_one_image_is_served_by_a_server_that_keeps_none(engine, server):
    """As with --mm-processor-cache-gb 0, or where another client clears the cache all the time."""
    server.cache_images = 0
    results = await asyncio.gather(*(sampled(engine, request(image())) for _ in range(20)))
    assert len(results) == 20


async def test_another_500_is_not_taken_for_a_missing_image_for_ever(engine, server):
    asked = request(image())
    await sampled(engine, asked)
    failure = answer(
        {"error": {"message": "Internal server error", "type": "x", "param": None, "code": 500}}, status=500
    )
    server.script[GENERATE] = [failure] * 10
    with pytest.raises(ServerError, match="Internal server error"):
        await sampled(engine, replace(asked, request_id="second"))
    assert [seen.shipped for seen in server.generations] == [["cat"], [], ["cat"]]


async def test_a_500_for_a_request_that_carried_everything_is_final(engine, server):
    server.script[GENERATE] = [
        answer({"error": {"message": "boom", "type": "x", "param": None, "code": 500}}, status=500)
    ]
    with pytest.raises(ServerError, match="boom"):
        await sampled(engine, request(image()))
    assert len(server.generations) == 1


async def test_a_miss_in_the_middle_of_a_stream_is_seen_too(engine, server):
    await sampled(engine, request(image()))
    error = (
        b'data: {"error":{"message":"Internal server error","type":"x","param":null,"code":500}}\n\ndata: [DONE]\n\n'
    )
    server.script[GENERATE] = [stream_pieces(error)]
    asked = request(image(), image("dog"))
    assert (await sampled(engine, asked)).token_ids.tolist() == expected(asked)
    assert [seen.shipped for seen in server.generations] == [["cat"], ["dog"], ["cat", "dog"]]


async def test_a_server_that_restarted_in_a_silence_is_asked_anew_what_it_wants(engine, server, monkeypatch):
    """Nobody noticed: without asking, its new flag would mean pixels that it normalises twice."""
    await sampled(engine, request(image()))
    await server.stop()
    server.pixel_dtype = "float32"
    await server.start()
    monkeypatch.setattr("rollouts.engines.vllm.capability_cache._QUIET_SECONDS", -1)
    await sampled(engine, request(image()))
    assert server.generations[-1].shipped == ["cat"]
    assert (await engine.capabilities()).pixel_dtype == "float32"


async def test_a_broken_connection_empties_the_record_and_the_knowledge(engine, server):
    await sampled(engine, request(image()))
    server.script[GENERATE] = [reset()]
    await sampled(engine, request(image("dog")))
    await sampled(engine, request(image()))
    assert "/version" in [seen.path for seen in server.requests]
    assert server.generations[-1].shipped == ["cat"]


async def test_a_form_that_the_server_does_not_take_is_refused_before_sending():
    async with FakeVLLM(content_parts=False) as server, VLLMEngine(server.base_url, media="content_parts") as engine:
        with pytest.raises(CapabilityError, match="content_parts"):
            await engine.generate(request(image(), placeholder_token_ids={"image": PAD}))


async def test_content_parts_need_to_know_the_marker(server):
    async with VLLMEngine(server.base_url, media="content_parts") as engine:
        with pytest.raises(InvalidRequestError, match="placeholder_token_ids"):
            await engine.generate(request(image()))


# What must not pass.


@pytest.mark.parametrize(
    ("fault", "error"),
    [
        (change(without_logprobs), MissingLogProbsError),
        (change(one_logprob_short), MissingLogProbsError),
        (change(clamped_logprob), MissingLogProbsError),
        (change(one_choice_short), MalformedResultError),
        (change(finished_by("tired")), MalformedResultError),
        (malformed(), MalformedResultError),
        (answer({"choices": []}), MalformedResultError),
        (answer({"unrelated": 1}), MalformedResultError),
    ],
)
async def test_a_faulty_answer_is_an_error_and_no_sample(engine, server, fault, error):
    server.script[GENERATE] = [fault]
    with pytest.raises(error):
        await sampled(engine, request())


async def test_half_an_answer_is_asked_for_again(engine, server):
    asked = request()
    server.script[GENERATE] = [half(), reset(), reset(after_head=True)]
    assert (await sampled(engine, asked)).token_ids.tolist() == expected(asked)


async def test_a_storm_of_429_and_503_is_weathered(engine, server):
    server.script[GENERATE] = [busy(429, retry_after="0"), busy(503), busy(429)]
    asked = request()
    assert (await sampled(engine, asked)).token_ids.tolist() == expected(asked)


async def test_an_error_of_the_request_is_final_and_keeps_the_servers_words(engine, server):

    async def refuse(server, seen, channel):
        return error_response(400, "Token id 999999 is out of vocabulary", "BadRequestError")

    server.script[GENERATE] = [refuse]
    with pytest.raises(ServerError, match="out of vocabulary") as caught:
        await sampled(engine, request())
    assert caught.value.status == 400
    assert len(server.generations) == 1


async def test_an_overlong_prompt_never_leaves(engine, server):
    with pytest.raises(OverlongPromptError):
        await engine.generate(GenerateRequest([1] * 4096, SamplingParams()))
    assert server.generations == []


async def test_scale_out_that_is_off_is_an_error_with_the_flag():
    async with FakeVLLM(scale_out=False) as server, VLLMEngine(server.base_url) as engine:
        with pytest.raises(CapabilityError, match="--enable-scale-out"):
            await engine.generate(request())


async def test_a_server_that_contradicts_the_configuration_is_an_error(server):
    async with VLLMEngine(server.base_url, expected=ExpectedCapabilities(pixel_dtype="float32")) as engine:
        with pytest.raises(CapabilityError, match="uint8"):
            await engine.generate(request(image()))


async def test_concurrent_first_calls_ask_the_server_once_what_it_is(server):
    async with VLLMEngine(server.base_url) as engine:
        await asyncio.gather(*(sampled(engine, request()) for _ in range(20)))
    assert sum(seen.path == "/version" for seen in server.requests) == 1


async def test_a_first_caller_that_is_cancelled_leaves_the_question_to_the_others(server):
    release, arrived = asyncio.Event(), asyncio.Event()
    server.script["/version"] = [hold(release, arrived)]
    async with VLLMEngine(server.base_url) as engine:
        first, second = (asyncio.ensure_future(sampled(engine, request())) for _ in range(2))
        await arrived.wait()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        release.set()
        assert len((await second).token_ids) == 6
    assert len([seen for seen in server.requests if seen.path == "/version"]) == 1


async def test_no_server_is_an_error_for_everyone_who_waits():
    async with FakeVLLM() as server:
        url = server.base_url
    async with VLLMEngine(url, limits=QUICK) as engine:
        results = await asyncio.gather(*(engine.generate(request()) for _ in range(5)), return_exceptions=True)
    assert all(isinstance(result, ServerUnreachableError) for result in results)


async def test_two_requests_of_one_id_at_once_are_refused(engine, server):
    release, arrived = asyncio.Event(), asyncio.Event()
    server.script[GENERATE] = [hold(release, arrived)]
    first = asyncio.ensure_future(engine.generate(request(request_id="same")))
    await arrived.wait()
    with pytest.raises(EngineError, match="running already"):
        await engine.generate(request(request_id="same"))
    release.set()
    await first


async def test_a_closed_engine_refuses(server):
    engine = VLLMEngine(server.base_url)
    await engine.close()
    with pytest.raises(EngineClosedError):
        await engine.generate(request())


# Aborting and resuming.


async def test_cancelling_aborts_under_the_servers_name_for_the_request(engine, server):
    never, arrived = asyncio.Event(), asyncio.Event()
    server.script[GENERATE] = [hold(never, arrived)]
    call = asyncio.ensure_future(engine.generate(request(request_id="mine")))
    await arrived.wait()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    (aborted,) = await server.requests_seen(1, ABORT)
    assert aborted.json == {"request_ids": ["generate-tokens-mine"]}


async def test_a_timeout_aborts_too(server):
    limits = replace(QUICK, total_seconds=0.2)
    async with introduced(VLLMEngine(server.base_url, limits=limits), server) as engine:
        server.script[GENERATE] = [hold(asyncio.Event())]
        with pytest.raises(ServerTimeoutError):
            await engine.generate(request(request_id="mine"))
        (aborted,) = await server.requests_seen(1, ABORT)
        assert aborted.json == {"request_ids": ["generate-tokens-mine"]}


async def test_a_completion_that_a_pause_cut_off_is_as_if_it_had_never_been(engine, server):
    asked = request(image(), sampling={"max_tokens": 9})
    await sampled(engine, request(image()))
    arrived = asyncio.Event()
    server.script[GENERATE] = [hold(asyncio.Event(), arrived, tokens_before=4)]
    call = asyncio.ensure_future(sampled(engine, asked))
    await arrived.wait()
    await engine.control.pause("abort")
    await engine.control.update_weight_version("v2")
    assert not call.done()
    await engine.control.resume()
    completion = await call
    assert completion.token_ids.tolist() == expected(asked)
    assert completion.logprobs.tolist() == [logprob_of(token) for token in expected(asked)]
    assert [(span.version, span.start, span.end) for span in completion.weight_spans] == [
        ("default", 0, 4),
        ("v2", 4, 9),
    ]
    continued = server.generations[-1].json
    assert continued["token_ids"] == [*asked.prompt_ids, *expected(asked)[:4]]
    assert continued["sampling_params"]["max_tokens"] == 5


async def test_a_cut_group_goes_on_sample_by_sample(engine, server):
    asked = request(sampling={"max_tokens": 9, "n": 3})
    server.script[GENERATE] = [hold(asyncio.Event(), arrived := asyncio.Event(), tokens_before=4)]
    call = asyncio.ensure_future(engine.generate(asked))
    await arrived.wait()
    await engine.control.pause("abort")
    await engine.control.resume()
    assert [completion.token_ids.tolist() for completion in (await call).completions] == [
        expected(asked, i) for i in range(3)
    ]


async def test_a_cut_before_the_first_token_asks_for_everything(engine, server):
    asked = request()
    server.script[GENERATE] = [hold(asyncio.Event(), arrived := asyncio.Event(), tokens_before=0)]
    call = asyncio.ensure_future(sampled(engine, asked))
    await arrived.wait()
    await engine.control.pause("abort")
    await engine.control.resume()
    assert (await call).token_ids.tolist() == expected(asked)


async def test_a_server_that_refuses_while_it_is_paused_is_waited_for():
    """vLLM 0.33 answers 503 where 0.32 queues."""
    async with (
        FakeVLLM(queue_while_paused=False) as server,
        introduced(VLLMEngine(server.base_url, limits=QUICK), server) as engine,
    ):
        await engine.control.pause("abort")
        asked = request()
        call = asyncio.ensure_future(sampled(engine, asked))
        await server.requests_seen(1 + QUICK.retries, GENERATE)
        await server.requests_seen(1, "/is_paused")
        assert not call.done()
        await engine.control.resume()
        assert (await call).token_ids.tolist() == expected(asked)


async def test_an_aborted_request_hands_out_what_it_has_and_does_not_go_on(engine, server):
    asked = request(request_id="mine")
    server.script[GENERATE] = [hold(asyncio.Event(), arrived := asyncio.Event(), tokens_before=2)]
    call = asyncio.ensure_future(sampled(engine, asked))
    await arrived.wait()
    await engine.abort(["mine", "unknown"])
    completion = await call
    assert completion.finish_reason is FinishReason.ABORT
    assert completion.token_ids.tolist() == expected(asked)[:2]


async def test_abort_all_ends_every_request_of_this_engine(engine, server):
    never = asyncio.Event()
    server.script[GENERATE] = [hold(never), hold(never)]
    calls = [asyncio.ensure_future(sampled(engine, request())) for _ in range(2)]
    await server.requests_seen(2, GENERATE)
    await engine.abort_all()
    assert [completion.finish_reason for completion in await asyncio.gather(*calls)] == [FinishReason.ABORT] * 2


async def test_what_is_aborted_again_and_again_ends_with_an_error(server):
    async with introduced(VLLMEngine(server.base_url, limits=QUICK, resume=ResumePolicy(rounds=3)), server) as engine:

        async def abort(server, seen, channel):
            return server.generated(seen, cut=1)

        server.script[GENERATE] = [abort] * 9
        with pytest.raises(EngineError, match="3 times"):
            await engine.generate(request(sampling={"max_tokens": 50}))


async def test_a_pause_without_end_is_a_timeout(server):
    resume = ResumePolicy(wait_seconds=0.2)
    async with introduced(VLLMEngine(server.base_url, limits=QUICK, resume=resume), server) as engine:
        server.script[GENERATE] = [hold(asyncio.Event(), arrived := asyncio.Event())]
        call = asyncio.ensure_future(engine.generate(request()))
        await arrived.wait()
        await engine.control.pause("abort")
        with pytest.raises(ServerTimeoutError, match="paused"):
            await call


# Weight versions and the prefix cache.


async def test_the_cache_salt_is_one_per_weight_version_and_stays_within_a_session(engine, server):
    await sampled(engine, request(session_id="a"))
    await engine.control.update_weight_version("v2")
    for session in ("a", "b", None):
        await sampled(engine, request(session_id=session))
    old, stays, new, without = [seen.json["cache_salt"] for seen in server.generations]
    assert old == stays
    assert new == without != old


async def test_without_a_salt_none_is_sent(server):
    async with introduced(VLLMEngine(server.base_url, cache_salt=False), server) as engine:
        await sampled(engine, request())
    assert "cache_salt" not in server.generations[0].json


async def test_a_weight_version_set_by_someone_else_is_read_off_the_answers(engine, server):
    await sampled(engine, request())
    server.weight_version = "theirs"
    await sampled(engine, request())
    assert engine.weight_version == "theirs"


async def test_one_engine_serves_several_event_loops(server):
    engine = VLLMEngine(server.base_url)
    asked = [request() for _ in range(4)]
    runs = [asyncio.to_thread(asyncio.run, engine.generate(each)) for each in asked]
    results = await asyncio.gather(*runs)
    await engine.close()
    assert [result.completions[0].token_ids.tolist() for result in results] == [expected(each) for each in asked]


# What a second, hostile reading found.


def delta(ids, finish=None):
    logprobs = {"content": [{"token_id": token, "logprob": -1} for token in ids]}
    choice = {"index": 0, "finish_reason": finish, "token_ids": ids, "logprobs": logprobs}
    return b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n"


def cut(count, prompt_logprobs=True):
    async def step(server, seen, channel):
        response = server.generated(seen, cut=count)
        if not prompt_logprobs:
            response.body = json.dumps(response.json | {"prompt_logprobs": [None]}).encode()
        return response

    return step


async def test_the_last_continuation_that_is_allowed_counts(server):
    async with introduced(VLLMEngine(server.base_url, limits=QUICK, resume=ResumePolicy(rounds=1)), server) as engine:
        asked = request()
        server.script[GENERATE] = [cut(1)]
        assert (await sampled(engine, asked)).token_ids.tolist() == expected(asked)


async def test_a_request_that_waits_for_the_end_of_a_pause_can_be_aborted(engine, server):
    server.script[GENERATE] = [hold(asyncio.Event(), arrived := asyncio.Event(), tokens_before=2)]
    call = asyncio.ensure_future(sampled(engine, request(request_id="mine")))
    await arrived.wait()
    await engine.control.pause("abort")
    await server.requests_seen(2, "/is_paused")
    await engine.abort(["mine"])
    async with asyncio.timeout(5):
        completion = await call
    assert (completion.finish_reason, len(completion.token_ids)) == (FinishReason.ABORT, 2)


@pytest.mark.parametrize("waits_for", ["image", "slot"])
async def test_a_request_that_has_not_left_yet_can_be_aborted(server, waits_for):
    limits = replace(QUICK, concurrency=1 if waits_for == "slot" else 8)
    shown = [image()] if waits_for == "image" else []
    async with introduced(VLLMEngine(server.base_url, limits=limits), server) as engine:
        server.script[GENERATE] = [hold(release := asyncio.Event(), arrived := asyncio.Event())]
        first = asyncio.ensure_future(sampled(engine, request(*shown)))
        await arrived.wait()
        second = asyncio.ensure_future(sampled(engine, request(*shown, request_id="mine")))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await engine.abort(["mine"])
        async with asyncio.timeout(5):
            assert (await second).finish_reason is FinishReason.ABORT
        release.set()
        assert (await first).finish_reason is FinishReason.LENGTH
        assert len(server.generations) == 1


async def test_an_answer_that_breaks_after_its_first_token_is_asked_for_again(engine, server):
    asked = request(image())

    async def first_token_only(server, seen, channel):
        server._take_images(seen.json)
        first = server.generated(seen).chunks[0]
        head = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\ncontent-type: text/event-stream\r\n\r\n"
        channel.write(head + b"%x\r\n%b\r\n" % (len(first), first))
        channel.close()

    server.script[GENERATE] = [first_token_only]
    assert (await sampled(engine, asked)).token_ids.tolist() == expected(asked)


async def test_an_error_after_the_first_token_is_no_missing_image(engine, server):
    await sampled(engine, request(image()))
    error = {"error": {"message": "Internal server error", "type": "x", "param": None, "code": 500}}
    failed = b"data: " + json.dumps(error).encode() + b"\n\ndata: [DONE]\n\n"
    server.script[GENERATE] = [stream_pieces(delta([3]), failed)]
    heard = []
    with pytest.raises(ServerError, match="Internal server error"):  # noqa: PT012 the loop is what raises
        async for each in engine.stream(request(image())):
            heard += each.token_ids.tolist()
    assert heard == [3]


@pytest.mark.parametrize("option", [{"frequency_penalty": 0.5}, {"structured_outputs": {"json": {}}}])
async def test_a_stream_of_what_is_drawn_anew_after_a_cut_holds_the_last_drawing_alone(engine, server, option):
    asked = request(sampling={"extra": option})
    server.script[GENERATE] = [cut(3)]
    heard = [token async for each in engine.stream(asked) for token in each.token_ids.tolist()]
    assert heard == expected(asked)
    assert server.generations[-1].json["token_ids"] == asked.prompt_ids


async def test_a_stream_with_prompt_log_probabilities_is_refused_before_sending(engine, server):
    with pytest.raises(InvalidRequestError, match="prompt_logprobs"):
        await anext(engine.stream(request(prompt_logprobs=True)))
    assert server.generations == []


async def test_prompt_log_probabilities_that_a_cut_forestalled_are_asked_for_again(engine, server):
    asked = request(prompt_logprobs=True)
    server.script[GENERATE] = [cut(0, prompt_logprobs=False)]
    result = await engine.generate(asked)
    assert result.prompt_logprobs[1:].tolist() == [logprob_of(token) for token in asked.prompt_ids[1:]]


async def test_an_image_that_cannot_be_decoded_is_an_error_of_the_request(server):
    async with introduced(VLLMEngine(server.base_url, media="content_parts"), server) as engine:
        with pytest.raises(InvalidRequestError, match="not an image"):
            await engine.generate(request(image(), placeholder_token_ids={"image": PAD}))


async def test_an_image_shown_twice_in_content_parts_comes_with_its_data_in_both_places():
    """The server looks each up in its cache before it has taken any."""
    asked = request(image(), image(), placeholder_token_ids={"image": PAD})
    payload = ContentPartsPayload(asked)
    payload._data_url = lambda item: [b"data:,"]
    parts = json.loads(b"{" + b"".join(payload.body_field(payload.names)) + b"}")["content_parts"]
    assert [part["url"] for part in parts] == ["data:,"] * 2


async def test_a_carrier_that_was_aborted_in_the_queue_has_not_brought_its_image(engine, server):
    server.script[GENERATE] = [hold(asyncio.Event(), arrived := asyncio.Event(), tokens_before=0)]
    call = asyncio.ensure_future(sampled(engine, request(image(), request_id="mine")))
    await arrived.wait()
    await engine.abort(["mine"])
    await call
    await sampled(engine, request(image()))
    assert [seen.shipped for seen in server.generations] == [["cat"], ["cat"]]


async def test_a_label_that_someone_else_sets_back_is_read_off_the_answers_too(engine, server):
    for label in ("theirs", "default", "theirs"):
        server.weight_version = label
        await sampled(engine, request())
        assert engine.weight_version == label


async def test_pixels_that_reached_a_server_with_another_flag_are_sent_again_for_it(engine, server):
    """It restarted in the middle of the request, and took what was made for the one before."""

    async def restart(server, seen, channel):
        server.pixel_dtype = "float32"
        channel.reset()

    server.script[GENERATE] = [restart]
    asked = request(image())
    assert (await sampled(engine, asked)).token_ids.tolist() == expected(asked)
    sizes = [len(seen.body) for seen in server.generations if seen.shipped]
    assert sizes[0] == sizes[1] < sizes[2] / 3


@pytest.mark.parametrize("field", ["n", "max_tokens"])
async def test_a_request_past_the_limits_is_refused_before_anything_is_sent_or_reserved(engine, server, field):
    tracemalloc.start()
    with pytest.raises(InvalidRequestError, match=rf"{field} is 1000000000 .* EngineLimits\({field}=...\)"):
        await engine.generate(request(sampling={field: 10**9}))
    with pytest.raises(InvalidRequestError, match=field):
        await anext(engine.stream(request(sampling={field: 10**9})))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
    assert server.generations == []


async def test_the_limits_of_a_request_can_be_set(server):
    async with VLLMEngine(server.base_url, request_limits=EngineLimits(n=2)) as engine:
        await engine.generate(request(sampling={"n": 2}))
        with pytest.raises(InvalidRequestError, match="at most 2"):
            await engine.generate(request(sampling={"n": 3}))


async def test_a_sampling_option_that_is_no_json_is_an_error_of_the_request(engine, server):
    with pytest.raises(InvalidRequestError, match="cannot be written as JSON"):
        await engine.generate(request(sampling={"extra": {"min_p": np.float32(1)}}))
    assert server.generations == []
