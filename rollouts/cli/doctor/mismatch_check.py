"""The mismatch: log-probabilities of the server against those of transformers, in float32, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from renderers import RenderedTokens
from renderers.installation import install_command
from renderers.vision.hf_runner import PROCESSOR_ERRORS
from rollouts.cli.doctor.target import Finding, Outcome, Target, failed, media_of, ok, skipped
from rollouts.engines.protocol import Completion
from rollouts.errors import SampleError, UnsupportedModelError

if TYPE_CHECKING:
    from rollouts.training import TrainingSample
    from rollouts.training.mismatch import Diagnosis

_CHECK = "mismatch"
_PROMPTS = 3

_WEIGHTS_CURE = (
    "compare what is served with --model: start the server from --model, with its dtype, and without quantisation, "
    "overrides of its config.json and dummy weights"
)

# The limits of the largest and the mean |log p(server) - log p(transformers, float32)|, by dtype of the weights.
_LIMITS = {"float32": (1e-4, 2e-5), "float16": (0.1, 0.02), "bfloat16": (0.5, 0.05)}


async def mismatch(target: Target, *, max_gigabytes: float) -> list[Finding]:
    """Compare completions of text and media, sampled at temperature 1 and scored again by transformers.

    A cause is named where the log-probabilities are the server's once they are computed with that fault.
    """
    if (reason := _reason_to_skip(target.directory, max_gigabytes)) is not None:
        return [reason]
    prompts = {f"text {number}": target.text_prompt() for number in range(_PROMPTS)}
    if target.is_ok("image request"):
        sizes = [{"height": 64 + 32 * number, "width": 96} for number in range(_PROMPTS)]
        prompts |= {f"image {number}": target.media_prompt("image", **size) for number, size in enumerate(sizes)}
    if target.is_ok("sound request"):
        prompts |= {f"sound {number}": target.media_prompt("audio") for number in range(_PROMPTS)}
    completions = await asyncio.gather(
        *(
            target.sample(rendered, max_tokens=32, temperature=1.0, seed=seed)
            for seed, rendered in enumerate(prompts.values())
        )
    )
    try:
        return await asyncio.to_thread(_findings, target, prompts, completions)
    except (SampleError, UnsupportedModelError, *PROCESSOR_ERRORS) as error:  # the last: what transformers raises
        return [skipped(f"transformers cannot run {target.directory}: {type(error).__name__}: {error}")]


def _reason_to_skip(directory: Path, max_gigabytes: float) -> Finding | None:
    missing = [package for package in ("torch", "transformers") if find_spec(package) is None]
    if missing:
        return skipped(f"{' and '.join(missing)} not installed", install_command("torch"))
    nbytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    if not nbytes:
        return skipped(f"{directory} holds no weights", "pass --model a directory with *.safetensors")
    if nbytes > max_gigabytes * 1e9:
        return skipped(
            f"the checkpoint has {nbytes / 1e9:.1f} GB, more than the limit of --reference-gb ({max_gigabytes:g})",
            f"--reference-gb {nbytes / 1e9:.0f}, if twice as much memory is free: weights are float32 here",
        )
    return None


def _findings(
    target: Target, prompts: Mapping[str, RenderedTokens], completions: Sequence[Completion]
) -> list[Finding]:
    from rollouts.models.loading import load_model
    from rollouts.training import TrainingBatch, diagnose_mismatch

    samples = [
        _sample(name, rendered, completion)
        for (name, rendered), completion in zip(prompts.items(), completions, strict=True)
    ]
    batch = TrainingBatch.from_samples(samples, pad_id=0)
    _, max_mean = _LIMITS.get(target.dtype, _LIMITS["bfloat16"])
    # A sample is examined if its mean difference is more than twice the tolerance.
    diagnosis = diagnose_mismatch(
        load_model(target.directory).eval(), batch, tolerance=max_mean / 2, max_samples=len(samples)
    )
    findings: list[Finding] = []
    for kind in dict.fromkeys(name.split()[0] for name in prompts):
        if findings and findings[0].outcome is Outcome.FAILED:
            findings.append(skipped(f"not checked, because of: {_CHECK}, text failed", check=f"{_CHECK}, {kind}"))
        else:
            findings.append(_finding(target, kind, diagnosis))
    return findings


def _sample(name: str, rendered: RenderedTokens, completion: Completion) -> TrainingSample:
    from rollouts.training import TrainingSample

    prompt = len(rendered.token_ids)
    ids = np.array([*rendered.token_ids, *completion.token_ids.tolist()], np.int32)
    logprobs = np.zeros(len(ids), np.float32)
    logprobs[prompt:] = completion.logprobs
    return TrainingSample(
        token_ids=ids,
        loss_mask=np.arange(len(ids)) >= prompt,
        logprobs=logprobs,
        advantages=np.zeros(len(ids), np.float32),
        media=tuple(media_of(rendered)),
        name=name,
    )


def _finding(target: Target, kind: str, diagnosis: Diagnosis) -> Finding:
    """The finding of a kind of prompts, with the tested causes that explain a sample of it."""
    compared = diagnosis.report.compared
    numbers = [number for number, name in enumerate(compared.names) if name.startswith(kind)]
    differences = np.abs(compared.difference[np.isin(compared.sample, numbers)])
    largest, mean = _LIMITS.get(target.dtype, _LIMITS["bfloat16"])
    seen = (
        f"|log p(server) - log p(transformers)| at most {differences.max():.2g}, {differences.mean():.2g} on average "
        f"over {len(differences)} tokens; {largest:g} and {mean:g} allowed for {target.dtype} weights"
    )
    check = f"{_CHECK}, {kind}"
    if differences.max() <= largest and differences.mean() <= mean:
        return ok(seen, check=check)
    causes: list[Any] = [found for found in diagnosis.causes if {*found.explained} & {*numbers}]
    if not causes:
        return failed(f"{seen}; no fault that was tested explains it", _WEIGHTS_CURE, check=check)
    named = "; ".join(f"{found.cause}: equal when computed with {found.name}" for found in causes)
    return failed(f"{seen}; {named}", "; ".join(dict.fromkeys(found.cause.cure for found in causes)), check=check)
