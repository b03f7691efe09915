"""Going on with a completion that a pause has cut off, from the tokens that it had."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from rollouts.engines.protocol import Completion, FinishReason, GenerateRequest, WeightSpan

#: Their effect depends on what counts as output, and after a cut the tokens before it count as prompt: a grammar, for
#: one, would begin anew in the middle.
_OF_THE_OUTPUT = ("frequency_penalty", "presence_penalty", "repetition_detection", "structured_outputs")


@dataclass(frozen=True, slots=True)
class ResumePolicy:
    """What becomes of completions that a pause aborts.

    They wait until the server runs again, at most `wait_seconds`, and are continued, each at most `rounds` times.
    """

    rounds: int = 64
    wait_seconds: float = 3600.0
    first_poll_seconds: float = 0.05
    longest_poll_seconds: float = 1.0


def continuation(request: GenerateRequest, cut: Completion, round_: int, limit: int) -> GenerateRequest | None:
    """The request that draws the rest of a completion; None where there is no room for another token.

    `limit` is the model's. Where penalties look at the output alone, the rest cannot be drawn as if nothing had
    happened: then the request is for the whole completion anew, see `restarts`.
    """
    done = 0 if restarts(request) else len(cut.token_ids)
    length = len(request.prompt_ids)
    left = min(request.sampling.max_tokens - done, limit - length - done)
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
        # Another one, for the same would draw the same numbers again; vLLM seeds sample i of n with seed + i.
        seed=None if seed is None else (seed + cut.index + (round_ << 32)) % 2**63,
    )
    return replace(
        request,
        prompt_ids=[*request.prompt_ids, *cut.token_ids[:done].tolist()],
        sampling=sampling,
        sampled=[*request.sampled, (length, length + done)] if done else request.sampled,
        request_id=f"{request.request_id}.{cut.index}.{round_}",
        prompt_logprobs=request.prompt_logprobs and not done,
    )


def restarts(request: GenerateRequest) -> bool:
    """Whether a completion of this request, once cut off, is drawn anew as a whole."""
    return any(request.sampling.extra.get(name) for name in _OF_THE_OUTPUT)


def joined(cut: Completion, rest: Completion) -> Completion:
    """One completion of both, as if it had been drawn in one go: ids, log-probs, versions, experts and masks."""
    done = len(cut.token_ids)
    if not done:  # cut before its first token: there is nothing to join, and no mask or expert that could be missing
        return replace(rest, index=cut.index)
    if not len(rest.token_ids) and rest.finish_reason is FinishReason.ABORT:
        return cut
    return replace(
        rest,
        index=cut.index,
        token_ids=np.concatenate([cut.token_ids, rest.token_ids]),
        logprobs=np.concatenate([cut.logprobs, rest.logprobs]),
        weight_spans=_joined_spans(cut.weight_spans, rest.weight_spans, done),
        # The later array begins at the prompt too; what the earlier one has was computed when it was sampled.
        routed_experts=rest.routed_experts
        if cut.routed_experts is None or rest.routed_experts is None
        else np.concatenate([cut.routed_experts, rest.routed_experts[len(cut.routed_experts) :]]),
        sampling_masks=None
        if cut.sampling_masks is None or rest.sampling_masks is None
        else cut.sampling_masks + rest.sampling_masks,
    )


def out_of_room(cut: Completion) -> Completion:
    """A completion whose cut fell on its last possible token."""
    return replace(cut, finish_reason=FinishReason.LENGTH)


def _joined_spans(first: tuple[WeightSpan, ...], then: tuple[WeightSpan, ...], by: int) -> tuple[WeightSpan, ...]:
    spans = list(first)
    for span in then:
        moved = WeightSpan(span.version, span.start + by, span.end + by)
        if spans and spans[-1].version == moved.version:
            moved = WeightSpan(moved.version, spans.pop().start, moved.end)
        spans.append(moved)
    return tuple(spans)
