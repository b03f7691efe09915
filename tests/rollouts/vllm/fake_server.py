"""A vLLM without a model: real sockets, one process, and a script for what a real one cannot be made to do.

`script` maps a path to the steps of its next requests, in the order of their arrival; without a step a request is
answered the way vLLM answers it. Everything that waits waits for an `asyncio.Event`; nothing sleeps.

What it samples is a function of the ids before it, so a completion that was cut and is continued from its own ids comes
out as if it had never been cut.
"""

import asyncio
import json
import os
import ssl
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from fake_http import Connection, Json, Response, Seen, error_response, event_stream, json_response
from fake_model import completion_of, logprob_of, rendered

GENERATE, ABORT, RENDER = "/inference/v1/generate", "/inference/v1/abort_requests", "/v1/chat/completions/render"
RELOAD, LABEL = "/collective_rpc", "/update_weight_version"
PREFIX, MM, ENCODER = "/reset_prefix_cache", "/reset_mm_cache", "/reset_encoder_cache"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
WATCHING = ("/metrics", "/is_paused", "/v1/models")
EOS = 387  # of the tiny Qwen3-VL

Step = Response | Callable[["FakeVLLM", Seen, Connection], Awaitable[Response | None]]
"""The response to one request, or what to do with it: None where the step has done everything itself."""


@dataclass(kw_only=True, eq=False)
class FakeVLLM:
    """A server on a free port of 127.0.0.1, as an async context manager.

    `root` is the directory of its model. `pixel_dtype` is what `/render` puts out. `cached` maps the hashes of the
    images that it holds to their data. `rust_frontend`: the version of vLLM's Rust frontend, which answers in place of
    vLLM's own as it was measured. `lora`: it loads adapters, as with --enable-lora and runtime updates of them;
    `adapters` maps their names to their directories. `loaded` are the directories that it has loaded, `bad` those that
    its workers cannot read; `busy` requests of other clients run; `events` are the paths that were answered.
    """

    version: str = "0.32.0"
    model: str = "tiny-qwen3vl"
    root: str = "/models/tiny"
    max_model_len: int = 4096
    pixel_dtype: str | None = "uint8"
    scale_out: bool = True
    control: bool = True
    lora: bool = False
    rust_frontend: str | None = None
    api_key: str | None = None
    weight_version: str = "default"
    port: int = 0
    tls: ssl.SSLContext | None = None

    def __post_init__(self) -> None:
        self.script: defaultdict[str, list[Step]] = defaultdict(list)
        self.requests: list[Seen] = []
        self.events: list[str] = []
        self.cached: dict[str, str] = {}
        self.adapters: dict[str, str] = {}
        self.loaded = [self.root]
        self.bad: set[str] = set()
        self.level = 0  # of its sleep
        self.busy = 0
        self.started_at = 0.0
        self.connections: list[Connection] = []
        self._server: asyncio.Server | None = None
        self._running = asyncio.Event()
        self._running.set()
        self._arrivals = asyncio.Condition()
        self._in_flight: set[Seen] = set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self.started_at = max(time.time(), self.started_at + 0.01)
        loop = asyncio.get_running_loop()
        options = {"backlog": 2048, "ssl": self.tls}
        self._server = await loop.create_server(self._connection, "127.0.0.1", self.port, **options)
        self.port = self._server.sockets[0].getsockname()[1]

    def _connection(self) -> Connection:
        self.connections.append(Connection(len(self.connections) + 1, self.handle))
        return self.connections[-1]

    async def stop(self) -> None:
        """Close every connection and refuse new ones; `start` takes the same port again, with empty caches."""
        if self._server is not None:
            self._server.close()
        still_open = [connection for connection in self.connections if connection.is_open]
        for connection in still_open:
            connection.reset()
        tasks = [connection.task for connection in still_open if connection.task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._server is not None:
            await self._server.wait_closed()
            self._server = None
        self.cached.clear()

    @property
    def base_url(self) -> str:
        return f"{'https' if self.tls else 'http'}://127.0.0.1:{self.port}"

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

    def abort(self, request_ids: Iterable[str] | None = None) -> int:
        """Abort requests by their prefixed ids (None: all); how many there were."""
        wanted = None if request_ids is None else set(request_ids)
        hit = [seen for seen in self._in_flight if wanted is None or seen.request_id in wanted]
        for seen in hit:
            seen.aborted.set()
        return len(hit)

    # A request's way through.

    async def handle(self, seen: Seen, connection: Connection) -> None:
        self.requests.append(seen)
        async with self._arrivals:
            self._arrivals.notify_all()
        steps = self.script.get(seen.path)
        step = steps.pop(0) if steps else None
        if seen.path == GENERATE:
            self._in_flight.add(seen)
        try:
            if isinstance(step, Response):
                response: Response | None = step
            else:
                response = await (self.respond(seen) if step is None else step(self, seen, connection))
            if response is not None:
                await connection.send(response)
            seen.answered.set()
        finally:
            self._in_flight.discard(seen)

    async def respond(self, seen: Seen) -> Response:
        """What vLLM would answer."""
        if seen.path not in WATCHING:
            self.events.append(seen.path)
        guarded = seen.path.startswith(("/v1", "/v2", "/inference", "/cohere"))
        if guarded and self.api_key is not None and seen.headers.get("authorization") != f"Bearer {self.api_key}":
            return json_response({"error": "Unauthorized"}, 401)
        if self.rust_frontend is not None and seen.path in (ABORT, RENDER):
            text = f"{seen.method} {seen.path} is not supported by the Rust frontend yet. Set VLLM_USE_RUST_FRONTEND=0"
            return error_response(501, f"{text} to use the Python frontend.", "NotImplementedError")
        if seen.path == GENERATE and seen.method != "POST":
            return json_response({"detail": "Method Not Allowed"}, 405)
        if not self.scale_out and (seen.path.startswith("/inference") or seen.path.endswith("/render")):
            text = "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to enable them."
            return error_response(403, text, "PermissionDeniedError")
        response = await self.answer(seen)
        if response is None and self.control:
            response = await self._control(seen)
        if response is None and self.lora:
            response = self._change_adapters(seen)
        return json_response({"detail": "Not Found"}, 404) if response is None else response

    async def answer(self, seen: Seen) -> Response | None:
        """The answer of a route that every server has, or None."""
        match seen.path:
            case "/version":
                rust = {} if self.rust_frontend is None else {"rust_frontend_version": self.rust_frontend}
                return json_response({"version": self.version} | rust)
            case "/health":
                return Response()
            case "/metrics":
                names = ("awake", "weights_offloaded", "discard_all")  # of the levels
                states = [f'{{sleep_state="{name}"}} {at == self.level:d}' for at, name in enumerate(names)]
                lines = [f"vllm:engine_sleep_state{state}" for state in states]
                lines += [f"vllm:num_requests_running {self.busy + len(self._in_flight)}"]
                lines += [f"process_start_time_seconds {self.started_at!r}"]
                return Response(200, "".join(f"{line}\n" for line in lines).encode(), {"content-type": "text/plain"})
            case "/v1/models":
                cards = [{"id": self.model, "root": self.root, "parent": None, "max_model_len": self.max_model_len}]
                for name, directory in self.adapters.items():
                    cards.append({"id": name, "root": directory, "parent": self.model, "max_model_len": None})
                return json_response({"object": "list", "data": [{"object": "model", **card} for card in cards]})
            case "/v1/chat/completions/render":
                no_sounds = b'"audio_url"' in seen.body
                return NO_SOUNDS if no_sounds else json_response(rendered(seen.json["messages"], self.pixel_dtype))
            case "/inference/v1/generate":
                return await self._generate(seen)
            case "/inference/v1/abort_requests":
                if (request_ids := seen.json.get("request_ids")) is None:
                    return error_response(400, "Missing 'request_ids' in request body", "Bad Request")
                self.abort(request_ids)
                return Response()
        return None

    # Completions.

    async def _generate(self, seen: Seen) -> Response:
        if (refused := self.refusal(seen.json)) is not None:
            return refused
        if self.paused:
            await first_of(self._running, seen.aborted)
            if seen.aborted.is_set():
                return self.generated(seen, cut=0)
        if not self._take_images(seen.json):
            return error_response(500, "Internal server error", "InternalServerError")
        return await self._sampled(seen)

    def refusal(self, body: Json) -> Response | None:
        """The errors that a client can provoke without killing anything."""
        ids, sampling = body.get("token_ids"), body.get("sampling_params")
        if not ids or sampling is None:
            return error_response(400, "2 validation errors", "Bad Request", "body.token_ids")
        if body.get("model") not in (None, self.model, *self.adapters):
            message = f"The model `{body['model']}` does not exist. Valid aliases: {self.model}."
            return error_response(404, message, "NotFoundError", "model")
        return None

    def _take_images(self, body: Json) -> bool:
        """Keep the media that came with data; whether every other one is already here."""
        features = (self.rust_frontend is None and body.get("features")) or {}
        for modality, hashes in (features.get("mm_hashes") or {}).items():
            data = (features.get("kwargs_data") or {}).get(modality) or [None] * len(hashes)
            for mm_hash, item in zip(hashes, data, strict=True):
                if item is not None:
                    self.cached.setdefault(mm_hash, item)
                elif mm_hash not in self.cached:
                    return False
        return True

    async def _sampled(self, seen: Seen) -> Response:
        return self.generated(seen)

    def generated(self, seen: Seen, *, cut: int | None = None) -> Response:
        """The answer of `/inference/v1/generate`, whole or as a stream; `cut` tokens of it if it was aborted."""
        body = seen.json
        sampling, prompt = body["sampling_params"], body["token_ids"]
        count = min(sampling.get("max_tokens", self.max_model_len), self.max_model_len - len(prompt))
        stops = {EOS, *(sampling.get("stop_token_ids") or ())}
        choices = []
        for index in range(sampling.get("n") or 1):
            ids = completion_of(prompt, count, index, stops)
            reason = "stop" if ids and ids[-1] in stops else "length"
            if cut is not None:
                ids, reason = ids[:cut], "abort"
            logprobs = None if sampling.get("logprobs") is None else [logprob_of(each) for each in ids]
            stop = ids[-1] if reason == "stop" and ids[-1] != EOS else None
            choices.append(self.choice(index, ids, logprobs, reason, stop))
        asked = sampling.get("prompt_logprobs") is not None
        return self.completion(seen, choices, prompt, [logprob_of(each) for each in prompt] if asked else None)

    def choice(
        self, index: int, ids: Sequence[int], logprobs: Sequence[float] | None, reason: str, stop: int | None
    ) -> Json:
        pairs = zip(ids, logprobs or (), strict=logprobs is not None)
        entries = [{"token_id": token, "logprob": logprob, "rank": 1} for token, logprob in pairs]
        return {
            "index": index,
            "finish_reason": reason,
            "stop_reason": stop,
            "token_ids": ids,
            "routed_experts": None,
            "sampling_mask": None,
            "weight_versions": [{"version": self.weight_version, "start": 0, "end": len(ids)}],
            "logprobs": logprobs and {"content": [entry | {"top_logprobs": [entry]} for entry in entries]},
        }

    def completion(
        self,
        seen: Seen,
        choices: Sequence[Json],
        prompt: Sequence[int],
        prompt_logprobs: Sequence[float] | None = None,
        placeholders: Json = None,
    ) -> Response:
        """The choices, whole or as a stream, beside the prompt as it was expanded."""
        expansion = {"prompt_token_ids": prompt, "mm_placeholders": placeholders}
        if not seen.json.get("return_token_ids"):
            expansion = dict.fromkeys(expansion)
        if seen.json.get("stream"):
            events = [{"choices": [], **expansion}] if expansion["prompt_token_ids"] else []
            events += [{"request_id": seen.request_id, "choices": [delta]} for delta in _deltas(choices)]
            return event_stream(*(b"data: " + json.dumps(each).encode() + b"\n\n" for each in events), DONE)
        scored = None
        if prompt_logprobs is not None:
            pairs = zip(prompt[1:], prompt_logprobs[1:], strict=True)
            scored = [None, *({str(t): {"logprob": p, "rank": 1, "decoded_token": None}} for t, p in pairs)]
        content = {"request_id": seen.request_id, "model": self.model, "prompt_logprobs": scored, "choices": choices}
        return json_response(content | expansion)

    # Pauses, sleep, caches, weights and adapters.

    async def _control(self, seen: Seen) -> Response | None:
        match seen.path:
            case "/abort_requests":
                request_ids = seen.json.get("request_ids") or None
                if self.rust_frontend is not None:  # without a prefix, and without a response
                    self.abort(request_ids and [f"generate-tokens-{request_id}" for request_id in request_ids])
                    return Response()
                return json_response({"status": "aborted", "aborted": self.abort(request_ids)})
            case "/pause":
                return await self._pause(seen.query.get("mode", "abort"), seen.query.get("clear_cache", "true"))
            case "/resume":
                self._running.set()
                return json_response({"status": "resumed"})
            case "/is_paused":
                return json_response({"is_paused": self.paused})
            case "/sleep":
                self.level = int(seen.query["level"])
                self._running.clear()
                return json_response({"status": "sleeping"})
            case "/wake_up" if seen.query.get("tags") == "weights":
                return json_response({"status": "sleeping"})
            case "/wake_up":
                self.level = 0
                self._running.set()
                return json_response({"status": "awake"})
            case "/reset_mm_cache" | "/reset_encoder_cache":
                self.cached.clear()
                return Response()
            case "/reset_prefix_cache":
                return json_response({"success": self.busy == 0 or seen.query["reset_running_requests"] == "true"})
            case "/collective_rpc":
                directory = seen.json["kwargs"]["weights_path"]
                if directory in self.bad:
                    return error_response(500, "Worker failed", "x")
                self.loaded.append(directory)
                return json_response({"results": [None, None]})
            case "/weight_info":
                return json_response({"weight_version": self.weight_version})
            case "/update_weight_version":
                self.weight_version = seen.json["new_version"]
                return json_response({"success": True, "new_version": self.weight_version})
        return None

    async def _pause(self, mode: str, clear_cache: str) -> Response:
        self._running.clear()
        if mode != "keep":
            self.busy = 0
        if mode == "abort":
            self.abort()
        if mode == "wait":
            for other in list(self._in_flight):
                await first_of(other.answered, other.disconnected)
        if clear_cache == "true":
            self.cached.clear()
        return json_response({"status": "paused"})

    def _change_adapters(self, seen: Seen) -> Response | None:
        if seen.path not in (LOAD, UNLOAD):
            return None
        name, directory = seen.json["lora_name"], seen.json.get("lora_path")
        if seen.path == UNLOAD:
            if self.adapters.pop(name, None) is None:
                return error_response(404, "The lora adapter cannot be found.", "NotFoundError")
        elif name in self.adapters:
            return error_response(400, f"The lora adapter '{name}' has already been loaded.", "InvalidUserInput")
        elif not os.path.exists(f"{directory}/adapter_config.json"):
            return error_response(404, f"Loading lora {name} failed: No adapter found for <path>", "NotFoundError")
        else:
            self.adapters[name] = directory
        return Response(body=b"Success")


DONE = b"data: [DONE]\n\n"
NO_SOUNDS = error_response(
    400, "At most 0 audio(s) may be provided in one prompt. (parameter=audio)", "BadRequestError", "audio"
)


async def first_of(*events: asyncio.Event) -> None:
    """Wait for any of the events."""
    waits = [asyncio.ensure_future(event.wait()) for event in events]
    try:
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()


def _deltas(choices: Sequence[Json]) -> list[Json]:
    """The first token of each choice by itself, then the rest: vLLM with a large stream_interval."""
    unfinished = dict.fromkeys(("finish_reason", "stop_reason", "weight_versions"))
    longer = [choice for choice in choices if len(choice["token_ids"]) > 1]
    first = [_part(choice, slice(0, 1)) | unfinished for choice in longer]
    return first + [_part(choice, slice(1 if choice in longer else 0, None)) for choice in choices]


def _part(choice: Json, part: slice) -> Json:
    logprobs = choice["logprobs"]
    content = logprobs and {"content": logprobs["content"][part]}
    return choice | {"token_ids": choice["token_ids"][part], "logprobs": content}
