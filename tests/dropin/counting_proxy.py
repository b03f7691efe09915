"""An HTTP proxy between a client and a server of `/inference/v1/generate` that counts what is sent."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import aiohttp
from aiohttp import web

_LARGEST_BODY = 2**30


@dataclass
class Sent:
    """What a client has sent to `/inference/v1/generate`.

    bytes: of the bodies of all requests. images: how often the data of each image, named by its URL, were sent.
    """

    requests: int = 0
    bytes: int = 0
    images: Counter[str] = field(default_factory=Counter)

    def add(self, body: bytes) -> None:
        """Count the body of a request."""
        self.requests += 1
        self.bytes += len(body)
        parts = json.loads(body).get("content_parts") or ()
        self.images.update(part["url"] for part in parts if part.get("url"))

    def times_each_image_once(self) -> float:
        """`bytes` as a multiple of the data of all distinct images."""
        return self.bytes / sum(map(len, self.images))


class CountingProxy:
    """Passes requests to `target` and counts them in `sent`.

    `names_tokens_by_text`: a response names its tokens as vLLM 0.31 did (`"token": "token_id:7"`), which PyPI's
    `renderers` 0.1.12 needs; vLLM 0.32 sends `"token_id": 7`.
    """

    def __init__(self, target: str, *, names_tokens_by_text: bool) -> None:
        self.sent = Sent()
        self._target = target
        self._names_tokens_by_text = names_tokens_by_text

    async def __aenter__(self) -> Self:
        self._session = aiohttp.ClientSession(auto_decompress=True)
        app = web.Application(client_max_size=_LARGEST_BODY)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._runner.cleanup()
        await self._session.close()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def _pass(self, request: web.Request) -> web.Response:
        body = await request.read()
        is_generation = request.path == "/inference/v1/generate"
        if is_generation:
            self.sent.add(body)
        headers = {"Content-Type": request.content_type} if body else {}
        async with self._session.request(
            request.method, f"{self._target}{request.path_qs}", data=body or None, headers=headers
        ) as response:
            content = await response.read()
            if is_generation and self._names_tokens_by_text and response.status == 200:
                content = json.dumps(with_token_texts(json.loads(content))).encode()
            return web.Response(body=content, status=response.status, content_type=response.content_type)


def with_token_texts(response: Mapping[str, Any]) -> Mapping[str, Any]:
    """A response of vLLM 0.32 with the names of tokens that vLLM 0.31 sent; changed in place."""
    for choice in response["choices"]:
        for entry in (choice.get("logprobs") or {}).get("content") or ():
            if "token_id" in entry:
                entry["token"] = f"token_id:{entry['token_id']}"
    return response
