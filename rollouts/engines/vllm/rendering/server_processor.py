"""A server as the processor of images: for what makes items of sources again, such as samples of a trajectory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from renderers import MediaItem, MediaSource, MediaStore
from renderers.media.item import Modality
from renderers.media.policy import MediaPolicy

if TYPE_CHECKING:
    from rollouts.engines.vllm.rendering.blocking_renderer import BlockingServerRenderer


class ServerImageProcessor:
    """`MediaProcessor` by way of a `BlockingServerRenderer`; must not be called on the thread of an event loop.

        samples_from_trajectory(episode, advantage=1.0, processors=renderer.sync.processors)

    What the server still is, or has become, is looked up at every call: `mm_hash` changes when it does.
    """

    modality: Modality = "image"

    def __init__(
        self, renderer: BlockingServerRenderer, *, marker: str, policy: MediaPolicy, store: MediaStore
    ) -> None:
        self._renderer = renderer
        self.marker = marker
        self.embed_token = marker
        self.policy = policy
        self.store = store

    @property
    def fingerprint(self) -> str:
        """Version, model and processing of the server, as far as it shows them."""
        return self._renderer.identity().fingerprint

    def mm_hash(self, source: MediaSource) -> str:
        """The digest of the pixels as the model sees them: source digest + fingerprint."""
        return f"{source.digest}-{self.fingerprint}"

    def process(self, source: MediaSource) -> MediaItem:
        """The item of a source, from the store or the server. Raises `MediaError` and `EngineError`."""
        return self._renderer.image(source)
