"""Sounds: whether the server hears, and makes the tokens and tensors of a sound that the renderer makes."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from renderers import RenderedTokens
from rollouts.cli.doctor.generation_checks import SAME_COMPLETION, max_logprob_difference
from rollouts.cli.doctor.target import Finding, Outcome, Target, absent, failed, images_of, ok, skipped
from rollouts.cli.doctor.token_checks import first_difference
from rollouts.engines.http.exchange import response_error
from rollouts.engines.http.source_files import source_file
from rollouts.engines.vllm.capabilities import RENDER_PATH
from rollouts.engines.vllm.features import decode_item
from rollouts.engines.vllm.generate import RenderResponse, parse_render_response
from rollouts.engines.vllm.media_payload import select_mode

_RENDERING = "rendering a sound"
_SECONDS, _RATE = 1.27, 16_000
# The largest difference between log-mel features, of about -1.5 to 1.5, in the arithmetic of two versions; of bfloat16.
_ROUNDING = {"float32": 1e-3, "float16": 2e-3, "bfloat16": 2e-2}


def sound_prompt(target: Target) -> RenderedTokens:
    """A prompt with a sound of random noise, which no server has in its cache."""
    samples = np.random.default_rng().uniform(-0.5, 0.5, round(_SECONDS * _RATE)).astype(np.float32)
    return target.renderer.render(_messages(audio=samples, sampling_rate=_RATE), add_generation_prompt=True)


def _messages(**sound: Any) -> list[dict[str, Any]]:
    kind = next(iter(sound))
    return [{"role": "user", "content": [{"type": kind, **sound}, {"type": "text", "text": "What is it?"}]}]


async def sound_rendering(target: Target) -> list[Finding]:
    """Tokens and tensors of a sound at the rate of the renderer's processor, as the server renders it."""
    if (missing := target.lacks("takes no sounds that the renderer has decoded")) is not None:
        return [missing]
    if target.capabilities.sound_refusal is not None:
        cure = (
            "start `vllm serve` with audio in --limit-mm-per-prompt ('{\"audio\": 8}', or as many sounds as an episode "
            "has) and with the packages of vllm[audio]"
        )
        return [absent(f"the server takes no sounds: {target.capabilities.sound_refusal}", cure)]
    ours = sound_prompt(target)
    ((item, _),) = images_of(ours)
    file = source_file(item.source, "audio", sampling_rate=item.sampling_rate)
    body = {
        "model": target.capabilities.model,
        "messages": _messages(audio_url={"url": b"".join(file.data_url()).decode()}),
        "add_generation_prompt": True,
    }
    response = await target.post(RENDER_PATH, body, _RENDERING)
    if response.status != 200:
        reason = response_error(_RENDERING, response, _RENDERING).reason
        seen = f"the server does not take a sound at {item.sampling_rate} Hz, the rate of the renderer: {reason}"
        return [failed(seen, _processor_cure(target))]
    theirs = parse_render_response(response.body, _RENDERING)
    tokens = await _tokens(target, ours, theirs)
    return [tokens, _features(target, ours, theirs)] if tokens.outcome is Outcome.OK else [tokens]


async def _tokens(target: Target, ours: RenderedTokens, theirs: RenderResponse) -> Finding:
    """Compare the whole prompt; if the text tokens are known to differ, only the number of tokens of the sound."""
    ((item, _),) = images_of(ours)
    sounds = [medium for medium in theirs.media if medium.modality == "audio"]
    count = sum(medium.placeholder.length for medium in sounds)
    difference = None
    if target.is_ok("text tokens"):
        difference = await first_difference(target, ours.token_ids, theirs.token_ids)
    elif len(sounds) != 1 or count < item.num_tokens:
        difference = f"the server gives {count} tokens to the sound, the renderer {item.num_tokens}"
    if difference is not None:
        return failed(f"{_SECONDS} s at {item.sampling_rate} Hz: {difference}", _processor_cure(target))
    return ok(f"{item.num_tokens} tokens for {_SECONDS} s at {item.sampling_rate} Hz, as the renderer's")


def _features(target: Target, ours: RenderedTokens, theirs: RenderResponse) -> Finding:
    """Compare the tensors that the engine sends with those that the server makes of the same sound."""
    check, request = "sound features", target.request(ours)
    if (mode := select_mode(request, "auto", target.capabilities)) != "features":
        return skipped(f'media="auto" sends sounds of this model as {mode}', check=check)
    payload = target.image_payload(request)
    features = json.loads(b"".join([b"{", *payload.body_field(payload.names.keys()), b"}"]))["features"]
    (sent,), medium = features["kwargs_data"]["audio"], theirs.media[0]
    if medium.encoded is None or len(theirs.media) != 1:
        return skipped("the server does not show the tensors of the sound", check=check)
    own = decode_item(sent)
    for name, tensor in decode_item(medium.encoded).items():
        mine, other = (_as_floats(each.tensor) for each in (own[name], tensor))
        if mine.shape != other.shape:
            seen = f"{name} has the shape {mine.shape} in the renderer and {other.shape} in the server"
            return failed(seen, _processor_cure(target), check=check)
        difference = float(np.abs(mine - other).max(initial=0))
        if difference > _ROUNDING.get(tensor.dtype, 0):
            return failed(f"{name} is up to {difference:.2g} from the server's", _processor_cure(target), check=check)
    return ok(f"{', '.join(sorted(own))} of a sound are the server's", check=check)


def _as_floats(tensor: Any) -> np.ndarray:
    return np.asarray(tensor if isinstance(tensor, np.ndarray) else tensor.unpack(), dtype=np.float64)


async def sound_request(target: Target) -> Finding:
    """Two different sounds must give different log-probabilities."""
    completions = [await target.sample(sound_prompt(target)) for _ in range(2)]
    difference = max_logprob_difference(*completions)
    if difference > SAME_COMPLETION:
        return ok(f"two sounds give different completions (log-probabilities differ by up to {difference:.2g})")
    return failed(
        "two different sounds give exactly the same completion: the server ignores sounds",
        "the weights that are served do not look at sounds, or a proxy drops the features: start `vllm serve` from a "
        'trained checkpoint, without --load-format dummy, or send files: VLLMEngine(media="content_parts")',
    )


def _processor_cure(target: Target) -> str:
    return (
        f"the two processors differ (sampling_rate, hop_length, n_fft...): copy the processor's files of the directory "
        f"that is served to {target.directory}, or start `vllm serve {target.directory}`"
    )
