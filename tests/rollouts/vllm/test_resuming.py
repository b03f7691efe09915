"""Continuing a completion that was cut off: what is asked for, and how the parts become one."""

from __future__ import annotations

import numpy as np
import pytest

from rollouts.engines.continuation import continuation, join_completions
from rollouts.engines.protocol import Completion, FinishReason, GenerateRequest, SamplingParams, WeightSpan


def cut(ids: list[int], *, index: int = 0, spans: tuple[WeightSpan, ...] = (), **more) -> Completion:
    logprobs = np.array([-token / 8 for token in ids], dtype=np.float32)
    return Completion(index, np.array(ids, dtype=np.int32), logprobs, FinishReason.ABORT, None, spans, **more)


def request(**sampling) -> GenerateRequest:
    return GenerateRequest(
        [1, 2, 3], SamplingParams(**{"max_tokens": 10, **sampling}), request_id="r", sampled=[(1, 2)]
    )


def test_the_rest_is_drawn_with_another_seed_than_the_part_before():
    seeds = {
        continuation(request(seed=5), cut([7], index=i), round_, 100).sampling.seed for i in (0, 1) for round_ in (1, 2)
    }
    assert len(seeds) == 4
    assert 5 not in seeds


@pytest.mark.parametrize(("tokens", "limit"), [(10, 100), (5, 8)])
def test_a_cut_on_the_last_possible_token_leaves_nothing_to_ask_for(tokens, limit):
    assert continuation(request(), cut([4] * tokens), 1, limit) is None


def test_experts_of_tokens_sampled_before_the_cut_are_those_of_that_time():
    # Prompt of 3: the first part has 3 + 2 - 1 rows, the second is asked for with a prompt of 5 and has 5 + 2 - 1.
    before, after = (np.full((rows, 1, 1), value, np.uint8) for rows, value in ((4, 1), (6, 2)))
    whole = join_completions(cut([7, 8], routed_experts=before), cut([9, 2], routed_experts=after))
    assert whole.routed_experts[:, 0, 0].tolist() == [1, 1, 1, 1, 2, 2]


def test_a_continuation_keeps_to_what_a_server_takes():
    cut_off = Completion(0, np.arange(10, dtype=np.int32), np.zeros(10, np.float32), FinishReason.ABORT)
    asked = request(max_tokens=100, seed=2**63 - 1, extra={"min_tokens": 100})
    sampling = continuation(asked, cut_off, 1, 53).sampling
    assert sampling.extra["min_tokens"] <= sampling.max_tokens
    assert 0 <= sampling.seed < 2**63


def test_a_cut_without_tokens_costs_no_sampling_mask():
    def piece(count, why):
        masks = tuple(np.array([1], np.int32) for _ in range(count)) or None
        return Completion(0, np.arange(count, dtype=np.int32), np.zeros(count, np.float32), why, sampling_masks=masks)

    empty, full = piece(0, FinishReason.ABORT), piece(3, FinishReason.LENGTH)
    assert len(join_completions(empty, full).sampling_masks) == 3
    assert len(join_completions(piece(3, FinishReason.ABORT), empty).sampling_masks) == 3
