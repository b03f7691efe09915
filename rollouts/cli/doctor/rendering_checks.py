"""The server's tokens and tensors of an image or a sound, as /render shows them, compared with the renderer's."""

from __future__ import annotations

import json
import re

import numpy as np

from renderers import RenderedTokens
from rollouts.cli.doctor.target import Finding, Outcome, Target, absent, failed, media_of, ok, skipped
from rollouts.cli.doctor.token_checks import first_difference
from rollouts.engines.http.responses import response_error
from rollouts.engines.http.source_files import image_file, source_file
from rollouts.engines.vllm.feature_decoding import DecodedTensor, decode_item, encoded_entries
from rollouts.engines.vllm.media_payload import FeaturesPayload, media_payload
from rollouts.engines.vllm.probe_requests import RENDER_PATH
from rollouts.engines.vllm.render_response import RenderResponse, parse_render_response
from rollouts.errors import OverlongPromptError

# The largest difference between log-mel features, of about -1.5 to 1.5, in the arithmetic of two versions; of bfloat16.
_ROUNDING_OF_SOUNDS = {"float32": 1e-3, "float16": 2e-3, "bfloat16": 2e-2}


async def image_rendering(target: Target) -> list[Finding]:
    """Tokens and tensors of an image, as the server renders it."""
    return await _rendering(target, "image", target.media_prompt("image"))


async def sound_rendering(target: Target) -> list[Finding]:
    """Tokens and tensors of a sound at the rate of the renderer's processor, as the server renders it."""
    if (refusal := target.capabilities.sound_refusal) is not None:
        cure = "start `vllm serve` with audio in --limit-mm-per-prompt, and with the packages of vllm[audio]"
        return [absent(f"the server takes no sounds: {refusal}", cure)]
    return await _rendering(target, "audio", target.media_prompt("audio"))


async def _rendering(target: Target, modality: str, ours: RenderedTokens) -> list[Finding]:
    name = f"rendering ({modality})"
    if target.rust_frontend is not None:
        return [skipped("vLLM's Rust frontend does not render")]
    if len(ours.token_ids) >= target.capabilities.max_model_len:
        raise OverlongPromptError(name, len(ours.token_ids), target.capabilities.max_model_len)
    ((item, _),) = media_of(ours)
    if modality == "image":
        file = image_file(item.source, target.renderer.processors["image"].policy)
    else:
        file = source_file(item.source, "audio", sampling_rate=item.sampling_rate)
    kind = f"{modality}_url"
    part = {"type": kind, kind: {"url": b"".join(file.data_url()).decode()}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]
    body = {"model": target.capabilities.model, "messages": messages, "add_generation_prompt": True}
    response = await target.post(RENDER_PATH, body, name)
    if response.status == 400:
        reason = response_error(name, response, name).body
        if modality == "image" and re.search(r"[Aa]t most 0 image", reason):
            cure = "start `vllm serve` without --language-model-only, and with image in --limit-mm-per-prompt"
            return [absent(f"the server takes no images: {reason}", cure)]
        return [failed(f"the server does not render it: {reason}", _processor_cure(target))]
    if response.status != 200:
        raise response_error(name, response, name)
    theirs = parse_render_response(response.body, name)
    tokens = _tokens(target, ours, theirs)
    return [tokens, _features(target, modality, ours, theirs)] if tokens.outcome is Outcome.OK else [tokens]


def _tokens(target: Target, ours: RenderedTokens, theirs: RenderResponse) -> Finding:
    """Compare the prompts. A server may count the tokens around the features of an item to the item's range."""
    difference = first_difference(target, ours.token_ids, theirs.token_ids)
    ((_, placeholder),) = media_of(ours)
    first, last = placeholder.runs[0][0], placeholder.runs[-1][1]
    ranges = [(medium.placeholder.offset, medium.placeholder.end) for medium in theirs.media]
    if difference is None and not (len(ranges) == 1 and ranges[0][0] <= first and last <= ranges[0][1]):
        difference = f"the server puts it at {ranges}, the renderer its features at {(first, last)}"
    if difference is not None:
        return failed(difference, _processor_cure(target))
    return ok(f"{len(ours.token_ids)} ids, all equal")


def _features(target: Target, modality: str, ours: RenderedTokens, theirs: RenderResponse) -> Finding:
    """Compare the encoded tensors that the engine sends with those that the server makes of the same file."""
    check, request = "sound features" if modality == "audio" else "image features", target.request(ours)
    payload = media_payload(request, "auto", target.capabilities)
    if not isinstance(payload, FeaturesPayload):
        return skipped('media="auto" sends it as content_parts', check=check)
    features = json.loads(b"".join([b"{", *payload.body_field(payload.names.keys()), b"}"]))["features"]
    (sent,), (medium,) = features["kwargs_data"][modality], theirs.media
    if medium.encoded is None:
        cure = "start `vllm serve` with --mm-processor-cache-gb 0 for this check"
        return skipped("the server does not show tensors that are in its cache", cure, check=check)
    # By name: servers write the names in an order of their own. A tensor that the server does not make (one with
    # which transformers' class counts images) is not read by its model.
    encoded, expected = encoded_entries(sent), encoded_entries(medium.encoded)
    if {name: encoded.get(name) for name in expected} == expected:
        return ok(f"{len(sent)} bytes, equal to the server's", check=check)
    own, others = decode_item(sent), decode_item(medium.encoded)
    if not others.keys() <= own.keys():
        seen = f"the server makes the tensors {', '.join(sorted(others))}, the renderer {', '.join(sorted(own))}"
        return failed(seen, 'send files: VLLMEngine(media="content_parts")', check=check)
    for name, other in others.items():
        ours_values, their_values = _as_floats(own[name]), _as_floats(other)
        if (own[name].dtype, ours_values.shape) != (other.dtype, their_values.shape):
            one, two = f"{own[name].dtype} {ours_values.shape}", f"{other.dtype} {their_values.shape}"
            seen = f"{name} is {one} in the renderer and {two} in the server"
            return failed(seen, _processor_cure(target), check=check)
        difference = float(np.abs(ours_values - their_values).max(initial=0))
        if difference > (_ROUNDING_OF_SOUNDS.get(other.dtype, 0) if modality == "audio" else 0):
            return failed(f"{name} is up to {difference:.2g} from the server's", _processor_cure(target), check=check)
    return ok(f"{', '.join(sorted(others))} are the server's", check=check)


def _as_floats(decoded: DecodedTensor) -> np.ndarray:
    tensor = decoded.tensor
    return np.asarray(tensor if isinstance(tensor, np.ndarray) else tensor.unpack(), dtype=np.float64)


def _processor_cure(target: Target) -> str:
    return (
        f"copy the files of the processor that is served to {target.directory}, or start `vllm serve` from it, without "
        "--mm-processor-kwargs and --no-mm-device-do-normalize"
    )
