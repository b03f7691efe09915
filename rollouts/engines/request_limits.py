"""What every engine refuses before it samples: requests beyond its bounds, prompts that do not fit."""

from array import array
from typing import Final

import numpy as np

from rollouts.engines.protocol import GenerateRequest
from rollouts.errors import ContextLengthError, InvalidRequestError, short_repr

#: Upper bounds of a request to an engine. Its prompt has a bound of its own: the context of the model.
MAX_SAMPLES: Final = 1024
MAX_TOKENS: Final = 2**20
MAX_TOP_LOGPROBS: Final = 1024


def check_limits(request: GenerateRequest) -> None:
    """Raise `InvalidRequestError`, naming the field, for a request that exceeds a bound."""
    sampling = request.sampling
    for name, value, limit in (
        ("n", sampling.n, MAX_SAMPLES),
        ("max_tokens", sampling.max_tokens, MAX_TOKENS),
        ("top_logprobs", sampling.top_logprobs, MAX_TOP_LOGPROBS),
        ("prompt_top_logprobs", request.prompt_top_logprobs, MAX_TOP_LOGPROBS),
    ):
        if value > limit:
            reason = f"{name} is {short_repr(value)} and an engine takes at most {limit}. Send a smaller one"
            raise InvalidRequestError(request.request_id, reason)


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
