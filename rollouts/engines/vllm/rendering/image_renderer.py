"""Images that a server has processed: each one once, whoever asks for it and on whichever event loop."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

from renderers import MediaItem, MediaSource
from renderers.media.pixel_scale import PixelScale
from renderers.media.policy import MediaPolicy
from renderers.media.reference import source_of_part
from renderers.media.store import MediaStore
from renderers.media.urls import allowed_target
from rollouts.engines.vllm.media.image_file import ImageFile, image_file
from rollouts.engines.vllm.rendering.render_client import RenderClient, ServerIdentity, image_part
from rollouts.engines.vllm.single_flight import SingleFlight
from rollouts.engines.vllm.wire.feature_decoding import decode_item
from rollouts.engines.vllm.wire.render_response import RenderedMedia, RenderResponse, single_token
from rollouts.errors import CapabilityError, MalformedResultError, ServerUnreachableError

# A server that becomes another one so often while one image is rendered is restarting in a circle.
_MOST_CHANGES = 4


class _ServerChangedError(Exception):
    """What was rendered belongs to a server that is gone."""


class RenderedImage(NamedTuple):
    """An image as a server made it, and what that server was."""

    item: MediaItem
    server: ServerIdentity

    @property
    def name(self) -> str:
        """The name under which the server's cache knows it."""
        return image_name(self.item.source)


def image_name(source: MediaSource) -> str:
    """Our digest and not the server's: its own hashes have confused images, and a name costs it no hashing."""
    return f"render-{source.digest}"


class ImageRenderer:
    """From references to items, by way of a server.

    `policy` decides what may be followed and how large an image may be. `store` keeps items and sources. `scale` is
    given to items of uint8 pixels.
    """

    def __init__(
        self, server: RenderClient, *, policy: MediaPolicy, store: MediaStore, scale: PixelScale | None
    ) -> None:
        self._server = server
        self._policy = policy
        self._store = store
        self._scale = scale
        self._rendering: SingleFlight[MediaItem] = SingleFlight()

    async def served(self, reference: Any) -> RenderedImage:
        """The image that a content part may hold. Raises `MediaError` and `EngineError`."""
        source = await asyncio.to_thread(self._source, reference)
        for _ in range(_MOST_CHANGES):
            server = await self._server.identity()
            mm_hash = f"{source.digest}-{server.fingerprint}"
            item = self._store.get(mm_hash)
            if item is not None:
                return RenderedImage(item, server)
            try:
                item = await self._rendering.run(mm_hash, _Rendering(self, source, mm_hash, server).item)
            except _ServerChangedError:
                continue
            return RenderedImage(item, server)
        raise ServerUnreachableError(
            _request_name(source), f"the server went away {_MOST_CHANGES} times while the image was rendered"
        )

    def file(self, source: MediaSource) -> ImageFile:
        """What is sent to the server for a source."""
        return image_file(source, self._policy)

    def files(self, served: Iterable[RenderedImage]) -> dict[str, ImageFile]:
        """What is sent for each distinct image, by the name that the server knows it under."""
        distinct = {image.name: image.item.source for image in served}
        return {name: self.file(source) for name, source in distinct.items()}

    def _source(self, reference: Any) -> MediaSource:
        """The source of a reference that the policy allows, also where the store knows it already."""
        if isinstance(reference, str) and reference[:8].lower().startswith(("http://", "https://")):
            allowed_target(reference, self._policy)
        known = self._store.references.get(reference)
        if known is not None and (known.is_pixels or known.nbytes <= self._policy.max_bytes):
            return known
        source = self._store.add_source(source_of_part({"type": "image", "image": reference}, self._policy))
        return self._store.references.put(reference, source)


@dataclass(frozen=True, slots=True)
class _Rendering:
    """One image on its way through the server."""

    images: ImageRenderer
    source: MediaSource
    mm_hash: str
    server: ServerIdentity

    async def item(self) -> MediaItem:
        file = await asyncio.to_thread(self.images.file, self.source)
        answer, medium = await self._alone(image_name(self.source), file)
        if medium.encoded is None:
            # Some versions answer with nothing where their cache knows the name. This name it cannot know.
            answer, medium = await self._alone(f"{image_name(self.source)}-{uuid.uuid4().hex}", file)
        if medium.encoded is None:
            raise CapabilityError(
                self._name,
                "/render names the image without its tensors, also under a name that no cache can hold. Start the "
                "server with --mm-processor-cache-gb 0, render on one started with `vllm launch render`, or load a "
                "renderer from the model's directory",
            )
        filling = single_token(answer.token_ids, medium.placeholder)
        if filling is None or filling != self.server.marker_id:
            raise CapabilityError(
                self._name,
                f"the {medium.placeholder.length} tokens of the image are of several kinds, and /render does not say "
                "which stand for its features. Load a renderer from the model's directory",
            )
        item = await asyncio.to_thread(self._decoded, medium.encoded, medium.placeholder.length)
        if not self.images._server.is_still(self.server):
            raise _ServerChangedError
        return self.images._store.put(item)

    async def _alone(self, name: str, file: ImageFile) -> tuple[RenderResponse, RenderedMedia]:
        """Render a message that holds nothing but the image."""
        message = {"role": "user", "content": [image_part(name)]}
        answer = await self.images._server.render(
            [message], {name: file}, model=self.server.model, name=self._name, tensors=True
        )
        if [medium.modality for medium in answer.media] != ["image"]:
            raise MalformedResultError(
                self._name, f"/render found {len(answer.media)} media in a message that holds one image"
            )
        return answer, answer.media[0]

    def _decoded(self, encoded: str, num_tokens: int) -> MediaItem:
        decoded = decode_item(encoded, name=self._name)
        raw_pixels = any(tensor.dtype == "uint8" for tensor in decoded.values())
        return MediaItem(
            "image",
            self.mm_hash,
            self.source,
            {name: tensor.tensor for name, tensor in decoded.items()},
            num_tokens,
            scale=self.images._scale if raw_pixels else None,
            fields={name: tensor.field for name, tensor in decoded.items()},
        )

    @property
    def _name(self) -> str:
        return _request_name(self.source)


def _request_name(source: MediaSource) -> str:
    return f"render of image {source.digest[:12]}"
