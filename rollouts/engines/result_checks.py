"""Checks of what an engine returns: completions, their log-probabilities, likeliest tokens and weight versions."""

from typing import Final

import numpy as np

from rollouts.engines.protocol import (
    NO_TOKEN,
    Completion,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    TopLogprobs,
    WeightSpan,
)
from rollouts.engines.token_checks import logprobs_error, token_ids_error, type_name
from rollouts.errors import MalformedResultError, MissingLogProbsError, short_repr
from transport.errors import quoted

_INTEGERS: Final = (int, np.integer)
_LISTS: Final = (list, tuple)


def check_result(request: GenerateRequest, result: GenerateResult, *, vocab_size: int | None = None) -> None:
    """Raise unless the result holds n completions with valid ids, each with one valid log-probability.

    The result has the id of the request, and no completion has more than `max_tokens` tokens. Token ids are
    integers from 0, below `vocab_size` where it is given. Log-probabilities are finite and at most 0 (but for
    rounding); values at or below -9999 are refused too: some servers write that number for a missing one.
    Those of a prompt, where the request asks for them, are NaN for its first token and may be anything on the
    tokens of media. Where it asks for the likeliest tokens, each place has as many of them, in descending
    order. Raises `MalformedResultError`, `MissingLogProbsError`.
    """
    name = request.request_id
    if not isinstance(result, GenerateResult):
        raise MalformedResultError(name, f"the engine returned {short_repr(result)}, not a GenerateResult")
    if result.request_id != name:
        raise MalformedResultError(name, f"the engine returned the result of request {short_repr(result.request_id)}")
    if len(result.completions) != request.sampling.n:
        raise MalformedResultError(
            name, f"the engine returned {len(result.completions)} completions, the request has n={request.sampling.n}"
        )
    for completion in result.completions:
        _check_completion(name, completion, request.sampling.max_tokens, vocab_size)
    if request.prompt_logprobs:
        _check_prompt_logprobs(request, result)
    if request.sampling.top_logprobs or request.prompt_top_logprobs:
        _check_top_logprobs(request, result, vocab_size)
    indices = sorted([completion.index for completion in result.completions])
    if indices != list(range(request.sampling.n)):
        raise MalformedResultError(
            name,
            f"the completions have indices {short_repr(indices)}; they must run from 0 to {request.sampling.n - 1}",
        )


def _check_completion(name: str, completion: Completion, max_tokens: int, vocab_size: int | None) -> None:
    error = token_ids_error(completion.token_ids, vocab_size) or ending_error(completion) or _version_error(completion)
    if error is not None:
        raise MalformedResultError(name, f"{_which(completion)}: {error}")
    count = len(completion.token_ids)
    if count > max_tokens:
        text = f"{_which(completion)} holds {count} tokens; the request has max_tokens={max_tokens}"
        raise MalformedResultError(name, text)
    if (error := logprobs_error(completion.logprobs, count)) is not None:
        raise MissingLogProbsError(name, f"{_which(completion)}: {error}")
    if not count and completion.finish_reason is not FinishReason.ABORT:
        raise MalformedResultError(name, f"{_which(completion)} holds no token")


def _version_error(completion: Completion) -> str | None:
    spans, count = completion.weight_spans, len(completion.token_ids)
    labelled = sum(span.end - span.start for span in spans)
    return f"its weight_spans have a version for {labelled} of {count} tokens" if spans and labelled != count else None


def _check_prompt_logprobs(request: GenerateRequest, result: GenerateResult) -> None:
    name, logprobs, count = request.request_id, result.prompt_logprobs, len(request.prompt_ids)
    if logprobs is None:
        if _is_aborted(result):
            return
        raise MissingLogProbsError(name, "the engine returned no log-probabilities of the prompt; use one that does")
    if isinstance(logprobs, np.ndarray) and logprobs.shape == (count,) and logprobs.dtype.kind == "f":
        if count and not np.isnan(logprobs[0]):
            text = f"prompt: the first token has log-probability {logprobs[0]}, and nothing predicts it; it must be NaN"
            raise MalformedResultError(name, text)
        logprobs = logprobs.copy()
        logprobs[:1] = 0
        for _, placeholder in request.media:  # some models never predict such a token
            logprobs[placeholder.offset : placeholder.end] = 0
    if (error := logprobs_error(logprobs, count)) is not None:
        raise MissingLogProbsError(name, f"prompt: {error}")


def _is_aborted(result: GenerateResult) -> bool:
    return all(completion.finish_reason is FinishReason.ABORT for completion in result.completions)


def _check_top_logprobs(request: GenerateRequest, result: GenerateResult, vocab_size: int | None) -> None:
    for completion in result.completions:
        count = len(completion.token_ids)
        # A completion that was aborted before its first token may have none.
        if request.sampling.top_logprobs and (count or completion.top_logprobs is not None):
            error = top_logprobs_error(completion.top_logprobs, count, request.sampling.top_logprobs, vocab_size)
            if error is not None:
                raise MissingLogProbsError(request.request_id, f"{_which(completion)}: {error}")
    top = result.prompt_top_logprobs
    if request.prompt_top_logprobs and not (top is None and _is_aborted(result)):
        error = top_logprobs_error(top, len(request.prompt_ids), request.prompt_top_logprobs, vocab_size, unpredicted=1)
        if error is not None:
            raise MissingLogProbsError(request.request_id, f"prompt: {error}")


def top_logprobs_error(
    top: object, count: int, k: int | None, vocab_size: int | None = None, *, unpredicted: int = 0
) -> str | None:
    """The likeliest tokens in the places of `count` tokens are a `TopLogprobs` of valid rows, the likeliest first.

    `k`: how many there are in each place; None: any number. The first `unpredicted` rows are without a
    prediction.
    """
    if not isinstance(top, TopLogprobs):
        wanted = "the likeliest" if k is None else f"the {k} likeliest"
        given = "none" if top is None else f"a {type(top).__name__}"
        return f"{wanted} tokens in the place of each are requested, and {given} reported; use an engine that has them"
    ids, logprobs = top
    for what, rows, kinds in (("ids", ids, "iu"), ("log-probabilities", logprobs, "f")):
        if not isinstance(rows, np.ndarray) or rows.dtype.kind not in kinds or rows.ndim != 2:
            described = f"{rows.dtype} {rows.shape}" if isinstance(rows, np.ndarray) else type_name(rows)
            return f"the {what} of the likeliest tokens are {described}, not numbers (tokens, k)"
    columns = ids.shape[1] if k is None else k
    if ids.shape != logprobs.shape or ids.shape != (count, columns):
        return (
            f"the likeliest tokens are ids {ids.shape} and log-probabilities {logprobs.shape}; {count} "
            f"tokens with {columns} each need ({count}, {columns}) of both"
        )
    first, ids, logprobs = ids[:unpredicted], ids[unpredicted:], logprobs[unpredicted:]
    if (first != NO_TOKEN).any():
        return f"the likeliest tokens in the place of the first one are {first[0].tolist()}; nothing predicts it"
    error = token_ids_error(ids.ravel(), vocab_size) or logprobs_error(logprobs.ravel(), ids.size)
    if error is not None:
        return f"of {columns} likeliest tokens a place: {error}"
    if (wrong := (logprobs[:, 1:] > logprobs[:, :-1]).any(axis=1)).any():
        return f"the likeliest tokens in place {int(wrong.argmax()) + unpredicted} are not in descending order"
    return None


def _which(completion: Completion) -> str:
    return f"completion {quoted(completion.index)}"


def ending_error(completion: Completion) -> str | None:
    """The text of an error in `finish_reason`, `stop_token_id` or `weight_spans`; None where they are valid."""
    if not isinstance(completion.finish_reason, FinishReason):
        reasons = ", ".join(f"FinishReason.{reason.name}" for reason in FinishReason)
        return f"finish_reason is {short_repr(completion.finish_reason)}; pass one of {reasons}"
    if completion.stop_token_id is not None and not isinstance(completion.stop_token_id, _INTEGERS):
        return f"stop_token_id is {short_repr(completion.stop_token_id)}, not a token id or None"
    return weight_span_error(completion.weight_spans, len(completion.token_ids))


def weight_span_error(spans: object, count: int) -> str | None:
    """Check that spans are ascending ranges within `count` sampled tokens; a sentence about the first wrong one."""
    if not isinstance(spans, _LISTS):
        return "weight_spans are not WeightSpans; pass a tuple of them"
    previous_end: int | np.integer = 0
    for span in spans:
        if not isinstance(span, WeightSpan):
            return "weight_spans are not WeightSpans; pass a tuple of them"
        if not isinstance(span.version, str):
            return f"a weight span has the version {quoted(span.version)}, not a text"
        if not isinstance(span.start, _INTEGERS) or not isinstance(span.end, _INTEGERS):
            return f"weight span {quoted(span.start)}:{quoted(span.end)} has no integers for its range"
        if not previous_end <= span.start <= span.end <= count:
            return (
                f"weight span {quoted(span.start)}:{quoted(span.end)} does not lie within "
                f"{previous_end}:{count}, the sampled tokens without a version"
            )
        previous_end = span.end
    return None
