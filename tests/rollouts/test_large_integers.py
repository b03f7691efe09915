"""Integers of more than 4,300 digits, which Python does not convert to text, are typed errors or values like others."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from trajectory_files import file_of, run

from renderers import MediaSource, PlaceholderRange
from rollouts import (
    Completion,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    MediaReference,
    SamplingParams,
    TokenNode,
    Trajectory,
    Turn,
    WeightSpan,
)
from rollouts.engines.request_limits import check_limits
from rollouts.engines.result_checks import check_result
from rollouts.errors import InvalidRequestError, MalformedResultError, TrajectoryError
from transport import DecodeLimits, decode, encode

LARGE = 10**5000
SOURCE = MediaSource.of(b"an image")


def node(parent: int = -1, **fields: Any) -> TokenNode:
    column = np.arange(3, dtype=np.int32)
    return TokenNode(parent, column, np.ones(3, bool), np.zeros(3, np.float32), **fields)


def with_placeholder(*placeholder: Any) -> TokenNode:
    return node(media=(MediaReference("image", "hash", SOURCE, PlaceholderRange(*placeholder)),))


def result_of(**fields: Any) -> None:
    request = GenerateRequest([1], SamplingParams())
    completion = {
        "index": 0,
        "token_ids": np.ones(1, np.int32),
        "logprobs": np.zeros(1, np.float32),
        "finish_reason": FinishReason.STOP,
    }
    check_result(request, GenerateResult(request.request_id, [Completion(**completion | fields)]))


def limited(**sampling: int) -> None:
    check_limits(GenerateRequest([1], SamplingParams(**sampling)))


@pytest.mark.parametrize(
    ("make", "error"),
    [
        (lambda: node(LARGE), TrajectoryError),
        (lambda: node(weight_spans=(WeightSpan("v", 0, LARGE),)), TrajectoryError),
        (lambda: node(weight_spans=(WeightSpan("v", -LARGE, 1),)), TrajectoryError),
        (lambda: with_placeholder(LARGE, 1), TrajectoryError),
        (lambda: with_placeholder(0, LARGE), TrajectoryError),
        (lambda: with_placeholder(0, -LARGE), TrajectoryError),
        (lambda: with_placeholder(0, 2, ((LARGE, 1),)), TrajectoryError),
        (lambda: limited(max_tokens=LARGE), InvalidRequestError),
        (lambda: limited(n=LARGE), InvalidRequestError),
        (lambda: SamplingParams(n=-LARGE), InvalidRequestError),
        (lambda: SamplingParams(temperature=LARGE), InvalidRequestError),
        (lambda: GenerateRequest([LARGE], SamplingParams()), InvalidRequestError),
        (lambda: result_of(index=LARGE), MalformedResultError),
        (lambda: result_of(finish_reason=LARGE), MalformedResultError),
        (lambda: result_of(stop_token_id=[LARGE]), MalformedResultError),
        (lambda: DecodeLimits(max_objects=-LARGE), ValueError),
    ],
)
def test_an_integer_too_large_to_print_is_a_typed_error(make: Callable[[], object], error: type[Exception]) -> None:
    with pytest.raises(error) as caught:
        make()
    assert "Exceeds the limit" not in str(caught.value)
    assert len(str(caught.value)) < 500


def test_an_episode_keeps_such_an_integer_and_the_commands_name_it(tmp_path: Any) -> None:
    message = {"role": "assistant", "content": "a"}
    turn = Turn(0, FinishReason.STOP, message, info={"large": LARGE})
    episode = Trajectory("e", nodes=[node()], turns=[turn])
    assert decode(encode(episode)).turns[0].info == {"large": LARGE}
    path = file_of(tmp_path / "a.mmr", episode)
    for command in (["export", path, "--jsonl", tmp_path / "out"], ["ls", path], ["show", path]):
        result = run(*command)
        assert result.exit_code in (1, 2)
        assert "episode 'e': turn 0: message or info hold an integer of 16610 bits" in result.output
