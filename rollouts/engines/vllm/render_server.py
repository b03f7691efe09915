"""A server that renders: what it is, and one request to it."""

import asyncio
import hashlib
import json
import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from renderers.messages import Modality
from rollouts.engines.event_loop import SingleFlight
from rollouts.engines.http.capability_cache import PROBE_NAME, probe_request
from rollouts.engines.http.connection import ServerConnection
from rollouts.engines.http.exchange import Body
from rollouts.engines.http.responses import HttpResponse, response_error
from rollouts.engines.http.source_files import SourceFile
from rollouts.engines.vllm.feature_decoding import encoded_entries
from rollouts.engines.vllm.probe_requests import (
    RENDER_PATH,
    json_object,
    render_message,
    render_probe,
    served_model,
    server_version,
)
from rollouts.engines.vllm.render_response import RenderResponse, parse_render_response, single_token
from rollouts.errors import CapabilityError, MalformedResultError

# A token with such a text that the template prints around a message is a control token, not a word.
_CONTROL = re.compile(r"<[^\s<>]{1,60}>|\[/?[A-Z_]{2,60}\]")


class ServerIdentity(NamedTuple):
    """Properties of a server that rendering depends on.

    `fingerprint` is a digest of everything known that decides the tensors of a modality: version, model, and
    the tensors of a small probe, on which size limits have no effect. `marker_id` is the token that stands
    for features of an image or of a sound, None where the server takes no images. `control_texts` are the
    control tokens that its template prints around a message.
    """

    model: str
    version: str
    fingerprint: str
    marker_id: int | None
    control_texts: tuple[str, ...]


def media_part(modality: Modality, name: str) -> dict[str, Any]:
    """A content part for the image or sound that the server's cache holds, or will hold, under this name."""
    return {"type": f"{modality}_url", f"{modality}_url": None, "uuid": name}


class RenderServer:
    """A server that renders. Its identity is found out when it is first needed, and again after `forget`."""

    def __init__(self, connection: ServerConnection, model: str | None) -> None:
        self._connection = connection
        self._model = model
        self._identity: ServerIdentity | None = None
        self._hearing: dict[ServerIdentity, ServerIdentity | str] = {}  # what is rendered of sounds, or why none is
        self._generation = 0  # how often the identity was forgotten
        self._probing: SingleFlight[ServerIdentity] = SingleFlight()

    def forget(self) -> None:
        """The server may have restarted."""
        self._identity = None
        self._generation += 1

    def is_still(self, identity: ServerIdentity) -> bool:
        """Whether the server was not forgotten since it had this identity."""
        return self._identity is identity

    async def identity(self) -> ServerIdentity:
        """Who the server is. Raises `CapabilityError` where it does not render, and what a probe raises."""
        while (identity := self._identity) is None:
            generation = self._generation
            probed = await self._probing.run(generation, self._probe)
            # Forgotten meanwhile, the answer may be that of the server of before.
            if self._generation == generation:
                self._identity = self._identity or probed
        return identity

    async def identity_for_sounds(self, server: ServerIdentity, request_name: str) -> ServerIdentity:
        """The identity of a server for sounds, by a probe sound. Raises `CapabilityError` where it takes none."""
        if server not in self._hearing:
            self._hearing = {server: await self._probe_sounds(server)}
        known = self._hearing[server]
        if isinstance(known, str):
            raise CapabilityError(
                request_name,
                f"{server.model} takes no sounds: {known}. Serve a model that hears, with audio in "
                "--limit-mm-per-prompt and with the packages of vllm[audio]",
            )
        return known

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        files: Mapping[str, SourceFile],
        *,
        model: str,
        name: str,
        tensors: bool,
        options: Mapping[str, Any] | None = None,
    ) -> RenderResponse:
        """Render messages whose media are `media_part`s; one without a file in `files` must be in the server's cache.

        `tensors` False requests a response without tensors, which vLLM supports from 0.32 on. Raises
        `EngineError`.
        """
        body = {"model": model, "messages": messages, **(options or {})}
        if not tensors:
            body["mm_payload"] = "none"
        segments = await asyncio.to_thread(_segments, body, files)
        response = await self._connection.request("POST", RENDER_PATH, name=name, body=segments)
        if response.status != 200:
            raise _render_error(name, response)
        return await asyncio.to_thread(parse_render_response, response.body, name)

    async def _probe(self) -> ServerIdentity:
        connection = self._connection
        model, version = await asyncio.gather(served_model(connection, self._model), server_version(connection))
        response = await render_probe(connection, model.name, "image")
        takes_images = response.status == 200
        if response.status == 400:  # a text-only model, or a server that was started with images disabled
            response = await render_message(connection, model.name, "a")
        if response.status != 200:
            raise _render_error(PROBE_NAME, response)
        rendered = parse_render_response(response.body, PROBE_NAME)
        if takes_images and len(rendered.media) != 1:
            raise MalformedResultError(
                PROBE_NAME, f"/render found {len(rendered.media)} media in a message with one image"
            )
        decisive = {
            "model": model.name,
            "root": model.root,
            "version": version.vllm,
            "probe": _tensors_digest(rendered),
        }
        marker_id = single_token(rendered.token_ids, rendered.media[0].placeholder) if takes_images else None
        texts = await self._token_texts(model.name, rendered.token_ids)
        return ServerIdentity(
            model=model.name,
            version=version.vllm or "unknown",
            fingerprint=hashlib.sha256(json.dumps(decisive, sort_keys=True).encode()).hexdigest()[:16],
            marker_id=marker_id,
            control_texts=tuple(text for text in texts.values() if _CONTROL.fullmatch(text)),
        )

    async def _token_texts(self, model: str, token_ids: Sequence[int]) -> dict[int, str]:
        distinct = sorted(set(token_ids))
        responses = await asyncio.gather(
            *(
                probe_request(self._connection, "POST", "/detokenize", {"model": model, "tokens": [token]})
                for token in distinct
            )
        )
        texts = [json_object(response).get("prompt") if response.status == 200 else None for response in responses]
        return {token: text for token, text in zip(distinct, texts, strict=True) if isinstance(text, str)}

    async def _probe_sounds(self, server: ServerIdentity) -> ServerIdentity | str:
        """The identity of a server for sounds, or the reason why it renders none."""
        response = await render_probe(self._connection, server.model, "audio")
        if response.status in (429, 503):  # a server that is busy may hear
            raise response_error(PROBE_NAME, response, "rendering a sound")
        if response.status != 200:
            return response_error(PROBE_NAME, response, "rendering a sound").reason
        rendered = parse_render_response(response.body, PROBE_NAME)
        sounds = [medium for medium in rendered.media if medium.modality == "audio"]
        marker_id = single_token(rendered.token_ids, sounds[0].placeholder) if len(sounds) == 1 else None
        if marker_id is None:
            return "/render does not say which tokens stand for the features of a sound"
        digest = hashlib.sha256(f"{server.fingerprint} {_tensors_digest(rendered)}".encode())
        return server._replace(fingerprint=digest.hexdigest()[:16], marker_id=marker_id)


def _segments(body: Mapping[str, Any], files: Mapping[str, SourceFile]) -> Body:
    """The JSON of a request, with the data URLs of files in the parts of their names."""
    mark = uuid.uuid4().hex  # random, so that no content contains it
    messages = [_with_urls(message, files, mark) for message in body["messages"]]
    pieces = json.dumps({**body, "messages": messages}, separators=(",", ":")).split(mark)
    segments: list[bytes | memoryview] = []
    for index, piece in enumerate(pieces):
        if index % 2:
            segments += files[piece].data_url()
        else:
            segments.append(piece.encode())
    return segments


def _with_urls(message: Mapping[str, Any], files: Mapping[str, SourceFile], mark: str) -> Mapping[str, Any]:
    """The message with the name of each file, between two marks, in place of its data URL."""
    if not isinstance(message.get("content"), list):
        return message
    parts = [
        {**part, part["type"]: {"url": f"{mark}{part['uuid']}{mark}"}} if part.get("uuid") in files else part
        for part in message["content"]
    ]
    return {**message, "content": parts}


def _tensors_digest(rendered: RenderResponse) -> str | None:
    """A digest of the tensors of the probe, sorted by name because their order differs between processes."""
    digest = hashlib.sha256()
    for item in rendered.media:
        if item.encoded is None:
            return None
        for entry in sorted(encoded_entries(item.encoded, name=PROBE_NAME).items()):
            digest.update(repr(entry).encode())
    return digest.hexdigest()


def _render_error(name: str, response: HttpResponse) -> Exception:
    error = response_error(name, response, "rendering")
    unknown_route = response.status in (404, 405) and b"NotFoundError" not in response.body
    if response.status == 501:  # vLLM's Rust frontend, which names the cure
        return CapabilityError(
            name, f"this server does not render ({error.reason}); or use `vllm launch render MODEL`, which needs no GPU"
        )
    if response.status == 403 or unknown_route:
        return CapabilityError(
            name,
            f"this server does not render ({error.reason}). Start `vllm serve` with --enable-scale-out, or "
            "a server that only renders with `vllm launch render MODEL`",
        )
    return error
