"""The media of requests that a program sends with an HTTP client of its own (`renderers.client.generate`)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from hashlib import blake2b
from typing import Any

from renderers import MultiModalData
from renderers.process.fork_reset import ProcessLock
from rollouts.engines.protocol import GenerateRequest, SamplingParams
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.engines.vllm.media_payload import is_source_missing, media_payload
from rollouts.engines.vllm.request_checks import check_request
from rollouts.engines.vllm.server_media_cache import ServerMediaCache

Post = Callable[[Mapping[str, Any]], Awaitable[bytes]]
"""Sends the request with further fields in its body; returns the body of the response."""

_ATTEMPTS = 3

# By address and event loop, because an engine belongs to one.
_known: dict[str, dict[asyncio.AbstractEventLoop, ClientMedia]] = {}
_known_lock = ProcessLock()


def client_media(base_url: str, api_key: str | None) -> ClientMedia:
    """The media of one server, shared by all clients of the running event loop, and passed on once it is closed."""
    running = asyncio.get_running_loop()
    with _known_lock:
        of_server = _known.setdefault(base_url, {})
        if running not in of_server:
            ended = next((loop for loop in of_server if loop.is_closed()), None)
            of_server[running] = ClientMedia(base_url, api_key) if ended is None else of_server.pop(ended)
        return of_server[running]


class ClientMedia:
    """Adds media to requests to one server; the data of each item are sent once."""

    def __init__(self, base_url: str, api_key: str | None) -> None:
        self._held = ServerMediaCache()
        # Only probes the server, when the first features are sent.
        self._engine = VLLMEngine(base_url, api_key=api_key)

    async def post_sources(self, sources: Sequence[tuple[str, str]], post: Post) -> bytes:
        """Post with source files: (modality, URL) in prompt order. The data of a data URL are sent once."""
        names = {_name(url): len(url) for _, url in sources if url.startswith("data:")}

        def fields(included: Collection[str]) -> Mapping[str, Any]:
            return {"content_parts": [_part(*source, included) for source in sources], "return_token_ids": True}

        return await self._post(names, fields, is_source_missing, post)

    async def post_features(self, prompt_ids: Sequence[int], media: MultiModalData, post: Post) -> bytes:
        """Post with processed features. Raises `InvalidRequestError` and `CapabilityError` as `VLLMEngine` does."""
        capabilities = await self._engine.capabilities()
        request = GenerateRequest(prompt_ids, SamplingParams(), media)
        check_request(request, capabilities)
        payload = media_payload(request, "features", capabilities)

        def fields(included: Collection[str]) -> Mapping[str, Any]:
            made: Mapping[str, Any] = json.loads(b"".join([b"{", *payload.body_field(included), b"}"]))
            return made

        return await self._post(payload.names, fields, payload.is_cache_miss, post)

    async def _post(
        self,
        names: Mapping[str, int],
        fields: Callable[[Collection[str]], Mapping[str, Any]],
        is_cache_miss: Callable[[int, str], bool],
        post: Post,
    ) -> bytes:
        """Post with the data of the items that the server does not hold, again with more if it has evicted some."""
        attempt = 0
        while True:
            attempt += 1
            reservation = await self._held.reserve(names, include_all=attempt == _ATTEMPTS)
            try:
                if reservation.included:
                    made = await asyncio.to_thread(fields, reservation.included)
                else:
                    made = fields(())
                content = await post(made)
            except BaseException as error:
                # The error is of the program's own HTTP client. It is raised again unless it reports a cache
                # miss.
                status, body = getattr(error, "status_code", 0), getattr(getattr(error, "response", None), "text", "")
                if attempt == _ATTEMPTS or not reservation.omitted or not is_cache_miss(status, body):
                    self._held.release(reservation)
                    raise
                self._held.evict(reservation)
            else:
                self._held.commit(reservation)
                return content


def _part(modality: str, url: str, included: Collection[str]) -> dict[str, Any]:
    if not url.startswith("data:"):
        return {"type": f"{modality}_url", "url": url}
    name = _name(url)
    return {"type": f"{modality}_url", "uuid": name, "url": url if name in included else None}


def _name(url: str) -> str:
    return f"url-{blake2b(url.encode(), digest_size=16).hexdigest()}"
