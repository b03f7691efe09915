"""A server under examination, and what it is compared with."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from renderers import MultiModalData, RenderedTokens, TemplateRenderer
from renderers.model_files import read_json
from rollouts.engines.protocol import Engine, GenerateRequest, SamplingParams
from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.connection import Reply, ServerConnection, error_of
from rollouts.engines.vllm.control import ServerControl
from rollouts.engines.vllm.features import features_segments
from rollouts.errors import MalformedResultError

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
    """`engine` and `connection` lead to the same server, and so does `server_side`, whose media the server processes.

    `renderer` is loaded from `directory`. `dtype` is that of the server's weights, `dtype_source` says where that is
    known from.
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

    @cached_property
    def config(self) -> Mapping[str, Any]:
        return read_json(self.directory / "config.json")

    @property
    def tolerance(self) -> float:
        """How far apart log-probabilities may be that should be equal but for the order of additions."""
        return _SAME.get(self.dtype, _SAME["bfloat16"])

    @property
    def takes_pictures(self) -> bool:
        return self.capabilities.pixel_dtype is not None and "image" in self.renderer.processors

    # Prompts.

    def text_prompt(self) -> RenderedTokens:
        return self.renderer.render([{"role": "user", "content": "Say something."}], add_generation_prompt=True)

    def picture_prompt(self, *pictures: np.ndarray) -> RenderedTokens:
        return self.renderer.render(picture_messages(*pictures), add_generation_prompt=True)

    def request(self, rendered: RenderedTokens, *, max_tokens: int = SAMPLED, **sampling: Any) -> GenerateRequest:
        """Greedy unless `sampling` says otherwise."""
        return GenerateRequest(
            rendered.token_ids,
            SamplingParams(max_tokens=max_tokens, **{"temperature": 0.0, **sampling}),
            rendered.multi_modal_data,
            marker_ids=rendered.marker_ids,
        )

    async def sample(self, rendered: RenderedTokens, *, engine: Engine | None = None, **sampling: Any) -> Sampled:
        result = await (engine or self.engine).generate(self.request(rendered, **sampling))
        completion = result.completions[0]
        return Sampled(completion.token_ids, completion.logprobs)

    # What the engine never does by itself.

    async def post(self, path: str, body: Mapping[str, Any], doing: str) -> Reply:
        return await self.connection.request("POST", path, name=doing, body=[json.dumps(body).encode()])

    async def post_features(
        self, token_ids: Sequence[int], media: MultiModalData, *, salt: str, max_tokens: int = SAMPLED
    ) -> Reply:
        """A greedy request that shows its media by hash alone; `salt` keeps cached prefixes out of the answer."""
        pixel_dtype = self.capabilities.pixel_dtype
        assert pixel_dtype is not None
        segments = features_segments(media, pixel_dtype=pixel_dtype, send=lambda mm_hash: False)
        body = {
            "model": self.capabilities.model,
            "token_ids": list(token_ids),
            "features": json.loads(b"".join(segments)),
            "sampling_params": {"max_tokens": max_tokens, "temperature": 0.0, "logprobs": 0, "detokenize": False},
            "cache_salt": salt,
        }
        return await self.post("/inference/v1/generate", body, "a request with known media")


def picture_messages(*pictures: np.ndarray) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image", "image": picture} for picture in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]


def fresh_picture(height: int = 128, width: int = 192) -> np.ndarray:
    """Coloured noise that no server has seen: uint8 (height, width, 3)."""
    return np.random.default_rng().integers(0, 256, (height, width, 3), dtype=np.uint8)


def sampled_in(reply: Reply, doing: str) -> Sampled:
    """The first completion of a raw answer."""
    if reply.status != 200:
        raise error_of(doing, reply, doing)
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
