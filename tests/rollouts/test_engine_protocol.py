"""What is refused of an engine's answer, and of a caller's sampling parameters."""

import numpy as np
import pytest

from rollouts import Completion, FinishReason, GenerateRequest, GenerateResult, SamplingParams
from rollouts.engines.protocol import EngineLimits, check_result
from rollouts.errors import ArgumentError, InvalidRequestError, MalformedResultError, MissingLogProbsError

REQUEST = GenerateRequest([1, 2], SamplingParams(), request_id="r1")


def result(ids: list[int], logprobs: list[float], count: int = 1) -> GenerateResult:
    drawn = Completion(0, np.array(ids, np.int32), np.array(logprobs, np.float32), FinishReason.STOP)
    return GenerateResult("r1", [drawn] * count)


def test_the_result_of_another_request_is_an_error_that_names_it():
    other = GenerateResult("r2", result([5], [-0.1]).completions)
    with pytest.raises(MalformedResultError, match="result of request 'r2'") as caught:
        check_result(REQUEST, other)
    assert caught.value.request_id == "r1"


def test_more_tokens_than_the_request_allows_are_an_error():
    request = GenerateRequest([1, 2], SamplingParams(max_tokens=2), request_id="r1")
    check_result(request, result([5, 6], [-0.1, -0.1]))
    with pytest.raises(MalformedResultError, match="completion 0 holds 3 tokens; the request has max_tokens=2"):
        check_result(request, result([5, 6, 7], [-0.1] * 3))


def test_one_finite_logprob_a_token_is_accepted():
    check_result(REQUEST, result([5, 6], [-0.1, -2.0]))


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


def test_too_few_completions_are_an_error():
    with pytest.raises(MalformedResultError, match="returned 0 completions, the request has n=1"):
        check_result(REQUEST, result([5], [-0.1], count=0))


def test_a_completion_without_tokens_is_an_error():
    with pytest.raises(MalformedResultError, match="holds no token"):
        check_result(REQUEST, result([], []))


@pytest.mark.parametrize(
    "bad", [{"max_tokens": 0}, {"temperature": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}, {"n": 0}]
)
def test_the_error_names_sampling_parameters_out_of_range(bad):
    with pytest.raises(InvalidRequestError, match=next(iter(bad))):
        SamplingParams(**bad)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        (field, value)
        for field in ("max_tokens", "n", "top_k", "seed")
        for value in ("5", 5.0, True, np.float32(5), np.bool_(True), [5], b"5", float("nan"), object())
    ]
    + [(field, None) for field in ("max_tokens", "n", "top_k", "temperature", "top_p", "stop_token_ids", "extra")]
    + [(field, value) for field in ("temperature", "top_p") for value in ("1", True, float("nan"), 1j, [1.0], 10**400)]
    + [("stop_token_ids", value) for value in ("12", 5, (1.5,), ("x",), (True,), b"ab", {"a": 1})]
    + [("extra", value) for value in ("min_p", [("min_p", 1)], {1: 2})],
)
def test_a_sampling_parameter_of_another_type_is_refused_by_the_constructor(field, value):
    with pytest.raises(InvalidRequestError, match=rf"^request sampling: {field} is "):
        SamplingParams(**{field: value})


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
    ("field", "value"),
    [
        ("sampling", {"max_tokens": 5}),
        ("sampling", None),
        ("multi_modal_data", {}),
        ("session_id", 5),
        ("request_id", None),
        ("placeholder_token_ids", [("image", 1)]),
        ("sampled", None),
        ("sampled", [(1, 2, 3)]),
        ("sampled", [5]),
        ("sampled", [(1, "2")]),
        ("priority", 1.5),
        ("prompt_logprobs", "yes"),
    ],
)
def test_a_request_field_of_another_type_is_refused_by_the_constructor(field, value):
    fields = {"prompt_ids": [1], "sampling": SamplingParams(), field: value}
    with pytest.raises(InvalidRequestError, match=f"{field} is "):
        GenerateRequest(**fields)


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


@pytest.mark.parametrize(("field", "most"), [("n", 1024), ("max_tokens", 2**20)])
def test_the_error_of_a_request_past_the_limits_has_the_field_and_both_numbers(field, most):
    EngineLimits().check(GenerateRequest([1], SamplingParams(**{field: most})))
    with pytest.raises(InvalidRequestError, match=f"{field} is 1000000000 and this engine takes at most {most}"):
        EngineLimits().check(GenerateRequest([1], SamplingParams(**{field: 10**9})))


@pytest.mark.parametrize("limits", [{"n": 0}, {"max_tokens": 0}])
def test_limits_that_admit_nothing_are_refused(limits):
    with pytest.raises(ArgumentError, match="admits no request"):
        EngineLimits(**limits)
