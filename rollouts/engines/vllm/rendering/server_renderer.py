"""Renders with a vLLM server's `/render`, for models without a local processor."""

from __future__ import annotations

import asyncio
import json
import os
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Self

import numpy as np

from renderers import MediaItem, MultiModalData, PlaceholderRange, RenderedTokens
from renderers.errors import ControlTokenInContentError, MediaError, MessageError, UnsupportedModalityError
from renderers.media.item import PixelScale
from renderers.media.policy import MediaPolicy
from renderers.media.store import MediaStore
from renderers.messages import (
    VIDEO_PART_TYPES,
    check_messages,
    check_tools,
    media_parts,
    media_value,
    message_tool_names,
)
from renderers.placement import PlacedItem
from renderers.rendered import TokenSpan
from rollouts.engines.vllm.error_context import name_server_in_errors
from rollouts.engines.vllm.http.connection import ServerConnection
from rollouts.engines.vllm.http.limits import HttpLimits
from rollouts.engines.vllm.rendering.image_renderer import ImageRenderer, RenderedImage
from rollouts.engines.vllm.rendering.render_client import RenderClient, ServerIdentity, image_part
from rollouts.engines.vllm.wire.render_response import RenderResponse, single_token
from rollouts.errors import InvalidRequestError, MalformedResultError, ServerError

_PartIndex = tuple[int, int]  # message index, part index


@dataclass(frozen=True, slots=True, eq=False)
class TokenChunk:
    """Token ids that go into the prompt unchanged."""

    token_ids: Sequence[int]


@dataclass(frozen=True, slots=True, eq=False)
class ImageChunk:
    """An image: bytes of a file, a PIL image, a uint8 array (height, width[, 1, 3 or 4]) or a data URL.

    `expected_tokens`, if given, is the number of tokens that it must take. Tokens around it (`<|vision_start|>`) belong
    into the neighbouring chunks.
    """

    image: Any
    expected_tokens: int | None = None


@dataclass(frozen=True, slots=True, eq=False)
class ImagePointer:
    """An image at a URL or path that the `MediaPolicy` must allow; this process fetches it, never the server."""

    location: str | os.PathLike[str]
    expected_tokens: int | None = None


Chunk = TokenChunk | ImageChunk | ImagePointer


class ServerRenderer:
    """Renders messages, or chunks of a prompt, into token ids and `MultiModalData` on a server.

        async with ServerRenderer.connect("http://127.0.0.1:8000") as renderer:
            rendered = await renderer.render(messages, add_generation_prompt=True)

    This process reads the images, under `policy`, and sends files: the server never opens a URL or a path. The server
    processes an image once, for all conversations that contain it; `store` keeps the items. Their `mm_hash` is our
    digest of the source and a fingerprint of the server.

    A server with uint8 pixels does not tell how its model converts them to floats. A trainer needs that, sampling does
    not: pass it as `scale` (`PixelScale` with the numbers of preprocessor_config.json), which is set on the items.

    The server tokenizes text as its tokenizer does: text of a user that equals a control token becomes that token.
    Text with a control token that the template prints around messages is refused; other control tokens are not known
    here. A renderer loaded from the model's directory (`load_renderer`) does not have this gap.
    """

    def __init__(
        self,
        connection: ServerConnection,
        *,
        model: str | None = None,
        policy: MediaPolicy | None = None,
        store: MediaStore | None = None,
        scale: PixelScale | None = None,
    ) -> None:
        self._connection = connection
        self._client = RenderClient(connection, model=model)
        self.policy = MediaPolicy() if policy is None else policy
        self.store = MediaStore() if store is None else store  # an empty store is falsy
        self._images = ImageRenderer(self._client, policy=self.policy, store=self.store, scale=scale)
        self._cache_holds_images = True
        self._owns_connection = False

    @classmethod
    def connect(
        cls,
        base_url: str,
        *,
        api_key: str | None = None,
        limits: HttpLimits | None = None,
        model: str | None = None,
        policy: MediaPolicy | None = None,
        store: MediaStore | None = None,
        scale: PixelScale | None = None,
    ) -> Self:
        """A renderer with a connection of its own, which `close` closes."""
        connection = ServerConnection(
            base_url, api_key=api_key, limits=limits or HttpLimits(), on_lost=lambda: renderer.forget()
        )
        renderer = cls(connection, model=model, policy=policy, store=store, scale=scale)
        renderer._owns_connection = True
        return renderer

    @property
    def base_url(self) -> str:
        return self._connection.base_url

    @name_server_in_errors
    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedTokens:
        """Render a conversation with the server's template.

        The server does not attribute tokens to messages: the result has one span without an owner (message -1, neither
        sampled nor content), so that masks by role are all False. Roles and tool names of the messages are set.

        Raises `MessageError` and `MediaError` with the message and part, and `EngineError` (`CapabilityError` where the
        server does not render).
        """
        checked = check_messages(messages)
        check_tools(tools)
        server = await self._client.identity()
        _check_texts(checked, server)
        images = await self._render_images(checked)
        options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        if tools:
            options["tools"] = [dict(tool) for tool in tools]
        if chat_template_kwargs:
            options["chat_template_kwargs"] = dict(chat_template_kwargs)
        request_name = f"render {uuid.uuid4().hex[:12]}"
        request = _openai_messages(checked, images)
        response = await self._render_messages(request, images, server, request_name, options)
        media = _place_images(response, [images[index] for index in sorted(images)], request_name)
        return _result(
            response.token_ids,
            media,
            server,
            message_roles=[message["role"] for message in checked],
            message_tool_names=message_tool_names(checked),
        )

    @name_server_in_errors
    async def render_chunks(self, chunks: Iterable[Chunk]) -> RenderedTokens:
        """Concatenate chunks: token ids unchanged, images as their placeholder tokens.

        Each image is rendered alone; only its placeholder tokens are used, not the tokens around them.
        Raises `InvalidRequestError` where an image takes another number of tokens than its chunk expects.
        """
        chunks = list(chunks)
        image_indices = [index for index, chunk in enumerate(chunks) if not isinstance(chunk, TokenChunk)]
        rendered = await asyncio.gather(*(self._render_chunk(index, chunks[index]) for index in image_indices))
        images = dict(zip(image_indices, rendered, strict=True))
        token_ids: list[int] = []
        media: list[PlacedItem] = []
        for index, chunk in enumerate(chunks):
            if isinstance(chunk, TokenChunk):
                token_ids += _chunk_ids(chunk, index)
                continue
            item, server = images[index]
            assert server.marker_id is not None  # a server without a marker renders no image
            media.append((item, PlaceholderRange(len(token_ids), item.num_tokens)))
            token_ids += [server.marker_id] * item.num_tokens
        return _result(token_ids, media, await self._client.identity())

    @name_server_in_errors
    async def image(self, reference: Any) -> MediaItem:
        """The item of one image: any value of an image part, or a `MediaSource`."""
        return (await self._images.render(reference)).item

    @name_server_in_errors
    async def identity(self) -> ServerIdentity:
        """The identity of the server; probed once, and again after `forget`."""
        return await self._client.identity()

    def forget(self) -> None:
        """Probe the server again and render every image again, because the server may have restarted."""
        self._client.forget()
        self._cache_holds_images = True

    async def close(self) -> None:
        """Close the connection, if it is this renderer's own."""
        if self._owns_connection:
            await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def _render_images(self, messages: Sequence[Mapping[str, Any]]) -> dict[_PartIndex, RenderedImage]:
        """The images of a conversation by (message index, part index), in its order."""
        parts = [(index, *part) for index, message in enumerate(messages) for part in media_parts(message)]
        images = await asyncio.gather(*(self._render_part(*part) for part in parts))
        return {(index, part_index): image for (index, part_index, _), image in zip(parts, images, strict=True)}

    async def _render_part(self, message_index: int, part_index: int, part: Mapping[str, Any]) -> RenderedImage:
        if part["type"] in VIDEO_PART_TYPES:
            raise UnsupportedModalityError(
                "a server renders only images here: /render does not say which tokens of a video stand for frames. "
                "Load a renderer from the model's directory",
                message_index=message_index,
                part_index=part_index,
            )
        try:
            return await self._images.render(media_value(part))
        except MediaError as error:
            raise error.at(message_index, part_index) from error.__cause__

    async def _render_chunk(self, index: int, chunk: Chunk) -> RenderedImage:
        name = f"chunk {index}"
        image = await self._images.render(_chunk_reference(chunk, name))
        expected: int | None = getattr(chunk, "expected_tokens", None)
        if expected is not None and image.item.num_tokens != expected:
            raise InvalidRequestError(
                name,
                f"the image takes {image.item.num_tokens} tokens on the server, not the expected {expected}. The two "
                "sides resize differently: compare size limits and patch sizes",
            )
        return image

    async def _render_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        images: Mapping[_PartIndex, RenderedImage],
        server: ServerIdentity,
        name: str,
        options: Mapping[str, Any],
    ) -> RenderResponse:
        """Render the whole conversation. Images are sent by name, because the server has just rendered them alone."""
        render = partial(self._client.render, messages, model=server.model, name=name, tensors=False, options=options)
        if images and self._cache_holds_images:
            try:
                return await render({})
            except ServerError:
                pass  # a cache that is disabled, full or of another process; any other error occurs again below
        response = await render(await asyncio.to_thread(self._images.files, images.values()))
        self._cache_holds_images = self._cache_holds_images and not images
        return response


def _check_texts(messages: Sequence[Mapping[str, Any]], server: ServerIdentity) -> None:
    """Raise where text that no model sampled contains a control token: the server would tokenize it as one."""
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            continue
        content = message["content"]
        texts = [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]
        for token in server.control_texts:
            if any(token in text for text in texts):
                raise ControlTokenInContentError(
                    f"the text contains {token!r}, which the server would tokenize as a control token. Load a renderer "
                    "from the model's directory, which tokenizes it as text, or escape it",
                    message_index=index,
                )


def _openai_messages(
    messages: Sequence[Mapping[str, Any]], images: Mapping[_PartIndex, RenderedImage]
) -> list[dict[str, Any]]:
    """The messages in OpenAI's format, each image as its name in the server's cache."""
    converted = []
    for index, message in enumerate(messages):
        message = dict(message)
        if isinstance(message.get("content"), list):
            message["content"] = [
                {"type": "text", "text": part["text"]}
                if part["type"] == "text"
                else image_part(images[index, position].name)
                for position, part in enumerate(message["content"])
            ]
        if "tool_calls" in message:
            message["tool_calls"] = [_openai_tool_call(call) for call in message["tool_calls"]]
        if "reasoning_content" in message:
            message["reasoning"] = message["reasoning_content"]
        converted.append(message)
    return converted


def _openai_tool_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", "id": "", **call, "function": {**function, "arguments": text}}


def _place_images(response: RenderResponse, images: Sequence[RenderedImage], name: str) -> list[PlacedItem]:
    """The items with the server's ranges, matched by name if the server returns our names, else by order."""
    if len(response.media) != len(images) or any(media.modality != "image" for media in response.media):
        raise MalformedResultError(
            name, f"/render returned {len(response.media)} media for a conversation with {len(images)} images"
        )
    by_name = {image.name: image for image in images}
    has_our_names = sorted(media.name for media in response.media) == sorted(image.name for image in images)
    in_order = [by_name[media.name] for media in response.media] if has_our_names else images
    placed = []
    for media, image in zip(response.media, in_order, strict=True):
        placeholder = media.placeholder
        if placeholder.length != image.item.num_tokens:
            raise MalformedResultError(
                name,
                f"/render gave image {image.item.source.digest[:12]} {image.item.num_tokens} tokens alone and "
                f"{placeholder.length} in the conversation, at {placeholder.offset}",
            )
        if single_token(response.token_ids, placeholder) != (marker := image.server.marker_id):
            where = f"{placeholder.offset}:{placeholder.end}"
            raise MalformedResultError(name, f"tokens {where} are not all the image token {marker}")
        placed.append((image.item, placeholder))
    return placed


def _result(token_ids: list[int], media: Sequence[PlacedItem], server: ServerIdentity, **known: Any) -> RenderedTokens:
    """A rendering without attribution; `multi_modal_data` is None only for a text model, as in other renderers."""
    return RenderedTokens(
        token_ids,
        (TokenSpan(0, len(token_ids), -1, False, False),) if token_ids else (),
        multi_modal_data=None if server.marker_id is None else MultiModalData.from_items(media),
        placeholder_token_ids={} if server.marker_id is None else {"image": server.marker_id},
        **known,
    )


def _chunk_ids(chunk: TokenChunk, index: int) -> list[int]:
    ids = np.asarray(chunk.token_ids)
    if ids.size == 0:
        return []
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0:
        raise InvalidRequestError(f"chunk {index}", "token_ids must be a flat list of integers of at least 0")
    return [int(token) for token in ids]


def _chunk_reference(chunk: Chunk, name: str) -> Any:
    if isinstance(chunk, ImagePointer):
        return chunk.location
    if not isinstance(chunk, ImageChunk):
        raise MessageError(f"{name} must be a TokenChunk, an ImageChunk or an ImagePointer, not {type(chunk).__name__}")
    if isinstance(chunk.image, str) and not chunk.image[:5].lower() == "data:":
        raise MessageError(f"{name}: an ImageChunk holds the image itself; pass a URL or path as an ImagePointer")
    return chunk.image
