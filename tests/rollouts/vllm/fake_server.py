"""A vLLM without a model: real sockets, one process, and a script for what a real one cannot be made to do.

    async with FakeVLLM() as server:
        engine = VLLMEngine(server.base_url)
        server.script["/inference/v1/generate"] += [busy(503, retry_after="2"), reset(), answer()]
        ...
        assert [seen.json["token_ids"] for seen in server.generations] == [...]

`script` maps a path to the steps of its next requests, in the order of their arrival; without a step a request is
answered the way vLLM answers it. Everything that waits waits for an `asyncio.Event`; nothing sleeps.

What it samples is a function of the ids before it (`next_token`), so a completion that was cut and is continued from
its own ids comes out as if it had never been cut.
"""

from __future__ import annotations

import asyncio
import ssl
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import ClassVar, Self
from urllib.parse import parse_qsl, urlsplit

from fake_control import Control
from fake_generation import GENERATE, Generation
from fake_http import Channel, Response, Seen, error_response, json_response, send_response
from fake_render import IMAGE_PAD, RENDER, Rendering

__all__ = ["ABORT", "GENERATE", "IMAGE_PAD", "RENDER", "FakeVLLM", "Step"]

ABORT = "/inference/v1/abort_requests"
Step = Callable[["FakeVLLM", Seen, Channel], Awaitable["Response | None"]]
"""What to do with one request: a response to be sent as usual, or None where the step has done everything itself."""


class FakeVLLM(Generation, Rendering, Control):
    """A server on a free port of 127.0.0.1, as an async context manager.

    `version` below 0.32 has log-probabilities in the chat shape (`token_id:N`). `pixel_dtype` is what `/render` puts
    out. `cached` maps the hashes of the images that it holds to their data; `forget_images()` empties it, as a pause or
    a reset does. `cache_images` bounds it (the oldest go). `queue_while_paused=False` answers 503 instead, like 0.33.
    `rust_frontend`: the version of vLLM's Rust frontend, which answers in place of vLLM's own as it was measured.
    """

    #: Of a server that is derived from this one: path -> HTTP method and the name of a method of the class.
    more_routes: Mapping[str, tuple[str, str]] = {}
    ROUTES: ClassVar = {
        **Generation.ROUTES,
        **Rendering.ROUTES,
        "/version": ("GET", "_version"),
        "/health": ("GET", "_health"),
        "/metrics": ("GET", "_metrics"),
        "/v1/models": ("GET", "_models"),
        ABORT: ("POST", "_abort_requests"),
    }

    def __init__(
        self,
        *,
        version: str = "0.32.0",
        model: str = "tiny-qwen3vl",
        max_model_len: int = 4096,
        pixel_dtype: str = "uint8",
        scale_out: bool = True,
        control: bool = True,
        queue_while_paused: bool = True,
        rust_frontend: str | None = None,
        api_key: str | None = None,
        weight_version: str = "default",
        cache_images: int | None = None,
        port: int = 0,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        self.version = version
        self.model = model
        self.max_model_len = max_model_len
        self.pixel_dtype = pixel_dtype
        self.scale_out = scale_out
        self.control = control
        self.queue_while_paused = queue_while_paused
        self.rust_frontend = rust_frontend
        self.api_key = api_key
        self.weight_version = weight_version
        self.cache_images = cache_images
        self.script: defaultdict[str, list[Step]] = defaultdict(list)
        self.requests: list[Seen] = []
        self.cached: dict[str, str] = {}
        self.weights_path = "/models/tiny"
        self.started_at = 0.0
        self.connections = 0
        self.open_connections: set[_Connection] = set()
        self._port = port
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._running = asyncio.Event()
        self._running.set()
        self._arrivals = asyncio.Condition()
        self._in_flight: set[Seen] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self.started_at = max(time.time(), self.started_at + 0.01)
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: _Connection(self), "127.0.0.1", self._port, backlog=2048, ssl=self._tls
        )
        self._port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        """Close every connection and refuse new ones; `start` takes the same port again, with empty caches."""
        if self._server is not None:
            self._server.close()
        for connection in list(self.open_connections):
            connection.channel.reset()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None
        self.forget_images()

    @property
    def base_url(self) -> str:
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self._port}"

    @property
    def generations(self) -> list[Seen]:
        """The requests to generate, in order."""
        return [seen for seen in self.requests if seen.path == GENERATE]

    @property
    def paused(self) -> bool:
        return not self._running.is_set()

    async def requests_seen(self, count: int, path: str | None = None) -> list[Seen]:
        """Wait until `count` requests (to `path`) have come; all of them."""

        def matching() -> list[Seen]:
            return [seen for seen in self.requests if path in (None, seen.path)]

        async with self._arrivals:
            await self._arrivals.wait_for(lambda: len(matching()) >= count)
        return matching()

    def forget_images(self) -> None:
        self.cached.clear()

    def abort(self, request_ids: Iterable[str] | None = None) -> int:
        """Abort requests by their prefixed ids (None: all); how many there were."""
        wanted = None if request_ids is None else set(request_ids)
        hit = [seen for seen in self._in_flight if wanted is None or seen.request_id in wanted]
        for seen in hit:
            seen.aborted.set()
        return len(hit)

    # A request's way through.

    async def handle(self, seen: Seen, channel: Channel) -> None:
        self.requests.append(seen)
        async with self._arrivals:
            self._arrivals.notify_all()
        steps = self.script.get(seen.path)
        step = steps.pop(0) if steps else None
        if seen.path == GENERATE:
            self._in_flight.add(seen)
        try:
            response = await self.respond(seen) if step is None else await step(self, seen, channel)
            if response is not None:
                await send_response(response, channel)
            seen.answered.set()
        finally:
            self._in_flight.discard(seen)

    def serve(self, seen: Seen, channel: Channel) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(self.handle(seen, channel))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def respond(self, seen: Seen) -> Response:
        """What vLLM would answer."""
        guarded = seen.path.startswith(("/v1", "/v2", "/inference", "/cohere"))
        if guarded and self.api_key is not None and seen.headers.get("authorization") != f"Bearer {self.api_key}":
            return json_response({"error": "Unauthorized"}, 401)
        routes = {**self.ROUTES, **self.more_routes, **(self.CONTROL_ROUTES if self.control else {})}
        if (route := routes.get(seen.path)) is None:
            return json_response({"detail": "Not Found"}, 404)
        method, name = route
        if self.rust_frontend is not None and seen.path in (ABORT, RENDER):
            message = (
                f"{seen.method} {seen.path} is not supported by the Rust frontend yet. Set VLLM_USE_RUST_FRONTEND=0"
            )
            return error_response(501, f"{message} to use the Python frontend.", "NotImplementedError")
        if seen.method != method:
            return json_response({"detail": "Method Not Allowed"}, 405)
        if not self.scale_out and (seen.path.startswith("/inference") or seen.path.endswith("/render")):
            return error_response(
                403,
                "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.",
                "PermissionDeniedError",
            )
        response: Response = await getattr(self, name)(seen)
        return response

    async def _version(self, seen: Seen) -> Response:
        rust = {} if self.rust_frontend is None else {"rust_frontend_version": self.rust_frontend}
        return json_response({"version": self.version} | rust)

    async def _health(self, seen: Seen) -> Response:
        return Response()

    async def _models(self, seen: Seen) -> Response:
        card = {"object": "model", "owned_by": "vllm", "root": self.weights_path, "max_model_len": self.max_model_len}
        return json_response({"object": "list", "data": [{"id": self.model} | card]})

    async def _abort_requests(self, seen: Seen) -> Response:
        request_ids = seen.json.get("request_ids")
        if request_ids is None:
            return error_response(400, "Missing 'request_ids' in request body", "Bad Request")
        self.abort(request_ids)
        return Response()

    async def _metrics(self, seen: Seen) -> Response:
        lines = [
            f"process_start_time_seconds {self.started_at!r}",
            f'vllm:num_requests_running{{engine="0",model_name="{self.model}"}} {float(len(self._in_flight))}',
        ]
        return Response(200, "".join(f"{line}\n" for line in lines).encode(), {"content-type": "text/plain"})


class _Connection(asyncio.Protocol):
    """Reads requests, one at a time; what ends the connection ends the request that is being answered."""

    def __init__(self, server: FakeVLLM) -> None:
        self._server = server
        self._received = bytearray()
        self._task: asyncio.Task[None] | None = None
        self._seen: list[Seen] = []
        self.channel: Channel

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.channel = Channel(transport)
        self._server.connections += 1
        self._number = self._server.connections
        self._server.open_connections.add(self)

    def data_received(self, data: bytes) -> None:
        self._received += data
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        self._server.open_connections.discard(self)
        for seen in self._seen:
            seen.disconnected.set()
        if self._task is not None:
            self._task.cancel()

    def _next(self) -> None:
        if self._task is not None and not self._task.done():
            return
        if (end := self._received.find(b"\r\n\r\n")) < 0:
            return
        first, *lines = self._received[:end].decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
        size = end + 4 + int(headers.get("content-length", 0))
        if len(self._received) < size:
            return
        body = bytes(memoryview(self._received)[end + 4 : size])
        del self._received[:size]
        method, target, _ = first.split(" ")
        parts = urlsplit(target)
        seen = Seen(method, parts.path, dict(parse_qsl(parts.query)), headers, body, self._number)
        self._seen.append(seen)
        self._task = self._server.serve(seen, self.channel)
        self._task.add_done_callback(lambda task: None if task.cancelled() else self._next())
