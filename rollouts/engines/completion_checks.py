"""Checks of token ids and log-probabilities. Each returns the text of an error, None where nothing is wrong."""

from __future__ import annotations

import operator
import struct
import sys
from collections.abc import Sequence
from math import isfinite
from typing import Final

import numpy as np

from rollouts.error_texts import short_repr

#: Token ids are stored as int32.
MAX_TOKEN_ID: Final = 2**31 - 1

#: The log of a probability is at most 0. A log-softmax in float32 over a large vocabulary may exceed it by rounding.
MAX_LOGPROB: Final = 1e-4

#: Some servers write this number for a log-probability that they do not have.
MISSING_LOGPROB: Final = -9999.0

#: Up to so many values, lists of Python take a third of the time of numpy's reductions.
_SHORT: Final = 256

#: Of each int32.
_HIGHEST_BYTES: Final = slice(3 if sys.byteorder == "little" else 0, None, 4)


def token_ids_error(token_ids: object, vocab_size: int | None = None) -> str | None:
    """Token ids are an integer array (n,) of ids from 0 to 2**31 - 1, and below `vocab_size` where that is known."""
    if not isinstance(token_ids, np.ndarray):
        return f"token ids are {_type_name(token_ids)}, not a numpy array of integers"
    if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
        return f"token ids are {token_ids.dtype} of shape {token_ids.shape}, not one row of integers"
    if not token_ids.size:
        return None
    largest = MAX_TOKEN_ID if vocab_size is None else vocab_size - 1
    if _are_within(token_ids, largest):
        return None
    wrong = (token_ids < 0) | (token_ids > largest)
    index = int(wrong.argmax())
    return f"token {index} has id {token_ids[index]}; ids run from 0 to {largest}"


def _are_within(token_ids: np.ndarray, largest: int) -> bool:
    """Whether ids are from 0 to `largest`. This check runs for every completion and every node that is decoded."""
    if largest == MAX_TOKEN_ID and token_ids.dtype == np.int32:
        # An id is negative where the first bit of its highest byte is set. numpy's reductions take longer, and give up
        # the interpreter's lock, for which the event loop then waits while a thread computes.
        return token_ids.tobytes()[_HIGHEST_BYTES].isascii()
    if token_ids.size <= _SHORT:
        ids = token_ids.tolist()
        return bool(min(ids) >= 0 and max(ids) <= largest)
    return bool(np.minimum.reduce(token_ids) >= 0 and np.maximum.reduce(token_ids) <= largest)


def prompt_error(token_ids: object) -> str | None:
    """A prompt is a list, or another sequence or array, of integers. The engine checks their range."""
    if isinstance(token_ids, np.ndarray):
        if token_ids.ndim == 1 and token_ids.dtype.kind in "iu":
            return None
        return f"the prompt is {token_ids.dtype} of shape {token_ids.shape}, not a row of integers"
    is_text = isinstance(token_ids, str | bytes | bytearray | memoryview)
    if type(token_ids) is not list and (is_text or not isinstance(token_ids, Sequence)):
        return f"the prompt is {type(token_ids).__name__}, not token ids"
    try:
        struct.pack(f"{len(token_ids)}q", *token_ids)  # the fastest check that each is an integer
    except struct.error:
        index, token = next((index, token) for index, token in enumerate(token_ids) if not _is_int64(token))
        return f"token {index} of the prompt is {short_repr(token)}, not an int of 64 bits"
    return None


def _is_int64(value: object) -> bool:
    return hasattr(type(value), "__index__") and -(2**63) <= operator.index(value) < 2**63  # type: ignore[arg-type]


def logprobs_error(logprobs: object, count: int) -> str | None:
    """Log-probabilities are a float array (count,), each finite, above -9999 and at most 0 but for rounding."""
    if not isinstance(logprobs, np.ndarray):
        return f"log-probabilities are {_type_name(logprobs)}, not a numpy array of float32"
    if logprobs.ndim != 1 or logprobs.dtype.kind != "f":
        return f"log-probabilities are {logprobs.dtype} of shape {logprobs.shape}, not one row of float32"
    if len(logprobs) != count:
        return f"{count} tokens and {len(logprobs)} log-probabilities"
    if not count or _are_logprobs(logprobs):
        return None
    valid = (logprobs > MISSING_LOGPROB) & (logprobs <= MAX_LOGPROB)
    index = int(valid.argmin())
    cause = ", as NaN in the weights gives" if np.isnan(logprobs[index]) else ""
    return f"token {index} has log-probability {logprobs[index]}{cause}"


def _are_logprobs(logprobs: np.ndarray) -> bool:
    """Whether all values are log-probabilities that a sampler may report; False for NaN, too."""
    if logprobs.size <= _SHORT:
        values = logprobs.tolist()
        # `min` and `max` may skip NaN, a sum with it is NaN.
        return isfinite(sum(values)) and min(values) > MISSING_LOGPROB and max(values) <= MAX_LOGPROB
    return bool(np.minimum.reduce(logprobs) > MISSING_LOGPROB and np.maximum.reduce(logprobs) <= MAX_LOGPROB)


def _type_name(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
