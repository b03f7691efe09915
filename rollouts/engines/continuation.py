"""Continuing a completion that a pause or an update of the weights has cut off."""

from collections.abc import Awaitable, Callable
from dataclasses import replace

import numpy as np

from rollouts.engines.protocol import (
    Completion,
    FinishReason,
    GenerateRequest,
    TokenListener,
    TopLogprobs,
    WeightSpan,
)


def continuation(
    request: GenerateRequest, partial: Completion, round_number: int, max_model_len: int
) -> GenerateRequest | None:
    """The request that samples the rest of a completion; None where there is no room for another token.

    The request is for the whole completion again where `restarts_from_prompt`.
    """
    done = 0 if restarts_from_prompt(request) else len(partial.token_ids)
    length = len(request.prompt_ids)
    left = min(request.sampling.max_tokens - done, max_model_len - length - done)
    if left < 1:
        return None
    extra = dict(request.sampling.extra)
    if "min_tokens" in extra:
        extra["min_tokens"] = min(left, max(0, extra["min_tokens"] - done))
    seed = request.sampling.seed
    sampling = replace(
        request.sampling,
        n=1,
        max_tokens=left,
        extra=extra,
        # A different seed, because the same one would draw the same numbers again. vLLM seeds sample i of n
        # with seed + i.
        seed=None if seed is None else (seed + partial.index + (round_number << 32)) % 2**63,
    )
    return replace(
        request,
        prompt_ids=[*request.prompt_ids, *partial.token_ids[:done].tolist()],
        sampling=sampling,
        sampled=[*request.sampled, (length, length + done)] if done else request.sampled,
        request_id=f"{request.request_id}.{partial.index}.{round_number}",
        prompt_logprobs=request.prompt_logprobs and not done,
        prompt_top_logprobs=0 if done else request.prompt_top_logprobs,
    )


def single_samples(request: GenerateRequest) -> list[GenerateRequest]:
    """A request for each of n samples, with the seed seed + i; the first one scores the prompt."""
    return [
        replace(
            request,
            sampling=replace(request.sampling, n=1, seed=_sample_seed(request.sampling.seed, index)),
            request_id=f"{request.request_id}.{index}",
            prompt_logprobs=request.prompt_logprobs and not index,
            prompt_top_logprobs=0 if index else request.prompt_top_logprobs,
        )
        for index in range(request.sampling.n)
    ]


def _sample_seed(seed: int | None, index: int) -> int | None:
    if seed is None:
        return None
    # -1 means no seed to vLLM, and 2**63 does not fit into its type.
    return seed + index if seed + index != -1 and seed + index < 2**63 else (seed + index) % 2**63


def restarts_from_prompt(request: GenerateRequest) -> bool:
    """Whether a completion of this request that is cut off is sampled again from its beginning."""
    # Parameters that depend on the tokens generated so far. In a continuation those tokens are part of the
    # prompt: a grammar, for example, would start again in the middle of the completion.
    return any(
        request.sampling.extra.get(name)
        for name in ("frequency_penalty", "presence_penalty", "repetition_detection", "structured_outputs")
    )


async def completed(
    request: GenerateRequest,
    partial: Completion,
    context_length: Callable[[], Awaitable[int | None]],
    send: Callable[[GenerateRequest], Awaitable[Completion]],
) -> Completion:
    """A completion with what is sampled after each time that it is cut off.

    `context_length` is awaited before each continuation; None ends the completion with its tokens so far.
    `send` samples the one completion of a request. Raises what they raise.
    """
    rounds = 0
    while partial.finish_reason is FinishReason.ABORT and (max_model_len := await context_length()) is not None:
        rounds += 1
        rest_request = continuation(request, partial, rounds, max_model_len)
        if rest_request is None:
            return replace(partial, finish_reason=FinishReason.LENGTH)  # cut off at its last possible token
        rest = await send(rest_request)
        is_nothing = not len(rest.token_ids) and rest.finish_reason is FinishReason.ABORT
        restarts = restarts_from_prompt(request) and not is_nothing
        partial = replace(rest, index=partial.index) if restarts else join_completions(partial, rest)
    return partial


def join_completions(partial: Completion, rest: Completion) -> Completion:
    """One completion of both parts: ids, log-probs, likeliest tokens, weight versions, experts and masks."""
    done = len(partial.token_ids)
    if not done:  # nothing was sampled, so no mask and no expert is missing
        return replace(rest, index=partial.index)
    if not len(rest.token_ids) and rest.finish_reason is FinishReason.ABORT:
        return partial
    return replace(
        rest,
        index=partial.index,
        token_ids=np.concatenate([partial.token_ids, rest.token_ids]),
        logprobs=np.concatenate([partial.logprobs, rest.logprobs]),
        weight_spans=join_spans(partial.weight_spans, rest.weight_spans, done),
        # Both arrays begin at the prompt; for the first tokens, the earlier array is from the time of their
        # sampling.
        routed_experts=rest.routed_experts
        if partial.routed_experts is None or rest.routed_experts is None
        else np.concatenate([partial.routed_experts, rest.routed_experts[len(partial.routed_experts) :]]),
        sampling_masks=None
        if partial.sampling_masks is None or rest.sampling_masks is None
        else partial.sampling_masks + rest.sampling_masks,
        top_logprobs=None
        if partial.top_logprobs is None or rest.top_logprobs is None
        else TopLogprobs.joined([partial.top_logprobs, rest.top_logprobs]),
    )


def join_spans(first: tuple[WeightSpan, ...], then: tuple[WeightSpan, ...], by: int) -> tuple[WeightSpan, ...]:
    """The spans of both parts of a completion, the first of which has `by` tokens."""
    spans = list(first)
    for span in then:
        moved = WeightSpan(span.version, span.start + by, span.end + by)
        if spans and spans[-1].version == moved.version:
            moved = WeightSpan(moved.version, spans.pop().start, moved.end)
        spans.append(moved)
    return tuple(spans)


def with_index(listen: TokenListener | None, index: int) -> TokenListener | None:
    """A listener for a continuation, whose only completion is completion `index` of the request."""
    return None if listen is None else lambda delta: listen(replace(delta, index=index))
