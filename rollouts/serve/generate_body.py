"""The body of `/inference/v1/generate`, and the sampling options in it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from math import isfinite
from typing import Any, Literal, Self

from pydantic import BaseModel, Field, NonNegativeInt, PositiveInt, model_validator

from rollouts.engines.protocol import SamplingParams
from rollouts.numbers import finite_number
from rollouts.serve.errors import RequestError
from rollouts.serve.served_model import ServedModel


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

    request_id: str | None = None
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
_NO_ALTERNATIVES = "must be 0 or 1: this server reports no tokens beside the sampled one"


def sampling_of(body: GenerateBody, model: ServedModel, *, prompt_tokens: int) -> SamplingParams:
    """The sampling options of a request, stop tokens of the model included; `prompt_tokens` with those of images.

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
        "logprobs": (0 <= _value(given, "logprobs", 0) <= 1, f"logprobs {_NO_ALTERNATIVES}"),
        "prompt_logprobs": (0 <= _value(given, "prompt_logprobs", 0) <= 1, f"prompt_logprobs {_NO_ALTERNATIVES}"),
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
    return RequestError(400, message, "BadRequestError", name)
