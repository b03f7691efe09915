"""Tokens that were added together, and the media that some of them stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from renderers import MediaItem, MediaSource, Message, PlaceholderRange
from renderers.media.item import Modality
from renderers.vision.processor import MediaProcessor
from rollouts.engines.completion_checks import logprobs_error
from rollouts.engines.protocol import Completion, WeightSpan, ending_error
from rollouts.errors import InvalidTurnError, MissingProcessorError, PixelMismatchError
from transport import wire_type


@wire_type("rollouts.MediaReference")
@dataclass(frozen=True, slots=True)
class MediaReference:
    """An image or video on a node: its pixels' name, its source, and where its tokens sit from the node's start."""

    modality: Modality
    mm_hash: str
    source: MediaSource
    placeholder: PlaceholderRange

    def shifted(self, by: int) -> MediaReference:
        return replace(self, placeholder=self.placeholder.shifted(by))

    def derive(self, processors: Mapping[Modality, MediaProcessor]) -> MediaItem:
        """The pixels, made again from the source by a renderer's `processors`.

        Raises `PixelMismatchError` unless they carry the name that the sampler saw them under, and
        `MissingProcessorError`.
        """
        item = processor_for(processors, self.modality).process(self.source)
        if item.mm_hash != self.mm_hash:
            raise PixelMismatchError(self.mm_hash, item.mm_hash)
        return item


def processor_for(processors: Mapping[Modality, MediaProcessor] | None, modality: Modality) -> MediaProcessor:
    """Raises `MissingProcessorError`."""
    if processors is None or modality not in processors:
        raise MissingProcessorError(modality)
    return processors[modality]


@wire_type("rollouts.TokenNode")
@dataclass(frozen=True, slots=True, eq=False)
class TokenNode:
    """Tokens that were added together. Arrays are read-only and parallel: token_ids int32 (n,), sampled bool (n,).

    `parent` is the index of the node before, -1 at a root. `logprobs` is float32 with one value per *sampled* token, in
    order; `weight_spans` count sampled tokens likewise. `content` is bool (n,), True on message body, None where that
    is not known. `messages` are those that this node is the first to show, with `MediaSource`s for their media.
    `extras` are further arrays with one row a token, by name (`routed_experts`, `sampling_mask`, `advantages`).
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

    def __len__(self) -> int:
        return len(self.token_ids)


def completion_node(parent: int, completion: Completion, extras: Mapping[str, np.ndarray]) -> TokenNode:
    """The node of what was sampled. Raises `InvalidTurnError`."""
    ids = token_array(completion.token_ids, "completion")
    logprobs = np.asarray(completion.logprobs)
    words = logprobs_error(logprobs, len(ids)) or ending_error(completion)
    if words is not None:
        raise InvalidTurnError(f"completion: {words}; have the engine return one valid log-probability for each token")
    return TokenNode(
        parent=parent,
        token_ids=ids,
        sampled=frozen(np.ones(len(ids), dtype=bool), np.bool_),
        logprobs=frozen(logprobs, np.float32),
        weight_spans=tuple(completion.weight_spans),
        extras={name: _extra(name, rows, len(ids)) for name, rows in extras.items()},
    )


def _extra(name: str, rows: np.ndarray, count: int) -> np.ndarray:
    if not isinstance(rows, np.ndarray) or rows.ndim == 0 or rows.dtype.hasobject:
        raise InvalidTurnError(
            f"extra {name!r} is no array of rows but a {type(rows).__name__}; pass numpy arrays of numbers"
        )
    if len(rows) != count:
        raise InvalidTurnError(f"extra {name!r} has {len(rows)} rows for {count} sampled tokens; pass one for each")
    return frozen(rows, rows.dtype)


def token_array(values: Sequence[int] | np.ndarray, what: str) -> np.ndarray:
    """Token ids as a read-only int32 (n,) of its own. Raises `InvalidTurnError` for what are no ids."""
    array = np.asarray(values)
    whole = array.ndim == 1 and (array.dtype.kind in "iu" or not array.size)
    if not whole or (array.size and not 0 <= int(array.min()) <= int(array.max()) < 2**31):
        raise InvalidTurnError(
            f"{what} of {array.dtype} {array.shape} holds no token ids; pass ints from 0 to 2**31 - 1"
        )
    return frozen(array, np.int32)


def frozen(values: Sequence[int] | np.ndarray, dtype: npt.DTypeLike) -> np.ndarray:
    """A copy that nobody can change. A read-only array is copied, too: it may be a view on one that is not."""
    array: np.ndarray = np.array(values, dtype=dtype)
    array.setflags(write=False)
    return array


def same_media(one: Sequence[MediaReference], start: int, other: Sequence[MediaReference]) -> bool:
    """Whether these are the same images at the same tokens, the ranges of `one` counted from token `start`."""
    return len(one) == len(other) and all(
        mine.mm_hash == theirs.mm_hash
        and mine.modality == theirs.modality
        and mine.source.digest == theirs.source.digest
        and mine.placeholder.offset + start == theirs.placeholder.offset
        and mine.placeholder.length == theirs.placeholder.length
        and mine.placeholder.embed_runs == theirs.placeholder.embed_runs
        for mine, theirs in zip(one, other, strict=True)
    )


def within(references: Sequence[MediaReference], start: int, end: int) -> tuple[MediaReference, ...]:
    """The references that begin in tokens `start:end`, with ranges relative to `start`."""
    return tuple(reference.shifted(-start) for reference in references if start <= reference.placeholder.offset < end)
