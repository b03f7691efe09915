"""Tokens that were added together, and the media that some of them stand for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from renderers import MediaItem, MediaSource, Message, PlaceholderRange
from renderers.media.item import Modality
from renderers.vision.processor import MediaProcessor
from rollouts.engines.protocol import WeightSpan
from rollouts.errors import PixelMismatchError
from transport import wire_type

wire_type("renderers.PlaceholderRange")(PlaceholderRange)


@wire_type("rollouts.MediaReference")
@dataclass(frozen=True, slots=True)
class MediaReference:
    """A picture or video on a node: its pixels' name, its source, and where its tokens sit from the node's start."""

    modality: Modality
    mm_hash: str
    source: MediaSource
    where: PlaceholderRange

    def shifted(self, by: int) -> MediaReference:
        return replace(self, where=self.where.shifted(by))

    def derive(self, processors: Mapping[Modality, MediaProcessor]) -> MediaItem:
        """The pixels, made again from the source by a renderer's `processors`.

        Raises `PixelMismatchError` unless they carry the name that the sampler saw them under.
        """
        item = processors[self.modality].process(self.source)
        if item.mm_hash != self.mm_hash:
            raise PixelMismatchError(self.mm_hash, item.mm_hash)
        return item


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


def frozen(values: Sequence[int] | np.ndarray, dtype: type) -> np.ndarray:
    """An array of this dtype that nobody can change; copied unless it is one already."""
    if isinstance(values, np.ndarray) and values.dtype == dtype and not values.flags.writeable:
        return values
    array: np.ndarray = np.array(values, dtype=dtype)
    array.setflags(write=False)
    return array


def within(references: Sequence[MediaReference], start: int, end: int) -> tuple[MediaReference, ...]:
    """The references that begin in tokens `start:end`, with ranges relative to `start`."""
    return tuple(reference.shifted(-start) for reference in references if start <= reference.where.offset < end)
