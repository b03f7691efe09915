"""The one number: the server's log-probabilities against transformers, in float32, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np

from renderers import RenderedTokens
from rollouts.doctor.finding import Finding, failed, ok, skipped
from rollouts.doctor.patient import Patient, Sampled, fresh_picture

_SAMPLED = 32
_PROMPTS = 3

# Largest and mean |log p(server) - log p(transformers in float32)| of a sound server, by the dtype of its weights.
_LIMITS = {"float32": (1e-4, 2e-5), "float16": (0.1, 0.02), "bfloat16": (0.5, 0.05)}


class _Scored(NamedTuple):
    kind: str
    difference: np.ndarray


async def mismatch(patient: Patient, *, max_gigabytes: float) -> list[Finding]:
    """Text and image completions, sampled at temperature 1 and scored again."""
    missing = [package for package in ("torch", "transformers") if find_spec(package) is None]
    if missing:
        return [skipped(_CHECK, f"{' and '.join(missing)} not installed", 'pip install "mmrollouts[torch]"')]
    nbytes = sum(path.stat().st_size for path in patient.directory.glob("*.safetensors"))
    if not nbytes:
        return [skipped(_CHECK, f"{patient.directory} holds no weights", "pass a directory with *.safetensors")]
    if nbytes > max_gigabytes * 1e9:
        return [
            skipped(
                _CHECK,
                f"the checkpoint has {nbytes / 1e9:.1f} GB, more than are scored here ({max_gigabytes:g})",
                "--reference-gb sets the limit; float32 takes up to twice the memory",
            )
        ]
    if "vision_config" in patient.config and patient.config.get("model_type") != "qwen3_vl":
        return [skipped(_CHECK, f"no forward pass is known here for {patient.config.get('model_type')}")]
    prompts = [("text", patient.text_prompt())] * _PROMPTS
    if patient.takes_pictures:
        prompts += [("image", patient.picture_prompt(fresh_picture(64 + 32 * n, 96))) for n in range(_PROMPTS)]
    sampled = await asyncio.gather(
        *(
            patient.sample(rendered, max_tokens=_SAMPLED, temperature=1.0, seed=seed)
            for seed, (_, rendered) in enumerate(prompts)
        )
    )
    try:
        rows = await asyncio.to_thread(_scored, patient, prompts, sampled)
    except (OSError, ValueError) as error:  # of transformers, for what it does not know or cannot read
        return [skipped(_CHECK, f"transformers cannot load {patient.directory}: {error}")]
    return [_finding(patient, kind, rows) for kind in dict.fromkeys(kind for kind, _ in prompts)]


_CHECK = "mismatch"


def _finding(patient: Patient, kind: str, rows: list[_Scored]) -> Finding:
    differences = np.concatenate([row.difference for row in rows if row.kind == kind])
    largest, mean = float(differences.max()), float(differences.mean())
    most, most_mean = _LIMITS.get(patient.dtype, _LIMITS["bfloat16"])
    seen = (
        f"|log p(server) - log p(transformers)| at most {largest:.2g}, {mean:.2g} on average over {len(differences)} "
        f"tokens; {most:g} and {most_mean:g} allowed for {patient.dtype} weights ({patient.dtype_source})"
    )
    if largest <= most and mean <= most_mean:
        return ok(f"{_CHECK}, {kind}", seen)
    return failed(
        f"{_CHECK}, {kind}",
        seen,
        "first put right what failed above; else the server serves other weights than --model holds, or quantised ones",
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """No progress bars of transformers between the lines of a report."""
    from transformers.utils import logging

    if not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()


def _scored(patient: Patient, prompts: list[tuple[str, RenderedTokens]], sampled: list[Sampled]) -> list[_Scored]:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    sees = "vision_config" in patient.config
    kind_of_model = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    with _quiet():
        model: Any = kind_of_model.from_pretrained(str(patient.directory), dtype=torch.float32).eval()
    rows = []
    with torch.inference_mode():
        for (kind, rendered), drawn in zip(prompts, sampled, strict=True):
            ids = np.concatenate([np.array(rendered.token_ids, dtype=np.int32), drawn.token_ids])
            scores = _scores_with_media(model, ids, rendered) if sees else _scores(model, ids)
            rows.append(_Scored(kind, np.abs(scores[len(rendered.token_ids) - 1 :] - drawn.logprobs)))
    return rows


def _scores(model: Any, ids: np.ndarray) -> np.ndarray:
    """float32 (n - 1,): log p of each token but the first, by the model's own forward."""
    import torch

    row = torch.from_numpy(ids.astype(np.int64))[None]
    scored = torch.log_softmax(model(input_ids=row).logits[0, :-1].float(), dim=-1)
    return scored.gather(-1, row[0, 1:, None])[:, 0].numpy()


def _scores_with_media(model: Any, ids: np.ndarray, rendered: RenderedTokens) -> np.ndarray:
    """The same by the trainer's forward, which places media by range."""
    from rollouts.training.batch import TrainingBatch
    from rollouts.training.logprobs import token_logprobs
    from rollouts.training.samples import TrainingSample

    zeros = np.zeros(len(ids), dtype=np.float32)
    media = () if rendered.multi_modal_data is None else tuple(rendered.multi_modal_data.placed())
    sample = TrainingSample(ids, np.arange(len(ids)) > 0, zeros, zeros, media, name="doctor")
    scores: np.ndarray = token_logprobs(model, TrainingBatch.from_samples([sample], pad_id=0))[0, 1:].numpy()
    return scores
