"""Streams of `SGLangEngine` against a scripted server."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_sglang import FakeSGLang
from sglang_requests import image, request_of, with_value, without

from rollouts import FinishReason, SamplingParams, WeightSpan
from rollouts.engines.protocol import TokenDelta
from rollouts.engines.sglang import SGLangEngine
from rollouts.errors import MalformedResultError, MissingLogProbsError, ServerError


class Heard:
    """What a listener was told, by completion."""

    def __init__(self) -> None:
        self.deltas: list[TokenDelta] = []

    def __call__(self, delta: TokenDelta) -> None:
        self.deltas.append(delta)

    def parts(self, index: int = 0) -> list[list[int]]:
        return [delta.token_ids.tolist() for delta in self.deltas if delta.index == index]


@pytest.mark.parametrize("incremental", [False, True])
async def test_tokens_are_reported_as_they_are_sampled_whether_or_not_parts_repeat_them(
    engine: SGLangEngine, server: FakeSGLang, incremental: bool
) -> None:
    server.info["incremental_streaming_output"] = incremental
    heard = Heard()
    request = request_of(image(1), sampling=SamplingParams(max_tokens=4, n=2, top_logprobs=2))
    result = await engine.generate(request, heard)
    for index, completion in enumerate(result.completions):
        assert heard.parts(index) == [[1], [2], [3], [4]]
        assert completion.token_ids.tolist() == [1, 2, 3, 4]
        assert completion.logprobs.tolist() == [-1, -2, -3, -4]
        assert completion.finish_reason is FinishReason.LENGTH
        assert completion.weight_spans == (WeightSpan("default", 0, 4),)
        tops = [delta.top_logprobs for delta in heard.deltas if delta.index == index]
        assert completion.top_logprobs is not None
        joined = np.concatenate([top.token_ids for top in tops if top is not None])
        np.testing.assert_array_equal(joined, completion.top_logprobs.token_ids)
    assert engine.streams


async def test_a_long_completion_has_few_parts_where_each_repeats_all_tokens(
    engine: SGLangEngine, server: FakeSGLang
) -> None:
    heard = Heard()
    await engine.generate(request_of(sampling=SamplingParams(max_tokens=1000)), heard)
    assert server.requests[0]["sampling_params"]["stream_interval"] == 8
    assert [len(part) for part in heard.parts()] == [1, *[8] * 124, 7]


async def test_a_stream_goes_on_across_a_pause(server: FakeSGLang, engine: SGLangEngine, checkpoint: Path) -> None:
    server.holds = True
    heard = Heard()
    sampling = asyncio.create_task(engine.generate(request_of(image(1), sampling=SamplingParams(max_tokens=5)), heard))
    await server.until_running()
    server.holds = False
    await engine.update_weights(checkpoint, "1")
    (completion,) = (await sampling).completions
    assert heard.parts() == [[1], [2], [1], [2], [3]]
    assert completion.token_ids.tolist() == [1, 2, 1, 2, 3]
    assert completion.weight_spans == (WeightSpan("default", 0, 2), WeightSpan("1", 2, 5))
    first, rest = server.requests
    assert rest["input_ids"] == [*first["input_ids"], 1, 2]
    assert rest["image_data"] == first["image_data"]
    assert rest["sampling_params"]["max_new_tokens"] == 3


@pytest.mark.slow
@pytest.mark.parametrize("answered", [True, False])
async def test_an_aborted_stream_has_the_tokens_that_were_reported(
    server: FakeSGLang, engine: SGLangEngine, answered: bool
) -> None:
    """Also where the server takes the abort and does not end the request."""
    if not answered:
        server.end = lambda request_id: None  # type: ignore[method-assign]
    server.holds = True
    heard = Heard()
    request = request_of(sampling=SamplingParams(max_tokens=5), request_id="x")
    sampling = asyncio.create_task(engine.generate(request, heard))
    await server.until_running()
    await engine.abort(["x"])
    (completion,) = (await sampling).completions
    assert completion.finish_reason is FinishReason.ABORT
    assert completion.token_ids.tolist() == [token for part in heard.parts() for token in part] == [1, 2]


async def test_leaving_a_stream_ends_its_request_on_the_server(server: FakeSGLang, engine: SGLangEngine) -> None:
    server.holds = True
    request = request_of(sampling=SamplingParams(max_tokens=5), request_id="x")
    sampling = asyncio.create_task(engine.generate(request, Heard()))
    await server.until_running()
    sampling.cancel()
    await asyncio.wait([sampling])
    assert ("/abort_request", {"rid": "x"}) in server.calls


_ROWS, _ENDING = ("meta_info", "output_token_logprobs"), ("meta_info", "finish_reason")


def _twice_as_many(answer: dict[str, Any]) -> None:
    for rows in (answer, answer["meta_info"]):
        for name in rows.keys() & {"output_ids", "output_token_logprobs"}:
            rows[name] *= 2


_REFUSAL = {"type": "abort", "status_code": 400, "message": "Input length exceeds the maximum"}


@pytest.mark.parametrize(
    ("spoil", "error", "text"),
    [
        (with_value(7, "output_ids", 1), MalformedResultError, "log-probability 0 is of token 2, not of token 7"),
        (with_value({"logprob": -2.0}, *_ROWS, 1), MissingLogProbsError, "cannot be read"),
        (with_value(None, *_ENDING), MalformedResultError, "the stream ended after 3 tokens without a finish_reason"),
        (with_value(_REFUSAL, *_ENDING), ServerError, "Input length exceeds the maximum"),
        (without(*_ROWS, 2), MalformedResultError, r"has 2 `output_token_logprobs` after 2 of 3 tokens"),
        (with_value(None, *_ROWS, 1, 0), MissingLogProbsError, "log-prob"),
        (with_value(3, "meta_info", "prompt_tokens"), MalformedResultError, "ran 3 tokens of a prompt of 2"),
        (_twice_as_many, MalformedResultError, "holds 6 tokens; the request has max_tokens=3"),
    ],
)
async def test_what_is_wrong_in_a_stream_is_an_error(
    server: FakeSGLang, engine: SGLangEngine, spoil: Any, error: type[Exception], text: str
) -> None:
    server.spoil = spoil
    with pytest.raises(error, match=text):
        await engine.generate(request_of(), Heard())
