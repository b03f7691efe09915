"""A renderer that lets a server render: `vllm serve`, or `vllm launch render`, which loads no weights."""

import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Self

from renderers import MediaItem, MediaSource, MultiModalData, RenderedTokens
from renderers.errors import MediaError, MessageError
from renderers.media.item import PixelScale
from renderers.media.policy import MediaPolicy
from renderers.media.reference import load_source
from renderers.media.store import MediaStore
from renderers.messages import (
    MEDIA_PART_TYPES,
    VIDEO_PART_TYPES,
    Modality,
    check_messages,
    check_tools,
    media_parts,
    message_tool_names,
)
from renderers.placement import PlacedItem
from renderers.rendered import TokenSpan
from rollouts.calls import ClosedAtEnd
from rollouts.engines.event_loop import SingleFlight
from rollouts.engines.http.connection import HttpLimits, ServerConnection
from rollouts.engines.http.error_context import error_context
from rollouts.engines.http.source_files import SourceFile, image_file, sound_file
from rollouts.engines.vllm.feature_decoding import decode_item
from rollouts.engines.vllm.render_response import RenderedMedia, RenderResponse, single_token
from rollouts.engines.vllm.render_server import RenderServer, ServerIdentity, media_part
from rollouts.errors import (
    CapabilityError,
    MalformedResultError,
    ServerError,
    ServerUnreachableError,
)

# Attempts for a medium whose rendering is interrupted by a change of server; more changes mean that it keeps
# crashing.
_MAX_ATTEMPTS = 4


class RenderedMedium(NamedTuple):
    """An image or sound processed by a server, and the identity of that server for its modality."""

    item: MediaItem
    server: ServerIdentity

    @property
    def name(self) -> str:
        """The name of the medium in the server's cache."""
        return media_name(self.item.source)


def media_name(source: MediaSource) -> str:
    """A name from our digest: vLLM's own hashes have had collisions, and with a name it computes no hash."""
    return f"render-{source.digest}"


def _request_name(source: MediaSource, modality: Modality) -> str:
    return f"render of {modality} {source.digest[:12]}"


def _file_of(source: MediaSource, modality: Modality, policy: MediaPolicy) -> SourceFile:
    """The file for a server that decides about size, and about rate and channels."""
    if modality == "audio":
        return sound_file(source, policy, None)
    return image_file(source, policy, jpeg_as_file=True)


_PartIndex = tuple[int, int]  # message index, part index


class ServerRenderer(ClosedAtEnd):
    """Renders messages into token ids and `MultiModalData` on a server.

        async with ServerRenderer.connect("http://127.0.0.1:8000") as renderer:
            rendered = await renderer.render(messages, add_generation_prompt=True)

    This process reads images and sounds, under `policy`, and sends files: the server never opens a URL or a
    path. The server processes each once, for all conversations that contain it; `store` keeps the items.
    Their `mm_hash` is our digest of the source and a fingerprint of the server. A sound is mixed and
    resampled by the server.

    A server with uint8 pixels does not tell how its model converts them to floats. A trainer needs that,
    sampling does not: pass it as `scale` (`PixelScale` with the numbers of preprocessor_config.json), which
    is set on the items.

    The server tokenizes text as its tokenizer does: text of a user that equals a control token becomes that
    token. Text with a control token that the template prints around messages is refused; other control tokens
    are not known here. A renderer loaded from the model's directory (`load_renderer`) does not have this gap.
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
        self._server = RenderServer(connection, model)
        self.policy = MediaPolicy() if policy is None else policy
        self.store = MediaStore() if store is None else store  # an empty store is falsy
        self._scale = scale
        self._processing: SingleFlight[MediaItem | None] = SingleFlight()
        self._cache_holds_media = True

    @classmethod
    def connect(
        cls,
        base_url: str,
        *,
        api_key: str | None = None,
        limits: HttpLimits | None = None,
        **options: Any,
    ) -> Self:
        """A renderer of the server at an address; `options` are those of the constructor."""
        connection = ServerConnection(
            base_url, api_key=api_key, limits=limits or HttpLimits(), on_lost=lambda: renderer.forget()
        )
        renderer = cls(connection, **options)
        return renderer

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        chat_template_kwargs: Mapping[str, Any] | None = None,
    ) -> RenderedTokens:
        """Render a conversation with the server's template.

        The server does not attribute tokens to messages: the result has one span without an owner (message
        -1, neither sampled nor content), so that masks by role are all False. Roles and tool names of the
        messages are set.

        Raises `MessageError` and `MediaError` with the message and part, and `EngineError` (`CapabilityError`
        where the server does not render).
        """
        checked = check_messages(messages)
        check_tools(tools)
        options: dict[str, Any] = {"add_generation_prompt": add_generation_prompt}
        if tools:
            options["tools"] = [dict(tool) for tool in tools]
        if chat_template_kwargs:
            options["chat_template_kwargs"] = dict(chat_template_kwargs)
        with error_context(self._connection):
            return await self._render(checked, options)

    async def _render(self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any]) -> RenderedTokens:
        server = await self._server.identity()
        _check_texts(messages, server)
        parts = [(index, *part) for index, message in enumerate(messages) for part in media_parts(message)]
        made = await asyncio.gather(*(self._render_part(*part) for part in parts))
        # By message index and part index, in the order of the conversation.
        media = {(index, part_index): medium for (index, part_index, _), medium in zip(parts, made, strict=True)}
        request_name = f"render {uuid.uuid4().hex[:12]}"
        request = _openai_messages(messages, media)
        response = await self._render_messages(request, media, server, request_name, options)
        in_order = [media[index] for index in sorted(media)]
        placed = _place_media(response, in_order, request_name)
        ids = response.token_ids
        markers = {"image": server.marker_id, **{each.item.modality: each.server.marker_id for each in in_order}}
        return RenderedTokens(
            ids,
            (TokenSpan(0, len(ids), -1, False, False),),
            # None for a model without images that got no sound.
            multi_modal_data=None if server.marker_id is None and not placed else MultiModalData.from_items(placed),
            placeholder_token_ids={modality: token for modality, token in markers.items() if token is not None},
            message_roles=[message["role"] for message in messages],
            message_tool_names=message_tool_names(messages),
        )

    def forget(self) -> None:
        """Probe the server again and render every medium again, because the server may have restarted."""
        self._server.forget()
        self._cache_holds_media = True

    async def close(self) -> None:
        """Close the connection."""
        await self._connection.close()

    async def _render_part(self, message_index: int, part_index: int, part: Mapping[str, Any]) -> RenderedMedium:
        if part["type"] in VIDEO_PART_TYPES:
            raise MessageError(
                "a server renders images and sounds here: /render does not say which tokens of a video "
                "stand for frames. Load a renderer from the model's directory",
                message_index=message_index,
                part_index=part_index,
            )
        try:
            return await self._render_medium(part)
        except MediaError as error:
            raise error.at(message_index, part_index) from error.__cause__

    async def _render_messages(
        self,
        messages: Sequence[Mapping[str, Any]],
        media: Mapping[_PartIndex, RenderedMedium],
        server: ServerIdentity,
        name: str,
        options: Mapping[str, Any],
    ) -> RenderResponse:
        """Render the whole conversation. Media are sent by name, because the server has just rendered them alone."""
        send = partial(self._server.render, messages, model=server.model, name=name, tensors=False, options=options)
        if media and self._cache_holds_media:
            try:
                # First by name: the server has just rendered each of them alone.
                return await send({})
            except ServerError:
                pass  # a cache that is disabled, full or of another process; any other error occurs again below
        items = {medium.name: medium.item for medium in media.values()}
        files = {
            name: await asyncio.to_thread(_file_of, item.source, item.modality, self.policy)
            for name, item in items.items()
        }
        response = await send(files)
        self._cache_holds_media = self._cache_holds_media and not media
        return response

    # One image or sound.

    async def _render_medium(self, part: Mapping[str, Any]) -> RenderedMedium:
        """Render the medium of an image or audio part. Raises `MediaError` and `EngineError`."""
        modality = MEDIA_PART_TYPES[part["type"]]
        source = await asyncio.to_thread(load_source, part, self.policy, self.store)
        for _ in range(_MAX_ATTEMPTS):
            probed = await self._server.identity()
            server = (
                probed
                if modality != "audio"
                else await self._server.identity_for_sounds(probed, _request_name(source, modality))
            )
            mm_hash = f"{source.digest}-{server.fingerprint}"
            item = self.store.get(mm_hash)
            if item is None:
                process = partial(self._process, source, modality, mm_hash, server, probed)
                item = await self._processing.run(mm_hash, process)
            if item is not None:
                return RenderedMedium(item, server)
        raise ServerUnreachableError(
            _request_name(source, modality), f"the server restarted {_MAX_ATTEMPTS} times while it rendered it"
        )

    async def _process(
        self, source: MediaSource, modality: Modality, mm_hash: str, server: ServerIdentity, probed: ServerIdentity
    ) -> MediaItem | None:
        """Let the server process an image or a sound, and store the item; None where it was replaced meanwhile."""
        request_name, cache_name = _request_name(source, modality), media_name(source)
        file = await asyncio.to_thread(_file_of, source, modality, self.policy)
        # Some versions send no tensors if their cache holds the name. A random name cannot be in the cache.
        for sent_name in (cache_name, f"{cache_name}-{uuid.uuid4().hex}"):
            response, medium = await self._render_alone(sent_name, modality, file, server.model, request_name)
            if medium.encoded is not None:
                break
        else:
            raise CapabilityError(
                request_name,
                f"/render sends no tensors of the {modality}, even for a random name that no cache can "
                "hold. Start the server with --mm-processor-cache-gb 0, render on one started with `vllm "
                "launch render`, or load a renderer from the model's directory",
            )
        num_tokens = medium.placeholder.length
        token = single_token(response.token_ids, medium.placeholder)
        if token is None or token != server.marker_id:
            raise CapabilityError(
                request_name,
                f"the {num_tokens} tokens of the {modality} differ, and /render does not say which of them "
                "stand for its features. Load a renderer from the model's directory",
            )
        decoded = await asyncio.to_thread(decode_item, medium.encoded, name=request_name)
        # The hash has the fingerprint of the server of before.
        if not self._server.is_still(probed):
            return None
        has_raw_pixels = any(tensor.dtype == "uint8" for tensor in decoded.values())
        item = MediaItem(
            modality,
            mm_hash,
            source,
            {name: tensor.tensor for name, tensor in decoded.items()},
            num_tokens,
            scale=self._scale if has_raw_pixels else None,
            fields={name: tensor.field for name, tensor in decoded.items()},
        )
        return self.store.put(item)

    async def _render_alone(
        self, cache_name: str, modality: Modality, file: SourceFile, model: str, request_name: str
    ) -> tuple[RenderResponse, RenderedMedia]:
        message = {"role": "user", "content": [media_part(modality, cache_name)]}
        response = await self._server.render(
            [message], {cache_name: file}, model=model, name=request_name, tensors=True
        )
        if [media.modality for media in response.media] != [modality]:
            raise MalformedResultError(
                request_name, f"/render found {len(response.media)} media in a message with one {modality}"
            )
        return response, response.media[0]


def _check_texts(messages: Sequence[Mapping[str, Any]], server: ServerIdentity) -> None:
    """Raise where text that no model sampled contains a control token: the server would tokenize it as one."""
    for index, message in enumerate(messages):
        if message["role"] == "assistant":
            continue
        content = message["content"]
        texts = [content] if isinstance(content, str) else [part["text"] for part in content if part["type"] == "text"]
        for token in server.control_texts:
            if any(token in text for text in texts):
                raise MessageError(
                    f"the text contains {token!r}, which the server would tokenize as a control token. Load "
                    "a renderer from the model's directory, which tokenizes it as text, or escape it",
                    message_index=index,
                )


def _openai_messages(
    messages: Sequence[Mapping[str, Any]], media: Mapping[_PartIndex, RenderedMedium]
) -> list[dict[str, Any]]:
    """The messages in OpenAI's format, each medium as its name in the server's cache."""
    converted = []
    for index, message in enumerate(messages):
        message = dict(message)
        if isinstance(message.get("content"), list):
            message["content"] = [
                {"type": "text", "text": part["text"]}
                if part["type"] == "text"
                else media_part(media[index, position].item.modality, media[index, position].name)
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


def _place_media(response: RenderResponse, given: Sequence[RenderedMedium], name: str) -> list[PlacedItem]:
    """The items with the server's ranges, matched by name if the server returns our names, else by order."""
    by_name = {medium.name: medium for medium in given}
    has_our_names = sorted(media.name for media in response.media) == sorted(medium.name for medium in given)
    in_order = [by_name[media.name] for media in response.media] if has_our_names else given
    if [media.modality for media in response.media] != [medium.item.modality for medium in in_order]:
        raise MalformedResultError(
            name, f"/render returned {len(response.media)} media for a conversation with {len(given)}, or other kinds"
        )
    placed = []
    for media, medium in zip(response.media, in_order, strict=True):
        placeholder, item = media.placeholder, medium.item
        if placeholder.length != item.num_tokens:
            raise MalformedResultError(
                name,
                f"/render gave {item.modality} {item.source.digest[:12]} {item.num_tokens} tokens alone and "
                f"{placeholder.length} in the conversation, at {placeholder.offset}",
            )
        if single_token(response.token_ids, placeholder) != (marker := medium.server.marker_id):
            where = f"{placeholder.offset}:{placeholder.end}"
            raise MalformedResultError(name, f"tokens {where} are not all the {item.modality} token {marker}")
        placed.append((item, placeholder))
    return placed
