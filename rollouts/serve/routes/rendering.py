"""Routes between messages, text and token ids: `/v1/chat/completions/render`, `/tokenize`, `/detokenize`."""

from __future__ import annotations

import asyncio
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import BaseModel, NonNegativeInt
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from renderers import MultiModalData, RenderedTokens
from renderers.messages import MEDIA_PART_TYPES
from rollouts.engines.vllm.features import encode_features
from rollouts.serve.bodies import read_model, read_object
from rollouts.serve.errors import RequestError
from rollouts.serve.generate_body import places
from rollouts.serve.media import named_sources
from rollouts.serve.served_model import check_length
from rollouts.serve.server_state import ServerState


class MessagesBody(BaseModel):
    """Messages to render. Members that are not named here are ignored."""

    model: str | None = None
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class RenderBody(MessagesBody):
    mm_payload: Literal["full", "none"] | None = None


class TokenizeChatBody(MessagesBody):
    return_token_strs: bool | None = False


class TokenizeTextBody(BaseModel):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class DetokenizeBody(BaseModel):
    model: str | None = None
    tokens: list[NonNegativeInt]


class RenderingRoutes:
    """Routes that run the chat template and the tokenizer, never the model."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self.routes = [
            Route("/v1/chat/completions/render", self._render, methods=["POST"]),
            Route("/tokenize", self._tokenize, methods=["POST"]),
            Route("/detokenize", self._detokenize, methods=["POST"]),
        ]

    async def _render(self, request: Request) -> Response:
        body = await read_model(request, RenderBody)
        await self._state.adapter_of(body.model)
        content = await asyncio.to_thread(self._render_response, body)
        return Response(content, media_type="application/json")

    def _render_response(self, body: RenderBody) -> bytes:
        rendered = self._rendered(body)
        check_length(rendered.token_ids, self._state.model.max_model_len)
        fields = {
            "request_id": f"chatcmpl-{uuid.uuid4().hex}",
            "model": self._state.model.name,
            "token_ids": rendered.token_ids,
            "content_parts": None,
            "stream": False,
        }
        opening = json.dumps(fields)[:-1].encode()
        media = rendered.multi_modal_data
        if media is None or media.is_empty():
            return opening + b',"features":null}'
        return b"".join([opening, b',"features":', *self._features(body, media), b"}"])

    def _features(self, body: RenderBody, media: MultiModalData) -> list[bytes | memoryview]:
        model = self._state.model
        if refused := media.mm_hashes.keys() - model.media.keys():
            raise RequestError(400, f"{model.name} takes no {', '.join(sorted(refused))} as features")
        names = _names(body.messages, media)
        if body.mm_payload == "none":
            content = {"mm_hashes": names, "mm_placeholders": places(media), "kwargs_data": None}
            return [json.dumps(content).encode()]
        named = MultiModalData(names, media.mm_placeholders, media.mm_items)
        # Only pixels may be of another dtype than their tensors, and a model has one dtype of pixels.
        pixel_dtype = model.media["image"].pixel_dtype if "image" in model.media else "float32"
        return list(encode_features(named, pixel_dtype=pixel_dtype))

    async def _tokenize(self, request: Request) -> Response:
        body: TokenizeChatBody | TokenizeTextBody
        if "messages" in await read_object(request):
            body = await read_model(request, TokenizeChatBody)
        else:
            body = await read_model(request, TokenizeTextBody)
        await self._state.adapter_of(body.model)
        content = await asyncio.to_thread(self._tokenize_response, body)
        return Response(content, media_type="application/json")

    def _tokenize_response(self, body: TokenizeChatBody | TokenizeTextBody) -> bytes:
        tokens, strings = self._tokens(body), None
        if body.return_token_strs:
            strings = self._state.tokenizer.convert_ids_to_tokens(tokens)
        length = self._state.model.max_model_len
        fields = {"count": len(tokens), "max_model_len": length, "tokens": tokens, "token_strs": strings}
        return json.dumps(fields, ensure_ascii=False).encode()

    def _tokens(self, body: MessagesBody | TokenizeTextBody) -> list[int]:
        if isinstance(body, MessagesBody):
            return self._rendered(body).token_ids
        if body.add_special_tokens:
            return self._state.tokenizer.encode(body.prompt)
        return self._state.tokenizer.encode(body.prompt, add_special_tokens=False)

    async def _detokenize(self, request: Request) -> Response:
        body = await read_model(request, DetokenizeBody)
        await self._state.adapter_of(body.model)
        return JSONResponse({"prompt": await asyncio.to_thread(self._state.renderer.tokenizer.decode, body.tokens)})

    def _rendered(self, body: MessagesBody) -> RenderedTokens:
        """Raises `RequestError` (400) and `RendererError`."""
        unsupported = {
            "continue_final_message": body.continue_final_message,
            "chat_template": body.chat_template,
            "chat_template_kwargs": body.chat_template_kwargs,
        }
        if named := [name for name, value in unsupported.items() if value]:
            raise RequestError(400, f"{named[0]} is not supported by this server", param=named[0])
        messages = named_sources(body.messages, self._state.renderer, self._state.sources)
        return self._state.renderer.render(messages, tools=body.tools, add_generation_prompt=body.add_generation_prompt)


def _names(messages: list[dict[str, Any]], media: MultiModalData) -> dict[str, list[str]]:
    """The names of the media by modality: those that their parts give them, else the hash of their tensors."""
    return {
        modality: _names_of([part for message in messages for part in _parts(message, modality)], hashes)
        for modality, hashes in media.mm_hashes.items()
    }


def _names_of(parts: list[Mapping[str, Any]], hashes: Sequence[str]) -> list[str]:
    given = [part.get("uuid") for part in parts]
    if len(given) != len(hashes):  # the template moves or drops messages
        return list(hashes)
    return [name if isinstance(name, str) else mm_hash for name, mm_hash in zip(given, hashes, strict=True)]


def _parts(message: Mapping[str, Any], modality: str) -> list[Mapping[str, Any]]:
    content = message.get("content")
    if not isinstance(content, list):
        return []
    return [
        part for part in content if isinstance(part, dict) and MEDIA_PART_TYPES.get(part.get("type", "")) == modality
    ]
