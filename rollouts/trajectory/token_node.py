"""The nodes of a tree of tokens, and the turns made of them."""

from __future__ import annotations

import struct
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Final, Generic, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from renderers import MediaItem, MediaSource, Message, PlaceholderRange
from renderers.messages import PLURALS, Modality, part_kind
from renderers.placement import placement_error
from renderers.vision.processor import MediaProcessor
from rollouts.engines.protocol import (
    NO_TOKEN,
    Completion,
    FinishReason,
    WeightSpan,
    token_ids_error,
    top_logprobs_error,
    weight_span_error,
)
from rollouts.errors import InvalidTurnError, PixelMismatchError, RolloutsError, short_repr
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


class ReportedExtras(NamedTuple):
    """Arrays by name, with one row for each new token of the prompt and for each token of the completion."""

    prompt: dict[str, np.ndarray]
    completion: dict[str, np.ndarray]


def reported_extras(completion: Completion, prompt_tokens: int, start: int) -> ReportedExtras:
    """The arrays for the prompt's tokens from `start` on, and for the tokens of its completion.

    `routed_experts` (n, layers, experts a token): a row names the experts of the pass that *predicted* its token, which
    read the token before it. So a row depends only on the tokens before its token, every sampled token has a row as
    soon as it is sampled, and the rows from a root to a leaf, without the first row, belong to the inputs of a forward
    pass over all tokens but the last. The first token of a prompt is not predicted: its row is zeros.
    `sampling_mask` int32 (n, longest): the ids that a token was sampled from, then -1. `top_ids` int32 (n, k) and
    `top_logprobs` float32 (n, k): the arrays of `Completion.top_logprobs`. Raises `InvalidTurnError` where counts do
    not agree.
    """
    prompt: dict[str, np.ndarray] = {}
    sampled: dict[str, np.ndarray] = {}
    end = prompt_tokens + len(completion.token_ids)
    if (experts := completion.routed_experts) is not None:
        if not isinstance(experts, np.ndarray) or experts.dtype.kind not in "iu":
            raise InvalidTurnError(f"routed experts are {short_repr(experts)}, not an array of integers")
        if experts.ndim != 3 or len(experts) != end - 1:
            raise InvalidTurnError(
                f"routed experts of shape {experts.shape} for {end} tokens of prompt and completion; there is one row "
                f"for each but the last: ({end - 1}, layers, experts a token)"
            )
        prompt[ROUTED_EXPERTS] = _predicting(experts, start, prompt_tokens)
        sampled[ROUTED_EXPERTS] = _predicting(experts, prompt_tokens, end)
    if (masks := completion.sampling_masks) is not None:
        if not isinstance(masks, list | tuple) or not all(map(_is_row_of_ids, masks)):
            raise InvalidTurnError(f"sampling masks are {short_repr(masks)}, not one array of token ids per token")
        if len(masks) != len(completion.token_ids):
            raise InvalidTurnError(f"{len(masks)} sampling masks for {len(completion.token_ids)} sampled tokens")
        sampled[SAMPLING_MASK] = _padded(masks)
    if (top := completion.top_logprobs) is not None:
        if (error := top_logprobs_error(top, len(completion.token_ids), None)) is not None:
            raise InvalidTurnError(error)
        sampled[TOP_IDS], sampled[TOP_LOGPROBS] = top.token_ids.astype(np.int32), top.logprobs.astype(np.float32)
    return ReportedExtras(prompt, sampled)


def _is_row_of_ids(mask: object) -> bool:
    return isinstance(mask, np.ndarray) and mask.ndim == 1 and (mask.dtype.kind in "iu" or not mask.size)


def _predicting(experts: np.ndarray, start: int, end: int) -> np.ndarray:
    """The rows of the passes that predicted tokens `start:end`, given those of the passes that read each token."""
    if start:
        return experts[start - 1 : end - 1]
    first_row = np.zeros((min(end, 1), *experts.shape[1:]), experts.dtype)
    return np.concatenate([first_row, experts[: max(end - 1, 0)]])


def _padded(masks: Sequence[np.ndarray]) -> np.ndarray:
    widths = np.array([len(mask) for mask in masks], dtype=np.intp)
    rows = np.full((len(masks), int(widths.max(initial=0))), NO_TOKEN, np.int32)
    rows[np.arange(rows.shape[1]) < widths[:, None]] = np.concatenate([*masks, np.empty(0, np.int32)])
    return rows


@wire_type("rollouts.MediaReference")
@dataclass(frozen=True, slots=True)
class MediaReference:
    """An image, a video or a sound: the hash of its pixels or features, its source, and the range of its tokens.

    `placeholder` counts tokens from the start of the node that holds the reference.
    """

    modality: Modality
    mm_hash: str
    source: MediaSource
    placeholder: PlaceholderRange

    def shifted(self, by: int) -> MediaReference:
        if by == 0:
            return self
        return MediaReference(self.modality, self.mm_hash, self.source, self.placeholder.shifted(by))

    def derive(self, processors: Mapping[Modality, MediaProcessor]) -> MediaItem:
        """Compute the pixels or features again from the source, with a renderer's `processors`.

        Raises `PixelMismatchError` unless they have the `mm_hash` of those that the sampler saw, and `RolloutsError`.
        """
        item = processor_for(processors, self.modality).process(self.source)
        if item.mm_hash != self.mm_hash:
            raise PixelMismatchError(self.mm_hash, item.mm_hash)
        return item


M = TypeVar("M", bound=MediaItem | MediaReference)


class MediaOfParts(Generic[M]):
    """The media of a prompt in its order, taken for one media part after the other.

    A template may print the images of a message before its videos, so that a part has the next medium of its own type.
    """

    def __init__(self, media: Iterable[M]) -> None:
        self._left = list(media)
        self.parts = 0  # for which a medium was asked

    def take(self, part: Mapping[str, Any]) -> M | None:
        """The medium of the next part; None where none is left."""
        self.parts += 1
        kind = part_kind(part)
        index = next((index for index, medium in enumerate(self._left) if medium.modality == kind), 0)
        return self._left.pop(index) if self._left else None


def media_counts(modalities: Iterable[str]) -> dict[str, int]:
    """How many images and sounds there are, of the modalities of media; videos count as images."""
    is_sound = [modality == "audio" for modality in modalities]
    return {"images": is_sound.count(False), "sounds": is_sound.count(True)}


def processor_for(processors: Mapping[Modality, MediaProcessor] | None, modality: Modality) -> MediaProcessor:
    """Raises `RolloutsError`."""
    if processors is None or modality not in processors:
        raise RolloutsError(f"there is no processor for {PLURALS[modality]}. Pass processors=renderer.processors.")
    return processors[modality]


@wire_type("rollouts.TokenNode")
@dataclass(frozen=True, slots=True, eq=False)
class TokenNode:
    """Tokens that were added together: the new tokens of a prompt, or a completion.

    `token_ids` int32 (n,) and `sampled` bool (n,) are parallel. `logprobs` is float32 with one value per *sampled*
    token, in order; `weight_spans` count sampled tokens likewise. `parent` is the index of the previous node, -1 at a
    root. `content` is bool (n,), True on message bodies, or None if unknown. `messages` are the messages that begin in
    this node, with `MediaSource`s for their media. `media` are in prompt order. `extras` are further arrays with one
    row per token, by name (`routed_experts`, `sampling_mask`, `top_ids` and `top_logprobs`, `advantages`).

    Raises `InvalidTurnError` for values of another type, shape or length, also when decoded. `Trajectory` and its
    `add_turn` check that token ids and log-probabilities are in range.
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
        ids, sampled, logprobs = self.token_ids, self.sampled, self.logprobs
        error: str | None = None
        if type(self.parent) is not int or not -1 <= self.parent < 2**63:
            error = "its parent is neither the index of a node nor -1"
        elif not isinstance(ids, np.ndarray) or ids.ndim != 1 or ids.dtype.kind not in "iu":
            error = f"token ids are {_kind(ids)}, not one row of integers"
        elif not isinstance(sampled, np.ndarray) or sampled.shape != ids.shape or sampled.dtype != np.bool_:
            error = f"sampled is {_kind(sampled)}, not bool ({len(ids)},)"
        elif not isinstance(logprobs, np.ndarray) or logprobs.dtype.kind != "f":
            error = f"log-probabilities are {_kind(logprobs)}, not one row of float32"
        elif logprobs.shape != (count := _num_sampled(sampled),):
            error = f"{count} tokens and {logprobs.size} log-probabilities of shape {logprobs.shape}"
        elif self.content is not None and not _is_mask(self.content, len(ids)):
            error = f"content is {_kind(self.content)}, not bool ({len(ids)},)"
        elif not _are_messages(self.messages):
            error = "its messages are not a list of dicts"
        else:
            error = (
                _extras_error(self.extras, len(ids))
                or weight_span_error(self.weight_spans, len(logprobs))
                or _media_error(self.media, len(ids))
            )
        if error is not None:
            raise InvalidTurnError(f"a node after node {quoted(self.parent)}: {error}")

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


def _num_sampled(sampled: np.ndarray) -> int:
    """How many of a mask's values are True: counted with the interpreter's lock, which `np.count_nonzero` gives up."""
    return sampled.size - sampled.tobytes().count(0)


def _kind(value: object) -> str:
    return f"{value.dtype} {value.shape}" if isinstance(value, np.ndarray) else f"a {type(value).__name__}"


def _is_mask(array: object, count: int) -> bool:
    return isinstance(array, np.ndarray) and array.dtype.kind == "b" and array.shape == (count,)


def _are_messages(messages: object) -> bool:
    return isinstance(messages, _SEQUENCES) and all(isinstance(message, dict) for message in messages)


def _extras_error(extras: object, count: int) -> str | None:
    if not isinstance(extras, Mapping):
        return "its extras are not a mapping of names to arrays"
    errors = (extra_error(name, rows, count) for name, rows in extras.items())
    return next((error for error in errors if error is not None), None)


def _media_error(media: object, count: int) -> str | None:
    if not isinstance(media, _SEQUENCES) or not all(map(_is_reference, media)):
        return "media are not references with a source and a range"
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
    """Token ids as a new read-only int32 (n,). Raises `InvalidTurnError` for values that are not token ids."""
    if type(values) is list:
        # The prompt of a turn: packed in a seventh of numpy's time, and without giving up the interpreter's lock.
        with suppress(struct.error):
            packed = struct.pack(f"{len(values)}i", *values)
            if packed[_HIGHEST_BYTES].isascii():  # none is negative: the first bit of its highest byte would be set
                return np.frombuffer(packed, np.int32)
    array = np.asarray(values)
    is_empty_row = array.shape == (0,)  # of any dtype
    if not is_empty_row and token_ids_error(array) is not None:
        raise InvalidTurnError(
            f"{what} of {array.dtype} {array.shape} holds no token ids; pass ints from 0 to 2**31 - 1"
        )
    return read_only(array, np.int32)


def read_only(values: Sequence[int] | np.ndarray, dtype: npt.DTypeLike | None) -> np.ndarray:
    """A read-only copy. A read-only array is copied, too: it may be a view of an array that can be written."""
    array: np.ndarray = np.array(values, dtype=dtype)
    array.setflags(write=False)
    return array


def same_media(node_media: Sequence[MediaReference], start: int, prompt_media: Sequence[MediaReference]) -> bool:
    """Whether the media of a node that begins at token `start` are these media of a prompt, at the same tokens."""
    return len(node_media) == len(prompt_media) and all(
        one.mm_hash == other.mm_hash
        and one.modality == other.modality
        and one.source.digest == other.source.digest
        and one.placeholder.offset + start == other.placeholder.offset
        and one.placeholder.length == other.placeholder.length
        and one.placeholder.embed_runs == other.placeholder.embed_runs
        for one, other in zip(node_media, prompt_media, strict=True)
    )


# A turn of an episode: what is known of one call of the model beside its tokens.


@wire_type("rollouts.Turn")
@dataclass(frozen=True, slots=True)
class Turn:
    """One model call: the node of its completion, how it ended, and the reward and info from the environment.

    `seconds` is how long the engine took. `agent` names which agent of the episode took the turn: "" is the one that
    plays the episode's environment. Raises `InvalidTurnError` for values of another type, also when decoded.
    """

    node: int
    finish_reason: FinishReason
    message: Message
    reward: float = 0.0
    info: dict[str, Any] = field(default_factory=dict)
    seconds: float = 0.0
    agent: str = ""

    def __post_init__(self) -> None:
        if type(self.node) is not int or self.node < 0:
            raise InvalidTurnError(f"a turn has the node {quoted(self.node)}; pass the index of its completion's node")
        if not isinstance(self.finish_reason, FinishReason):
            raise InvalidTurnError(
                f"the turn of node {self.node} has no FinishReason, but {quoted(self.finish_reason)}"
            )
        if not isinstance(self.message, dict) or not isinstance(self.info, dict):
            raise InvalidTurnError(f"the turn of node {self.node} has a message or an info that is not a dict")
        if not is_plain_number(self.reward) or not is_plain_number(self.seconds):
            raise InvalidTurnError(
                f"the turn of node {self.node} has the reward {quoted(self.reward)} and the seconds "
                f"{quoted(self.seconds)}; both are finite numbers"
            )
        if type(self.agent) is not str:
            raise InvalidTurnError(f"the turn of node {self.node} has the agent {quoted(self.agent)}, which is no text")


_LARGEST: Final = sys.float_info.max


def is_plain_number(value: object) -> bool:
    """Whether the value is a finite float, or an int that a float can hold. Called for every decoded turn."""
    return (type(value) is float or type(value) is int) and -_LARGEST <= value <= _LARGEST
