"""The body of `/inference/v1/generate`, and the sampling options in it."""

from __future__ import annotations

import asyncio
import base64
import io
import math
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from itertools import pairwise
from math import isfinite
from typing import Any, Literal, Self

import numpy as np
from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, model_validator

from renderers import MultiModalData
from rollouts.engines.protocol import (
    Completion,
    FinishReason,
    GenerateRequest,
    GenerateResult,
    SamplingParams,
    StreamingEngine,
    TokenDelta,
    TopLogprobs,
)
from rollouts.serve.errors import RequestError
from rollouts.serve.served_model import ServedModel
from rollouts.values import finite_number


class PlaceholderBody(BaseModel):
    offset: NonNegativeInt
    length: PositiveInt


class FeaturesBody(BaseModel):
    """By modality, parallel lists: hashes, placeholders, and base64 of tensors or null for those that are cached."""

    mm_hashes: dict[str, list[str]]
    mm_placeholders: dict[str, list[PlaceholderBody]]
    kwargs_data: dict[str, list[str | None]] | None = None

    @model_validator(mode="after")
    def _check_lists(self) -> Self:
        names, ranges, data = self.mm_hashes, self.mm_placeholders, self.kwargs_data
        if names.keys() != ranges.keys():
            raise ValueError("mm_hashes and mm_placeholders must use the same modalities")
        if data is not None and data.keys() != names.keys():
            raise ValueError("kwargs_data must use the same modalities as mm_hashes")
        for modality in names:
            if len(names[modality]) != len(ranges[modality]):
                raise ValueError(f"{modality} mm_hashes and mm_placeholders must have the same length")
            if data is not None and len(data[modality]) != len(names[modality]):
                raise ValueError(f"{modality} kwargs_data and mm_hashes must have the same length")
        spans = sorted((each.offset, each.offset + each.length) for listed in ranges.values() for each in listed)
        if any(start < end for (_, end), (start, _) in pairwise(spans)):
            raise ValueError("mm_placeholders must be globally non-overlapping and sorted")
        return self


class ContentPartBody(BaseModel):
    """A source file: a data URL, or null for one that the server has under its `uuid`."""

    type: str
    url: str | None = None
    uuid: str | None = None


class GenerateBody(BaseModel):
    """Token ids and sampling options. Members that are not named here are ignored, as in vLLM."""

    # A bound on the length also refuses half of a surrogate pair, which no response could hold.
    request_id: str | None = Field(default=None, max_length=4096)
    token_ids: list[NonNegativeInt] = Field(min_length=1)
    sampling_params: dict[str, Any]
    features: FeaturesBody | None = None
    content_parts: list[ContentPartBody] | None = None
    model: str | None = None
    return_token_ids: bool | None = None
    output_mode: Literal["tokens", "text"] = "tokens"
    stream: bool | None = False
    stream_options: dict[str, Any] | None = None
    cache_salt: str | None = Field(default=None, min_length=1, max_length=1024)
    priority: int = Field(default=0, ge=-(2**63), lt=2**63)

    @model_validator(mode="after")
    def _check_media(self) -> Self:
        if self.content_parts and self.features:
            raise ValueError("content_parts and features are mutually exclusive")
        for ranges in () if self.features is None else self.features.mm_placeholders.values():
            if any(each.offset + each.length > len(self.token_ids) for each in ranges):
                raise ValueError("mm_placeholders must remain within the token_ids sequence")
        return self


# Sampling options.

#: Options of `SamplingParams`, and those that this module reads itself.
_READ = frozenset({"n", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop_token_ids"}) | frozenset(
    {"ignore_eos", "logprobs", "prompt_logprobs", "stream_interval"}
)
#: Options that change nothing about token ids and their log-probabilities.
_WITHOUT_EFFECT = frozenset(
    {
        "detokenize",
        "flat_logprobs",
        "include_stop_str_in_output",
        "output_kind",
        "skip_clone",
        "skip_reading_prefix_cache",
        "skip_special_tokens",
        "spaces_between_special_tokens",
    }
)
#: Other options with their value of no effect; with another one they are passed to the engine, which may refuse them.
_PASSED: Mapping[str, Any] = {
    "allowed_token_ids": None,
    "bad_words": None,
    "extra_args": None,
    "frequency_penalty": 0,
    "logit_bias": None,
    "min_p": 0,
    "min_tokens": 0,
    "presence_penalty": 0,
    "repetition_detection": None,
    "repetition_penalty": 1,
    "stop": None,
    "structured_outputs": None,
    "thinking_token_budget": None,
    "watermarking": None,
}

_MAX_TEMPERATURE = 2.0
_MAX_COMPLETIONS = 16384  # vLLM's default; engines may take fewer
_MAX_LIKELIEST = 20  # vLLM's default of --max-logprobs


def sampling_of(body: GenerateBody, model: ServedModel, *, prompt_tokens: int) -> SamplingParams:
    """The sampling options of a request, stop tokens of the model included; `prompt_tokens` with those of media.

    Raises `RequestError` (400).
    """
    given = body.sampling_params
    if unknown := sorted(given.keys() - _READ - _WITHOUT_EFFECT - _PASSED.keys()):
        raise _refusal(unknown[0], f"{unknown[0]!r} is no sampling option of this server")
    _check_values(given)
    _check_stops(given.get("stop_token_ids") or (), model.vocab_size)
    room = model.max_model_len - prompt_tokens
    stop_ids = [*(given.get("stop_token_ids") or ()), *model_stops(given, model)]
    seed = given.get("seed")
    top_k = given.get("top_k")
    return SamplingParams(
        # Without `max_tokens`, all that is left of the context; with a larger one, the engine ends there.
        max_tokens=max(1, room if given.get("max_tokens") is None else given["max_tokens"]),
        temperature=_value(given, "temperature", 1.0),
        top_p=_value(given, "top_p", 1.0),
        top_k=0 if top_k in (None, -1) else top_k,
        seed=None if seed == -1 else seed,
        n=_value(given, "n", 1),
        stop_token_ids=tuple(dict.fromkeys(stop_ids)),
        extra={
            name: value
            for name, value in given.items()
            if name in _PASSED and value != _PASSED[name] and value not in (None, [], "", {})
        },
        top_logprobs=_value(given, "logprobs", 0),
    )


def model_stops(sampling: Mapping[str, Any], model: ServedModel) -> tuple[int, ...]:
    """The stop tokens of the model that apply: none where the request ignores them."""
    if sampling.get("ignore_eos"):
        return ()
    return (*(() if model.eos_id is None else (model.eos_id,)), *model.more_stop_ids)


def _value(given: Mapping[str, Any], name: str, default: Any) -> Any:
    value = given.get(name)
    return default if value is None else value


def _check_values(given: Mapping[str, Any]) -> None:
    """Raise `RequestError` for a value that vLLM refuses, or that this server cannot honour."""
    for name in ("n", "max_tokens", "top_k", "seed", "logprobs", "prompt_logprobs"):
        value = given.get(name)
        if value is not None and (type(value) is not int or not -(2**63) <= value < 2**63):
            raise _refusal(name, f"{name} must be an integer of 64 bits, got {value!r:.100}.")
    for name in ("temperature", "top_p"):
        value = given.get(name)
        if value is not None and (isinstance(value, bool) or finite_number(value) is None or not isfinite(value)):
            raise _refusal(name, f"{name} must be a finite number, got {value!r:.100}.")
    temperature = _value(given, "temperature", 1.0)
    rules = {
        "n": (1 <= _value(given, "n", 1) <= _MAX_COMPLETIONS, f"n must be between 1 and {_MAX_COMPLETIONS}"),
        "max_tokens": (_value(given, "max_tokens", 1) >= 1, "max_tokens must be at least 1"),
        "temperature": (
            0 <= temperature <= _MAX_TEMPERATURE,
            f"temperature must be between 0 and {_MAX_TEMPERATURE:g}",
        ),
        "top_p": (0 < _value(given, "top_p", 1.0) <= 1, "top_p must be in (0, 1]"),
        "top_k": (_value(given, "top_k", 0) >= -1, "top_k must be 0 or -1 (disable), or at least 1"),
        **{
            name: (0 <= _value(given, name, 0) <= _MAX_LIKELIEST, f"{name} must be between 0 and {_MAX_LIKELIEST}")
            for name in ("logprobs", "prompt_logprobs")
        },
    }
    for name, (holds, rule) in rules.items():
        if not holds:
            raise _refusal(name, f"{rule}, got {given[name]!r:.100}.")
    if temperature == 0 and _value(given, "n", 1) > 1:
        raise _refusal("n", f"n must be 1 when using greedy sampling, got {given['n']}.")
    stop_ids = given.get("stop_token_ids")
    if stop_ids is not None and not (isinstance(stop_ids, list) and all(type(each) is int for each in stop_ids)):
        raise _refusal("stop_token_ids", f"stop_token_ids must be a list of integers, got {stop_ids!r:.100}.")


def _check_stops(stop_ids: Sequence[int], vocab_size: int | None) -> None:
    if wrong := [each for each in stop_ids if each < 0 or (vocab_size is not None and each >= vocab_size)]:
        message = f"token_id(s) {wrong[:10]} in stop_token_ids are out of vocabulary ({vocab_size} ids)"
        raise _refusal("stop_token_ids", message)


def _refusal(name: str, message: str) -> RequestError:
    return RequestError(400, message, name)


#: What stands for a log-probability that JSON cannot represent.
_NO_LOGPROB = -9999.0


def whole_response(
    result: GenerateResult,
    prompt_ids: Sequence[int],
    *,
    model: str,
    eos_id: int | None,
    expanded: MultiModalData | None,
    with_logprobs: bool,
    returns_prompt: bool,
) -> dict[str, Any]:
    """The response with all completions. `eos_id` is the stop token that is not named as the stop reason."""
    return {
        "request_id": result.request_id,
        "model": model,
        "created": int(time.time()),
        "usage": usage(len(prompt_ids), sum(len(each.token_ids) for each in result.completions)),
        "prompt_logprobs": prompt_logprobs(result, prompt_ids),
        "prompt_token_id_logprobs": None,
        **prompt_fields(prompt_ids, expanded, returns_prompt),
        "metrics": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "output_mode": "tokens",
        "choices": [choice(each, 0, eos_id=eos_id, with_logprobs=with_logprobs) for each in result.completions],
    }


def prompt_fields(prompt_ids: Sequence[int], expanded: MultiModalData | None, returned: bool) -> dict[str, Any]:
    """The prompt that was run, and the places of its media, where the request asks for them."""
    if not returned:
        return {"prompt_token_ids": None, "mm_placeholders": None}
    return {"prompt_token_ids": list(prompt_ids), "mm_placeholders": None if expanded is None else places(expanded)}


def places(media: MultiModalData) -> dict[str, list[dict[str, int]]]:
    return {
        modality: [{"offset": each.offset, "length": each.length} for each in ranges]
        for modality, ranges in media.mm_placeholders.items()
    }


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def choice(completion: Completion, start: int, *, eos_id: int | None, with_logprobs: bool) -> dict[str, Any]:
    """A completion from token `start` to its end."""
    stop = completion.stop_token_id
    experts = completion.routed_experts
    masks = completion.sampling_masks
    top = completion.top_logprobs
    rest = TokenDelta(
        completion.index,
        completion.token_ids[start:],
        completion.logprobs[start:],
        None if top is None else top.rows(slice(start, None)),
    )
    return {
        **delta(rest, with_logprobs=with_logprobs),
        "finish_reason": str(completion.finish_reason),
        "stop_reason": stop if completion.finish_reason is FinishReason.STOP and stop != eos_id else None,
        "routed_experts": None if experts is None else npy(experts),
        "sampling_mask": None if masks is None else [mask.tolist() for mask in masks[start:]],
        "weight_versions": [
            {"version": span.version, "start": span.start, "end": span.end} for span in completion.weight_spans
        ],
    }


def delta(new: TokenDelta, *, with_logprobs: bool) -> dict[str, Any]:
    """New tokens of a completion that has not ended."""
    return {
        "index": new.index,
        "finish_reason": None,
        "stop_reason": None,
        "token_ids": new.token_ids.tolist(),
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": None,
        "logprobs": {"content": _content(new)} if with_logprobs else None,
    }


def npy(array: np.ndarray) -> str:
    """The base64 of a .npy file."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode()


def prompt_logprobs(result: GenerateResult, prompt_ids: Sequence[int]) -> list[dict[str, Any] | None] | None:
    """For each token of the prompt log-probabilities by id, its own first, null for the first token."""
    values, top = result.prompt_logprobs, result.prompt_top_logprobs
    if values is None:
        return None
    rest = None if top is None else top.rows(slice(1, None))
    entries = (
        {str(token): {"logprob": value, "rank": rank, "decoded_token": None} for token, (value, rank) in row.items()}
        for row in _alternatives(prompt_ids[1:], values[1:], rest)
    )
    return [None, *entries]


def _content(new: TokenDelta) -> list[dict[str, Any]]:
    """Entries with the candidates of each token, the sampled one first, as in vLLM 0.33."""
    content = []
    for row in _alternatives(new.token_ids.tolist(), new.logprobs, new.top_logprobs):
        entries = [{"token_id": token, "logprob": value, "rank": rank} for token, (value, rank) in row.items()]
        content.append({**entries[0], "top_logprobs": entries})
    return content


def _alternatives(
    token_ids: Sequence[int], logprobs: np.ndarray, top: TopLogprobs | None
) -> Iterator[dict[int, tuple[float, int | None]]]:
    """For each token log-probability and rank by id, its own first. Its rank is not known outside of the likeliest."""
    none: list[list[Any]] = [[]] * len(token_ids)
    ids, values = (none, none) if top is None else (top.token_ids.tolist(), top.logprobs.tolist())
    for token, value, row_ids, row_values in zip(token_ids, logprobs.tolist(), ids, values, strict=True):
        likeliest = {
            each: (_finite(logprob), rank)
            for rank, (each, logprob) in enumerate(zip(row_ids, row_values, strict=True), 1)
        }
        yield {token: (_finite(value), None), **likeliest}


def _finite(value: float) -> float:
    return max(value, _NO_LOGPROB) if math.isfinite(value) else _NO_LOGPROB


class TokenStream:
    """Runs a request; `deltas` yields its tokens, then `result` returns the whole result.

    Without `cancel`, the request runs to its end.
    """

    def __init__(self, engine: StreamingEngine, request: GenerateRequest) -> None:
        self._queue: asyncio.Queue[TokenDelta | None] = asyncio.Queue()
        self._task = asyncio.ensure_future(engine.generate_streamed(request, self._queue.put_nowait))
        self._task.add_done_callback(lambda _: self._queue.put_nowait(None))

    async def deltas(self, interval: int) -> AsyncIterator[TokenDelta]:
        """The first token of each completion as soon as it is there, then its tokens in chunks of `interval`.

        The last chunk of a completion may be missing: those tokens are in the result alone.
        """
        pending: dict[int, list[TokenDelta]] = {}
        while (delta := await self._queue.get()) is not None:
            is_first = delta.index not in pending
            waiting = pending.setdefault(delta.index, [])
            waiting.append(delta)
            if is_first or sum(len(each.token_ids) for each in waiting) >= interval:
                yield _joined(waiting)
                waiting.clear()

    async def result(self) -> GenerateResult:
        """The result. Raises what the engine raises."""
        return await self._task

    def cancel(self) -> None:
        """End the request if it runs."""
        self._task.cancel()


def _joined(deltas: list[TokenDelta]) -> TokenDelta:
    if len(deltas) == 1:
        return deltas[0]
    tops = [each.top_logprobs for each in deltas if each.top_logprobs is not None]
    return TokenDelta(
        deltas[0].index,
        np.concatenate([each.token_ids for each in deltas]),
        np.concatenate([each.logprobs for each in deltas]),
        TopLogprobs.joined(tops) if tops else None,
    )
