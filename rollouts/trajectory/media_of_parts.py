"""Which medium of a prompt belongs to which part of its messages."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Generic, Protocol, TypeVar

from renderers.media.item import Modality
from renderers.messages import part_kind


class Medium(Protocol):
    @property
    def modality(self) -> Modality: ...


M = TypeVar("M", bound=Medium)


class MediaOfParts(Generic[M]):
    """The media of a prompt in its order, taken for one image or video part after the other.

    A template may print the images of a message before its videos, so that a part has the next medium of its own type.
    """

    def __init__(self, media: Iterable[M]) -> None:
        self._left = list(media)

    def __len__(self) -> int:
        """The number of media that were not taken."""
        return len(self._left)

    def take(self, part: Mapping[str, Any]) -> M | None:
        """The medium of the next part; None where none is left."""
        kind = part_kind(part)
        index = next((index for index, medium in enumerate(self._left) if medium.modality == kind), 0)
        return self._left.pop(index) if self._left else None
