"""`ScriptedEngine` returns the completions of its script as a model would."""

import asyncio

import pytest

from rollouts import Completion, FinishReason, GenerateRequest, GenerateResult, SamplingParams
from rollouts.engines.result_checks import check_result
from rollouts.errors import EngineClosedError, EngineError
from rollouts.testing import ScriptedCompletion, ScriptedEngine


def completions_of(engine, **sampling):
    request = GenerateRequest([1, 2, 3], SamplingParams(**sampling))
    result = asyncio.run(engine.generate(request))
    check_result(request, result)
    return result.completions


def test_control_tokens_of_a_text_are_control_tokens_and_a_stop_token_is_not_doubled(renderer):
    (completion,) = completions_of(ScriptedEngine(["<think>\nx</think>y<|im_end|>"], renderer=renderer))
    ids = completion.token_ids.tolist()
    assert ids[0] == renderer.tokenizer.control_id("<think>")
    assert ids.count(renderer.get_stop_token_ids()[0]) == 1


def test_log_probabilities_and_finish_reasons_can_be_given(renderer):
    engine = ScriptedEngine(
        [
            ScriptedCompletion([5, 6], [-0.25, -1.5], FinishReason.STOP),
            ScriptedCompletion("fi", -2.0, FinishReason.LENGTH),
            ScriptedCompletion("a long answer", [-0.1] * 14),
        ],
        renderer=renderer,
    )
    (first,) = completions_of(engine)
    (second,) = completions_of(engine)
    assert (first.logprobs.tolist(), first.finish_reason) == ([-0.25, -1.5], FinishReason.STOP)
    assert (second.logprobs.tolist(), len(second.token_ids)) == ([-2.0, -2.0], 2), "cut off: no stop token"
    (third,) = completions_of(engine, max_tokens=3)
    assert (len(third.token_ids), len(third.logprobs), third.finish_reason) == (3, 3, FinishReason.LENGTH)


def test_a_result_is_returned_unchanged_even_if_it_is_invalid():
    wrong = GenerateResult("r", [Completion(0, None, None, "weird")])
    engine = ScriptedEngine([wrong])
    assert asyncio.run(engine.generate(GenerateRequest([1], SamplingParams()))) is wrong


def test_the_error_of_a_script_that_is_too_short_names_the_request():
    engine = ScriptedEngine([[1]])
    completions_of(engine)
    with pytest.raises(EngineError, match="no entry left for request 2"):
        completions_of(engine)


def test_requests_are_kept_and_a_closed_engine_refuses():
    engine = ScriptedEngine([[1], [2]])
    completions_of(engine, seed=5)
    assert [request.sampling.seed for request in engine.requests] == [5]
    asyncio.run(engine.close())
    assert engine.closed
    with pytest.raises(EngineClosedError):
        completions_of(engine)


def test_a_text_in_place_of_a_script_or_without_a_renderer_is_refused():
    with pytest.raises(EngineError, match=r"pass \[text\]"):
        ScriptedEngine("five")
    with pytest.raises(EngineError, match="pass renderer="):
        completions_of(ScriptedEngine(["five"]))
