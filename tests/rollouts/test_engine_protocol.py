"""What is refused of an engine's answer, and of a caller's sampling parameters."""

import numpy as np
import pytest

from rollouts import Completion, FinishReason, GenerateRequest, GenerateResult, SamplingParams
from rollouts.engines.protocol import check_result
from rollouts.errors import InvalidRequestError, MalformedResultError, MissingLogProbsError

REQUEST = GenerateRequest([1, 2], SamplingParams(), request_id="r1")


def result(ids: list[int], logprobs: list[float], count: int = 1) -> GenerateResult:
    drawn = Completion(0, np.array(ids, np.int32), np.array(logprobs, np.float32), FinishReason.STOP)
    return GenerateResult("r1", [drawn] * count)


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
    with pytest.raises(MalformedResultError, match="0 completions came back, 1 were asked for"):
        check_result(REQUEST, result([5], [-0.1], count=0))


def test_a_completion_without_tokens_is_an_error():
    with pytest.raises(MalformedResultError, match="holds no token"):
        check_result(REQUEST, result([], []))


@pytest.mark.parametrize(
    "bad", [{"max_tokens": 0}, {"temperature": -1}, {"top_p": 0.0}, {"top_p": 1.5}, {"top_k": -1}, {"n": 0}]
)
def test_sampling_parameters_out_of_range_are_named(bad):
    with pytest.raises(InvalidRequestError, match=next(iter(bad))):
        SamplingParams(**bad)
