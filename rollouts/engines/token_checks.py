"""Checks of token ids and log-probabilities. Each returns the text of an error, None where nothing is wrong."""

import operator
import struct
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from rollouts.errors import short_repr

#: Token ids are stored as int32.
MAX_TOKEN_ID: Final = 2**31 - 1
#: The log of a probability is at most 0. A log-softmax in float32 over a large vocabulary may exceed it by
#: rounding.
MAX_LOGPROB: Final = 1e-4
#: Some servers write this number for a log-probability that they do not have.
MISSING_LOGPROB: Final = -9999.0


def token_ids_error(token_ids: object, vocab_size: int | None = None) -> str | None:
    """Token ids are an integer array (n,) of ids from 0 to 2**31 - 1, and below `vocab_size` where that is known."""
    if not isinstance(token_ids, np.ndarray):
        return f"token ids are {type_name(token_ids)}, not a numpy array of integers"
    if token_ids.ndim != 1 or token_ids.dtype.kind not in "iu":
        return f"token ids are {token_ids.dtype} of shape {token_ids.shape}, not one row of integers"
    largest = MAX_TOKEN_ID if vocab_size is None else vocab_size - 1
    if not token_ids.size or (token_ids.min() >= 0 and token_ids.max() <= largest):
        return None
    wrong = (token_ids < 0) | (token_ids > largest)
    index = int(wrong.argmax())
    return f"token {index} has id {token_ids[index]}; ids run from 0 to {largest}"


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


def float32_array(values: npt.ArrayLike) -> np.ndarray:
    """The numbers as float32; one beyond float32 is infinite. Raises `TypeError`, `ValueError`."""
    with np.errstate(over="ignore"):  # numpy would warn
        return np.array(values, np.float64).astype(np.float32)


def logprobs_error(logprobs: object, count: int) -> str | None:
    """Log-probabilities are a float array (count,), each finite, above -9999 and at most 0 but for rounding."""
    if not isinstance(logprobs, np.ndarray):
        return f"log-probabilities are {type_name(logprobs)}, not a numpy array of float32"
    if logprobs.ndim != 1 or logprobs.dtype.kind != "f":
        return f"log-probabilities are {logprobs.dtype} of shape {logprobs.shape}, not one row of float32"
    if len(logprobs) != count:
        return f"{count} tokens and {len(logprobs)} log-probabilities"
    valid = (logprobs > MISSING_LOGPROB) & (logprobs <= MAX_LOGPROB)  # False for NaN, too
    if valid.all():
        return None
    index = int(valid.argmin())
    cause = ", as NaN in the weights gives" if np.isnan(logprobs[index]) else ""
    return f"token {index} has log-probability {logprobs[index]}{cause}"


def type_name(value: object) -> str:
    return "None" if value is None else f"a {type(value).__name__}"
