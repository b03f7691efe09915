"""The JSON body of `/inference/v1/generate`, as segments, so that large data is never copied into one string."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import numpy as np

from rollouts.engines.protocol import GenerateRequest
from rollouts.engines.vllm.http.exchange import Body
from rollouts.errors import InvalidRequestError

#: Tokens in a chunk, so many that a streamed response has two chunks: the first token, which shows that the prompt and
#: its media have reached the engine, and all other tokens.
_ONE_CHUNK = 1_000_000

_ENCODER = json.JSONEncoder(separators=(",", ":"), allow_nan=False)

#: How a response is sent: whole (None), the first token and then the rest ("first"), or token by token ("each").
Chunks = Literal["first", "each"] | None


def request_body(
    request: GenerateRequest,
    prompt_ids: Sequence[int],
    media: Body,
    *,
    model: str,
    cache_salt: str | None,
    chunks: Chunks,
    return_prompt: bool,
) -> Body:
    """The body of a request. `media` is `MediaPayload.body_field`: one member of the object, or empty.

    Raises `InvalidRequestError` for sampling options that JSON cannot represent.
    """
    sampling = _sampling(request, chunks)
    fields: dict[str, Any] = {
        "request_id": request.request_id,
        "model": model,
        "sampling_params": sampling,
        "priority": request.priority,
        "stream": chunks is not None,
        "return_token_ids": return_prompt,
        "token_ids": prompt_ids if isinstance(prompt_ids, list) else np.asarray(prompt_ids).tolist(),
    }
    if cache_salt is not None:
        fields["cache_salt"] = cache_salt
    try:
        opening = _ENCODER.encode(fields)[:-1].encode()
    except (TypeError, ValueError) as error:
        raise InvalidRequestError(
            request.request_id, f"a sampling option cannot be written as JSON ({error}): {sampling}"
        ) from error
    return [opening, b",", *media, b"}"] if media else [opening, b"}"]


def _sampling(request: GenerateRequest, chunks: Chunks) -> Mapping[str, Any]:
    """Every sampling parameter, explicitly: a server fills missing ones with its own defaults."""
    sampling = request.sampling
    fields: dict[str, Any] = {
        "n": sampling.n,
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "seed": sampling.seed,
        "stop_token_ids": list(sampling.stop_token_ids),
        "logprobs": 0,  # of the sampled token only
        "detokenize": False,
        **sampling.extra,
    }
    if request.prompt_logprobs:
        fields["prompt_logprobs"] = 0
    if chunks == "first":
        fields["stream_interval"] = _ONE_CHUNK
    return fields
