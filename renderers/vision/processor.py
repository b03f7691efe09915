"""The interface of media processors, and a base for those with a store."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal, Protocol

from renderers.media.item import MediaItem, Modality
from renderers.media.policy import MediaPolicy
from renderers.media.source import MediaSource
from renderers.media.store import MediaStore

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
        ...

    def mm_hash(self, source: MediaSource) -> str:
        """The digest of the pixels as the model sees them: source digest + fingerprint."""
        ...

    def process(self, source: MediaSource) -> MediaItem:
        """The item of a source, from the store when it was seen before. Raises `MediaError`."""
        ...


class StoringProcessor(ABC):
    """A `MediaProcessor` that makes the item of each distinct source once and keeps it in the store."""

    modality: Modality
    marker: str
    embed_token: str

    def __init__(self, fingerprint: str, policy: MediaPolicy, store: MediaStore) -> None:
        self.fingerprint = fingerprint
        self.policy = policy
        self.store = store

    def mm_hash(self, source: MediaSource) -> str:
        return f"{source.digest}-{self.fingerprint}"

    def process(self, source: MediaSource) -> MediaItem:
        cached = self.store.get(self.mm_hash(source))
        return self.store.put(self._item(source)) if cached is None else cached

    @abstractmethod
    def _item(self, source: MediaSource) -> MediaItem:
        """Make the item of a source."""
