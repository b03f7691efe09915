"""What an SGLang server is and reports, found out once with requests that cannot harm it."""

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Final

from rollouts.engines.http.capability_cache import PROBE_NAME, probe_request
from rollouts.engines.http.connection import ServerConnection
from rollouts.engines.http.responses import HttpResponse, reading, response_error
from rollouts.errors import CapabilityError, MalformedResultError

#: At position 0 of every vocabulary; what it means does not matter.
_PROBE_IDS: Final = (0,)
_PROBE_TEMPERATURE: Final = 0.5

_KEYS_ERROR = re.compile(r"logit_bias must ha(?:s|ve) keys in \[0, (\d+)\]")


@dataclass(frozen=True, slots=True)
class SGLangCapabilities:
    """What a server reports of itself, and what its answers to probes show.

    `vocab_size`: ids from there on end the server's process. `raw_logprobs`: log-probabilities are those
    before temperature; None: not known, because the model finds the likeliest tokens equally likely.
    `returns_prompt`: the server returns the ids of the prompt that it ran. `streams_new_tokens`: the parts of
    a stream do not repeat earlier ones. `deterministic`: it takes seeds. `kept_ids`: so many ids it reports
    at most for a token that was sampled with `top_k`; 0: it would refuse the request.
    """

    engine: ClassVar[str] = "SGLang"

    version: str
    model: str
    vocab_size: int
    max_model_len: int
    takes_images: bool
    raw_logprobs: bool | None
    returns_prompt: bool
    streams_new_tokens: bool = False
    deterministic: bool = False
    lora: bool = False
    routed_experts: bool = False
    kept_ids: int = 0


async def server_info(connection: ServerConnection) -> Mapping[str, Any]:
    """The arguments that the server was started with, and its version. Raises `CapabilityError`."""
    return await _report(connection, "/server_info")


async def model_info(connection: ServerConnection) -> Mapping[str, Any]:
    """What the server says of its model and the version of its weights. Raises `CapabilityError`, `ApiKeyError`."""
    return await _report(connection, "/model_info")


async def probe(connection: ServerConnection) -> SGLangCapabilities:
    """The capabilities of a server. Raises `CapabilityError` where it is no SGLang, or hides what is needed."""
    server, model = await asyncio.gather(server_info(connection), model_info(connection))
    size, length = await asyncio.gather(_vocab_size(connection), _max_model_len(connection))
    reports_kept = server.get("speculative_algorithm") is None and server.get("disaggregation_mode") == "null"
    plain, scaled = await asyncio.gather(*(_probe_tokens(connection, each) for each in (1.0, _PROBE_TEMPERATURE)))
    return SGLangCapabilities(
        version=str(server.get("version", "unknown")),
        model=str(model.get("served_model_name") or model.get("model_path")),
        vocab_size=size,
        max_model_len=length,
        takes_images=model.get("has_image_understanding") is True,
        raw_logprobs=_are_raw(_gap(plain), _gap(scaled)),
        returns_prompt=plain.get("prompt_token_ids") == list(_PROBE_IDS),
        streams_new_tokens=server.get("incremental_streaming_output") is True,
        deterministic=server.get("enable_deterministic_inference") is True,
        lora=bool(server.get("enable_lora")),
        routed_experts=server.get("enable_return_routed_experts") is True,
        kept_ids=server.get("sampling_mask_max_tokens", 0) if reports_kept else 0,
    )


async def _report(connection: ServerConnection, path: str) -> Mapping[str, Any]:
    response = await probe_request(connection, "GET", path)
    try:
        content = response.json() if response.status == 200 else None
    except MalformedResultError:  # as of another program
        content = None
    if not isinstance(content, dict):
        reason = response_error(PROBE_NAME, response, f"GET {path}").reason
        raise CapabilityError(
            PROBE_NAME,
            f"{connection.base_url} is no SGLang server, or a proxy hides its {path}: {reason}. For a vLLM server use "
            'VLLMEngine, in commands --engine vllm, in files kind = "vllm"',
        )
    return content


async def _generate(connection: ServerConnection, fields: Mapping[str, Any]) -> HttpResponse:
    return await probe_request(connection, "POST", "/generate", {"input_ids": _PROBE_IDS, **fields})


async def _vocab_size(connection: ServerConnection) -> int:
    """The size that the server names where it refuses a bias for token -1, which it does before it runs anything."""
    response = await _generate(connection, {"sampling_params": {"max_new_tokens": 1, "logit_bias": {"-1": 0.0}}})
    match = _KEYS_ERROR.search(response.body.decode(errors="replace"))
    if match is None:
        reason = "ids outside of the vocabulary end the server's process, and it does not report its size"
        raise CapabilityError(PROBE_NAME, f"{connection.base_url}: {reason}; use SGLang 0.5.23")
    return int(match[1]) + 1


async def _max_model_len(connection: ServerConnection) -> int:
    response = await probe_request(connection, "GET", "/v1/models")
    with reading(PROBE_NAME, f"{connection.base_url}/v1/models has no max_model_len", CapabilityError):
        return int(response.json()["data"][0]["max_model_len"])


async def _probe_tokens(connection: ServerConnection, temperature: float) -> Mapping[str, Any]:
    sampling = {"max_new_tokens": 1, "temperature": temperature}
    # So many likeliest tokens show whether the temperature is in the log-probabilities; no model has fewer
    # tokens.
    fields = {"return_logprob": True, "top_logprobs_num": 8, "return_prompt_token_ids": True}
    response = await _generate(connection, {"sampling_params": sampling, **fields})
    content = response.json() if response.status == 200 else None
    if not isinstance(content, dict):
        raise response_error(PROBE_NAME, response, f"sampling a token at {connection.base_url}")
    return content


def _gap(answer: Mapping[str, Any]) -> float:
    """The distance between the log-probabilities of the likeliest tokens."""
    with reading(PROBE_NAME, "the log-probabilities of the likeliest tokens cannot be read", CapabilityError):
        values = [entry[0] for entry in answer["meta_info"]["output_top_logprobs"][0]]
        return float(max(values) - min(values))


def _are_raw(plain: float, scaled: float) -> bool | None:
    """Whether log-probabilities are those before temperature, which otherwise multiplies distances by 1 / 0.5."""
    # The smallest distance between the likeliest tokens by which the two kinds are told apart.
    if plain < 1e-3:
        return None
    return scaled / plain < (1 + 1 / _PROBE_TEMPERATURE) / 2
