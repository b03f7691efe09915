"""The nodes of a tree of tokens."""

import struct
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import NoneType
from typing import Final

import numpy as np
import numpy.typing as npt

from renderers import MediaSource, Message, PlaceholderRange
from renderers.messages import PLURALS
from renderers.placement import placement_error
from rollouts.engines.protocol import WeightSpan
from rollouts.engines.result_checks import weight_span_error
from rollouts.engines.token_checks import token_ids_error
from rollouts.errors import TrajectoryError
from rollouts.trajectory.media_reference import MediaReference
from transport import wire_type
from transport.errors import quoted

ROUTED_EXPERTS, SAMPLING_MASK = "routed_experts", "sampling_mask"
#: What a teacher said of the tokens (`rollouts.training.score`).
TEACHER_LOGPROBS = "teacher_logprobs"
TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS = "teacher_top_ids", "teacher_top_logprobs"
#: The metric of an episode: the mean of log p(sampler) - log p(teacher) over its sampled tokens, in nats.
TEACHER_KL = "teacher_kl"
TEACHER_COLUMNS = (TEACHER_LOGPROBS, TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS)
TOP_IDS, TOP_LOGPROBS = "top_ids", "top_logprobs"


@wire_type("rollouts.TokenNode")
@dataclass(frozen=True, slots=True, eq=False)
class TokenNode:
    """Tokens that were added together: the new tokens of a prompt, or a completion.

    `token_ids` int32 (n,) and `sampled` bool (n,) are parallel. `logprobs` is float32 with one value per
    *sampled* token, in order; `weight_spans` count sampled tokens likewise. `parent` is the index of the
    previous node, -1 at a root. `content` is bool (n,), True on message bodies, or None if unknown.
    `messages` are the messages that begin in this node, with `MediaSource`s for their media. `media` are in
    prompt order. `extras` are further arrays with one row per token, by name (`routed_experts`,
    `sampling_mask`, `top_ids` and `top_logprobs`, `advantages`).

    Raises `TrajectoryError` for values of another type, shape or length, also when decoded. `Trajectory` and
    its `add_turn` check that token ids and log-probabilities are in range.
    """

    parent: int
    token_ids: np.ndarray
    sampled: np.ndarray
    logprobs: np.ndarray
    weight_spans: tuple[WeightSpan, ...] = ()
    media: tuple[MediaReference, ...] = ()
    content: np.ndarray | None = None
    messages: tuple[Message, ...] = ()
    extras: Mapping[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        error = self._error()
        if error is not None:
            raise TrajectoryError(f"a node after node {quoted(self.parent)}: {error}")

    def _error(self) -> str | None:
        """The first value that is wrong, in a sentence."""
        ids, sampled, logprobs = self.token_ids, self.sampled, self.logprobs
        if type(self.parent) is not int or not -1 <= self.parent < 2**63:
            return "its parent is neither the index of a node nor -1"
        if not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
            return f"token ids are {_kind(ids)}, not one row of integers"
        count = len(ids)
        if not _is_mask(sampled, count):
            return f"sampled is {_kind(sampled)}, not bool ({count},)"
        if not isinstance(logprobs, np.ndarray) or logprobs.dtype.kind != "f":
            return f"log-probabilities are {_kind(logprobs)}, not one row of float32"
        # Counted with the interpreter's lock, which `np.count_nonzero` gives up.
        num_sampled = count - sampled.tobytes().count(0)
        if logprobs.ndim != 1 or len(logprobs) != num_sampled:
            return f"{num_sampled} tokens and {logprobs.size} log-probabilities of shape {logprobs.shape}"
        if self.content is not None and not _is_mask(self.content, count):
            return f"content is {_kind(self.content)}, not bool ({count},)"
        return (
            _messages_error(self.messages)
            or _extras_error(self.extras, count)
            or weight_span_error(self.weight_spans, num_sampled)
            or _media_error(self.media, count)
        )

    def __len__(self) -> int:
        return len(self.token_ids)


_SEQUENCES = (tuple, list)


def extra_error(name: object, rows: object, count: int) -> str | None:
    """Check that `rows` is an array of numbers with one row for each of `count` tokens."""
    if not isinstance(name, str):
        return f"extra {quoted(name)} has no text for a name"
    if not isinstance(rows, np.ndarray) or rows.ndim == 0 or rows.dtype.hasobject:
        return f"extra {quoted(name)} is no array of rows but a {type(rows).__name__}; pass numpy arrays of numbers"
    if len(rows) != count:
        return f"extra {quoted(name)} has {len(rows)} rows for {count} tokens; pass one row for each"
    return None


def _kind(value: object) -> str:
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


def _is_mask(array: object, count: int) -> bool:
    return isinstance(array, np.ndarray) and array.ndim == 1 and len(array) == count and array.dtype.kind == "b"


def _messages_error(messages: object) -> str | None:
    if not isinstance(messages, _SEQUENCES) or (messages and not all(isinstance(one, dict) for one in messages)):
        return "its messages are not a list of dicts"
    return None


def _extras_error(extras: object, count: int) -> str | None:
    if type(extras) is not dict and not isinstance(extras, Mapping):
        return "its extras are not a mapping of names to arrays"
    for name, rows in extras.items():
        if (error := extra_error(name, rows, count)) is not None:
            return error
    return None


def _media_error(media: object, count: int) -> str | None:
    if not isinstance(media, _SEQUENCES) or (media and not all(map(_is_reference, media))):
        return "media are not references with a source and a range"
    if not media:
        return None
    placeholders = [reference.placeholder for reference in media]
    if not count and all(one.offset == one.length == 0 for one in placeholders):  # of a prompt without tokens
        return None
    error = placement_error(placeholders, count)
    if error is None:
        return None
    wrong = media[error.position]
    return f"{wrong.modality} {error.position} ({quoted(wrong.mm_hash)}) {error.reason}"


def _is_reference(reference: object) -> bool:
    if not isinstance(reference, MediaReference) or not isinstance(reference.source, MediaSource):
        return False
    placeholder = reference.placeholder
    return (
        isinstance(placeholder, PlaceholderRange)
        and reference.modality in PLURALS
        and type(reference.mm_hash) is str
        and type(reference.source.digest) is str
        and type(placeholder.offset) is type(placeholder.length) is int
        and isinstance(placeholder.embed_runs, (tuple, list, NoneType))
        and all(_is_run(run) for run in placeholder.embed_runs or ())
    )


def _is_run(run: object) -> bool:
    return isinstance(run, _SEQUENCES) and len(run) == 2 and type(run[0]) is type(run[1]) is int


#: Of each int32.
_HIGHEST_BYTES: Final = slice(3 if sys.byteorder == "little" else 0, None, 4)


def token_array(values: Sequence[int] | np.ndarray, what: str) -> np.ndarray:
    """Token ids as a new read-only int32 (n,). Raises `TrajectoryError` for values that are not token ids."""
    if type(values) is list:
        # The prompt of a turn: packed in a seventh of numpy's time, and without giving up the interpreter's
        # lock.
        with suppress(struct.error):
            packed = struct.pack(f"{len(values)}i", *values)
            if packed[_HIGHEST_BYTES].isascii():  # none is negative: the first bit of its highest byte would be set
                return np.frombuffer(packed, np.int32)
    array = np.asarray(values)
    is_empty_row = array.shape == (0,)  # of any dtype
    if not is_empty_row and token_ids_error(array) is not None:
        raise TrajectoryError(
            f"{what} of {array.dtype} {array.shape} holds no token ids; pass ints from 0 to 2**31 - 1"
        )
    return read_only(array, np.int32)


def read_only(values: Sequence[int] | np.ndarray, dtype: npt.DTypeLike | None) -> np.ndarray:
    """A read-only copy. A read-only array is copied, too: it may be a view of an array that can be written."""
    array: np.ndarray = np.array(values, dtype=dtype)
    array.setflags(write=False)
    return array
