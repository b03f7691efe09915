"""A scripted SGLang server: the routes that `SGLangEngine` uses, with answers in the shape of SGLang 0.5.23."""

import asyncio
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any

from aiohttp import web

Json = dict[str, Any]

VOCABULARY = 300
IMAGE_TOKEN = 268
TOKENS_OF_AN_IMAGE = 12


def _event(content: Json) -> bytes:
    return b"data: " + json.dumps(content).encode() + b"\n\n"


class FakeSGLang:
    """Samples ids 1, 2, 3... with log-probabilities -1, -2, -3...; `spoil` changes an answer before it is sent.

    After the last id of the vocabulary follows 1.

    `info` and `model` are what the server says of itself. `temperature_in_logprobs` divides the distances between
    log-probabilities by the temperature, as SGLang does by default. While `paused` is set, requests wait.
    `requests` holds the bodies of `/generate` but for the probes, `calls` those of the control routes.
    """

    def __init__(self) -> None:
        self.info: Json = {"version": "0.5.23", "random_seed": 1, "sampling_mask_max_tokens": 4096}
        self.info |= {"disaggregation_mode": "null", "speculative_algorithm": None}
        self.model: Json = {"model_path": "/model", "has_image_understanding": True, "weight_version": "default"}
        self.temperature_in_logprobs = True
        self.spoil: Callable[[Json], None] = lambda answer: None
        self.vocabulary = VOCABULARY
        self.tokens_of_an_image = TOKENS_OF_AN_IMAGE
        self.metrics = ""  # none where it is empty, as without --enable-metrics
        self.vocabulary_error = "logit_bias must has keys in [0, {last}], got -1."
        self.refuse: dict[str, tuple[int, str]] = {}  # by path: a status and a body
        self.prompt_logprob: Callable[[int], float] = lambda token: -0.5
        self.tokenize: Callable[[str], list[int]] = lambda text: []
        self.stream_error: Json | None = None  # what a stream begins with
        self.requests: list[Json] = []
        self.calls: list[tuple[str, Json]] = []
        self.adapters: dict[str, str] = {}
        self.running: dict[str, asyncio.Event] = {}
        self.arrived = asyncio.Condition()
        self.free = asyncio.Event()
        self.free.set()
        self.holds = False  # whether requests run until they are aborted
        self._runner: web.AppRunner | None = None
        self.base_url = ""

    async def start(self, port: int = 0) -> None:
        app = web.Application(client_max_size=2**26)
        app.router.add_get("/server_info", self._report)
        app.router.add_get("/model_info", self._report)
        app.router.add_get("/v1/models", self._models)
        app.router.add_get("/health", self._health)
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/generate", self._generate)
        app.router.add_post("/{path:.*}", self._control)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", port)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.base_url = f"http://{host}:{port}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def until_running(self, count: int = 1) -> None:
        async with self.arrived:
            await self.arrived.wait_for(lambda: len(self.running) >= count)

    def end(self, request_id: str) -> None:
        """Let a held request end."""
        if request_id in self.running:
            self.running[request_id].set()

    async def _report(self, request: web.Request) -> web.Response:
        content = {"/server_info": self.info, "/model_info": self.model}.get(request.path, {})
        return self._refusal(request.path) or web.json_response(content)

    async def _health(self, _: web.Request) -> web.Response:
        return self._refusal("/health") or web.Response(status=200 if self.free.is_set() else 503)

    async def _metrics(self, _: web.Request) -> web.Response:
        return web.Response(text=self.metrics) if self.metrics else web.Response(status=404)

    def _refusal(self, path: str) -> web.Response | None:
        if path not in self.refuse:
            return None
        status, text = self.refuse[path]
        return web.Response(status=status, text=text)

    async def _models(self, _: web.Request) -> web.Response:
        cards = [{"id": "/model", "root": "/model", "parent": None, "max_model_len": 4096}]
        cards += [{"id": name, "root": path, "parent": "/model"} for name, path in self.adapters.items()]
        return web.json_response({"object": "list", "data": cards})

    async def _control(self, request: web.Request) -> web.Response:
        path = request.path
        content = await request.json() if request.can_read_body else {}
        self.calls.append((path, content))
        if (refusal := self._refusal(path)) is not None:
            return refusal
        if path == "/tokenize":
            return web.json_response({"tokens": self.tokenize(content["prompt"])})
        if path == "/pause_generation":
            self.free.clear()
            if content["mode"] == "abort":
                for ended in self.running.values():
                    ended.set()
        elif path == "/continue_generation":
            self.free.set()
        elif path == "/abort_request":
            self.end(content.get("rid", ""))
        elif path == "/update_weights_from_disk":
            self.model["weight_version"] = content["weight_version"]
        elif path == "/load_lora_adapter":
            self.adapters[content["lora_name"]] = content["lora_path"]
        elif path == "/unload_lora_adapter":
            del self.adapters[content["lora_name"]]
        return web.json_response({"success": True, "message": ""})

    async def _generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        sampling = body["sampling_params"]
        if "logit_bias" in sampling:
            message = self.vocabulary_error.format(last=self.vocabulary - 1)
            return web.json_response({"error": {"message": message}}, status=400)
        is_probe = "rid" not in body
        if not is_probe:
            self.requests.append(body)
            if (refusal := self._refusal("/generate")) is not None:
                return refusal
        await self.free.wait()
        count, ending = sampling["max_new_tokens"], {"type": "length", "length": sampling["max_new_tokens"]}
        held = self.holds and not is_probe
        if held:
            count, ending = min(2, count - 1), {"type": "abort", "message": "Aborted"}
        answer = self._sampled(body, count, ending)
        if not is_probe:
            self.spoil(answer)
        if body.get("stream"):
            return await self._stream(request, body, answer, held)
        if held:
            await self._until_ended(body["rid"])
        return web.json_response(answer)

    async def _until_ended(self, request_id: str) -> None:
        ended = self.running[request_id] = asyncio.Event()
        async with self.arrived:
            self.arrived.notify_all()
        try:
            await ended.wait()
        finally:
            del self.running[request_id]

    async def _stream(self, request: web.Request, body: Json, answer: Json, held: bool) -> web.StreamResponse:
        """The first token, then as many in a part as were asked for; a held request ends after its tokens."""
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.stream_error is not None:
            await response.write(
                b"data: " + json.dumps({"error": self.stream_error}).encode() + b"\n\ndata: [DONE]\n\n"
            )
            return response
        count = len(answer["output_ids"])
        interval = body["sampling_params"].get("stream_interval", 1)
        ends = [*range(1, count + held, interval), count]
        for start, end in pairwise([0, *ends]):
            if held and end == count == start:
                await self._until_ended(body["rid"])
            part = self._part(answer, start, end, is_last=end == ends[-1] and start == ends[-2])
            await response.write(_event(part))
        await response.write(b"data: [DONE]\n\n")
        return response

    def _part(self, answer: Json, start: int, end: int, *, is_last: bool) -> Json:
        first = start if self.info.get("incremental_streaming_output") else 0
        meta = {**answer["meta_info"], "completion_tokens": end}
        keys = {"output_token_logprobs", "output_top_logprobs", "output_token_sampling_mask"}
        for key in meta.keys() & keys:
            meta[key] = meta[key][first:end]
        meta["weight_versions"] = [{**meta["weight_versions"][0], "end": end}]
        if not is_last:
            meta["finish_reason"] = None
        return {**answer, "output_ids": answer["output_ids"][first:end], "meta_info": meta}

    def _sampled(self, body: Json, count: int, ending: Json) -> Json:
        prompt: list[int] = []
        for token in body["input_ids"]:
            prompt += [token] * (self.tokens_of_an_image if token == IMAGE_TOKEN and body.get("image_data") else 1)
        ids = [at % (self.vocabulary - 1) + 1 for at in range(count)]
        temperature = body["sampling_params"].get("temperature", 1.0) or 1.0
        scale = temperature if self.temperature_in_logprobs else 1.0
        top = body.get("top_logprobs_num", 0)
        meta: Json = {
            "id": body.get("rid", "probe"),
            "finish_reason": ending,
            "prompt_tokens": len(prompt),
            "weight_version": self.model["weight_version"],
            "output_token_logprobs": [[-float(token), token, None] for token in ids],
            "output_top_logprobs": [[[-float(rank) / scale, rank, None] for rank in range(1, top + 1)]] * count,
            "weight_versions": [{"version": self.model["weight_version"], "start": 0, "end": count}],
        }
        if body.get("return_sampling_mask"):
            meta["output_token_sampling_mask"] = [[token, 4] for token in ids]
        if body.get("logprob_start_len") == 0:
            named = [0 if token in (IMAGE_TOKEN, self.vocabulary - 1) else token for token in prompt]
            meta["input_top_logprobs"] = [None, *[[[-2.0, 4, None], [-3.0, 5, None]][:top]] * (len(prompt) - 1)]
            meta["input_token_logprobs"] = [
                [None if not at else self.prompt_logprob(token), token, None] for at, token in enumerate(named)
            ]
        answer: Json = {"text": "", "output_ids": ids, "meta_info": meta}
        if body.get("return_prompt_token_ids"):
            answer["prompt_token_ids"] = prompt
        return answer
