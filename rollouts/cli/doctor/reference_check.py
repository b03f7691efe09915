"""The one number: the server's log-probabilities against transformers, in float32, in this process."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from renderers import MediaItem, PlaceholderRange, RenderedTokens
from renderers.vision.batching import combine
from renderers.vision.hf_calling import PROCESSOR_ERRORS
from renderers.vision.normalise import normalised
from rollouts.cli.doctor.finding import Finding, failed, ok, skipped
from rollouts.cli.doctor.pixel_scale import (
    NORMALISATION,
    Normalisation,
    renormalised,
    written_normalisation,
    wrong_normalisation,
)
from rollouts.cli.doctor.target import Sampled, Target, fresh_image
from rollouts.engines.vllm.wire.tensors import tensor_dtype

_CHECK = "mismatch"
_SAMPLED = 32
_PROMPTS = 3
_TOKEN_TYPES = {"image": 1, "video": 2}

# Largest and mean |log p(server) - log p(transformers in float32)| of a sound server, by the dtype of its weights.
_LIMITS = {"float32": (1e-4, 2e-5), "float16": (0.1, 0.02), "bfloat16": (0.5, 0.05)}

# So many times as far as another is a normalisation that the server does not have.
_CLEARLY = 1.5

#: Numbers that published processors have, which a server may use in place of the directory's.
_COMMON: Mapping[str, Normalisation] = {
    "the common": Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "CLIP's": Normalisation((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "ImageNet's": Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "no": Normalisation((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}


class _Prompt(NamedTuple):
    kind: str
    rendered: RenderedTokens
    drawn: Sampled

    @property
    def ids(self) -> np.ndarray:
        """int32 (prompt + drawn,)."""
        return np.concatenate([np.array(self.rendered.token_ids, dtype=np.int32), self.drawn.token_ids])

    @property
    def media(self) -> Sequence[tuple[MediaItem, PlaceholderRange]]:
        media = self.rendered.multi_modal_data
        return () if media is None else media.items_with_ranges()


async def mismatch(target: Target, *, max_gigabytes: float) -> list[Finding]:
    """Text and image completions, sampled at temperature 1 and scored again by the model's own forward pass."""
    if (reason := _why_not(target.directory, max_gigabytes)) is not None:
        return [reason]
    prompts = [("text", target.text_prompt())] * _PROMPTS
    if target.is_ok("image request"):
        prompts += [("image", target.image_prompt(fresh_image(64 + 32 * n, 96))) for n in range(_PROMPTS)]
    sampled = await asyncio.gather(
        *(
            target.sample(rendered, max_tokens=_SAMPLED, temperature=1.0, seed=seed)
            for seed, (_, rendered) in enumerate(prompts)
        )
    )
    drawn = [_Prompt(kind, rendered, each) for (kind, rendered), each in zip(prompts, sampled, strict=True)]
    try:
        return await asyncio.to_thread(_findings, target, drawn)
    except PROCESSOR_ERRORS as error:  # what transformers raises for a model that it cannot load or run
        return [skipped(_CHECK, f"transformers cannot run {target.directory}: {type(error).__name__}: {error}")]


def _why_not(directory: Path, max_gigabytes: float) -> Finding | None:
    missing = [package for package in ("torch", "transformers") if find_spec(package) is None]
    if missing:
        return skipped(_CHECK, f"{' and '.join(missing)} not installed", 'pip install "mmrollouts[torch]"')
    nbytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
    if not nbytes:
        return skipped(_CHECK, f"{directory} holds no weights", "pass --model a directory with *.safetensors")
    if nbytes > max_gigabytes * 1e9:
        return skipped(
            _CHECK,
            f"the checkpoint has {nbytes / 1e9:.1f} GB, more than are scored here ({max_gigabytes:g})",
            f"--reference-gb {nbytes / 1e9:.0f}, where twice as much memory is free: weights are float32 here",
        )
    return None


def _findings(target: Target, drawn: Sequence[_Prompt]) -> list[Finding]:
    model = _loaded(target)
    text = [_difference(model, each) for each in drawn if each.kind == "text"]
    findings = [_finding(target, "text", text, _OTHER_WEIGHTS)]
    images = [each for each in drawn if each.kind == "image"]
    if not images:
        return findings
    if not _agrees(target, text):
        return [*findings, skipped(f"{_CHECK}, image", f"not checked, because of: {_CHECK}, text failed")]
    image = [_difference(model, each) for each in images]
    if _agrees(target, image):
        return [*findings, _finding(target, "image", image, ""), *_normalisation(target, model, images, image)]
    return [*findings, *_wrong_images(target, model, images, image)]


def _normalisation(target: Target, model: Any, images: Sequence[_Prompt], image: Sequence[np.ndarray]) -> list[Finding]:
    """Whether the directory's numbers explain the server's answers better than others; nothing where that is open.

    Rounded weights leave room for a wrong normalisation within what is allowed, so the numbers are compared.
    """
    written = written_normalisation(target.directory)
    # A server that takes floats of ours agrees with transformers whatever its own numbers are.
    sees_own = target.capabilities.pixel_dtype == "uint8" or target.image_mode == "content_parts"
    if written is None or not sees_own or NORMALISATION in target.known:
        return []
    own = float(np.concatenate(image).mean())
    others = {
        other: float(np.concatenate([_difference(model, each, instead=(written, other)) for each in images]).mean())
        for other in _COMMON.values()
        if len(other.mean) == len(written.mean) and not other.is_near(written)
    }
    best = min(others, key=others.__getitem__, default=None)
    if best is None or others[best] > _CLEARLY * own:
        return [ok(NORMALISATION, f"log-probabilities of images are those of {written}")]
    if own > _CLEARLY * others[best]:
        return [wrong_normalisation(target.directory, written, best, "the server's log-probabilities are nearest to")]
    return []


_OTHER_WEIGHTS = (
    "the server has other weights than --model, or quantised ones: start `vllm serve` from --model, without "
    "--quantization and --load-format dummy"
)


def _wrong_images(target: Target, model: Any, images: Sequence[_Prompt], image: Sequence[np.ndarray]) -> list[Finding]:
    """Text agrees and images do not: what the server does with them is other, or the weights of its vision tower."""
    if "token_type_ids" in inspect.signature(model.forward).parameters and _agrees(
        target, [_difference(model, each, causal=True) for each in images]
    ):
        return [_finding(target, "image", image, _CAUSAL)]
    written = written_normalisation(target.directory)
    for whose, other in _COMMON.items():
        if written is None or len(written.mean) != len(other.mean) or other.is_near(written):
            continue
        if _agrees(target, [_difference(model, each, instead=(written, other)) for each in images]):
            said = f"the server's log-probabilities are those of {whose} numbers,"
            return [
                wrong_normalisation(target.directory, written, other, said),
                skipped(f"{_CHECK}, image", f"not checked, because of: {NORMALISATION} failed"),
            ]
    return [_finding(target, "image", image, _OTHER_IMAGES)]


_CAUSAL = (
    "the server attends to images causally, where the model attends to the whole of each: its attention backend does "
    "not know how (that of vLLM for the CPU does not). On a GPU: `vllm serve` with --attention-backend TRITON_ATTN"
)
_OTHER_IMAGES = (
    "text agrees, so the language model's weights are those of --model; compare image_mean, image_std and "
    "rescale_factor in preprocessor_config.json (or processor_config.json) and the vision tower's weights with what "
    "is served, or start `vllm serve` from --model"
)


def _agrees(target: Target, rows: Sequence[np.ndarray]) -> bool:
    differences = np.concatenate(rows)
    if not len(differences):  # each began with the token of an image
        return True
    most, most_mean = _LIMITS.get(target.dtype, _LIMITS["bfloat16"])
    return bool(differences.max() <= most and differences.mean() <= most_mean)


def _finding(target: Target, kind: str, rows: Sequence[np.ndarray], cure: str) -> Finding:
    differences = np.concatenate(rows)
    if not len(differences):
        return skipped(f"{_CHECK}, {kind}", "each completion began with the token of an image")
    most, most_mean = _LIMITS.get(target.dtype, _LIMITS["bfloat16"])
    seen = (
        f"|log p(server) - log p(transformers)| at most {differences.max():.2g}, {differences.mean():.2g} on average "
        f"over {len(differences)} tokens; {most:g} and {most_mean:g} allowed for {target.dtype} weights "
        f"({target.dtype_source})"
    )
    check = f"{_CHECK}, {kind}"
    return ok(check, seen) if _agrees(target, rows) else failed(check, seen, cure)


# The reference.


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


def _loaded(target: Target) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

    sees = "vision_config" in target.config
    kind_of_model = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    with _quiet():
        return kind_of_model.from_pretrained(
            str(target.directory), dtype=torch.float32, trust_remote_code=False, local_files_only=True
        ).eval()


def _difference(
    model: Any,
    prompt: _Prompt,
    *,
    instead: tuple[Normalisation, Normalisation] | None = None,
    causal: bool = False,
) -> np.ndarray:
    """float32 (scored,): |log p(server) - log p(transformers)| of the drawn tokens.

    `instead`: the normalisation that the renderer's pixels have, and the one to give them.
    `causal`: the tokens of an image see only those before them, in models that would show them all of it.
    transformers finds images by token id, so a completion counts up to the first such token that was drawn.
    """
    import torch

    ids, given = prompt.ids, len(prompt.rendered.token_ids)
    placeholders = [int(ids[start]) for _, where in prompt.media for start, _ in where.runs]
    drawn_placeholders = np.flatnonzero(np.isin(ids[given:], [*placeholders, *_placeholder_ids(model)]))
    end = given + (int(drawn_placeholders[0]) if len(drawn_placeholders) else len(ids) - given)
    row = torch.from_numpy(ids[:end].astype(np.int64))[None]
    inputs = {"input_ids": row, "attention_mask": torch.ones_like(row), **_media_inputs(prompt.media, instead)}
    types = torch.zeros_like(row)
    for item, where in prompt.media:
        for start, stop in where.runs:
            types[0, start:stop] = _TOKEN_TYPES[item.modality]
    accepted = inspect.signature(model.forward).parameters
    inputs |= {name: types for name in ("mm_token_type_ids", "token_type_ids") if name in accepted}
    if causal:
        inputs["token_type_ids"] = torch.zeros_like(row)
    with torch.inference_mode():
        logits = model(**inputs).logits[0, given - 1 : -1].float()
    scored = torch.log_softmax(logits, dim=-1).gather(-1, row[0, given:, None])[:, 0].numpy()
    difference: np.ndarray = np.abs(scored - prompt.drawn.logprobs[: end - given])
    return difference


def _placeholder_ids(model: Any) -> list[int]:
    names = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
    return [value for name in names if isinstance(value := getattr(model.config, name, None), int)]


def _media_inputs(
    media: Sequence[tuple[MediaItem, PlaceholderRange]], instead: tuple[Normalisation, Normalisation] | None
) -> dict[str, Any]:
    """The tensors that the model takes for the images of one prompt, as its processor would return them."""
    import torch

    items = [item for item, _ in media]
    inputs = {}
    for name, field in {name: field for item in items for name, field in item.fields.items()}.items():
        arrays = [_floats(item, name) for item in items if name in item]
        if instead is not None and name.startswith("pixel_values"):
            arrays = [renormalised(array, *instead) for array in arrays]
        inputs[name] = torch.from_numpy(np.array(combine(arrays, field)))
    return inputs


def _floats(item: MediaItem, name: str) -> np.ndarray:
    """A tensor as the model takes it: pixels normalised, all else as it is."""
    raw = item.scale is not None and tensor_dtype(item.tensors[name]) == "uint8"
    return normalised(item, name) if raw else item[name]
