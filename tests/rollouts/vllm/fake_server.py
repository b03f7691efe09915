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
import base64
import copy
import hashlib
import io
import json
import ssl
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Self
from urllib.parse import parse_qsl, urlsplit

from fake_http import Channel, Json, Response, Seen, error_response, json_response, send_response
from fake_model import completion_of, encoded_image, image_grid, logprob_of, prompt_logprobs
from PIL import Image

GENERATE = "/inference/v1/generate"
ABORT = "/inference/v1/abort_requests"
RENDER = "/v1/chat/completions/render"
# Of the tiny Qwen3-VL.
IMAGE_PAD, VISION_START, VISION_END, EOS = 397, 394, 395, 387
VOCABULARY = 16384
Step = Callable[["FakeVLLM", Seen, Channel], Awaitable["Response | None"]]
"""What to do with one request: a response to be sent as usual, or None where the step has done everything itself."""


class FakeVLLM:
    """A server on a free port of 127.0.0.1, as an async context manager.

    `version` below 0.32 has log-probabilities in the chat shape (`token_id:N`). `pixel_dtype` is what `/render` puts
    out. `cached` maps the hashes of the images that it holds to their data; `forget_images()` empties it, as a pause or
    a reset does. `cache_images` bounds it (the oldest go). `queue_while_paused=False` answers 503 instead, like 0.33.
    """

    #: Of a server that is derived from this one.
    more_routes: Mapping[str, _Route] = {}

    def __init__(
        self,
        *,
        version: str = "0.32.0",
        model: str = "tiny-qwen3vl",
        max_model_len: int = 4096,
        pixel_dtype: str = "uint8",
        scale_out: bool = True,
        control: bool = True,
        content_parts: bool = True,
        queue_while_paused: bool = True,
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
        self.content_parts = content_parts
        self.queue_while_paused = queue_while_paused
        self.api_key = api_key
        self.weight_version = weight_version
        self.cache_images = cache_images
        self.script: defaultdict[str, list[Step]] = defaultdict(list)
        self.requests: list[Seen] = []
        self.cached: dict[str, str] = {}
        self.weights_path = "/models/tiny"
        self.sleep_level = 0
        self.started_at = 0.0
        self.connections = 0
        self.open_connections: set[_Connection] = set()
        self._port = port
        self._tls = tls
        self._server: asyncio.Server | None = None
        self._running = asyncio.Event()
        self._running.set()
        self._awake = asyncio.Event()
        self._awake.set()
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

    @staticmethod
    async def first_of(*events: asyncio.Event) -> None:
        """Wait for any of the events."""
        if any(event.is_set() for event in events):
            return
        waits = [asyncio.ensure_future(event.wait()) for event in events]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()

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
        routes = _ROUTES | self.more_routes | (_CONTROL_ROUTES if self.control else {})
        if (route := routes.get(seen.path)) is None:
            return json_response({"detail": "Not Found"}, 404)
        method, respond = route
        if seen.method != method:
            return json_response({"detail": "Method Not Allowed"}, 405)
        if not self.scale_out and (seen.path.startswith("/inference") or seen.path.endswith("/render")):
            return error_response(
                403,
                "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them.",
                "PermissionDeniedError",
            )
        answered: Response = await getattr(self, respond.__name__)(seen)
        return answered

    async def _version(self, seen: Seen) -> Response:
        return json_response({"version": self.version})

    async def _health(self, seen: Seen) -> Response:
        return Response()

    async def _models(self, seen: Seen) -> Response:
        card = {"object": "model", "owned_by": "vllm", "root": self.weights_path, "max_model_len": self.max_model_len}
        return json_response({"object": "list", "data": [{"id": self.model} | card]})

    async def _generate(self, seen: Seen) -> Response:
        if (refused := self._refused(seen.json)) is not None:
            return refused
        if self.paused:
            if not self.queue_while_paused:
                return error_response(503, "The engine is paused", "ServiceUnavailableError")
            await self.first_of(self._running, seen.aborted)
            if seen.aborted.is_set():
                return self.generated(seen, cut=0)
        await self.first_of(self._awake, seen.aborted)
        if not self._take_images(seen.json):
            return error_response(500, "Internal server error", "InternalServerError")
        return self.generated(seen)

    def _refused(self, body: Json) -> Response | None:
        """The errors that a client can provoke without killing anything."""
        ids, sampling = body.get("token_ids"), body.get("sampling_params")
        if not ids or sampling is None:
            wrong = {
                "token_ids": not ids,
                "sampling_params": sampling is None,
                "content_parts": self.content_parts and not isinstance(body.get("content_parts"), list | None),
                "output_mode": not self._chat_shape and body.get("output_mode", "tokens") not in ("tokens", "text"),
            }
            lines = [f"  {{'type': 'x', 'loc': 'body.{name}', ...}}" for name, is_wrong in wrong.items() if is_wrong]
            message = "\n".join([f"{len(lines)} validation errors:", *lines])
            return error_response(400, message, "Bad Request", "body.token_ids")
        if body.get("model") not in (None, self.model):
            message = f"The model `{body['model']}` does not exist. Valid aliases: {self.model}."
            return error_response(404, message, "NotFoundError", "model")
        if not all(0 <= each < VOCABULARY for each in ids):
            return error_response(400, f"Token id {max(ids)} is out of vocabulary", "BadRequestError")
        if sampling.get("max_tokens", 1) < 1:
            return error_response(400, "max_tokens must be at least 1, got 0.", "BadRequestError", "max_tokens")
        if len(ids) >= self.max_model_len:
            message = f"The decoder prompt (length {len(ids)}) is longer than the maximum model length of"
            return error_response(400, f"{message} {self.max_model_len}.", "BadRequestError")
        return None

    def _take_images(self, body: Json) -> bool:
        """Keep the images that came with data; whether every other one is already here."""
        features = body.get("features") or {}
        for modality, hashes in (features.get("mm_hashes") or {}).items():
            data = (features.get("kwargs_data") or {}).get(modality) or [None] * len(hashes)
            for mm_hash, item in zip(hashes, data, strict=True):
                if item is not None:
                    self.cached.setdefault(mm_hash, item)
                elif mm_hash not in self.cached:
                    return False
                while self.cache_images is not None and len(self.cached) > self.cache_images:
                    self.cached.pop(next(iter(self.cached)))
        return True

    def generated(self, seen: Seen, *, cut: int | None = None) -> Response:
        """The answer of `/inference/v1/generate`, whole or as a stream; `cut` tokens of it if it was aborted."""
        body = seen.json
        sampling, prompt = body["sampling_params"], body["token_ids"]
        count = min(sampling.get("max_tokens", self.max_model_len), self.max_model_len - len(prompt))
        stops = {EOS, *(sampling.get("stop_token_ids") or ())}
        choices = []
        for index in range(sampling.get("n") or 1):
            ids = completion_of(prompt, count, index, stops)
            stopped = bool(ids) and ids[-1] in stops
            reason = "stop" if stopped else "length"
            if cut is not None:
                ids, stopped, reason = ids[:cut], False, "abort"
            choices.append(
                {
                    "index": index,
                    "finish_reason": reason,
                    "stop_reason": ids[-1] if stopped and ids[-1] != EOS else None,
                    "token_ids": ids,
                    "routed_experts": None,
                    "sampling_mask": None,
                    "weight_versions": [{"version": self.weight_version, "start": 0, "end": len(ids)}],
                    "logprobs": None if sampling.get("logprobs") is None else self._logprobs(ids),
                }
            )
        if body.get("stream"):
            return self._streamed(seen, choices)
        tokens = sum(len(choice["token_ids"]) for choice in choices)
        return json_response(
            {
                "request_id": seen.request_id,
                "model": self.model,
                "created": 1795257439,
                "usage": {
                    "prompt_tokens": len(prompt),
                    "total_tokens": len(prompt) + tokens,
                    "completion_tokens": tokens,
                    "prompt_tokens_details": None,
                    "completion_tokens_details": None,
                },
                "prompt_logprobs": None if sampling.get("prompt_logprobs") is None else prompt_logprobs(prompt),
                "prompt_token_id_logprobs": None,
                "prompt_token_ids": prompt if body.get("return_token_ids") else None,
                "mm_placeholders": None,
                "metrics": None,
                "kv_transfer_params": None,
                "ec_transfer_params": None,
                "output_mode": "tokens",
                "choices": choices,
            }
        )

    def _logprobs(self, ids: Sequence[int]) -> Json:
        if self._chat_shape:
            return {
                "content": [
                    {"token": f"token_id:{each}", "logprob": logprob_of(each), "bytes": None, "top_logprobs": []}
                    for each in ids
                ]
            }
        entries = [{"token_id": each, "logprob": logprob_of(each), "rank": 1} for each in ids]
        return {"content": [entry | {"top_logprobs": [entry]} for entry in entries]}

    @property
    def _chat_shape(self) -> bool:
        return tuple(map(int, self.version.split(".")[:2])) < (0, 32)

    def _streamed(self, seen: Seen, choices: list[Json]) -> Response:
        """The first token of each choice in a chunk of its own, then the rest: vLLM with a large stream_interval."""
        chunks: list[bytes | asyncio.Event] = []
        for part in (slice(0, 1), slice(1, None)):
            for choice in choices:
                ids = choice["token_ids"][part]
                last = part.stop is None or len(choice["token_ids"]) <= 1
                if not ids and not (last and part.stop is None and not choice["token_ids"]):
                    continue
                delta = copy.deepcopy(choice) | {"token_ids": ids}
                if delta["logprobs"] is not None:
                    delta["logprobs"]["content"] = delta["logprobs"]["content"][part]
                if not last:
                    delta |= {"finish_reason": None, "stop_reason": None, "weight_versions": None}
                event = {"request_id": seen.request_id, "usage": None, "output_mode": "tokens", "choices": [delta]}
                chunks.append(b"data: " + json.dumps(event).encode() + b"\n\n")
        chunks.append(b"data: [DONE]\n\n")
        return Response(headers={"content-type": "text/event-stream; charset=utf-8"}, chunks=chunks)

    async def _abort_requests(self, seen: Seen) -> Response:
        request_ids = seen.json.get("request_ids")
        if request_ids is None:
            return error_response(400, "Missing 'request_ids' in request body", "Bad Request")
        self.abort(request_ids)
        return Response()

    async def _abort_any(self, seen: Seen) -> Response:
        count = self.abort(seen.json.get("request_ids") or None)
        return json_response({"status": "aborted", "aborted": count})

    async def _render(self, seen: Seen) -> Response:
        """Text is one token a character; an image is resized to a multiple of 32 pixels, its patches are zeros."""
        ids: list[int] = []
        images: list[Image.Image] = []
        places: list[Json] = []
        hashes: list[str] = []
        for message in seen.json["messages"]:
            content = message["content"]
            for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                if part["type"] != "image_url":
                    ids += [ord(character) % 256 for character in part["text"]]
                    continue
                data = base64.b64decode(part["image_url"]["url"].partition(",")[2])
                images.append(Image.open(io.BytesIO(data)))
                hashes.append(hashlib.sha256(data).hexdigest())
                grid = image_grid(images[-1])
                ids.append(VISION_START)
                places.append({"offset": len(ids), "length": grid[1] * grid[2] // 4})
                ids += [IMAGE_PAD] * places[-1]["length"] + [VISION_END]
        features = None
        if images:
            features = {
                "mm_hashes": {"image": hashes},
                "mm_placeholders": {"image": places},
                "kwargs_data": {"image": [encoded_image(image, self.pixel_dtype) for image in images]},
                "mm_metadata": None,
            }
        sampling = {"temperature": 1.0, "top_p": 1.0, "max_tokens": self.max_model_len - len(ids)}
        content = {
            "request_id": "chatcmpl-fake",
            "token_ids": ids,
            "token_offsets": None,
            "features": features,
            "content_parts": None,
            "sampling_params": sampling,
            "model": self.model,
            "output_mode": "tokens",
            "stream": False,
        }
        if not self.content_parts:
            del content["content_parts"]
        return json_response(content)

    async def _pause(self, seen: Seen) -> Response:
        mode = seen.query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            return json_response({"error": f"unknown mode {mode}"}, 400)
        self._running.clear()
        if mode == "abort":
            self.abort()
        if mode == "wait":
            for other in list(self._in_flight):
                await self.first_of(other.answered, other.disconnected)
        if seen.query.get("clear_cache", "true") == "true":
            self.forget_images()
        return json_response({"status": "paused"})

    async def _resume(self, seen: Seen) -> Response:
        self._running.set()
        return json_response({"status": "resumed"})

    async def _is_paused(self, seen: Seen) -> Response:
        return json_response({"is_paused": self.paused})

    async def _reset_images(self, seen: Seen) -> Response:
        self.forget_images()
        return Response()

    async def _metrics(self, seen: Seen) -> Response:
        levels = {"awake": 0, "weights_offloaded": 1, "discard_all": 2}
        lines = [
            f"process_start_time_seconds {self.started_at!r}",
            f'vllm:num_requests_running{{engine="0",model_name="{self.model}"}} {float(len(self._in_flight))}',
            *(
                f'vllm:engine_sleep_state{{engine="0",model_name="{self.model}",sleep_state="{name}"}} '
                f"{float(level == self.sleep_level)}"
                for name, level in levels.items()
            ),
        ]
        return Response(200, "".join(f"{line}\n" for line in lines).encode(), {"content-type": "text/plain"})

    async def _load(self, seen: Seen) -> Response:
        return json_response({"server_load": len(self._in_flight)})

    async def _sleep(self, seen: Seen) -> Response:
        self.sleep_level = int(seen.query.get("level", 1))
        self._awake.clear()
        self.forget_images()
        return Response()

    async def _wake_up(self, seen: Seen) -> Response:
        self.sleep_level = 0
        self._awake.set()
        return Response()

    async def _is_sleeping(self, seen: Seen) -> Response:
        return json_response({"is_sleeping": self.sleep_level > 0})

    async def _world_size(self, seen: Seen) -> Response:
        return json_response({"world_size": 1})

    async def _collective_rpc(self, seen: Seen) -> Response:
        if seen.json["method"] == "reload_weights":
            self.weights_path = seen.json["kwargs"]["weights_path"]
        return json_response({"results": [None]})

    async def _weight_info(self, seen: Seen) -> Response:
        return json_response({"weight_version": self.weight_version})

    async def _update_weight_version(self, seen: Seen) -> Response:
        self.weight_version = seen.json["new_version"]
        return json_response({"success": True, "new_version": self.weight_version})


_Route = tuple[str, Callable[[FakeVLLM, Seen], Awaitable[Response]]]
_ROUTES: dict[str, _Route] = {
    "/version": ("GET", FakeVLLM._version),
    "/health": ("GET", FakeVLLM._health),
    "/ping": ("GET", FakeVLLM._health),
    "/load": ("GET", FakeVLLM._load),
    "/metrics": ("GET", FakeVLLM._metrics),
    "/v1/models": ("GET", FakeVLLM._models),
    GENERATE: ("POST", FakeVLLM._generate),
    ABORT: ("POST", FakeVLLM._abort_requests),
    RENDER: ("POST", FakeVLLM._render),
}
_CONTROL_ROUTES: dict[str, _Route] = {
    "/abort_requests": ("POST", FakeVLLM._abort_any),
    "/pause": ("POST", FakeVLLM._pause),
    "/resume": ("POST", FakeVLLM._resume),
    "/is_paused": ("GET", FakeVLLM._is_paused),
    "/reset_mm_cache": ("POST", FakeVLLM._reset_images),
    "/reset_encoder_cache": ("POST", FakeVLLM._reset_images),
    "/reset_prefix_cache": ("POST", FakeVLLM._health),
    "/sleep": ("POST", FakeVLLM._sleep),
    "/wake_up": ("POST", FakeVLLM._wake_up),
    "/is_sleeping": ("GET", FakeVLLM._is_sleeping),
    "/get_world_size": ("GET", FakeVLLM._world_size),
    "/collective_rpc": ("POST", FakeVLLM._collective_rpc),
    "/weight_info": ("GET", FakeVLLM._weight_info),
    "/update_weight_version": ("POST", FakeVLLM._update_weight_version),
}


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
