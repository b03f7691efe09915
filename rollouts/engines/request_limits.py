"""What every engine refuses before it samples: requests beyond its bounds, prompts that do not fit."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

import numpy as np

from rollouts.engines.protocol import GenerateRequest
from rollouts.errors import ContextLengthError, InvalidRequestError, short_repr
from rollouts.values import Bounded, whole_field


@dataclass(frozen=True, slots=True)
class EngineLimits(Bounded):
    """Upper bounds, checked before anything is reserved for a request: for `n`, `max_tokens` and `top_logprobs` of
    `SamplingParams`, the last one also for `GenerateRequest.prompt_top_logprobs`."""

    n: int = whole_field(1024)
    max_tokens: int = whole_field(2**20)
    top_logprobs: int = whole_field(1024, least=0)

    def check(self, request: GenerateRequest) -> None:
        """Raise `InvalidRequestError`, naming the field, for a request that exceeds a bound."""
        sampling = request.sampling
        for name, value, limited in (
            ("n", sampling.n, "n"),
            ("max_tokens", sampling.max_tokens, "max_tokens"),
            ("top_logprobs", sampling.top_logprobs, "top_logprobs"),
            ("prompt_top_logprobs", request.prompt_top_logprobs, "top_logprobs"),
        ):
            if value > (limit := getattr(self, limited)):
                raise InvalidRequestError(
                    request.request_id,
                    f"{name} is {short_repr(value)} and this engine takes at most {limit}. Send a smaller "
                    f"one; in a program engines take request_limits=EngineLimits({limited}=...)",
                )


def check_streamable(request: GenerateRequest) -> None:
    """Raise `InvalidRequestError` for a request that a stream cannot answer."""
    if request.scores_prompt:
        name = "prompt_logprobs" if request.prompt_logprobs else "prompt_top_logprobs"
        raise InvalidRequestError(request.request_id, f"a stream cannot return {name}; use generate")


def check_prompt(request: GenerateRequest, max_length: int, vocab_size: int | None) -> np.ndarray:
    """The prompt as int64 (tokens,). `max_length` bounds prompt and completion; `vocab_size` None: any id from 0.

    Raises `ContextLengthError` and `InvalidRequestError`.
    """
    name, prompt = request.request_id, request.prompt_ids
    if not len(prompt):
        raise InvalidRequestError(name, "the prompt is empty")
    if len(prompt) >= max_length:
        raise ContextLengthError(name, len(prompt), max_length)
    # For a list, twice as fast as numpy.
    ids = prompt if isinstance(prompt, np.ndarray) else np.frombuffer(array("q", prompt), dtype=np.int64)
    limit = 2**63 - 1 if vocab_size is None else vocab_size
    if ids.min() < 0 or ids.max() >= limit:
        position = int(np.argmax((ids < 0) | (ids >= limit)))
        size = "" if vocab_size is None else f" of {vocab_size}"
        raise InvalidRequestError(
            name, f"token {position} of the prompt is {ids[position]}, which is not in the vocabulary{size}"
        )
    return ids.astype(np.int64, copy=False)
