"""Whether the server's tokens and pixels are ours."""

from __future__ import annotations

import base64
import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from renderers import RenderedTokens
from renderers.errors import TemplateError
from rollouts.doctor.finding import Finding, failed, ok, skipped
from rollouts.doctor.patient import Patient, fresh_picture, picture_messages
from rollouts.engines.vllm.connection import error_of
from rollouts.engines.vllm.features import features_segments
from rollouts.engines.vllm.kwargs_decoding import decode_item, encoded_entries
from rollouts.engines.vllm.picture_file import picture_file
from rollouts.engines.vllm.render_answer import RenderAnswer, read_answer

# What tokenizers and templates disagree about first: spaces, line breaks, digits, scripts, reasoning, turn ends.
_CONVERSATION = [
    {"role": "user", "content": "  Count: 1 22 333, 4,444.\n\n\tnaïve façade — 東京 🙂 don't\n"},
    {"role": "assistant", "content": "1, 2...\n\n```py\nx  =  [1,\t2]\n```"},
    {"role": "user", "content": "And?"},
]
_SYSTEM = {"role": "system", "content": "Be brief."}

_SAME_DIRECTORY = "load the renderer from the directory that the server serves (tokenizer.json, chat_template.jinja)"


async def text_tokens(patient: Patient) -> Finding:
    messages = _acceptable(patient)
    ours = patient.renderer.render(messages, add_generation_prompt=True)
    body = {"model": patient.capabilities.model, "messages": messages, "add_generation_prompt": True}
    reply = await patient.post("/tokenize", body, "tokenising a conversation")
    if reply.status != 200:
        raise error_of("tokenising a conversation", reply, "comparing tokens")
    answer = reply.json()
    theirs = answer.get("tokens") if isinstance(answer, dict) else None
    return await _compared(patient, "text tokens", ours.token_ids, theirs or [])


async def picture_tokens_and_features(patient: Patient) -> list[Finding]:
    """Ids and features of a conversation with two pictures of different shapes."""
    if not patient.takes_pictures:
        return [skipped("image tokens", "the server or the model takes no pictures")]
    ours = patient.picture_prompt(fresh_picture(), fresh_picture(96, 64))
    theirs = await _rendered_by_server(patient, ours)
    if isinstance(theirs, Finding):
        return [theirs]
    tokens = await _compared(patient, "image tokens", ours.token_ids, theirs.token_ids)
    return [tokens, _features(patient, ours, theirs)]


def _acceptable(patient: Patient) -> list[dict[str, Any]]:
    """The conversation, with a system message where the template takes one."""
    try:
        patient.renderer.render([_SYSTEM, *_CONVERSATION], add_generation_prompt=True)
    except TemplateError:
        return list(_CONVERSATION)
    return [_SYSTEM, *_CONVERSATION]


async def _rendered_by_server(patient: Patient, ours: RenderedTokens) -> RenderAnswer | Finding:
    assert ours.multi_modal_data is not None
    policy = patient.renderer.processors["image"].policy
    files = [picture_file(item.source, policy) for item, _ in ours.multi_modal_data.placed()]
    urls = [f"data:{file.media_type};base64,{base64.b64encode(file.data).decode()}" for file in files]
    parts = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    (message,) = picture_messages()
    body = {
        "model": patient.capabilities.model,
        "messages": [{**message, "content": [*parts, *message["content"]]}],
        "add_generation_prompt": True,
    }
    reply = await patient.post("/v1/chat/completions/render", body, "rendering pictures")
    if reply.status in (403, 404):
        return skipped("image tokens", "the server does not render", "start `vllm serve` with --enable-scale-out")
    if reply.status != 200:
        raise error_of("rendering pictures", reply, "comparing pictures")
    return read_answer(reply.body, "rendering pictures")


async def _compared(patient: Patient, check: str, ours: Sequence[int], theirs: Sequence[int]) -> Finding:
    if list(ours) == list(theirs):
        return ok(check, f"{len(ours)} ids, all equal")
    pairs = zip(ours, theirs, strict=False)
    at = next((index for index, (a, b) in enumerate(pairs) if a != b), min(len(ours), len(theirs)))
    shown = [await _spelled(patient, ids[at : at + 4]) for ids in (ours, theirs)]
    return failed(
        check,
        f"{len(ours)} ids of ours, {len(theirs)} of the server's; from {at} on {shown[0]} against {shown[1]}",
        _SAME_DIRECTORY,
    )


async def _spelled(patient: Patient, ids: Sequence[int]) -> str:
    if not ids:
        return "nothing"
    reply = await patient.post(
        "/detokenize", {"model": patient.capabilities.model, "tokens": list(ids)}, "spelling tokens"
    )
    text = reply.json().get("prompt") if reply.status == 200 else None
    return f"{list(ids)} {text!r}"


def _features(patient: Patient, ours: RenderedTokens, theirs: RenderAnswer) -> Finding:
    """Our bytes against the server's."""
    media, pixel_dtype = ours.multi_modal_data, patient.capabilities.pixel_dtype
    assert media is not None
    assert pixel_dtype is not None
    made = json.loads(b"".join(features_segments(media, pixel_dtype=pixel_dtype)))
    places = [(medium.offset, medium.length) for medium in theirs.media]
    if places != [(where.offset, where.length) for _, where in media.placed()]:
        return failed(
            "image features",
            f"the server puts pictures at {places}, we at {[(w.offset, w.length) for _, w in media.placed()]}",
            "the size limits differ: use the preprocessor_config.json that the server uses",
        )
    for mine, medium in zip(made["kwargs_data"]["image"], theirs.media, strict=True):
        if medium.encoded is None:
            return skipped(
                "image features", "the server does not show what its cache holds", "--mm-processor-cache-gb 0"
            )
        # By name: servers write the names in an order of their own.
        if encoded_entries(mine) != encoded_entries(medium.encoded):
            return failed("image features", *_difference(mine, medium.encoded))
    size = sum(len(mine) for mine in made["kwargs_data"]["image"])
    return ok("image features", f"{len(places)} pictures, {size} bytes, equal to the server's; {pixel_dtype} pixels")


def _difference(mine: str, of_server: str) -> tuple[str, str]:
    """What differs between two encoded items, and the cure."""
    ours, theirs = decode_item(mine), decode_item(of_server)
    if ours.keys() != theirs.keys():
        return f"the server sends {', '.join(theirs)}, we {', '.join(ours)}", "the processors are of different models"
    for name, (tensor, _, dtype) in ours.items():
        other, _, other_dtype = theirs[name]
        if dtype != other_dtype:
            return (
                f"{name} is {dtype} with us and {other_dtype} with the server",
                "the pixel dtype was detected wrongly or set by hand: it must be the server's "
                "(--no-mm-device-do-normalize decides)",
            )
        array, of_theirs = (one if isinstance(one, np.ndarray) else one.unpack() for one in (tensor, other))
        if array.shape != of_theirs.shape:
            return f"{name} is {array.shape} with us and {of_theirs.shape} with the server", _SAME_PROCESSOR
        if not np.array_equal(array, of_theirs):
            count = int(np.count_nonzero(array != of_theirs))
            return f"{count} of {array.size} values of {name} differ", _SAME_PROCESSOR
    return "the same tensors, written otherwise", "this version of vLLM writes features differently: upgrade mmrollouts"


_SAME_PROCESSOR = (
    "use the preprocessor_config.json that the server uses; if few values differ, the two resample differently: load "
    'the renderer with config=RendererConfig(image_backend="torchvision"), or "pillow", as the server does'
)
