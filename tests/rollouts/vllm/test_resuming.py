"""Continuing a completion that was cut off: what is asked for, and how the parts become one."""

import numpy as np

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


def test_experts_of_tokens_sampled_before_the_cut_are_those_of_that_time():
    # Prompt of 3: the first part has 3 + 2 - 1 rows, the second is asked for with a prompt of 5 and has 5 + 2 - 1.
    before, after = (np.full((rows, 1, 1), value, np.uint8) for rows, value in ((4, 1), (6, 2)))
    whole = join_completions(cut([7, 8], routed_experts=before), cut([9, 2], routed_experts=after))
    assert whole.routed_experts[:, 0, 0].tolist() == [1, 1, 1, 1, 2, 2]
