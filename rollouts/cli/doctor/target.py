"""The server that is being checked, and the model directory that it is compared with."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from rich.console import Console
from rich.text import Text

from renderers import MediaItem, MultiModalData, PlaceholderRange, RenderedTokens, TemplateRenderer
from renderers.process.files import read_json
from rollouts.engines.http.connection import ServerConnection
from rollouts.engines.http.exchange import HttpResponse, response_error
from rollouts.engines.http.source_files import image_file
from rollouts.engines.protocol import Completion, Engine, GenerateRequest, SamplingParams
from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.generate import Generation, request_body
from rollouts.engines.vllm.media_payload import MediaMode, MediaPayload, media_payload, select_mode
from rollouts.errors import CapabilityError, InvalidRequestError, OverlongPromptError
from rollouts.terminal.table import Column, Row, print_table, printable_line


class Outcome(StrEnum):
    """`absent`: the server lacks an option that only some uses need. `skipped`: not checked, with the reason."""

    OK = "ok"
    FAILED = "failed"
    ABSENT = "absent"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the report: the name of the check, what was seen, and the cure."""

    check: str
    outcome: Outcome
    seen: str
    cure: str = ""

    def without(self, secret: str | None) -> Finding:
        """A copy in which the secret, which a response of the server may quote, is replaced by asterisks."""
        if not secret:
            return self
        return replace(self, seen=self.seen.replace(secret, "***"), cure=self.cure.replace(secret, "***"))


def ok(seen: str, *, check: str = "") -> Finding:
    """As the three below: without `check`, the finding gets the name of the check that returns it."""
    return Finding(check, Outcome.OK, seen)


def failed(seen: str, cure: str, *, check: str = "") -> Finding:
    return Finding(check, Outcome.FAILED, seen, cure)


def absent(seen: str, cure: str, *, check: str = "") -> Finding:
    return Finding(check, Outcome.ABSENT, seen, cure)


def skipped(seen: str, cure: str = "", *, check: str = "") -> Finding:
    return Finding(check, Outcome.SKIPPED, seen, cure)


_STYLES = {Outcome.OK: "green", Outcome.FAILED: "bold red", Outcome.ABSENT: "yellow", Outcome.SKIPPED: "dim"}


def print_findings(findings: Sequence[Finding], console: Console | None = None) -> None:
    """Print a row for each finding, with the cure below what was seen."""
    rows: list[Row] = []
    for finding in findings:
        seen = Text(printable_line(finding.seen))
        if finding.cure:
            seen.append(f"\n-> {printable_line(finding.cure)}", "bold" if finding.outcome is Outcome.FAILED else "")
        rows.append([finding.check, Text(finding.outcome.value, _STYLES[finding.outcome]), seen])
    print_table([Column("check", wraps=True), Column("outcome"), Column("seen", wraps=True)], rows, console)


def summary(findings: Sequence[Finding]) -> str:
    counts = {outcome: sum(finding.outcome is outcome for finding in findings) for outcome in Outcome}
    return ", ".join(f"{count} {outcome.value}" for outcome, count in counts.items() if count)


RENDERING = "rendering images"
#: The source of a dtype that the server has reported.
REPORTED = "reported by the server"
GENERATE_PATH = "/inference/v1/generate"

#: The number of tokens that a check samples.
SAMPLED_TOKENS = 16

_IMAGE_LIMIT = re.compile(r"[Aa]t most (\d+) image")
_DTYPE = re.compile(r"\bdtype=torch\.(\w+)")
# The largest difference between log-probabilities of equal computations whose additions are in another order, by dtype.
_TOLERANCES = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.3}


@dataclass(frozen=True, eq=False)
class Target:
    """A server, and the model directory that it is compared with.

    `engine` sends media as `media="auto"` decides, the default of users' engines; `server_side` sends files, which the
    server processes; `connection` is a connection to the same server. `renderer` is loaded from `directory`. `dtype`
    is that of the server's weights, `dtype_source` says how it is known. `findings` holds the results so far, by the
    name of the check.
    """

    command: ClassVar[str] = "vllm serve"
    length_option: ClassVar[str] = "--max-model-len"

    engine: Engine
    server_side: Engine
    control: Any  # of the engine
    connection: ServerConnection
    renderer: TemplateRenderer
    directory: Path
    capabilities: ServerCapabilities
    dtype: str
    dtype_source: str
    findings: dict[str, Finding] = field(default_factory=dict)

    def is_ok(self, check: str) -> bool:
        """Whether a check has run and passed."""
        return check in self.findings and self.findings[check].outcome is Outcome.OK

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return read_json(self.directory / "config.json")

    @property
    def tolerance(self) -> float:
        """The largest difference between log-probabilities that are equal apart from the order of additions."""
        return _TOLERANCES.get(self.dtype, _TOLERANCES["bfloat16"])

    # Images.

    @property
    def has_images(self) -> bool:
        """Whether the renderer can process images of this model."""
        return "image" in self.renderer.processors

    @cached_property
    def image_mode(self) -> MediaMode:
        """The mode that the engine chooses under `media="auto"` for an image of this model and this server."""
        return select_mode(self.request(self.image_prompt(fresh_image())), "auto", self.capabilities)

    def no_server_side(self, rendered: RenderedTokens) -> str | None:
        """Why the server cannot process the files of these images itself; None if it can."""
        try:
            select_mode(self.request(rendered), "content_parts", self.capabilities)
        except (CapabilityError, InvalidRequestError) as error:
            return error.reason
        return None

    def image_payload(self, request: GenerateRequest) -> MediaPayload:
        """The images of a request as the engine would send them. Raises `CapabilityError`."""
        return media_payload(request, "auto", self.capabilities)

    def lacks(self, what: str) -> Finding | None:
        """The finding of a check that vLLM's Rust frontend makes impossible; None for vLLM's own frontend."""
        if self.capabilities.rust_frontend is None:
            return None
        return skipped(f"vLLM's Rust frontend {what}")

    # Prompts.

    def text_prompt(self) -> RenderedTokens:
        return self.renderer.render([{"role": "user", "content": "Say something."}], add_generation_prompt=True)

    def image_prompt(self, *images: np.ndarray, separated: bool = False) -> RenderedTokens:
        """A prompt of the images and a question; `separated`: with text between the images."""
        parts = [{"type": "image", "image": image} for image in images]
        return self.renderer.render(_image_messages(parts, separated), add_generation_prompt=True)

    def request(
        self, rendered: RenderedTokens, *, max_tokens: int = SAMPLED_TOKENS, **sampling: Any
    ) -> GenerateRequest:
        """A request with temperature 0 unless `sampling` has another."""
        return GenerateRequest(
            rendered.token_ids,
            SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling}),
            rendered.multi_modal_data,
            placeholder_token_ids=rendered.placeholder_token_ids,
        )

    async def sample(self, rendered: RenderedTokens, *, engine: Engine | None = None, **sampling: Any) -> Completion:
        return (await (engine or self.engine).generate(self.request(rendered, **sampling))).completions[0]

    # Requests that the engine never sends by itself.

    async def post(self, path: str, body: Mapping[str, Any], name: str) -> HttpResponse:
        return await self.connection.request("POST", path, name=name, body=[json.dumps(body).encode()])

    async def render(self, prompt: RenderedTokens, *, separated: bool = False) -> HttpResponse:
        """Let the server render the messages of a prompt made by `image_prompt`: its own token ids and tensors.

        Raises `OverlongPromptError` if the prompt is longer than the server allows.
        """
        if len(prompt.token_ids) >= self.capabilities.max_model_len:
            raise OverlongPromptError(RENDERING, len(prompt.token_ids), self.capabilities.max_model_len)
        policy = self.renderer.processors["image"].policy
        files = [image_file(item.source, policy) for item, _ in images_of(prompt)]
        urls = [b"".join(file.data_url()).decode() for file in files]
        body = {
            "model": self.capabilities.model,
            "messages": _image_messages([{"type": "image_url", "image_url": {"url": url}} for url in urls], separated),
            "add_generation_prompt": True,
        }
        return await self.post("/v1/chat/completions/render", body, RENDERING)

    async def post_hashes_only(self, request: GenerateRequest, payload: MediaPayload) -> HttpResponse:
        """Send a request with the hashes of its images and without their data, as after their first use.

        A new cache salt keeps the server from answering out of its prefix cache.
        """
        body = request_body(
            request,
            payload.prompt_ids,
            payload.body_field(()),
            model=self.capabilities.model,
            cache_salt=uuid.uuid4().hex,
            chunks=None,
            return_prompt=payload.returns_prompt,
        )
        return await self.connection.request("POST", GENERATE_PATH, name="a request with known images", body=body)

    async def health(self) -> int:
        """The HTTP status of /health: 200 while the server's engine lives."""
        return (await self.connection.request("GET", "/health", name="asking for its health")).status


def _image_messages(parts: Sequence[Mapping[str, Any]], separated: bool) -> list[dict[str, Any]]:
    """A message of image parts and a question; `separated`: with text between the images."""
    between = [{"type": "text", "text": "And:"}] if separated else []
    content = [each for part in parts for each in (*between, part)][len(between) :]
    return [{"role": "user", "content": [*content, {"type": "text", "text": "What is it?"}]}]


def image_limit(reason: str) -> int | None:
    """The limit of images per prompt that a refusal of vLLM names; None if it has another reason."""
    found = _IMAGE_LIMIT.search(reason)
    return None if found is None else int(found[1])


def fresh_image(height: int = 128, width: int = 192) -> np.ndarray:
    """Random coloured noise, which no server has in its cache: uint8 (height, width, 3)."""
    return np.random.default_rng().integers(0, 256, (height, width, 3), dtype=np.uint8)


def images_of(rendered: RenderedTokens) -> list[tuple[MediaItem, PlaceholderRange]]:
    return (rendered.multi_modal_data or MultiModalData()).items_with_ranges()


def completion_of(response: HttpResponse, rendered: RenderedTokens, name: str) -> Completion:
    """The completion in a response of the server to a prompt; `name` names the request in errors."""
    if response.status != 200:
        raise response_error(name, response, name)
    generation = Generation(name, 1)
    generation.add_response(response.body)
    return generation.completions(len(rendered.token_ids), "")[0]


async def weights_dtype(connection: ServerConnection, directory: Path) -> tuple[str, str]:
    """The dtype of the server's weights, and how it is known."""
    response = await connection.request("GET", "/server_info", name="asking for the dtype")
    if response.status == 200 and (found := _DTYPE.search(response.body.decode(errors="replace"))) is not None:
        return found[1], REPORTED
    config = read_json(directory / "config.json")
    dtype = config.get("dtype") or config.get("torch_dtype") or config.get("text_config", {}).get("dtype") or "bfloat16"
    return str(dtype), "assumed from config.json"
