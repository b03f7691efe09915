"""References to the media of an episode: hash, source and place in the tokens."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from renderers import MediaItem, MediaSource, PlaceholderRange
from renderers.messages import PLURALS, Modality, part_kind
from renderers.vision.processor import MediaProcessor
from rollouts.errors import PixelMismatchError, RolloutsError
from transport import wire_type


@wire_type("rollouts.MediaReference")
@dataclass(frozen=True, slots=True)
class MediaReference:
    """An image, video or sound: the hash of its pixels or features, its source, the range of its tokens.

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

        Raises `PixelMismatchError` unless they have the `mm_hash` of those that the sampler saw, and
        `RolloutsError`.
        """
        item = processor_for(processors, self.modality).process(self.source)
        if item.mm_hash != self.mm_hash:
            raise PixelMismatchError(self.mm_hash, item.mm_hash)
        return item


M = TypeVar("M", bound=MediaItem | MediaReference)


class MediaOfParts(Generic[M]):
    """The media of a prompt, taken part by part: each gets the next medium of its own type."""

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
