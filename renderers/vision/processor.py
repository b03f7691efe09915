"""Processors: what they make of media, the interface, and which one a model directory has."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol, get_args

import numpy as np

from renderers.errors import ConfigError, MediaError
from renderers.media.item import MediaItem, MediaSource
from renderers.media.policy import MediaPolicy
from renderers.media.store import MediaStore
from renderers.messages import Modality
from renderers.vision.patches import normalised


@dataclass(frozen=True, eq=False)
class ProcessorOutput(Mapping[str, np.ndarray]):
    """A mapping from tensor name to array, as a transformers processor returns it for one medium.

    Pixels are float32, made each time they are read; a tensor of which the item is one row of the batch has a leading
    axis of length 1, so that the tensors of several items are concatenated along axis 0. `item` holds the tensors in
    their canonical form: uint8 pixels, without that axis.
    """

    item: MediaItem

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self.item.tensors[name]
        is_pixels = self.item.scale is not None and (not isinstance(tensor, np.ndarray) or tensor.dtype == np.uint8)
        array = normalised(self.item, name) if is_pixels else self.item[name]
        field = self.item.fields.get(name)
        return array[None] if field is not None and field.kind == "batched" else array

    def __iter__(self) -> Iterator[str]:
        return iter(self.item.tensors)

    def __len__(self) -> int:
        return len(self.item.tensors)

    def __eq__(self, other: object) -> bool:
        """Whether both are views of equal items."""
        return isinstance(other, ProcessorOutput) and self.item == other.item

    def __hash__(self) -> int:
        return hash(self.item)


ImageBackend = Literal["torchvision", "pillow"]
"""The backend of transformers whose resampling and arithmetic the pixels follow."""


class MediaProcessor(Protocol):
    """Turns the sources of one modality into `MediaItem`s. Safe to share between threads."""

    modality: Modality
    marker: str
    """The control token that a chat template prints for an item."""
    embed_token: str
    """The control token that stands for one row of features; often equal to the marker."""
    policy: MediaPolicy
    store: MediaStore

    @property
    def fingerprint(self) -> str:
        """Identifies everything except the source that affects the tensors."""

    def mm_hash(self, source: MediaSource) -> str:
        """The digest of the pixels as the model sees them: source digest + fingerprint."""

    def process(self, source: MediaSource) -> MediaItem:
        """The item of a source, from the store when it was seen before. Raises `MediaError`."""


class StoringProcessor(ABC):
    """A `MediaProcessor` that makes the item of each distinct source once and keeps it in the store.

    A subclass sets `modality`, `marker` and `embed_token`, and makes items in `make_item`. `fingerprint` is a text that
    changes with everything except the source that affects the tensors: settings, code, and versions of libraries.
    Raises `ConfigError` for one that is empty.
    """

    modality: Modality
    marker: str
    embed_token: str
    reads_sound = False
    """Whether videos are processed together with the sound inside of them."""

    def __init__(self, fingerprint: str, policy: MediaPolicy, store: MediaStore) -> None:
        if not fingerprint.isprintable() or not fingerprint.strip():
            raise ConfigError(f"fingerprint of {type(self).__name__}", fingerprint, ("a text that is not empty",))
        self.fingerprint = fingerprint
        self.policy = policy
        self.store = store

    def mm_hash(self, source: MediaSource) -> str:
        return f"{source.digest}-{self.fingerprint}"

    def process(self, source: MediaSource) -> MediaItem:
        cached = self.store.get(self.mm_hash(source))
        return self.store.put(self._checked(self.make_item(source), source)) if cached is None else cached

    @abstractmethod
    def make_item(self, source: MediaSource) -> MediaItem:
        """Make the item of a source, with `self.mm_hash(source)`. Called on threads. Raises `MediaError`."""

    def _checked(self, item: MediaItem, source: MediaSource) -> MediaItem:
        """The item; raises `MediaError` for one of another source or of other tokens than it says."""
        expansion = item.expansion
        tokens = item.num_tokens if expansion is None else sum(piece.times for piece in expansion if piece.embed)
        made = (item.modality, item.mm_hash, item.num_tokens)
        expected = (self.modality, self.mm_hash(source), tokens)
        if made != expected or tokens < 1:
            raise MediaError(
                f"{type(self).__name__}.make_item returned an item with modality, mm_hash and num_tokens {made}; "
                f"they have to be {expected}, with at least one token",
                digest=source.digest,
            )
        return item


_ATTRIBUTES = ("modality", "marker", "embed_token", "fingerprint", "policy", "store", "mm_hash", "process")


def check_processors(processors: Mapping[Modality, Any]) -> None:
    """Raise `ConfigError` unless `processors` maps modalities to processors of that modality."""
    for modality, processor in processors.items():
        if modality not in get_args(Modality):
            raise ConfigError("a key of processors", modality, get_args(Modality))
        lacking = [name for name in _ATTRIBUTES if not hasattr(processor, name)]
        if lacking:
            cure = f"an object with {', '.join(lacking)} (a subclass of StoringProcessor)"
            raise ConfigError(f"processors[{modality!r}]", processor, (cure,))
        if processor.modality != modality:
            raise ConfigError(f"the modality of processors[{modality!r}]", processor.modality, (repr(modality),))
