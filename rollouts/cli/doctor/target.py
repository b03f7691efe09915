"""A server under examination, and what it is compared with."""

from __future__ import annotations

import base64
import json
import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from renderers import MultiModalData, RenderedTokens, TemplateRenderer
from renderers.model_files import read_json
from rollouts.cli.doctor.finding import Finding, Outcome
from rollouts.engines.protocol import Engine, GenerateRequest, SamplingParams
from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.control.control import ServerControl
from rollouts.engines.vllm.http.connection import ServerConnection
from rollouts.engines.vllm.http.response import HttpResponse, response_error
from rollouts.engines.vllm.media.image_file import image_file
from rollouts.engines.vllm.media.media_forms import MediaForm, MediaMode, media_form, resolved_mode
from rollouts.engines.vllm.wire.request_body import request_body
from rollouts.errors import MalformedResultError, OverlongPromptError

_RENDERING = "rendering images"
GENERATE = "/inference/v1/generate"

#: How many tokens a check samples.
SAMPLED = 16

_DTYPE = re.compile(r"\bdtype=torch\.(\w+)")
# Largest difference of log-probabilities between two answers that compute the same in another order.
_SAME = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.3}


class Sampled(NamedTuple):
    """Sampled ids int32 (n,) and their log-probabilities float32 (n,)."""

    token_ids: np.ndarray
    logprobs: np.ndarray


@dataclass(frozen=True, eq=False)
class Patient:
    """A server, and the model directory that it is compared with.

    `engine` sends media as `media="auto"` decides, as a user's engine does by default; `server_side` sends files, which
    the server processes itself; `connection` leads to the same server. `renderer` is loaded from `directory`. `dtype`
    is that of the server's weights, `dtype_source` says where that is known from. `known` is what was found so far, by
    the name of the check.
    """

    engine: Engine
    server_side: Engine
    control: ServerControl
    connection: ServerConnection
    renderer: TemplateRenderer
    directory: Path
    capabilities: ServerCapabilities
    dtype: str
    dtype_source: str
    known: dict[str, Finding] = field(default_factory=dict)

    def is_ok(self, check: str) -> bool:
        """Whether a check was made and found nothing wrong."""
        return check in self.known and self.known[check].outcome is Outcome.OK

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return read_json(self.directory / "config.json")

    @property
    def tolerance(self) -> float:
        """How far apart log-probabilities may be that should be equal but for the order of additions."""
        return _SAME.get(self.dtype, _SAME["bfloat16"])

    # Images.

    @cached_property
    def image_mode(self) -> MediaMode:
        """What `media="auto"` comes to for an image of this model and this server: the engine's own decision."""
        return resolved_mode(self.request(self.image_prompt(fresh_image())), "auto", self.capabilities)

    def image_form(self, request: GenerateRequest) -> MediaForm:
        """How the engine would send the images of a request. Raises `CapabilityError`."""
        return media_form(request, "auto", self.capabilities)

    # Prompts.

    def text_prompt(self) -> RenderedTokens:
        return self.renderer.render([{"role": "user", "content": "Say something."}], add_generation_prompt=True)

    def image_prompt(self, *images: np.ndarray) -> RenderedTokens:
        return self.renderer.render(image_messages(*images), add_generation_prompt=True)

    def request(self, rendered: RenderedTokens, *, max_tokens: int = SAMPLED, **sampling: Any) -> GenerateRequest:
        """Greedy unless `sampling` says otherwise."""
        return GenerateRequest(
            rendered.token_ids,
            SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling}),
            rendered.multi_modal_data,
            placeholder_token_ids=rendered.placeholder_token_ids,
        )

    async def sample(self, rendered: RenderedTokens, *, engine: Engine | None = None, **sampling: Any) -> Sampled:
        result = await (engine or self.engine).generate(self.request(rendered, **sampling))
        completion = result.completions[0]
        return Sampled(completion.token_ids, completion.logprobs)

    # What the engine never does by itself.

    async def post(self, path: str, body: Mapping[str, Any], doing: str) -> HttpResponse:
        return await self.connection.request("POST", path, name=doing, body=[json.dumps(body).encode()])

    async def render(self, shown: RenderedTokens) -> HttpResponse:
        """Let the server render a prompt of `image_prompt`: ids and tensors of its own making.

        Raises `OverlongPromptError` where it could not hold the prompt.
        """
        if len(shown.token_ids) >= self.capabilities.max_model_len:
            raise OverlongPromptError(_RENDERING, len(shown.token_ids), self.capabilities.max_model_len)
        policy = self.renderer.processors["image"].policy
        media = shown.multi_modal_data or MultiModalData()
        files = [image_file(item.source, policy) for item, _ in media.items_with_ranges()]
        urls = [f"data:{file.media_type};base64,{base64.b64encode(file.data).decode()}" for file in files]
        (message,) = image_messages()
        content = [*({"type": "image_url", "image_url": {"url": url}} for url in urls), *message["content"]]
        body = {
            "model": self.capabilities.model,
            "messages": [{**message, "content": content}],
            "add_generation_prompt": True,
        }
        return await self.post("/v1/chat/completions/render", body, _RENDERING)

    async def post_by_name(self, request: GenerateRequest, form: MediaForm) -> HttpResponse:
        """Send a request whose images are shown by their names alone, as after their first use.

        A salt of its own keeps cached prefixes out of the answer.
        """
        body = request_body(
            request,
            form.prompt_ids,
            form.member(()),
            model=self.capabilities.model,
            cache_salt=uuid.uuid4().hex,
            chunks=None,
            return_prompt=form.returns_prompt,
        )
        return await self.connection.request("POST", GENERATE, name="a request with known images", body=body)

    async def health(self) -> int:
        """The HTTP status of /health: 200 while the server's engine lives."""
        return (await self.connection.request("GET", "/health", name="asking for its health")).status


def apart(first: Sampled, second: Sampled) -> float:
    """The largest difference of log-probabilities up to the first token that differs, where each has its own."""
    count = min(len(first.token_ids), len(second.token_ids))
    differing = np.flatnonzero(first.token_ids[:count] != second.token_ids[:count])
    if len(differing):
        count = int(differing[0]) + 1
    return float(np.abs(first.logprobs[:count] - second.logprobs[:count]).max())


def image_messages(*images: np.ndarray) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]


def fresh_image(height: int = 128, width: int = 192) -> np.ndarray:
    """Coloured noise that no server has seen: uint8 (height, width, 3)."""
    return np.random.default_rng().integers(0, 256, (height, width, 3), dtype=np.uint8)


def sampled_in(reply: HttpResponse, doing: str) -> Sampled:
    """The first completion of a raw answer."""
    if reply.status != 200:
        raise response_error(doing, reply, doing)
    try:
        choice = reply.json()["choices"][0]
        token_ids = np.array(choice["token_ids"], dtype=np.int32)
        logprobs = np.array([said["logprob"] for said in choice["logprobs"]["content"]], dtype=np.float32)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise MalformedResultError(doing, f"an answer without log-probabilities: {error!r}") from error
    if len(token_ids) != len(logprobs) or not len(token_ids):
        raise MalformedResultError(doing, f"{len(token_ids)} tokens came with {len(logprobs)} log-probabilities")
    return Sampled(token_ids, logprobs)


async def weights_dtype(connection: ServerConnection, directory: Path) -> tuple[str, str]:
    """The dtype of the server's weights and where it is known from."""
    reply = await connection.request("GET", "/server_info", name="asking for the dtype")
    if reply.status == 200 and (said := _DTYPE.search(reply.body.decode(errors="replace"))) is not None:
        return said[1], "said by the server"
    config = read_json(directory / "config.json")
    dtype = config.get("dtype") or config.get("torch_dtype") or config.get("text_config", {}).get("dtype") or "bfloat16"
    return str(dtype), "assumed from config.json"
