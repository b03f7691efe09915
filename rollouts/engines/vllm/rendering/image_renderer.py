"""Images processed by a server, each one once for all callers on all event loops."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterable
from functools import partial
from typing import Any, NamedTuple

from renderers import MediaItem, MediaSource
from renderers.media.item import PixelScale
from renderers.media.policy import MediaPolicy
from renderers.media.reference import load_source
from renderers.media.store import MediaStore
from rollouts.engines.vllm.media.source_files import SourceFile, image_file
from rollouts.engines.vllm.rendering.render_client import RenderClient, ServerIdentity, image_part
from rollouts.engines.vllm.single_flight import SingleFlight
from rollouts.engines.vllm.wire.feature_decoding import decode_item
from rollouts.engines.vllm.wire.render_response import RenderedMedia, RenderResponse, single_token
from rollouts.errors import CapabilityError, MalformedResultError, ServerUnreachableError

# Attempts for an image whose rendering is interrupted by a change of server; more changes mean that it keeps crashing.
_MAX_ATTEMPTS = 4


class _ServerChangedError(Exception):
    """The server was replaced while it rendered the image."""


class RenderedImage(NamedTuple):
    """An image processed by a server, and the identity of that server."""

    item: MediaItem
    server: ServerIdentity

    @property
    def name(self) -> str:
        """The name of the image in the server's cache."""
        return image_name(self.item.source)


def image_name(source: MediaSource) -> str:
    """A name from our digest: vLLM's own hashes have had collisions, and with a name it computes no hash."""
    return f"render-{source.digest}"


class ImageRenderer:
    """Turns references into items by rendering them on a server.

    `policy` decides which references may be read and how large an image may be. `store` keeps items and sources.
    `scale` is set on items with uint8 pixels.
    """

    def __init__(
        self, client: RenderClient, *, policy: MediaPolicy, store: MediaStore, scale: PixelScale | None
    ) -> None:
        self._client = client
        self._policy = policy
        self._store = store
        self._scale = scale
        self._rendering: SingleFlight[MediaItem] = SingleFlight()

    async def render(self, reference: Any) -> RenderedImage:
        """Render the value of an image part. Raises `MediaError` and `EngineError`."""
        part = {"type": "image", "image": reference}
        source = await asyncio.to_thread(load_source, part, self._policy, self._store)
        for _ in range(_MAX_ATTEMPTS):
            server = await self._client.identity()
            mm_hash = f"{source.digest}-{server.fingerprint}"
            item = self._store.get(mm_hash)
            if item is not None:
                return RenderedImage(item, server)
            try:
                item = await self._rendering.run(mm_hash, partial(self._render, source, mm_hash, server))
            except _ServerChangedError:
                continue
            return RenderedImage(item, server)
        raise ServerUnreachableError(
            _request_name(source), f"the server restarted {_MAX_ATTEMPTS} times while it rendered the image"
        )

    def files(self, images: Iterable[RenderedImage]) -> dict[str, SourceFile]:
        """The file of each distinct image by its name in the server's cache."""
        distinct = {image.name: image.item.source for image in images}
        return {name: image_file(source, self._policy, jpeg_as_file=True) for name, source in distinct.items()}

    async def _render(self, source: MediaSource, mm_hash: str, server: ServerIdentity) -> MediaItem:
        """Let the server process an image, and store the item."""
        request_name, cache_name = _request_name(source), image_name(source)
        file = await asyncio.to_thread(image_file, source, self._policy, jpeg_as_file=True)
        # Some versions send no tensors if their cache holds the name. A random name cannot be in the cache.
        for sent_name in (cache_name, f"{cache_name}-{uuid.uuid4().hex}"):
            response, image = await self._render_alone(sent_name, file, server.model, request_name)
            if image.encoded is not None:
                break
        else:
            raise CapabilityError(
                request_name,
                "/render sends no tensors of the image, even for a random name that no cache can hold. Start the "
                "server with --mm-processor-cache-gb 0, render on one started with `vllm launch render`, or load a "
                "renderer from the model's directory",
            )
        num_tokens = image.placeholder.length
        token = single_token(response.token_ids, image.placeholder)
        if token is None or token != server.marker_id:
            raise CapabilityError(
                request_name,
                f"the {num_tokens} tokens of the image differ, and /render does not say which of them stand for its "
                "features. Load a renderer from the model's directory",
            )
        decoded = await asyncio.to_thread(decode_item, image.encoded, name=request_name)
        if not self._client.is_current(server):
            raise _ServerChangedError
        has_raw_pixels = any(tensor.dtype == "uint8" for tensor in decoded.values())
        item = MediaItem(
            "image",
            mm_hash,
            source,
            {name: tensor.tensor for name, tensor in decoded.items()},
            num_tokens,
            scale=self._scale if has_raw_pixels else None,
            fields={name: tensor.field for name, tensor in decoded.items()},
        )
        return self._store.put(item)

    async def _render_alone(
        self, cache_name: str, file: SourceFile, model: str, request_name: str
    ) -> tuple[RenderResponse, RenderedMedia]:
        """Render a message that contains only the image."""
        message = {"role": "user", "content": [image_part(cache_name)]}
        response = await self._client.render(
            [message], {cache_name: file}, model=model, name=request_name, tensors=True
        )
        if [media.modality for media in response.media] != ["image"]:
            raise MalformedResultError(
                request_name, f"/render found {len(response.media)} media in a message with one image"
            )
        return response, response.media[0]


def _request_name(source: MediaSource) -> str:
    return f"render of image {source.digest[:12]}"
