"""The server that is being checked, and the model directory that it is compared with."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from rich.console import Console
from rich.text import Text

from renderers import MediaItem, MultiModalData, PlaceholderRange, RenderedTokens, TemplateRenderer
from renderers.messages import Modality
from renderers.process.files import read_json
from rollouts.engines.http.connection import ServerConnection
from rollouts.engines.http.responses import HttpResponse
from rollouts.engines.protocol import Completion, GenerateRequest, GenerateResult, SamplingParams
from rollouts.terminal.table import Column, Row, print_table
from rollouts.terminal.text import printable_line


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


#: The number of tokens that a check samples.
SAMPLED_TOKENS = 16

_SOUND_RATE = 16_000
# The largest difference between log-probabilities of equal computations whose additions are in another order, by dtype.
_TOLERANCES = {"float32": 1e-4, "float16": 0.05, "bfloat16": 0.3}


@dataclass(frozen=True, eq=False)
class Target:
    """A server, and the model directory that it is compared with.

    `engine` sends media as `media="auto"` decides, the default of users' engines; `connection` is a connection to the
    same server. `renderer` is loaded from `directory`. `dtype` is that of the server's weights, of config.json where
    the server does not report it. `findings` holds the results so far, by the name of the check.
    """

    kind: Literal["vLLM", "SGLang"]
    engine: Any
    connection: ServerConnection
    renderer: TemplateRenderer
    directory: Path
    capabilities: Any
    dtype: str
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

    @property
    def command(self) -> str:
        return "vllm serve" if self.kind == "vLLM" else "sglang serve"

    @property
    def rust_frontend(self) -> str | None:
        """The version of vLLM's Rust frontend; None for vLLM's own frontend and other servers."""
        return getattr(self.capabilities, "rust_frontend", None)

    # Prompts.

    def text_prompt(self) -> RenderedTokens:
        return self._prompt("Say something.")

    def media_prompt(self, modality: Modality, *, height: int = 128, width: int = 192) -> RenderedTokens:
        """A prompt with an image of that size, or a sound, of random noise, which no server has in its cache."""
        random = np.random.default_rng()
        if modality == "audio":
            samples = random.uniform(-0.5, 0.5, round(1.27 * _SOUND_RATE)).astype(np.float32)
            part = {"type": "audio", "audio": samples, "sampling_rate": _SOUND_RATE}
        else:
            part = {"type": "image", "image": random.integers(0, 256, (height, width, 3), dtype=np.uint8)}
        return self._prompt([part, {"type": "text", "text": "What is it?"}])

    def _prompt(self, content: Any) -> RenderedTokens:
        return self.renderer.render([{"role": "user", "content": content}], add_generation_prompt=True)

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

    async def sample(self, rendered: RenderedTokens, **sampling: Any) -> Completion:
        result: GenerateResult = await self.engine.generate(self.request(rendered, **sampling))
        return result.completions[0]

    async def post(self, path: str, body: Mapping[str, Any], name: str) -> HttpResponse:
        return await self.connection.request("POST", path, name=name, body=[json.dumps(body).encode()])


def media_of(rendered: RenderedTokens) -> list[tuple[MediaItem, PlaceholderRange]]:
    return (rendered.multi_modal_data or MultiModalData()).items_with_ranges()


async def weights_dtype(connection: ServerConnection, directory: Path) -> str:
    """The dtype of the server's weights: as it reports it, else that of config.json."""
    response = await connection.request("GET", "/server_info", name="asking for the dtype")
    if response.status == 200 and (found := re.search(r"\bdtype=torch\.(\w+)", response.body.decode(errors="replace"))):
        return found[1]
    config = read_json(directory / "config.json")
    return str(config.get("dtype") or config.get("torch_dtype") or config.get("text_config", {}).get("dtype"))
