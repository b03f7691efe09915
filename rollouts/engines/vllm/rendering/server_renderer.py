"""Rendering where no local processor exists: a vLLM server's own `/render` makes ids and tensors."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

import numpy as np

from renderers import MediaItem, MultiModalData, PlaceholderRange, RenderedTokens
from renderers.errors import ControlTokenInContentError, MediaError, MessageError, UnsupportedModalityError
from renderers.media.pixel_scale import PixelScale
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
from rollouts.engines.vllm.rendering.prompt_chunks import Chunk, ImageChunk, ImagePointer, TokenChunk
from rollouts.engines.vllm.rendering.render_client import RenderClient, ServerIdentity, image_part
from rollouts.engines.vllm.wire.render_response import RenderResponse
from rollouts.errors import InvalidRequestError, MalformedResultError, ServerError

_PLACE = tuple[int, int]


class ServerRenderer:
    """Turns messages, or chunks of a prompt, into token ids and `MultiModalData` by asking a server.

        async with ServerRenderer.connect("http://127.0.0.1:8000") as renderer:
            rendered = await renderer.render(messages, add_generation_prompt=True)

    Images are read here, under `policy`, and sent as files: the server never follows a URL or a path. Each one is
    processed once per server and digest, however many conversations show it; `store` keeps the items. Their `mm_hash`
    is our digest of the source and a fingerprint of the server.

    A server whose pixels are uint8 does not say how its model makes floats of them. `scale` says it (`PixelScale` with
    the numbers of preprocessor_config.json) and goes into the items, for trainers; sampling does without.

    The server renders as its template and tokenizer do: text of a user that spells a control token becomes that token.
    Texts with the control tokens that the template prints around a message are refused; others the server does not
    name. A renderer that is loaded from the model's directory (`load_renderer`) has no such gap.
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
        self._server = RenderClient(connection, model=model)
        self.policy = MediaPolicy() if policy is None else policy
        self.store = MediaStore() if store is None else store  # an empty one is false
        self._images = ImageRenderer(self._server, policy=self.policy, store=self.store, scale=scale)
        self._finds_names = True
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
        made: list[Self] = []
        connection = ServerConnection(
            base_url, api_key=api_key, limits=limits or HttpLimits(), on_lost=lambda: made[0].forget()
        )
        made.append(cls(connection, model=model, policy=policy, store=store, scale=scale))
        made[0]._owns_connection = True
        return made[0]

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

        Who owns a token the server does not tell: the result has one span without an owner (message -1, neither sampled
        nor content), so masks by role are all False. Roles and tool names of the messages are there.

        Raises `MessageError` and `MediaError`, both naming the place, and `EngineError` (`CapabilityError` where the
        server does not render).
        """
        checked = check_messages(messages)
        check_tools(tools)
        server = await self._server.identity()
        _check_texts(checked, server)
        images = await self._served(checked)
        names = {place: image.name for place, image in images.items()}
        options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        if tools:
            options["tools"] = [dict(tool) for tool in tools]
        if chat_template_kwargs:
            options["chat_template_kwargs"] = dict(chat_template_kwargs)
        request_name = f"render {uuid.uuid4().hex[:12]}"
        answer = await self._rendered(_for_server(checked, names), images, server, request_name, options)
        media = _placed(answer, [images[place] for place in sorted(images)], request_name)
        return _result(
            answer.token_ids,
            media,
            server,
            message_roles=[message["role"] for message in checked],
            message_tool_names=message_tool_names(checked),
        )

    @name_server_in_errors
    async def render_chunks(self, chunks: Iterable[Chunk]) -> RenderedTokens:
        """Put chunks one behind the other: token ids as they are, images as the tokens that stand for them.

        Each image is rendered alone; only its placeholder tokens are taken, not what the template prints around them.
        Raises `InvalidRequestError` where an image takes another number of tokens than its chunk expects.
        """
        listed = list(chunks)
        shown = [index for index, chunk in enumerate(listed) if not isinstance(chunk, TokenChunk)]
        served = await asyncio.gather(*(self._chunk(index, listed[index]) for index in shown))
        image_of = dict(zip(shown, served, strict=True))
        token_ids: list[int] = []
        media: list[PlacedItem] = []
        for index, chunk in enumerate(listed):
            if isinstance(chunk, TokenChunk):
                token_ids += _ids(chunk, index)
                continue
            item, server = image_of[index]
            assert server.marker_id is not None  # a server without one rendered no image
            media.append((item, PlaceholderRange(len(token_ids), item.num_tokens)))
            token_ids += [server.marker_id] * item.num_tokens
        return _result(token_ids, media, await self._server.identity())

    @name_server_in_errors
    async def image(self, reference: Any) -> MediaItem:
        """The item of one image: of anything that an image part may hold, or of a `MediaSource`."""
        return (await self._images.served(reference)).item

    @name_server_in_errors
    async def identity(self) -> ServerIdentity:
        """What the server is; asked once, and again after `forget`."""
        return await self._server.identity()

    def forget(self) -> None:
        """The server may have been started anew: ask again what it is, and render every image again."""
        self._server.forget()
        self._finds_names = True

    async def close(self) -> None:
        """Close the connection, if it is this renderer's own."""
        if self._owns_connection:
            await self._connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def _served(self, messages: Sequence[Mapping[str, Any]]) -> dict[_PLACE, RenderedImage]:
        """(message, part) -> the image there, in the order of the conversation."""
        places = [(index, *part) for index, message in enumerate(messages) for part in media_parts(message)]
        served = await asyncio.gather(*(self._part(*place) for place in places))
        return {(index, part_index): one for (index, part_index, _), one in zip(places, served, strict=True)}

    async def _part(self, message_index: int, part_index: int, part: Mapping[str, Any]) -> RenderedImage:
        if part["type"] in VIDEO_PART_TYPES:
            raise UnsupportedModalityError(
                "a server is only asked for images: /render does not say which tokens of a video stand for frames. "
                "Load a renderer from the model's directory",
                message_index=message_index,
                part_index=part_index,
            )
        try:
            return await self._images.served(media_value(part))
        except MediaError as error:
            raise error.at(message_index, part_index) from error.__cause__

    async def _chunk(self, index: int, chunk: Chunk) -> RenderedImage:
        place = f"chunk {index}"
        served = await self._images.served(_reference(chunk, place))
        expected: int | None = getattr(chunk, "expected_tokens", None)
        if expected is not None and served.item.num_tokens != expected:
            raise InvalidRequestError(
                place,
                f"{expected} tokens are expected of the image and the server makes {served.item.num_tokens} of it. "
                "The two sides resize differently: compare size limits and patch sizes",
            )
        return served

    async def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        images: Mapping[_PLACE, RenderedImage],
        server: ServerIdentity,
        name: str,
        options: Mapping[str, Any],
    ) -> RenderResponse:
        """The whole conversation. Its images the server has just seen: their names do, where its cache kept them."""
        ask = partial(self._server.render, messages, model=server.model, name=name, tensors=False, options=options)
        if images and self._finds_names:
            try:
                return await ask({})
            except ServerError:
                pass  # a cache that is off, full, or another process's; a real fault comes again with the files
        answer = await ask(await asyncio.to_thread(self._images.files, images.values()))
        self._finds_names = self._finds_names and not images
        return answer


def _check_texts(messages: Sequence[Mapping[str, Any]], server: ServerIdentity) -> None:
    """Raise where text that no model sampled spells a control token: the server would take it for one."""
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            continue
        content = message["content"]
        texts = [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]
        for token in server.control_texts:
            if any(token in text for text in texts):
                raise ControlTokenInContentError(
                    f"the text holds {token!r}, which the server would take for a control token. Load a renderer from "
                    "the model's directory, which keeps it text, or escape it",
                    message_index=index,
                )


def _for_server(messages: Sequence[Mapping[str, Any]], names: Mapping[_PLACE, str]) -> list[dict[str, Any]]:
    """The messages in OpenAI's shapes, with names for images."""
    shaped = []
    for index, message in enumerate(messages):
        message = dict(message)
        if isinstance(message.get("content"), list):
            parts = enumerate(message["content"])
            message["content"] = [_part(part, names.get((index, part_index))) for part_index, part in parts]
        if "tool_calls" in message:
            message["tool_calls"] = [_call(call) for call in message["tool_calls"]]
        if "reasoning_content" in message:
            message["reasoning"] = message["reasoning_content"]
        shaped.append(message)
    return shaped


def _part(part: Mapping[str, Any], name: str | None) -> dict[str, Any]:
    return {"type": "text", "text": part["text"]} if name is None else image_part(name)


def _call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    arguments = function["arguments"]
    spelled = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    return {"type": "function", "id": "", **call, "function": {**function, "arguments": spelled}}


def _placed(answer: RenderResponse, images: Sequence[RenderedImage], name: str) -> list[PlacedItem]:
    """The items at the ranges that the server gave them: by their names, else in the order of the messages."""
    if len(answer.media) != len(images) or any(medium.modality != "image" for medium in answer.media):
        raise MalformedResultError(
            name, f"/render placed {len(answer.media)} media of a conversation with {len(images)} images"
        )
    by_name = {image.name: image for image in images}
    ours = sorted(medium.name for medium in answer.media) == sorted(image.name for image in images)
    in_order = [by_name[medium.name] for medium in answer.media] if ours else images
    placed = []
    for medium, image in zip(answer.media, in_order, strict=True):
        placeholder = medium.placeholder
        if placeholder.length != image.item.num_tokens:
            raise MalformedResultError(
                name,
                f"/render gave image {image.item.source.digest[:12]} {image.item.num_tokens} tokens alone and "
                f"{placeholder.length} in the conversation, at {placeholder.offset}",
            )
        start, end = placeholder.offset, placeholder.end
        if set(answer.token_ids[start:end]) != {image.server.marker_id}:
            raise MalformedResultError(name, f"tokens {start}:{end} are not all those of an image")
        placed.append((image.item, placeholder))
    return placed


def _result(token_ids: list[int], media: Sequence[PlacedItem], server: ServerIdentity, **known: Any) -> RenderedTokens:
    """As a renderer of the same model would: media are None only where the model reads nothing but text."""
    return RenderedTokens(
        token_ids,
        (TokenSpan(0, len(token_ids), -1, False, False),) if token_ids else (),
        multi_modal_data=None if server.marker_id is None else MultiModalData.from_items(media),
        placeholder_token_ids={} if server.marker_id is None else {"image": server.marker_id},
        **known,
    )


def _ids(chunk: TokenChunk, index: int) -> list[int]:
    ids = np.asarray(chunk.token_ids)
    if ids.size == 0:
        return []
    if ids.ndim != 1 or ids.dtype.kind not in "iu" or ids.min() < 0:
        raise InvalidRequestError(f"chunk {index}", "token ids are a flat list of integers from 0 on")
    return [int(one) for one in ids]


def _reference(chunk: Chunk, place: str) -> Any:
    if isinstance(chunk, ImagePointer):
        return chunk.location
    if not isinstance(chunk, ImageChunk):
        raise MessageError(f"{place} is a TokenChunk, an ImageChunk or an ImagePointer, not {type(chunk).__name__}")
    if isinstance(chunk.image, str) and not chunk.image[:5].lower() == "data:":
        raise MessageError(f"{place}: an ImageChunk holds the image itself; a URL or path goes into an ImagePointer")
    return chunk.image
