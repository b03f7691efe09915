"""The `/v1/chat/completions/render` of a vLLM server, or of a `vllm launch render` without a model in it."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import re
import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from renderers import MediaSource
from renderers.media.policy import MediaPolicy
from renderers.media.raw import array_to_raw
from rollouts.engines.vllm.http.connection import ServerConnection
from rollouts.engines.vllm.http.exchange import Body
from rollouts.engines.vllm.http.response import HttpResponse, response_error
from rollouts.engines.vllm.media.image_file import ImageFile, image_file
from rollouts.engines.vllm.single_flight import SingleFlight
from rollouts.engines.vllm.wire.kwargs_decoding import encoded_entries
from rollouts.engines.vllm.wire.render_response import RenderAnswer, read_answer, single_token
from rollouts.errors import CapabilityError, MalformedResultError

_RENDER = "/v1/chat/completions/render"
# One token spelled like this, printed by the template around a message, is a control token and no word.
_CONTROL = re.compile(r"<[^\s<>]{1,60}>|\[/?[A-Z_]{2,60}\]")


class ServerIdentity(NamedTuple):
    """What a server is, as far as it says.

    `fingerprint` names everything known that decides the tensors of an image: version, model, and what the server's
    processor makes of a small image. Limits that only large images meet do not show in it. `marker_id` is the token
    that stands for an image's features and `marker` how it is spelled, both None where the server takes no images.
    `control_texts` are the control tokens that its template prints around a message.
    """

    model: str
    version: str
    fingerprint: str
    marker_id: int | None
    marker: str | None
    control_texts: tuple[str, ...]


class RenderServer:
    """Asks a server to render. Safe to use from several event loops."""

    def __init__(self, connection: ServerConnection, *, model: str | None) -> None:
        self._connection = connection
        self._model = model
        self._lock = threading.Lock()
        self._known: ServerIdentity | None = None
        self._generation = 0
        self._probing: SingleFlight[ServerIdentity] = SingleFlight()

    def forget(self) -> None:
        """The server may be another one by now: ask again what it is."""
        with self._lock:
            self._known = None
            self._generation += 1

    def is_still(self, identity: ServerIdentity) -> bool:
        """Whether nothing was forgotten since `identity` was asked for."""
        return self._known is identity

    async def identity(self) -> ServerIdentity:
        """What the server is; asked once."""
        while (known := self._known) is None:
            generation = self._generation
            probed = await self._probing.run(generation, self._probe)
            with self._lock:
                if self._generation == generation:
                    self._known = self._known or probed
        return known

    async def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        files: Mapping[str, ImageFile],
        *,
        model: str,
        name: str,
        tensors: bool,
        options: Mapping[str, Any] | None = None,
    ) -> RenderAnswer:
        """Render messages whose image parts are `image_part`s; those without a file in `files` the server is to know.

        `tensors` False leaves the tensors out, where the server knows how (vLLM 0.32). Raises `EngineError`.
        """
        body = {"model": model, "messages": messages, **(options or {})}
        if not tensors:
            body["mm_payload"] = "none"
        segments = await asyncio.to_thread(_segments, body, files)
        reply = await self._request("POST", _RENDER, name=name, body=segments)
        if reply.status != 200:
            raise _refusal(name, reply)
        return await asyncio.to_thread(read_answer, reply.body, name)

    async def _request(self, method: str, path: str, *, name: str, body: Body | None = None) -> HttpResponse:
        return await self._connection.request(method, path, name=name, body=body)

    # What the server is.

    async def _probe(self) -> ServerIdentity:
        name = "what the render server is"
        models, version = await asyncio.gather(
            self._request("GET", "/v1/models", name=name), self._request("GET", "/version", name=name)
        )
        if models.status != 200:
            raise response_error(name, models, "asking which model is served")
        model, root = self._served(models, name)
        said = version.json().get("version") if version.status == 200 else None
        file = image_file(MediaSource.of(array_to_raw(_probe_image())), MediaPolicy())
        part = f"render-probe-{uuid.uuid4().hex}"
        body: dict[str, Any] = {"model": model, "messages": [{"role": "user", "content": [image_part(part)]}]}
        reply = await self._request("POST", _RENDER, name=name, body=_segments(body, {part: file}))
        takes_images = reply.status == 200
        if reply.status == 400:  # a model that only reads text, or a server told to take no images
            body["messages"] = [{"role": "user", "content": "a"}]
            reply = await self._request("POST", _RENDER, name=name, body=_segments(body, {}))
        if reply.status != 200:
            raise _refusal(name, reply)
        answer = read_answer(reply.body, name)
        if takes_images and len(answer.media) != 1:
            raise MalformedResultError(name, f"/render found {len(answer.media)} media in a message that holds one")
        made = {"model": model, "root": root, "version": said, "probe": _tensors_digest(answer, name)}
        marker_id = single_token(answer.token_ids, answer.media[0]) if takes_images else None
        spelled = await self._spelled(model, answer.token_ids)
        return ServerIdentity(
            model=model,
            version=str(said or "unknown"),
            fingerprint=hashlib.sha256(json.dumps(made, sort_keys=True).encode()).hexdigest()[:16],
            marker_id=marker_id,
            marker=None if marker_id is None else spelled.get(marker_id, ""),
            control_texts=tuple(text for text in spelled.values() if _CONTROL.fullmatch(text)),
        )

    def _served(self, reply: HttpResponse, name: str) -> tuple[str, Any]:
        """Name and origin of the model to render for."""
        answer = reply.json()
        listed = answer.get("data") if isinstance(answer, dict) else None
        served = [one for one in listed or () if isinstance(one, dict) and isinstance(one.get("id"), str)]
        for one in served:
            if self._model in (None, one["id"]):
                return one["id"], one.get("root")
        names = ", ".join(one["id"] for one in served) or "none"
        raise CapabilityError(name, f"model {self._model or 'any'} is wanted and the server serves {names}")

    async def _spelled(self, model: str, token_ids: Sequence[int]) -> dict[int, str]:
        """The text of each token, as far as the server tells."""
        distinct = sorted(set(token_ids))
        bodies = [[json.dumps({"model": model, "tokens": [one]}).encode()] for one in distinct]
        replies = await asyncio.gather(
            *(self._request("POST", "/detokenize", name="spelling a token", body=body) for body in bodies)
        )
        texts = [reply.json().get("prompt") if reply.status == 200 else None for reply in replies]
        return {one: text for one, text in zip(distinct, texts, strict=True) if isinstance(text, str)}


def image_part(name: str) -> dict[str, Any]:
    """A content part that shows an image under the name by which the server's cache is to know it."""
    return {"type": "image_url", "image_url": None, "uuid": name}


def _segments(body: Mapping[str, Any], files: Mapping[str, ImageFile]) -> Body:
    """The JSON of a request, with the files in the parts of their names."""
    mark = uuid.uuid4().hex  # no content can spell what is drawn afresh
    messages = [_with_urls(message, files, mark) for message in body["messages"]]
    pieces = json.dumps({**body, "messages": messages}, separators=(",", ":")).split(mark)
    segments: list[bytes | memoryview] = []
    for index, piece in enumerate(pieces):
        if index % 2:
            file = files[piece]
            segments += [f"data:{file.media_type};base64,".encode(), base64.b64encode(file.data)]
        else:
            segments.append(piece.encode())
    return segments


def _with_urls(message: Mapping[str, Any], files: Mapping[str, ImageFile], mark: str) -> Mapping[str, Any]:
    """The name of a file between two marks, where its data URL is to stand."""
    if not isinstance(message.get("content"), list):
        return message
    parts = [
        {**part, "image_url": {"url": f"{mark}{part['uuid']}{mark}"}} if part.get("uuid") in files else part
        for part in message["content"]
    ]
    return {**message, "content": parts}


def _tensors_digest(answer: RenderAnswer, name: str) -> str | None:
    """What the server made of the probe; a server process writes the names of tensors in an order of its own."""
    digest = hashlib.sha256()
    for medium in answer.media:
        if medium.encoded is None:
            return None
        for entry in sorted(encoded_entries(medium.encoded, name=name).items()):
            digest.update(repr(entry).encode())
    return digest.hexdigest()


def _refusal(name: str, reply: HttpResponse) -> Exception:
    error = response_error(name, reply, "rendering")
    unknown_route = reply.status in (404, 405) and b"NotFoundError" not in reply.body
    if reply.status in (403, 501) or unknown_route:
        return CapabilityError(
            name,
            f"this server does not render ({error.reason}). Start `vllm serve` with --enable-scale-out, or a server "
            "for it alone with `vllm launch render MODEL`",
        )
    return error


def _probe_image() -> np.ndarray:
    """Noise of odd sides, uint8 (53, 37, 3): resizing, rescaling and cutting into patches all show in it."""
    row, column, channel = np.ogrid[:53, :37, :3]
    noise: np.ndarray = (row * 73 + column * 151 + channel * 29 + row * column * 7) % 256
    return noise.astype(np.uint8)
