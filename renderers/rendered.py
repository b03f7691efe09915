"""What rendering returns: token ids, who owns each of them, and the media that some of them stand for."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from renderers.media.source import MediaSource
from renderers.vision.normalise import PixelScale


@dataclass(frozen=True, slots=True)
class PlaceholderRange:
    """Where one item's placeholder tokens sit: `token_ids[offset : offset + length]`."""

    offset: int
    length: int

    @property
    def end(self) -> int:
        return self.offset + self.length

    def shifted(self, by: int) -> PlaceholderRange:
        return PlaceholderRange(self.offset + by, self.length)


@dataclass(frozen=True, eq=False)
class MediaItem(Mapping[str, np.ndarray]):
    """One picture as the model sees it: a read-only mapping from tensor name to array, and where it came from.

    `item["pixel_values"]` holds canonical uint8 patches (after resize, before rescale and normalise), for Qwen-VL of
    shape (t*h*w, 3 * temporal_patch * patch * patch); `item["image_grid_thw"]` is int64 of shape (3,). `mm_hash` names
    exactly these pixels: the source's digest and the fingerprint of the processor that made them. `scale` makes floats
    of the uint8 pixels (`renderers.vision.normalise`).
    """

    modality: str
    mm_hash: str
    source: MediaSource
    tensors: Mapping[str, np.ndarray] = field(repr=False)
    num_tokens: int
    scale: PixelScale

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of the tensors, without the source."""
        return sum(array.nbytes for array in self.tensors.values())


@dataclass(frozen=True)
class MultiModalData:
    """The media of a prompt: per modality three parallel lists, in prompt order."""

    mm_hashes: dict[str, list[str]] = field(default_factory=dict)
    mm_placeholders: dict[str, list[PlaceholderRange]] = field(default_factory=dict)
    mm_items: dict[str, list[MediaItem]] = field(default_factory=dict)

    @classmethod
    def from_items(cls, placed: Iterable[tuple[MediaItem, PlaceholderRange]]) -> MultiModalData:
        """Collect items with their ranges; the order given is kept within each modality."""
        data = cls()
        for item, where in placed:
            data.mm_hashes.setdefault(item.modality, []).append(item.mm_hash)
            data.mm_placeholders.setdefault(item.modality, []).append(where)
            data.mm_items.setdefault(item.modality, []).append(item)
        return data

    def placed(self) -> list[tuple[MediaItem, PlaceholderRange]]:
        """Every item with its range, over all modalities, in prompt order."""
        placed = [
            pair
            for modality, ranges in self.mm_placeholders.items()
            for pair in zip(self.mm_items[modality], ranges, strict=True)
        ]
        return sorted(placed, key=lambda pair: pair[1].offset)

    def followed_by(self, later: MultiModalData | None, offset: int) -> MultiModalData:
        """These items at unchanged offsets, then `later`'s, moved right by `offset` tokens."""
        moved = [] if later is None else [(item, where.shifted(offset)) for item, where in later.placed()]
        return MultiModalData.from_items([*self.placed(), *moved])

    def is_empty(self) -> bool:
        return not any(self.mm_items.values())

    def __len__(self) -> int:
        return sum(len(items) for items in self.mm_items.values())


class TokenSpan(NamedTuple):
    """Tokens `start:end` share one owner and one kind. `message_index` is -1 for scaffold without a message."""

    start: int
    end: int
    message_index: int
    sampled: bool
    content: bool


@dataclass(frozen=True)
class RenderedTokens:
    """A rendered conversation.

    `token_ids` is a plain list of ints: it goes into JSON and is compared with `==`. Attribution is kept as spans that
    partition the tokens; the per-token columns are built when first read.
    """

    token_ids: list[int]
    spans: tuple[TokenSpan, ...] = ()
    message_roles: list[str] = field(default_factory=list)
    multi_modal_data: MultiModalData | None = None

    @cached_property
    def message_indices(self) -> list[int]:
        """Per token, the index of the message that it belongs to; -1 is scaffold without a message."""
        return self._column(lambda span: span.message_index, -1)

    @cached_property
    def sampled_mask(self) -> list[bool]:
        """Per token, whether the model would have sampled it."""
        return self._column(lambda span: span.sampled, False)

    @cached_property
    def is_content(self) -> list[bool]:
        """Per token, whether it is message body and not scaffold."""
        return self._column(lambda span: span.content, False)

    def message_token_spans(self) -> list[tuple[int, int] | None]:
        """Per message, the half-open token range from its first to its last token; None where it printed nothing."""
        found: list[tuple[int, int] | None] = [None] * len(self.message_roles)
        for span in self.spans:
            if 0 <= span.message_index < len(found):
                first = found[span.message_index]
                found[span.message_index] = (span.start if first is None else first[0], span.end)
        return found

    def __len__(self) -> int:
        return len(self.token_ids)

    def _column(self, value: Any, default: Any) -> list[Any]:
        column = [default] * len(self.token_ids)
        for span in self.spans:
            column[span.start : span.end] = [value(span)] * (span.end - span.start)
        return column
