"""What is refused of an engine's answer, and of a caller's sampling parameters."""

from dataclasses import replace

import numpy as np
import pytest

from rollouts import Completion, FinishReason, GenerateRequest, GenerateResult, SamplingParams, TopLogprobs
from rollouts.engines.request_limits import check_limits
from rollouts.engines.result_checks import check_result
from rollouts.errors import InvalidRequestError, MalformedResultError, MissingLogProbsError

REQUEST = GenerateRequest([1, 2], SamplingParams(), request_id="r1")


def result(ids: list[int], logprobs: list[float], count: int = 1) -> GenerateResult:
    drawn = Completion(0, np.array(ids, np.int32), np.array(logprobs, np.float32), FinishReason.STOP)
    return GenerateResult("r1", [drawn] * count)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (GenerateResult("r2", result([5], [-0.1]).completions), "result of request 'r2'"),
        (result([5], [-0.1], count=0), "returned 0 completions, the request has n=1"),
        (result([], []), "holds no token"),
        (result([5, 6, 7], [-0.1] * 3), "completion 0 holds 3 tokens; the request has max_tokens=2"),
    ],
)
def test_a_result_that_is_not_that_of_the_request_is_an_error_that_names_it(found, words):
    request = GenerateRequest([1, 2], SamplingParams(max_tokens=2), request_id="r1")
    check_result(request, result([5, 6], [-0.1, -0.1]))
    with pytest.raises(MalformedResultError, match=words) as caught:
        check_result(request, found)
    assert caught.value.request_id == "r1"


@pytest.mark.parametrize(
    ("logprobs", "words"),
    [
        ([], "2 tokens and 0 log-probabilities"),
        ([-0.1], "2 tokens and 1 log-probabilities"),
        ([-0.1, float("nan")], "token 1 has log-probability nan"),
        ([-0.1, float("-inf")], "token 1 has log-probability -inf"),
        ([-9999.0, -0.1], "token 0 has log-probability -9999"),
    ],
)
def test_a_missing_or_invented_logprob_is_an_error_and_never_zero(logprobs, words):
    with pytest.raises(MissingLogProbsError, match=words) as caught:
        check_result(REQUEST, result([5, 6], logprobs))
    assert caught.value.request_id == "r1"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (field, value)
        for field in ("max_tokens", "n", "top_k", "seed", "top_logprobs")
        for value in ("5", 5.0, True, np.float32(5), np.bool_(True), [5], b"5", float("nan"), object())
    ]
    + [(field, None) for field in ("max_tokens", "n", "top_k", "temperature", "top_p", "stop_token_ids")]
    + [
        ("max_tokens", 0),
        ("max_tokens", 2**31),
        ("n", 0),
        ("top_k", -1),
        ("top_k", 2**31),
        ("stop_token_ids", [2**70]),
        ("top_logprobs", -1),
        ("temperature", -1),
    ]
    + [("top_p", 0.0), ("top_p", 1.5)]
    + [(field, value) for field in ("temperature", "top_p") for value in ("1", True, float("nan"), 1j, [1.0], 10**400)]
    + [("stop_token_ids", value) for value in ("12", 5, (1.5,), ("x",), (True,), b"ab", {"a": 1})],
)
def test_a_sampling_parameter_of_another_type_or_range_is_refused_by_the_constructor(field, value):
    with pytest.raises(InvalidRequestError, match=rf"^request sampling: (SamplingParams\.)?{field} is "):
        SamplingParams(**{field: value})


@pytest.mark.parametrize("value", ["5", 1.5, True, None, -1])
def test_a_number_of_likeliest_tokens_of_the_prompt_is_an_integer_from_zero(value):
    with pytest.raises(InvalidRequestError, match="prompt_top_logprobs"):
        GenerateRequest([1], SamplingParams(), prompt_top_logprobs=value)


def test_numpy_numbers_become_python_numbers():
    params = SamplingParams(
        max_tokens=np.int64(5),
        n=np.uint8(2),
        top_k=np.int32(3),
        seed=np.uint64(7),
        temperature=np.float32(0.5),
        top_p=np.array(0.25),
        stop_token_ids=np.array([4, 5]),
    )
    assert params == SamplingParams(
        max_tokens=5, n=2, top_k=3, seed=7, temperature=0.5, top_p=0.25, stop_token_ids=(4, 5)
    )
    held = [params.max_tokens, params.n, params.top_k, params.seed, *params.stop_token_ids]
    assert {type(number) for number in held} == {int}
    assert {type(params.temperature), type(params.top_p)} == {float}


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ([1, 2**70], "token 1 of the prompt is 1180591620717411303424"),
        ([1, 2.0], "token 1 of the prompt is 2.0"),
        ([1, "2"], "token 1 of the prompt is '2'"),
        ([1, None], "token 1 of the prompt is None"),
        (b"\x01\x02\x03\x04\x05\x06\x07\x08", "the prompt is bytes, not token ids"),
        ("text", "the prompt is str, not token ids"),
        (None, "the prompt is NoneType, not token ids"),
        ({1: 2}, "the prompt is dict, not token ids"),
        (np.zeros(3), "not a row of integers"),
        (np.zeros((2, 2), np.int64), "not a row of integers"),
        (np.array([True, False]), "not a row of integers"),
    ],
)
def test_the_error_of_a_prompt_that_is_no_row_of_integers_has_the_position(prompt, words):
    with pytest.raises(InvalidRequestError, match=words):
        GenerateRequest(prompt, SamplingParams())


@pytest.mark.parametrize("prompt", [[], [1, 2], (1, 2), range(3), np.array([1, 2], np.int32), [np.int64(3), 4]])
def test_rows_of_integers_of_any_kind_are_prompts(prompt):
    assert GenerateRequest(prompt, SamplingParams()).prompt_ids is prompt


@pytest.mark.parametrize(
    ("field", "most"), [("n", 1024), ("max_tokens", 2**20), ("top_logprobs", 1024), ("prompt_top_logprobs", 1024)]
)
def test_the_error_of_a_request_past_the_limits_has_the_field_and_both_numbers(field, most):
    def request(value):
        if field == "prompt_top_logprobs":
            return GenerateRequest([1], SamplingParams(), prompt_top_logprobs=value)
        return GenerateRequest([1], SamplingParams(**{field: value}))

    check_limits(request(most))
    reason = f"{field} is 1000000000 and an engine takes at most {most}. Send a smaller one"
    with pytest.raises(InvalidRequestError, match=reason):
        check_limits(request(10**9))


def with_top(ids, logprobs, *, of_prompt=None):
    top = TopLogprobs(np.array(ids, np.int32), np.array(logprobs, np.float32))
    found = result([5, 6], [-0.1, -2.0])
    return replace(
        found,
        completions=[replace(each, top_logprobs=top) for each in found.completions],
        prompt_top_logprobs=of_prompt,
    )


TOP = replace(REQUEST, sampling=SamplingParams(top_logprobs=2))
ROWS = [[5, 7], [8, 6]], [[-0.1, -3.0], [-0.5, -2.0]]


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (result([5, 6], [-0.1, -2.0]), "the 2 likeliest tokens in the place of each are requested, and none reported"),
        (with_top([[5], [8]], [[-0.1], [-0.5]]), r"2 tokens with 2 each need \(2, 2\)"),
        (with_top(ROWS[0][:1], ROWS[1][:1]), r"2 tokens with 2 each need \(2, 2\)"),
        (with_top(ROWS[0], [[-0.1, -3.0], [-0.5, np.nan]]), "log-probability nan"),
        (with_top(ROWS[0], [[-0.1, -3.0], [-0.5, -9999.0]]), "log-probability -9999"),
        (with_top(ROWS[0], [[-0.1, -3.0], [-2.0, -0.5]]), "place 1 are not in descending order"),
        (with_top([[5, 7], [8, 9]], ROWS[1]), "id 9; ids run from 0 to 8"),
        (with_top([[5, 7], [8, -1]], ROWS[1]), "id -1"),
    ],
)
def test_likeliest_tokens_that_are_missing_or_wrong_are_an_error(found, words):
    with pytest.raises(MissingLogProbsError, match=words):
        check_result(TOP, found, vocab_size=9)


@pytest.mark.parametrize(
    ("of_prompt", "words"),
    [
        (None, "none reported"),
        (TopLogprobs(np.array([[3], [4]], np.int32), np.array([[-1], [-1]], np.float32)), "nothing predicts it"),
        (TopLogprobs(np.array([[-1]], np.int32), np.array([[np.nan]], np.float32)), r"2 tokens with 1 each"),
    ],
)
def test_likeliest_tokens_of_a_prompt_are_checked_too(of_prompt, words):
    request = replace(REQUEST, prompt_top_logprobs=1)
    with pytest.raises(MissingLogProbsError, match=words):
        check_result(request, replace(result([5], [-0.1]), prompt_top_logprobs=of_prompt))


def test_an_aborted_completion_without_tokens_needs_no_likeliest_tokens():
    aborted = Completion(0, np.empty(0, np.int32), np.empty(0, np.float32), FinishReason.ABORT)
    check_result(replace(TOP, prompt_top_logprobs=2), GenerateResult("r1", [aborted]))
