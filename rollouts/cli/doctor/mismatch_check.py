"""The mismatch: log-probabilities of the server against those of transformers, in float32, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from renderers.installation import install_command
from renderers.vision.hf_runner import PROCESSOR_ERRORS
from rollouts.cli.doctor.target import MEDIA, Finding, Target
from rollouts.engines.protocol import Completion, GenerateRequest
from rollouts.errors import SampleError, UnsupportedModelError

if TYPE_CHECKING:
    from rollouts.training import TrainingSample

_WEIGHTS_CURE = (
    "compare what is served with --model: start the server from --model, with its dtype, and without "
    "quantisation, overrides of its config.json and dummy weights"
)

# The limits of the largest and the mean |log p(server) - log p(transformers, float32)|, by dtype of the
# weights.
_LIMITS = {"float32": (1e-4, 2e-5), "float16": (0.1, 0.02), "bfloat16": (0.5, 0.05)}


async def mismatch(target: Target, *, max_gigabytes: float) -> Finding:
    """Compare completions sampled at temperature 1 with scores of transformers; name the cause if known."""
    if (reason := _reason_to_skip(target.directory, max_gigabytes)) is not None:
        return reason
    passed = {check for check, finding in target.findings.items() if finding.outcome == "ok"}
    checked = [modality for modality, name in MEDIA.items() if f"{name} request" in passed]
    requests = [
        target.request(modality, height=64 + 32 * number, max_tokens=32, temperature=1.0, seed=number)
        for modality in (None, *checked)
        for number in range(3)
    ]
    completions = await asyncio.gather(*map(target.sample, requests))
    try:
        return await asyncio.to_thread(_compared, target, requests, completions)
    except (SampleError, UnsupportedModelError, *PROCESSOR_ERRORS) as error:  # the last: what transformers raises
        return Finding("skipped", f"transformers cannot run {target.directory}: {type(error).__name__}: {error}")


def _reason_to_skip(directory: Path, max_gigabytes: float) -> Finding | None:
    missing = [package for package in ("torch", "transformers") if find_spec(package) is None]
    if missing:
        return Finding("skipped", f"{' and '.join(missing)} not installed", install_command("torch"))
    nbytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    if not nbytes:
        return Finding("skipped", f"{directory} holds no weights", "pass --model a directory with *.safetensors")
    if nbytes > max_gigabytes * 1e9:
        return Finding(
            "skipped",
            f"the checkpoint has {nbytes / 1e9:.1f} GB, more than the limit of --reference-gb ({max_gigabytes:g})",
            f"--reference-gb {nbytes / 1e9:.0f}, if twice as much memory is free: weights are float32 here",
        )
    return None


def _compared(target: Target, requests: Sequence[GenerateRequest], completions: Sequence[Completion]) -> Finding:
    from rollouts.models.loading import load_model
    from rollouts.training import TrainingBatch, diagnose_mismatch

    samples = [_sample(*pair) for pair in zip(requests, completions, strict=True)]
    batch = TrainingBatch.from_samples(samples, pad_id=0)
    largest, mean = _LIMITS.get(target.dtype, _LIMITS["bfloat16"])
    # A sample is examined if its mean difference is more than twice the tolerance.
    diagnosis = diagnose_mismatch(
        load_model(target.directory).eval(), batch, tolerance=mean / 2, max_samples=len(samples)
    )
    seen = f"|log p(server) - log p(transformers)|, {largest:g} allowed and {mean:g} on average for {target.dtype}: "
    too_large = []
    for kind, figures in diagnosis.report.by_modality:
        seen += f"{kind} {figures.max_abs:.2g}, {figures.mean_abs:.2g} on average over {figures.tokens} tokens; "
        if figures.max_abs > largest or figures.mean_abs > mean:
            too_large.append(kind)
    if not too_large:
        return Finding("ok", seen.removesuffix("; "))
    seen += f"too large for {' and '.join(too_large)}: "
    if not diagnosis.causes:
        return Finding("failed", f"{seen}no fault that was tested explains it", _WEIGHTS_CURE)
    named = "; ".join(f"{found.cause}: equal when computed with {found.name}" for found in diagnosis.causes)
    return Finding("failed", seen + named, "; ".join(dict.fromkeys(found.cause.cure for found in diagnosis.causes)))


def _sample(request: GenerateRequest, completion: Completion) -> TrainingSample:
    from rollouts.training import TrainingSample

    ids = np.array([*request.prompt_ids, *completion.token_ids.tolist()], np.int32)
    sampled = np.arange(len(ids)) >= len(request.prompt_ids)
    logprobs = np.zeros(len(ids), np.float32)
    logprobs[sampled] = completion.logprobs
    return TrainingSample(ids, sampled, logprobs, np.zeros(len(ids), np.float32), tuple(request.media))
