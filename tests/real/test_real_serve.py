"""`rollouts serve` beside a real vLLM with the same checkpoint: the same requests, status codes, shapes and numbers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from served_in_thread import ServedInThread, serve_directory
from vllm_server import VLLMServer

from renderers import load_renderer
from rollouts import GenerateRequest, SamplingParams
from rollouts.engines.vllm import VLLMEngine
from rollouts.engines.vllm.features import encode_features

GENERATE = "/inference/v1/generate"
RENDER = "/v1/chat/completions/render"
GREEDY = {"max_tokens": 6, "temperature": 0, "logprobs": 0}
TEXT = [{"role": "user", "content": "What is it?"}]


@pytest.fixture(scope="module")
def served(vllm_server: VLLMServer) -> Iterator[ServedInThread]:
    model = httpx.get(f"{vllm_server.base_url}/v1/models").json()["data"][0]
    with serve_directory(vllm_server.model_dir, name=model["id"]) as server:
        yield server


def image_request(directory) -> GenerateRequest:
    image = np.random.default_rng(0).integers(0, 256, (64, 96, 3), dtype=np.uint8)
    content = [{"type": "image", "image": image}, {"type": "text", "text": "What is it?"}]
    rendered = load_renderer(directory).render([{"role": "user", "content": content}], add_generation_prompt=True)
    return GenerateRequest(
        rendered.token_ids,
        SamplingParams(max_tokens=6, temperature=0),
        rendered.multi_modal_data,
        placeholder_token_ids=rendered.placeholder_token_ids,
    )


def shape_of(value: Any) -> Any:
    """The keys and types of a JSON value; a list has the shape of its first entry, a number is a number."""
    if isinstance(value, dict):
        return {key: shape_of(each) for key, each in value.items()}
    if isinstance(value, list):
        return [shape_of(value[0])] if value else []
    return "number" if isinstance(value, int | float) and not isinstance(value, bool) else type(value).__name__


def requests_of(directory) -> dict[str, tuple[str, str, Any]]:
    """By name: method, path and body."""
    prompt = load_renderer(directory).render(TEXT, add_generation_prompt=True).token_ids

    def body(**fields: Any) -> tuple[str, str, Any]:
        return "POST", GENERATE, {"token_ids": prompt, "sampling_params": GREEDY, **fields}

    def sampling(**options: Any) -> tuple[str, str, Any]:
        return body(sampling_params={**GREEDY, **options})

    place = {"mm_hashes": {"image": ["unknown"]}, "mm_placeholders": {"image": [{"offset": 0, "length": 1}]}}
    media = image_request(directory)
    assert media.multi_modal_data is not None
    features = json.loads(b"".join(encode_features(media.multi_modal_data, pixel_dtype="uint8")))
    return {
        "text": body(),
        "text without log-probabilities": sampling(logprobs=None),
        "text with those of the prompt": sampling(prompt_logprobs=0),
        "several samples": sampling(n=2, temperature=1, seed=1),
        "a stop token": sampling(ignore_eos=True, stop_token_ids=list(range(288))),
        "the prompt returned": body(return_token_ids=True),
        "an image": body(token_ids=list(media.prompt_ids), features=features),
        "a stop token beyond the vocabulary": sampling(stop_token_ids=[9_999_999]),
        "another model": body(model="nope"),
        "a long prompt": body(token_ids=[5] * 5000),
        "a full prompt": body(token_ids=[5] * 4096),
        "a token beyond the vocabulary": body(token_ids=[9_999_999]),
        "no tokens": body(token_ids=[]),
        "negative tokens": body(token_ids=[-1]),
        "no sampling options": ("POST", GENERATE, {"token_ids": prompt}),
        "a wrong temperature": sampling(temperature=-1),
        "max_tokens 0": sampling(max_tokens=0),
        "many log-probabilities": sampling(logprobs=21),
        "several greedy samples": sampling(n=2),
        "features without hashes": body(features={"mm_placeholders": {}}),
        "a placeholder past the end": body(
            features={"mm_hashes": {"image": ["a"]}, "mm_placeholders": {"image": [{"offset": 4000, "length": 2}]}}
        ),
        "an unknown image": body(features=place),
        "no base64": body(features={**place, "kwargs_data": {"image": ["?"]}}),
        "an abort without ids": ("POST", "/inference/v1/abort_requests", {}),
        "an abort": ("POST", "/inference/v1/abort_requests", {"request_ids": ["generate-tokens-none"]}),
        "tokens of text": ("POST", "/tokenize", {"prompt": "What is it?", "add_special_tokens": False}),
        "tokens of messages": ("POST", "/tokenize", {"messages": TEXT}),
        "text of tokens": ("POST", "/detokenize", {"tokens": prompt}),
        "a rendered prompt": ("POST", RENDER, {"messages": TEXT}),
        "models": ("GET", "/v1/models", None),
        "version": ("GET", "/version", None),
        "load": ("GET", "/load", None),
        "paused": ("GET", "/is_paused", None),
        "sleeping": ("GET", "/is_sleeping", None),
        "weights": ("GET", "/weight_info", None),
        "world size": ("GET", "/get_world_size", None),
        "an unknown mode": ("POST", "/pause?mode=nope", None),
        "pause": ("POST", "/pause?mode=keep", None),
        "resume": ("POST", "/resume", None),
        "sleep": ("POST", "/sleep?level=1", None),
        "wake up": ("POST", "/wake_up", None),
        "prefix cache": ("POST", "/reset_prefix_cache", None),
        "media cache": ("POST", "/reset_mm_cache", None),
        "encoder cache": ("POST", "/reset_encoder_cache", None),
        "a label": ("POST", "/update_weight_version", {"new_version": "default"}),
        "an unknown route": ("GET", "/nope", None),
        "another method": ("GET", GENERATE, None),
    }


#: What the two may differ in: the kind of a value that one of them does not know, and more fields of vLLM.
DIFFERENT_SHAPES = {"models", "a rendered prompt", "an unknown mode", "text with those of the prompt"}


def test_the_same_requests_get_the_same_status_codes_and_shapes(vllm_server, served):
    differences = []
    for name, (method, path, body) in requests_of(vllm_server.model_dir).items():
        answers = [
            httpx.request(method, base_url + path, json=body, timeout=120)
            for base_url in (vllm_server.base_url, served.base_url)
        ]
        statuses = [answer.status_code for answer in answers]
        if statuses[0] != statuses[1]:
            differences.append(f"{name}: status {statuses}: {[answer.text[:300] for answer in answers]}")
        elif answers[0].content and name not in DIFFERENT_SHAPES:
            found = [comparable(answer.json()) for answer in answers]
            if found[0] != found[1]:
                differences.append(f"{name}: {found[0]} and {found[1]}")
    assert not differences, "\n".join(differences)


def comparable(content: Any) -> Any:
    """The shape of a response; of an error, its type and parameter, and of tokens, the values."""
    if isinstance(content, dict) and isinstance(content.get("error"), dict):
        return {"type": content["error"]["type"], "code": content["error"]["code"]}
    shape = shape_of(content)
    for choice in shape.get("choices", ()) if isinstance(shape, dict) else ():
        for entry in (choice["logprobs"] or {}).get("content", ()) if isinstance(choice["logprobs"], dict) else ():
            entry.pop("rank")  # which an engine of ours does not report
            for each in entry["top_logprobs"]:
                each.pop("rank")
    if isinstance(shape, dict) and "choices" in shape:
        shape["tokens"] = [choice["token_ids"] for choice in content["choices"] if len(content["choices"]) == 1]
    return content.get("tokens", shape) if isinstance(content, dict) and "tokens" in content else shape


@pytest.mark.parametrize("media", ["features", "content_parts"])
async def test_both_give_the_same_tokens_and_log_probabilities(vllm_server, served, media):
    request = image_request(vllm_server.model_dir)
    async with VLLMEngine(vllm_server.base_url, media=media) as one, VLLMEngine(served.base_url, media=media) as other:
        ours, theirs = await asyncio.gather(one.generate(request), other.generate(request))
    (first,), (second,) = ours.completions, theirs.completions
    np.testing.assert_array_equal(first.token_ids, second.token_ids)
    np.testing.assert_allclose(first.logprobs, second.logprobs, atol=1e-4)
    assert first.finish_reason is second.finish_reason
    assert first.stop_token_id == second.stop_token_id
