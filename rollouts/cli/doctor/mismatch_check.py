"""The mismatch: log-probabilities of the server against those of transformers, in float32, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from renderers.vision.hf_calling import PROCESSOR_ERRORS
from rollouts.cli.doctor.finding import Finding, failed, ok, skipped
from rollouts.cli.doctor.normalisation import NORMALISATION, Normalisation, written_normalisation, wrong_normalisation
from rollouts.cli.doctor.reference_model import (
    ScoredPrompt,
    has_bidirectional_images,
    load_reference,
    logprob_differences,
)
from rollouts.cli.doctor.target import Target, fresh_image

_CHECK = "mismatch"
_SAMPLED_TOKENS = 32
_PROMPTS = 3

# The limits of the largest and the mean |log p(server) - log p(transformers, float32)|, by dtype of the weights.
_LIMITS = {"float32": (1e-4, 2e-5), "float16": (0.1, 0.02), "bfloat16": (0.5, 0.05)}

# A normalisation is ruled out if its mean difference is this many times that of another.
_CLEARLY_WORSE = 1.5

#: The normalisations of published processors, which a server may use in place of the directory's.
_COMMON: Mapping[str, Normalisation] = {
    "the common": Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "CLIP's": Normalisation((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "ImageNet's": Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "no": Normalisation((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}

_OTHER_WEIGHTS_CURE = (
    "the server has other weights than --model, or quantised ones: start `vllm serve` from --model, without "
    "--quantization and --load-format dummy"
)
_CAUSAL_CURE = (
    "the server attends to images causally, and the model attends to the whole of each image: the server's attention "
    "backend does not support that (vLLM's for the CPU does not). On a GPU: `vllm serve` with "
    "--attention-backend TRITON_ATTN"
)
_OTHER_IMAGES_CURE = (
    "text agrees, so the language model's weights are those of --model; compare image_mean, image_std and "
    "rescale_factor in preprocessor_config.json (or processor_config.json) and the vision tower's weights with what "
    "is served, or start `vllm serve` from --model"
)


async def mismatch(target: Target, *, max_gigabytes: float) -> list[Finding]:
    """Compare completions of text and images, sampled at temperature 1 and scored again by transformers."""
    if (reason := _reason_to_skip(target.directory, max_gigabytes)) is not None:
        return [reason]
    prompts = [target.text_prompt()] * _PROMPTS
    if target.is_ok("image request"):
        prompts += [target.image_prompt(fresh_image(64 + 32 * n, 96)) for n in range(_PROMPTS)]
    completions = await asyncio.gather(
        *(
            target.sample(rendered, max_tokens=_SAMPLED_TOKENS, temperature=1.0, seed=seed)
            for seed, rendered in enumerate(prompts)
        )
    )
    scored = [ScoredPrompt(*pair) for pair in zip(prompts, completions, strict=True)]
    try:
        return await asyncio.to_thread(_findings, target, scored[:_PROMPTS], scored[_PROMPTS:])
    except PROCESSOR_ERRORS as error:  # what transformers raises for a model that it cannot load or run
        return [skipped(f"transformers cannot run {target.directory}: {type(error).__name__}: {error}")]


def _reason_to_skip(directory: Path, max_gigabytes: float) -> Finding | None:
    missing = [package for package in ("torch", "transformers") if find_spec(package) is None]
    if missing:
        return skipped(f"{' and '.join(missing)} not installed", 'pip install "mmrollouts[torch]"')
    nbytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    if not nbytes:
        return skipped(f"{directory} holds no weights", "pass --model a directory with *.safetensors")
    if nbytes > max_gigabytes * 1e9:
        return skipped(
            f"the checkpoint has {nbytes / 1e9:.1f} GB, more than the limit of --reference-gb ({max_gigabytes:g})",
            f"--reference-gb {nbytes / 1e9:.0f}, if twice as much memory is free: weights are float32 here",
        )
    return None


def _findings(target: Target, texts: Sequence[ScoredPrompt], images: Sequence[ScoredPrompt]) -> list[Finding]:
    model = load_reference(target)
    differences = _differences(model, texts)
    findings = [_finding(target, "text", differences, _OTHER_WEIGHTS_CURE)]
    if not images:
        return findings
    if not _agrees(target, differences):
        return [*findings, skipped(f"not checked, because of: {_CHECK}, text failed", check=f"{_CHECK}, image")]
    differences = _differences(model, images)
    if not _agrees(target, differences):
        return [*findings, *_image_failures(target, model, images, differences)]
    return [
        *findings,
        _finding(target, "image", differences, ""),
        *_normalisation(target, model, images, differences),
    ]


def _differences(model: Any, prompts: Sequence[ScoredPrompt], **options: Any) -> np.ndarray:
    """float32 (scored,): `logprob_differences` of all prompts."""
    return np.concatenate([logprob_differences(model, prompt, **options) for prompt in prompts])


def _normalisation(
    target: Target, model: Any, images: Sequence[ScoredPrompt], differences: np.ndarray
) -> list[Finding]:
    """Whether the directory's normalisation explains the server's log-probabilities better than others; else nothing.

    Rounded weights make the limits wide enough for a wrong normalisation, so normalisations are compared.
    """
    written = written_normalisation(target.directory)
    # A server that takes the engine's floats agrees with transformers whatever its own normalisation is.
    normalises = target.capabilities.pixel_dtype == "uint8" or target.image_mode == "content_parts"
    if written is None or not normalises or NORMALISATION in target.findings:
        return []
    own = float(differences.mean())
    others = {
        other: float(_differences(model, images, renormalise=(written, other)).mean())
        for other in _others(written).values()
    }
    best = min(others, key=others.__getitem__, default=None)
    if best is None or others[best] > _CLEARLY_WORSE * own:
        return [ok(f"log-probabilities of images are those of {written}", check=NORMALISATION)]
    if own > _CLEARLY_WORSE * others[best]:
        return [wrong_normalisation(target.directory, written, best, "the server's log-probabilities are nearest to")]
    return []


def _others(written: Normalisation) -> dict[str, Normalisation]:
    """The common normalisations that are not `written`."""
    return {
        name: other
        for name, other in _COMMON.items()
        if len(other.mean) == len(written.mean) and not other.is_near(written)
    }


def _image_failures(
    target: Target, model: Any, images: Sequence[ScoredPrompt], differences: np.ndarray
) -> list[Finding]:
    """The cause where text agrees and images do not: attention, normalisation, or the vision tower's weights."""
    if has_bidirectional_images(model) and _agrees(target, _differences(model, images, causal=True)):
        return [_finding(target, "image", differences, _CAUSAL_CURE)]
    written = written_normalisation(target.directory)
    if written is None:
        return [_finding(target, "image", differences, _OTHER_IMAGES_CURE)]
    for name, other in _others(written).items():
        if _agrees(target, _differences(model, images, renormalise=(written, other))):
            evidence = f"the server's log-probabilities are those of {name} normalisation,"
            return [
                wrong_normalisation(target.directory, written, other, evidence),
                skipped(f"not checked, because of: {NORMALISATION} failed", check=f"{_CHECK}, image"),
            ]
    return [_finding(target, "image", differences, _OTHER_IMAGES_CURE)]


def _agrees(target: Target, differences: np.ndarray) -> bool:
    if not len(differences):  # each completion began with the token of an image
        return True
    max_difference, max_mean = _LIMITS.get(target.dtype, _LIMITS["bfloat16"])
    return bool(differences.max() <= max_difference and differences.mean() <= max_mean)


def _finding(target: Target, kind: str, differences: np.ndarray, cure: str) -> Finding:
    check = f"{_CHECK}, {kind}"
    if not len(differences):
        return skipped("each completion began with the token of an image", check=check)
    max_difference, max_mean = _LIMITS.get(target.dtype, _LIMITS["bfloat16"])
    seen = (
        f"|log p(server) - log p(transformers)| at most {differences.max():.2g}, {differences.mean():.2g} on average "
        f"over {len(differences)} tokens; {max_difference:g} and {max_mean:g} allowed for {target.dtype} weights "
        f"({target.dtype_source})"
    )
    return ok(seen, check=check) if _agrees(target, differences) else failed(seen, cure, check=check)
