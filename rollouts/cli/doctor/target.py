"""The server that is being checked, the model directory that it is compared with, and what was found."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from renderers import TemplateRenderer
from renderers.messages import Modality
from renderers.process.files import read_json
from rollouts.engines.http.connection import ServerConnection
from rollouts.engines.http.responses import HttpResponse
from rollouts.engines.protocol import Completion, GenerateRequest, GenerateResult, SamplingParams
from rollouts.engines.server_kinds import ServerKind

Outcome = Literal["ok", "failed", "absent", "skipped"]


class Finding(NamedTuple):
    """What a check found, and the cure.

    `absent`: the server lacks an option that only some uses need. `skipped`: not checked, with the reason.
    """

    outcome: Outcome
    seen: str
    cure: str = ""


#: The kinds of media that are checked, and what one of them is called.
MEDIA: Final[Mapping[Modality, str]] = {"image": "image", "audio": "sound"}
#: The number of tokens that a check samples.
SAMPLED_TOKENS: Final = 16

_SOUND_RATE = 16_000


@dataclass(frozen=True, eq=False)
class Target:
    """A server, and the model directory that it is compared with.

    `engine` sends media as `media="auto"` decides, the default of users' engines; `connection` is a
    connection to the same server. `renderer` is loaded from `directory`. `dtype` is that of the server's
    weights, of config.json where the server does not report it. `findings` holds the results so far, by the
    name of the check.
    """

    kind: ServerKind
    engine: Any
    connection: ServerConnection
    renderer: TemplateRenderer
    directory: Path
    capabilities: Any
    dtype: str
    findings: dict[str, Finding] = field(default_factory=dict)

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return read_json(self.directory / "config.json")

    def request(
        self,
        modality: Modality | None = None,
        *,
        height: int = 128,
        max_tokens: int = SAMPLED_TOKENS,
        temperature: float = 0.0,
        **sampling: Any,
    ) -> GenerateRequest:
        """A request about text, an image of that height or a sound: random noise, which no server has in its cache."""
        random = np.random.default_rng()
        content: Any = "Say something."
        if modality == "audio":
            samples = random.uniform(-0.5, 0.5, round(1.27 * _SOUND_RATE)).astype(np.float32)
            content = [{"type": "audio", "audio": samples, "sampling_rate": _SOUND_RATE}]
        elif modality == "image":
            content = [{"type": "image", "image": random.integers(0, 256, (height, 192, 3), dtype=np.uint8)}]
        if modality is not None:
            content.append({"type": "text", "text": "What is it?"})
        rendered = self.renderer.render([{"role": "user", "content": content}], add_generation_prompt=True)
        return GenerateRequest(
            rendered.token_ids,
            SamplingParams(max_tokens=max_tokens, temperature=temperature, **sampling),
            rendered.multi_modal_data,
            placeholder_token_ids=rendered.placeholder_token_ids,
        )

    async def sample(self, request: GenerateRequest) -> Completion:
        result: GenerateResult = await self.engine.generate(request)
        return result.completions[0]

    async def post(self, path: str, body: Mapping[str, Any], name: str) -> HttpResponse:
        sent = json.dumps({"model": self.capabilities.model, **body}).encode()
        return await self.connection.request("POST", path, name=name, body=[sent])


async def weights_dtype(connection: ServerConnection, directory: Path) -> str:
    """The dtype of the server's weights: as it reports it, else that of config.json."""
    response = await connection.request("GET", "/server_info", name="asking for the dtype")
    if response.status == 200 and (found := re.search(r"\bdtype=torch\.(\w+)", response.body.decode(errors="replace"))):
        return found[1]
    config = read_json(directory / "config.json")
    return str(config.get("dtype") or config.get("torch_dtype") or config.get("text_config", {}).get("dtype"))
