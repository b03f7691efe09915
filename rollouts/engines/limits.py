"""Bounds for one request of an engine."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from rollouts.engines.protocol import GenerateRequest
from rollouts.error_texts import short_repr
from rollouts.errors import InvalidRequestError, OverlongPromptError
from rollouts.numbers import whole_number


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """Upper bounds for `SamplingParams.n` and `max_tokens`, checked before anything is reserved for a request."""

    n: int = 1024
    max_tokens: int = 2**20

    def __post_init__(self) -> None:
        for name in ("n", "max_tokens"):
            number = whole_number(value := getattr(self, name))
            if number is None or number < 1:
                rule = "pass an integer of at least 1: a smaller limit admits no request"
                raise InvalidRequestError("limits", f"EngineLimits.{name} is {short_repr(value)}; {rule}")

    def check(self, request: GenerateRequest) -> None:
        """Raise `InvalidRequestError`, naming the field, for a request that exceeds a bound."""
        for name in ("n", "max_tokens"):
            value, limit = getattr(request.sampling, name), getattr(self, name)
            if value > limit:
                raise InvalidRequestError(
                    request.request_id,
                    f"{name} is {short_repr(value)} and this engine takes at most {limit}. Use a smaller one, or give "
                    f"the engine other EngineLimits({name}=...)",
                )


def check_prompt(request: GenerateRequest, max_length: int, vocab_size: int | None) -> np.ndarray:
    """The prompt as int64 (tokens,). `max_length` bounds prompt and completion; `vocab_size` None: any id from 0.

    Raises `OverlongPromptError` and `InvalidRequestError`.
    """
    name, prompt = request.request_id, request.prompt_ids
    if not len(prompt):
        raise InvalidRequestError(name, "the prompt is empty")
    if len(prompt) >= max_length:
        raise OverlongPromptError(name, len(prompt), max_length)
    if isinstance(prompt, np.ndarray):
        ids = prompt.astype(np.int64, copy=False)
    else:
        ids = np.frombuffer(array("q", prompt), dtype=np.int64)  # twice as fast as numpy with a list
    limit = 2**63 - 1 if vocab_size is None else vocab_size
    if ids.min() < 0 or ids.max() >= limit:
        position = int(np.argmax((ids < 0) | (ids >= limit)))
        size = "" if vocab_size is None else f" of {vocab_size}"
        raise InvalidRequestError(
            name, f"token {position} of the prompt is {ids[position]}, which is not in the vocabulary{size}"
        )
    return ids
