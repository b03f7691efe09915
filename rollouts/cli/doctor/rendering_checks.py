"""The server's tokens and tensors of an image or a sound, as /render shows them, compared with the renderer's."""

import json
import re

import numpy as np

from renderers.messages import Modality
from rollouts.cli.doctor.target import Finding, Target
from rollouts.cli.doctor.token_checks import first_difference
from rollouts.engines.http.responses import response_error
from rollouts.engines.http.source_files import source_file
from rollouts.engines.protocol import GenerateRequest
from rollouts.engines.vllm.feature_decoding import DecodedTensor, decode_item
from rollouts.engines.vllm.media_payload import FeaturesPayload, media_payload
from rollouts.engines.vllm.probe_requests import RENDER_PATH
from rollouts.engines.vllm.render_response import RenderedMedia, parse_render_response
from rollouts.errors import ContextLengthError

# The largest difference between log-mel features, of about -1.5 to 1.5, in the arithmetic of two versions; of
# bfloat16.
_ROUNDING_OF_SOUNDS = {"float32": 1e-3, "float16": 2e-3, "bfloat16": 2e-2}


async def rendering(target: Target, *, modality: Modality) -> Finding:
    """Compare tokens and tensors of an image, or of a sound at the rate of the renderer's processor."""
    if modality == "audio" and (refusal := target.capabilities.sound_refusal) is not None:
        cure = "start `vllm serve` with audio in --limit-mm-per-prompt, and with the packages of vllm[audio]"
        return Finding("absent", f"the server takes no sounds: {refusal}", cure)
    name = f"rendering ({modality})"
    if target.capabilities.rust_frontend is not None:
        return Finding("skipped", "vLLM's Rust frontend does not render")
    request, limit = target.request(modality), target.capabilities.max_model_len
    if len(request.prompt_ids) >= limit:
        raise ContextLengthError(name, len(request.prompt_ids), limit)
    ((item, placeholder),) = request.media
    file = source_file(item.source, modality, sampling_rate=item.sampling_rate)
    kind = f"{modality}_url"
    part = {"type": kind, kind: {"url": b"".join(file.data_url()).decode()}}
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "What is it?"}]}]
    response = await target.post(RENDER_PATH, {"messages": messages, "add_generation_prompt": True}, name)
    if response.status == 400:
        reason = response_error(name, response, name).body
        if modality == "image" and re.search(r"[Aa]t most 0 image", reason):
            cure = "start `vllm serve` without --language-model-only, and with image in --limit-mm-per-prompt"
            return Finding("absent", f"the server takes no images: {reason}", cure)
        return Finding("failed", f"the server does not render it: {reason}", _processor_cure(target))
    if response.status != 200:
        raise response_error(name, response, name)
    theirs = parse_render_response(response.body, name)
    difference = first_difference(target, request.prompt_ids, theirs.token_ids)
    # A server may count the tokens around the features of an item to the item's range.
    first, last = placeholder.runs[0][0], placeholder.runs[-1][1]
    ranges = [(medium.placeholder.offset, medium.placeholder.end) for medium in theirs.media]
    if difference is None and not (len(ranges) == 1 and ranges[0][0] <= first and last <= ranges[0][1]):
        difference = f"the server puts it at {ranges}, the renderer its features at {(first, last)}"
    if difference is not None:
        return Finding("failed", difference, _processor_cure(target))
    found = _tensors(target, modality, request, theirs.media[0])
    return found._replace(seen=f"{len(request.prompt_ids)} ids, all equal; {found.seen}")


def _tensors(target: Target, modality: Modality, request: GenerateRequest, medium: RenderedMedia) -> Finding:
    """Compare the tensors that the engine sends with those that the server makes of the same file."""
    payload = media_payload(request, "auto", target.capabilities)
    if not isinstance(payload, FeaturesPayload):
        return Finding("skipped", 'media="auto" sends it as content_parts, without tensors')
    if medium.encoded is None:
        cure = "start `vllm serve` with --mm-processor-cache-gb 0 for this check"
        return Finding("skipped", "the server does not show tensors that are in its cache", cure)
    features = json.loads(b"".join([b"{", *payload.body_field(payload.names.keys()), b"}"]))["features"]
    ours, theirs = decode_item(features["kwargs_data"][modality][0]), decode_item(medium.encoded)
    # A tensor that the server does not make (one with which transformers' class counts images) is not read by
    # its model.
    if not theirs.keys() <= ours.keys():
        seen = f"the server makes the tensors {', '.join(sorted(theirs))}, the renderer {', '.join(sorted(ours))}"
        return Finding("failed", seen, 'send files: VLLMEngine(media="content_parts")')
    for name, tensor in theirs.items():
        ours_values, their_values = _as_floats(ours[name]), _as_floats(tensor)
        if (ours[name].dtype, ours_values.shape) != (tensor.dtype, their_values.shape):
            one, two = f"{ours[name].dtype} {ours_values.shape}", f"{tensor.dtype} {their_values.shape}"
            seen = f"{name} is {one} in the renderer and {two} in the server"
            return Finding("failed", seen, _processor_cure(target))
        difference = float(np.abs(ours_values - their_values).max(initial=0))
        if difference > (_ROUNDING_OF_SOUNDS.get(tensor.dtype, 0) if modality == "audio" else 0):
            return Finding("failed", f"{name} is up to {difference:.2g} from the server's", _processor_cure(target))
    return Finding("ok", f"{', '.join(sorted(theirs))} are the server's")


def _as_floats(decoded: DecodedTensor) -> np.ndarray:
    tensor = decoded.tensor
    return np.asarray(tensor if isinstance(tensor, np.ndarray) else tensor.unpack(), dtype=np.float64)


def _processor_cure(target: Target) -> str:
    return (
        f"copy the files of the processor that is served to {target.directory}, or start `vllm serve` from "
        "it, without --mm-processor-kwargs and --no-mm-device-do-normalize"
    )
