"""The responses of `/inference/v1/generate`, whole and in chunks, in the form of vLLM 0.32."""

from __future__ import annotations

import base64
import io
import json
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from renderers import MultiModalData
from rollouts.engines.protocol import Completion, FinishReason, GenerateResult

#: What stands for a log-probability that JSON cannot represent.
_NO_LOGPROB = -9999.0

END_OF_STREAM = b"data: [DONE]\n\n"


def whole_response(
    result: GenerateResult,
    prompt_ids: Sequence[int],
    *,
    model: str,
    eos_id: int | None,
    expanded: MultiModalData | None,
    with_logprobs: bool,
    returns_prompt: bool,
) -> dict[str, Any]:
    """The response with all completions. `eos_id` is the stop token that is not named as the stop reason."""
    return {
        "request_id": result.request_id,
        "model": model,
        "created": int(time.time()),
        "usage": usage(len(prompt_ids), sum(len(each.token_ids) for each in result.completions)),
        "prompt_logprobs": prompt_logprobs(result.prompt_logprobs, prompt_ids),
        "prompt_token_id_logprobs": None,
        **prompt_fields(prompt_ids, expanded, returns_prompt),
        "metrics": None,
        "kv_transfer_params": None,
        "ec_transfer_params": None,
        "output_mode": "tokens",
        "choices": [choice(each, 0, eos_id=eos_id, with_logprobs=with_logprobs) for each in result.completions],
    }


def prompt_fields(prompt_ids: Sequence[int], expanded: MultiModalData | None, returned: bool) -> dict[str, Any]:
    """The prompt that was run, and the places of its media, where the request asks for them."""
    if not returned:
        return {"prompt_token_ids": None, "mm_placeholders": None}
    return {"prompt_token_ids": list(prompt_ids), "mm_placeholders": None if expanded is None else places(expanded)}


def places(media: MultiModalData) -> dict[str, list[dict[str, int]]]:
    return {
        modality: [{"offset": each.offset, "length": each.length} for each in ranges]
        for modality, ranges in media.mm_placeholders.items()
    }


def usage(prompt_tokens: int, completion_tokens: int) -> dict[str, Any]:
    return {
        "prompt_tokens": prompt_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "completion_tokens": completion_tokens,
        "prompt_tokens_details": None,
        "completion_tokens_details": None,
    }


def choice(completion: Completion, start: int, *, eos_id: int | None, with_logprobs: bool) -> dict[str, Any]:
    """A completion from token `start` to its end."""
    stop = completion.stop_token_id
    experts = completion.routed_experts
    masks = completion.sampling_masks
    rest = completion.token_ids[start:], completion.logprobs[start:]
    return {
        **delta(completion.index, *rest, with_logprobs=with_logprobs),
        "finish_reason": str(completion.finish_reason),
        "stop_reason": stop if completion.finish_reason is FinishReason.STOP and stop != eos_id else None,
        "routed_experts": None if experts is None else npy(experts),
        "sampling_mask": None if masks is None else [mask.tolist() for mask in masks[start:]],
        "weight_versions": [
            {"version": span.version, "start": span.start, "end": span.end} for span in completion.weight_spans
        ],
    }


def delta(index: int, token_ids: np.ndarray, logprobs: np.ndarray, *, with_logprobs: bool) -> dict[str, Any]:
    """New tokens of a completion that has not ended."""
    return {
        "index": index,
        "finish_reason": None,
        "stop_reason": None,
        "token_ids": token_ids.tolist(),
        "routed_experts": None,
        "sampling_mask": None,
        "weight_versions": None,
        "logprobs": {"content": _content(token_ids, logprobs)} if with_logprobs else None,
    }


def event(content: Mapping[str, Any]) -> bytes:
    """One event of a streamed response."""
    return b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"


def npy(array: np.ndarray) -> str:
    """The base64 of a .npy file."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode()


def prompt_logprobs(values: np.ndarray | None, prompt_ids: Sequence[int]) -> list[dict[str, Any] | None] | None:
    """For each token of the prompt its log-probability by its id, null for the first one."""
    if values is None:
        return None
    entries = (
        {str(token): {"logprob": _finite(value), "rank": None, "decoded_token": None}}
        for token, value in zip(prompt_ids[1:], values[1:].tolist(), strict=True)
    )
    return [None, *entries]


def _content(token_ids: np.ndarray, logprobs: np.ndarray) -> list[dict[str, Any]]:
    """Entries with the sampled token as the only candidate; its rank is not known."""
    entries = [
        {"token_id": token, "logprob": _finite(value), "rank": None}
        for token, value in zip(token_ids.tolist(), logprobs.tolist(), strict=True)
    ]
    return [{**entry, "top_logprobs": [entry]} for entry in entries]


def _finite(value: float) -> float:
    return max(value, _NO_LOGPROB) if math.isfinite(value) else _NO_LOGPROB
