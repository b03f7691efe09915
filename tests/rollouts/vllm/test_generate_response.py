"""Answers of `/inference/v1/generate`: both log-prob shapes, whole and in chunks, and what must not pass."""

import base64
import io
import json
from typing import Any

import numpy as np
import pytest

from rollouts.engines.protocol import FinishReason, WeightSpan
from rollouts.engines.vllm.generate import Generation
from rollouts.errors import MalformedResultError, MissingLogProbsError

IDS, LOGPROBS = [7, 9, 2], [-0.5, -1.25, -3.0]


def integers(ids=IDS, logprobs=LOGPROBS) -> dict[str, Any]:
    """The log-probabilities as vLLM 0.32 writes them."""
    return {
        "content": [
            {"token_id": token, "logprob": value, "rank": 1, "top_logprobs": []}
            for token, value in zip(ids, logprobs, strict=True)
        ]
    }


def chat(ids=IDS, logprobs=LOGPROBS) -> dict[str, Any]:
    """The same as vLLM 0.31 and earlier write them."""
    return {
        "content": [
            {"token": f"token_id:{token}", "logprob": value, "bytes": None, "top_logprobs": []}
            for token, value in zip(ids, logprobs, strict=True)
        ]
    }


def choice(**changes: Any) -> dict[str, Any]:
    return {
        "index": 0,
        "finish_reason": "length",
        "stop_reason": None,
        "token_ids": IDS,
        "logprobs": integers(),
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": [{"version": "v1", "start": 0, "end": 3}],
        **changes,
    }


def whole(*choices: dict[str, Any], **changes: Any) -> bytes:
    return json.dumps({"request_id": "generate-tokens-r", "choices": list(choices), **changes}).encode()


def npy(array: np.ndarray) -> str:
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    return base64.b64encode(file.getvalue()).decode()


def read(*texts: bytes, count: int = 1, prompt: int = 5) -> Any:
    answer = Generation("r", count)
    for text in texts:
        answer.add_response(text)
    return answer.completions(prompt, "unlabelled")


@pytest.mark.parametrize("shape", [integers, chat])
def test_both_shapes_of_log_probabilities_give_the_same_completion(shape):
    (completion,) = read(whole(choice(logprobs=shape())))
    assert completion.token_ids.dtype == np.int32
    assert completion.token_ids.tolist() == IDS
    assert completion.logprobs.dtype == np.float32
    assert completion.logprobs.tolist() == LOGPROBS
    assert completion.finish_reason is FinishReason.LENGTH
    assert completion.weight_spans == (WeightSpan("v1", 0, 3),)


@pytest.mark.parametrize("stop_reason", [None, 2])
def test_the_stop_token_is_the_last_token_whether_the_server_names_it_or_not(stop_reason):
    (completion,) = read(whole(choice(finish_reason="stop", stop_reason=stop_reason)))
    assert completion.stop_token_id == 2


def test_routed_experts_cover_prompt_and_completion_but_for_the_last_token():
    experts = np.arange(7 * 2 * 4, dtype=np.uint8).reshape(7, 2, 4)
    (completion,) = read(whole(choice(routed_experts=npy(experts))))
    assert np.array_equal(completion.routed_experts, experts)


def test_sampling_masks_come_one_a_token():
    (completion,) = read(whole(choice(sampling_mask=[[7, 8], [9], [2, 3, 4]])))
    assert [mask.tolist() for mask in completion.sampling_masks] == [[7, 8], [9], [2, 3, 4]]


@pytest.mark.parametrize(
    ("planted", "error"),
    [
        ({"logprobs": None}, MissingLogProbsError),
        ({"logprobs": integers(IDS[:2], LOGPROBS[:2])}, MissingLogProbsError),
        ({"logprobs": integers(IDS, [-0.5, None, -1.0])}, MissingLogProbsError),
        ({"logprobs": integers([7, 8, 2])}, MalformedResultError),
        ({"logprobs": chat([7, 8, 2])}, MalformedResultError),
        ({"logprobs": {"content": [{"token": " a", "logprob": -1.0}] * 3}}, MalformedResultError),
        ({"finish_reason": None}, MalformedResultError),
        ({"finish_reason": "stop", "stop_reason": 5}, MalformedResultError),
        ({"index": 1}, MalformedResultError),
        ({"token_ids": None}, MalformedResultError),
        ({"token_ids": [7, 9, 2**40], "logprobs": integers([7, 9, 2**40])}, MalformedResultError),
        ({"weight_versions": [{"version": "v1", "start": 0, "end": 2}]}, MalformedResultError),
        ({"weight_versions": [{"version": "v1"}]}, MalformedResultError),
        ({"sampling_mask": [[7]]}, MalformedResultError),
        ({"routed_experts": "no base64!"}, MalformedResultError),
        ({"routed_experts": npy(np.zeros((6, 2, 4), np.uint8))}, MalformedResultError),  # of 7 tokens
        ({"routed_experts": npy(np.array([object()] * 7, dtype=object))}, MalformedResultError),  # never unpickled
    ],
)
def test_a_contradiction_in_an_answer_is_an_error_of_its_kind(planted, error):
    with pytest.raises(error, match="request r"):
        read(whole(choice(**planted)))


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b"null", b'{"choices": 3}', b'{"choices": [1]}', b"\xff\xfe"])
def test_what_is_no_answer_at_all_is_an_error(text):
    with pytest.raises(MalformedResultError, match="request r"):
        read(text)


@pytest.mark.parametrize(
    ("usage", "told"),
    [
        ({"prompt_tokens": 5, "completion_tokens": 2}, "2 .*completion.* 3"),
        ({"prompt_tokens": 4, "completion_tokens": 3}, "4 .*prompt.* 5"),
    ],
)
def test_the_numbers_that_a_server_counts_are_those_of_what_it_ran_and_sent(usage, told):
    right = {"prompt_tokens": 5, "completion_tokens": 3}
    for agreeing in (right, None, {}, {**right, "prompt_tokens": None}):
        read(whole(choice(), usage=agreeing))
    with pytest.raises(MalformedResultError, match=told):
        read(whole(choice(), usage=usage))


def ranked(**ranks):
    return {token[1:]: {"logprob": -float(rank), "rank": rank} for token, rank in ranks.items()}


def test_the_likeliest_tokens_of_a_prompt_are_in_the_order_of_their_ranks_without_the_prompts_own():
    answer = Generation("r", 1)
    answer.add_response(whole(choice(), prompt_logprobs=[None, ranked(_7=12, _9=2, _3=1), ranked(_8=1, _5=2)]))
    top = answer.prompt_top_logprobs(3, 2)
    assert top.token_ids.tolist() == [[-1, -1], [3, 9], [8, 5]]
    assert np.isnan(top.logprobs[0]).all()
    assert top.logprobs[1:].tolist() == [[-1, -2], [-1, -2]]
    assert (top.token_ids.dtype, top.logprobs.dtype) == (np.int32, np.float32)
    assert answer.prompt_top_logprobs(3, 1).token_ids.tolist() == [[-1], [3], [8]]


@pytest.mark.parametrize(
    "entries",
    [None, [None, ranked(_3=1, _4=2)], [None, ranked(_3=1, _4=2), ranked(_3=1)], [None, None, None], [1, 2, 3]],
)
def test_missing_log_probabilities_of_a_prompt_are_an_error(entries):
    answer = Generation("r", 1)
    answer.add_response(whole(choice(), prompt_logprobs=entries))
    with pytest.raises(MissingLogProbsError, match="likeliest"):
        answer.prompt_top_logprobs(3, 2)
    with pytest.raises(MissingLogProbsError):
        answer.prompt_logprobs([5, 3, 8])


def likeliest(shape, *rows):
    """The log-probabilities of `IDS`; a row has (token, log-probability, rank) of each alternative."""
    content = shape()["content"]
    for token, row in zip(content, rows, strict=True):
        token["top_logprobs"] = [
            {"token": f"token_id:{each}", "logprob": value}
            if shape is chat
            else {"token_id": each, "logprob": value, "rank": rank}
            for each, value, rank in row
        ]
    return {"content": content}


# What servers answer where the two likeliest are requested: the sampled token (7, 9, 2) in front or not, beside them.
NEWEST = likeliest(
    integers,
    [(7, -0.5, 1), (4, -2.0, 2)],
    [(9, -1.25, 2), (6, -0.25, 1)],
    [(2, -3.0, 9), (5, -0.5, 1), (8, -1.5, 2)],
)
CUT_AT_THREE = likeliest(
    integers,
    [(7, -0.5, 1), (4, -2.0, 2), (3, -2.5, 3)],
    [(9, -1.25, 2), (6, -0.25, 1), (3, -4.0, 3)],
    [(2, -3.0, 9), (5, -0.5, 1), (8, -1.5, 2)],
)
WITHOUT_RANKS = likeliest(
    chat,
    [(7, -0.5, 0), (4, -2.0, 0), (3, -2.5, 0)],
    [(9, -1.25, 0), (6, -0.25, 0), (3, -4.0, 0)],
    [(2, -3.0, 0), (5, -0.5, 0), (8, -1.5, 0)],
)


@pytest.mark.parametrize("shape", [NEWEST, CUT_AT_THREE, WITHOUT_RANKS])
def test_exactly_the_likeliest_tokens_come_out_of_every_shape_of_a_response(shape):
    answer = Generation("r", 1, top=2)
    (delta,) = answer.add_response(whole(choice(logprobs=shape)))
    (completion,) = answer.completions(5, "unlabelled")
    for top in (delta.top_logprobs, completion.top_logprobs):
        assert top.token_ids.tolist() == [[7, 4], [6, 9], [5, 8]]
        assert top.logprobs.tolist() == [[-0.5, -2.0], [-0.25, -1.25], [-0.5, -1.5]]
        assert (top.token_ids.dtype, top.logprobs.dtype) == (np.int32, np.float32)


CUT_AT_TWO = likeliest(
    integers, [(7, -0.5, 1), (4, -2.0, 2)], [(9, -1.25, 2), (6, -0.25, 1)], [(2, -3.0, 9), (5, -0.5, 1)]
)
TOO_FEW = likeliest(integers, [(7, -0.5, 1)], [(9, -1.25, 2)], [(2, -3.0, 9)])


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (CUT_AT_TWO, "lacks one of the 2 likeliest tokens"),
        (TOO_FEW, "a token has 1 alternatives"),
    ],
)
def test_a_list_in_which_the_sampled_token_has_the_place_of_a_likelier_one_is_an_error(shape, words):
    answer = Generation("r", 1, top=2)
    with pytest.raises(MissingLogProbsError, match=words):
        answer.add_response(whole(choice(logprobs=shape)))
