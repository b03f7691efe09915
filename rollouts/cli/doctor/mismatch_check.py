"""The mismatch: log-probabilities of the server against those of transformers, in float32, in this process."""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from renderers import MediaItem, PlaceholderRange, RenderedTokens
from renderers.installation import install_command
from renderers.vision.batching import combine
from renderers.vision.hf_runner import PROCESSOR_ERRORS
from renderers.vision.patches import normalised
from rollouts.cli.doctor.image_rendering_checks import (
    NORMALISATION,
    Normalisation,
    renormalised,
    written_normalisation,
    wrong_normalisation,
)
from rollouts.cli.doctor.target import REPORTED, Finding, Outcome, Target, failed, fresh_image, images_of, ok, skipped
from rollouts.engines.protocol import Completion
from rollouts.engines.vllm.features import tensor_type

#: Class of a configuration, and name of one of its fields.
Read = tuple[type, str]

# Code that reads every field: to write, copy and validate configurations.
_GENERIC_READERS = ("transformers.configuration_utils", "transformers.generation.", "huggingface_hub.")
# Fields that describe the file, or that take effect outside of the forward pass.
_NO_PART_OF_FORWARD = frozenset(
    {"architectures", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache", "initializer_range"}
)
# Tokens and lengths, with which processors and sampling are set up.
_NO_PART_OF_FORWARD_ENDINGS = ("_token_id", "_token_ids", "_token_index", "_seq_length")


@contextlib.contextmanager
def recorded_reads() -> Iterator[set[Read]]:
    """Record which fields of configurations the code of models reads, while a model is loaded and run in this block.

    It replaces the attribute access of transformers' configurations, in all threads, until the block ends.
    """
    from transformers import PretrainedConfig

    reads: set[Read] = set()
    original = PretrainedConfig.__getattribute__

    def recording(config: Any, name: str) -> Any:
        reader = sys._getframe(1).f_globals.get("__name__", "")
        if not name.startswith("_") and not reader.startswith(_GENERIC_READERS):
            kind = type(config)
            reads.add((kind, kind.attribute_map.get(name, name)))
        return original(config, name)

    own = "__getattribute__" in vars(PretrainedConfig)
    PretrainedConfig.__getattribute__ = recording
    try:
        yield reads
    finally:
        if own:
            PretrainedConfig.__getattribute__ = original
        else:
            del PretrainedConfig.__getattribute__


def unread_fields(config: Any, written: Mapping[str, Any], reads: set[Read]) -> dict[str, Any]:
    """The fields of a config.json that were not read, by their path ("text_config.logit_scale"), with their values.

    `config` is transformers' object of it, `written` the content of the file. A field is left out if it is null, cannot
    take part in a forward pass, or was converted to another one when the file was loaded.
    """
    found: dict[str, Any] = {}
    kind = type(config)
    for name, value in written.items():
        attribute = kind.attribute_map.get(name, name)
        held = vars(config).get(attribute)
        if held is None or name.startswith("_"):
            continue
        if hasattr(held, "attribute_map") and isinstance(value, Mapping):
            found |= {f"{name}.{path}": each for path, each in unread_fields(held, value, reads).items()}
        elif (kind, attribute) not in reads and not (
            name in _NO_PART_OF_FORWARD or name.endswith(_NO_PART_OF_FORWARD_ENDINGS)
        ):
            found[name] = value
    return found


_TOKEN_TYPES = {"image": 1, "video": 2}
# Where a config.json names tokens of media. The positions of Qwen-Omni begin an image or a sound at its start token.
_PLACEHOLDERS = (
    *(f"{modality}_token_{end}" for modality in ("image", "video", "audio") for end in ("id", "index")),
    *("vision_start_token_id", "audio_start_token_id"),
)


class ScoredPrompt(NamedTuple):
    """A prompt, and the completion that the server sampled for it."""

    rendered: RenderedTokens
    completion: Completion


def load_reference(target: Target) -> Any:
    """The model in float32, on the CPU."""
    from rollouts.models.loading import load_model

    return load_model(target.directory).eval()


def completion_logits(
    model: Any,
    prompt: ScoredPrompt,
    *,
    renormalise: tuple[Normalisation, Normalisation] | None = None,
    causal: bool = False,
) -> Any:
    """The model's logits for the sampled tokens: float32 torch tensor (scored, vocabulary).

    `renormalise`: the normalisation that the renderer's pixels have, and the one to give them instead.
    `causal`: the tokens of an image attend only to those before them, in models whose images attend to all of it.
    transformers finds media by token id: a completion is scored up to the first token that stands for media or begins
    them.
    """
    import torch

    prompt_ids, sampled_ids = prompt.rendered.token_ids, prompt.completion.token_ids.tolist()
    media = images_of(prompt.rendered)
    placeholder_ids: set[int | None] = {prompt_ids[start] for _, each in media for start, _ in each.runs}
    placeholder_ids |= {getattr(model.config, name, None) for name in _PLACEHOLDERS}
    count = next((at for at, token in enumerate(sampled_ids) if token in placeholder_ids), len(sampled_ids))
    row = torch.tensor([[*prompt_ids, *sampled_ids[:count]]])
    inputs = {"input_ids": row, "attention_mask": torch.ones_like(row), **_media_inputs(media, renormalise)}
    types = torch.zeros_like(row)
    for item, placeholder in media:
        for start, stop in placeholder.runs:
            types[0, start:stop] = _TOKEN_TYPES[item.modality]
    accepted = inspect.signature(model.forward).parameters
    inputs |= {name: types for name in ("mm_token_type_ids", "token_type_ids") if name in accepted}
    if causal:
        inputs["token_type_ids"] = torch.zeros_like(row)
    with torch.inference_mode():
        return model(**inputs).logits[0, len(prompt_ids) - 1 : -1].float()


def logprob_differences(logits: Any, prompt: ScoredPrompt) -> np.ndarray:
    """float32 (scored,): |log p(server) - log p| of the sampled tokens, given the logits of `completion_logits`."""
    import torch

    count = len(logits)
    sampled = torch.tensor(prompt.completion.token_ids[:count].tolist(), dtype=torch.int64)
    with torch.inference_mode():
        scored = torch.log_softmax(logits, dim=-1).gather(-1, sampled[:, None])[:, 0].numpy()
    differences: np.ndarray = np.abs(scored - prompt.completion.logprobs[:count])
    return differences


def has_bidirectional_images(model: Any) -> bool:
    """Whether the tokens of an image attend to the whole of it (Gemma 3)."""
    return "token_type_ids" in inspect.signature(model.forward).parameters


def _media_inputs(
    media: Sequence[tuple[MediaItem, PlaceholderRange]], renormalise: tuple[Normalisation, Normalisation] | None
) -> dict[str, Any]:
    """The tensors that the model takes for the images of one prompt, as its processor would return them."""
    import torch

    items = [item for item, _ in media]
    inputs = {}
    for name, field in {name: field for item in items for name, field in item.fields.items()}.items():
        # uint8 pixels are normalised; other tensors are the model's inputs.
        arrays = [
            normalised(item, name) if tensor_type(item.tensors[name]).dtype == "uint8" else item[name]
            for item in items
            if name in item
        ]
        if renormalise is not None and name.startswith("pixel_values"):
            arrays = [renormalised(array, *renormalise) for array in arrays]
        inputs[name] = torch.from_numpy(np.array(combine(arrays, field)))
    return inputs


_CHECK = "mismatch"
_SAMPLED_TOKENS = 32
_PROMPTS = 3

# The limits of the largest and the mean |log p(server) - log p(transformers, float32)|, by dtype of the weights.
_LIMITS = {"float32": (1e-4, 2e-5), "float16": (0.1, 0.02), "bfloat16": (0.5, 0.05)}

# A normalisation is ruled out if its mean difference is this many times that of another.
_CLEARLY_WORSE = 1.5
# The largest difference of logits between two images that a model does not look at.
_SAME_LOGITS = 1e-6

#: The normalisations of published processors, which a server may use in place of the directory's.
_COMMON: Mapping[str, Normalisation] = {
    "the common": Normalisation((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    "CLIP's": Normalisation((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)),
    "ImageNet's": Normalisation((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
    "no": Normalisation((0.0, 0.0, 0.0), (1.0, 1.0, 1.0)),
}

# What a server may do to logits with a number of config.json: scale them, or soft-cap them.
_LOGIT_CHANGES: Mapping[str, Callable[[Any, float], Any]] = {
    "multiplied by": lambda logits, number: logits * number,
    "divided by": lambda logits, number: logits / number,
    "soft-capped at": lambda logits, number: (logits / number).tanh() * number,
}

_OTHER_WEIGHTS_CURE = (
    "the server has other weights or another config.json than --model, or quantised weights: start `vllm serve` from "
    "--model, without --quantization, --hf-overrides and --load-format dummy"
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
    others: list[RenderedTokens] = []
    if "image request" in target.findings and target.findings["image request"].outcome is not Outcome.SKIPPED:
        sides = [(64 + 32 * n, 96) for n in range(_PROMPTS)]
        prompts += [target.image_prompt(fresh_image(*each)) for each in sides]
        others += [target.image_prompt(fresh_image(*each)) for each in sides]
    completions = await asyncio.gather(
        *(
            target.sample(rendered, max_tokens=_SAMPLED_TOKENS, temperature=1.0, seed=seed)
            for seed, rendered in enumerate(prompts)
        )
    )
    scored = [ScoredPrompt(*pair) for pair in zip(prompts, completions, strict=True)]
    images = scored[_PROMPTS:]
    other_images = [prompt._replace(rendered=other) for prompt, other in zip(images, others, strict=True)]
    try:
        return await asyncio.to_thread(_findings, target, scored[:_PROMPTS], images, other_images)
    except PROCESSOR_ERRORS as error:  # what transformers raises for a model that it cannot load or run
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
    target: Target, texts: Sequence[ScoredPrompt], images: Sequence[ScoredPrompt], other_images: Sequence[ScoredPrompt]
) -> list[Finding]:
    """`other_images`: the completions of `images` with prompts of the same tokens and other pixels."""
    with recorded_reads() as reads:
        model = load_reference(target)
        text_logits = [completion_logits(model, prompt) for prompt in texts]
        image_logits = [completion_logits(model, prompt) for prompt in images]
    unread = unread_fields(model.config, target.config, reads)
    differences = _compared(text_logits, texts)
    if not _agrees(target, differences):
        finding = _text_failure(target, model, text_logits, texts, differences, unread)
        if not images:
            return [finding]
        return [finding, skipped(f"not checked, because of: {_CHECK}, text failed", check=f"{_CHECK}, image")]
    findings = [_finding(target, "text", differences)]
    if not images:
        return findings
    other_logits = [completion_logits(model, prompt) for prompt in other_images]
    differences, control = _compared(image_logits, images), _compared(other_logits, other_images)
    if not target.is_ok("image request"):
        return [*findings, _blindness(target, image_logits, other_logits)]
    if not _agrees(target, differences):
        return [*findings, *_image_failures(target, model, images, differences, unread)]
    if len(control) and control.mean() <= _CLEARLY_WORSE * differences.mean():
        seen = (
            "not known: with the pixels of other images, log-probabilities are as near to the server's "
            f"({control.mean():.2g} on average) as with those of its own ({differences.mean():.2g})"
        )
        cure = "the images of this check, noise of about 96 x 96 pixels, hardly change what the model samples"
        return [*findings, skipped(seen, cure, check=f"{_CHECK}, image")]
    return [
        *findings,
        _finding(target, "image", differences, control=control),
        *_normalisation(target, model, images, differences),
    ]


def _compared(logits: Sequence[Any], prompts: Sequence[ScoredPrompt]) -> np.ndarray:
    """float32 (scored,): `logprob_differences` of all prompts."""
    return np.concatenate([logprob_differences(*pair) for pair in zip(logits, prompts, strict=True)])


def _differences(model: Any, prompts: Sequence[ScoredPrompt], **options: Any) -> np.ndarray:
    """As `_compared`, of the logits of `completion_logits` with these options."""
    return _compared([completion_logits(model, prompt, **options) for prompt in prompts], prompts)


def _text_failure(
    target: Target,
    model: Any,
    logits: Sequence[Any],
    texts: Sequence[ScoredPrompt],
    differences: np.ndarray,
    unread: Mapping[str, Any],
) -> Finding:
    """The cause where log-probabilities of text differ: a field that transformers does not read, the dtype, weights."""
    name = type(model).__name__
    for path, number in unread.items():
        if isinstance(number, bool) or not isinstance(number, int | float) or number <= 0:
            continue
        for change, apply in _LOGIT_CHANGES.items():
            if _agrees(target, _compared([apply(each, number) for each in logits], texts)):
                neutral = "null" if change == "soft-capped at" else "1.0"
                return failed(
                    f"{_seen(target, differences)}; equal if the logits of transformers are {change} {path} "
                    f"({number:g}) of config.json, which its {name} never reads",
                    "let the trainer do it too, or keep the server from it: start `vllm serve` with --hf-overrides "
                    f"'{_nested(path, neutral)}'",
                    check=f"{_CHECK}, text",
                )
    cures = [_OTHER_WEIGHTS_CURE, *_unread_cure(name, unread)]
    if target.dtype_source != REPORTED and _agrees(target, differences, "bfloat16"):
        cures.insert(
            0,
            f"the server's dtype is not known, and differences like these are usual for bfloat16: start `vllm serve` "
            f"with --dtype {target.dtype}, or with VLLM_SERVER_DEV_MODE=1, so that it reports its dtype",
        )
    return _finding(target, "text", differences, "; or ".join(cures))


def _unread_cure(name: str, unread: Mapping[str, Any]) -> list[str]:
    """What fields that transformers' class does not read may mean, if there are any."""
    if not unread:
        return []
    listed = ", ".join(f"{path} ({value!r:.40})" for path, value in unread.items())
    return [f"the server applies fields of config.json that transformers' {name} never reads: {listed}"]


def _nested(path: str, value: str) -> str:
    """A value in JSON objects, given the names that lead to it: {"text_config": {"logit_scale": 1.0}}."""
    for name in reversed(path.split(".")):
        value = f'{{"{name}": {value}}}'
    return value


def _blindness(target: Target, logits: Sequence[Any], other_logits: Sequence[Any]) -> Finding:
    """Where two images give the same completion on the server: whether they do so in transformers."""
    check = f"{_CHECK}, image"
    if any(float((one - other).abs().max()) > _SAME_LOGITS for one, other in zip(logits, other_logits, strict=True)):
        return skipped("not checked, because of: image request failed; in transformers, images differ", check=check)
    return failed(
        "transformers gives different images the same log-probabilities, too",
        f"the weights of {target.directory} do not look at images: its vision tower or projection holds zeros, as "
        "Gemma 3's projection does before training. Serve and pass a trained checkpoint",
        check=check,
    )


def _normalisation(
    target: Target, model: Any, images: Sequence[ScoredPrompt], differences: np.ndarray
) -> list[Finding]:
    """Whether the directory's normalisation explains the server's log-probabilities better than others; else nothing.

    Rounded weights make the limits wide enough for a wrong normalisation, so normalisations are compared.
    """
    written = written_normalisation(target.directory)
    if written is None or not _server_normalises(target) or NORMALISATION in target.findings:
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


def _server_normalises(target: Target) -> bool:
    """Whether the server normalises the images of requests; else its own normalisation does not change completions."""
    return target.image_mode == "content_parts" or target.capabilities.pixel_dtype == "uint8"


def _others(written: Normalisation) -> dict[str, Normalisation]:
    """The common normalisations that are not `written`."""
    return {
        name: other
        for name, other in _COMMON.items()
        if len(other.mean) == len(written.mean) and not other.is_near(written)
    }


def _image_failures(
    target: Target, model: Any, images: Sequence[ScoredPrompt], differences: np.ndarray, unread: Mapping[str, Any]
) -> list[Finding]:
    """The cause where text agrees and images do not: attention, normalisation, or the vision tower's weights."""
    known = target.findings.get(NORMALISATION)
    if known is not None and known.outcome is Outcome.FAILED and _server_normalises(target):
        return [skipped(f"not checked, because of: {NORMALISATION} failed", check=f"{_CHECK}, image")]
    other_cause = "; or ".join([_OTHER_IMAGES_CURE, *_unread_cure(type(model).__name__, unread)])
    if has_bidirectional_images(model) and _agrees(target, _differences(model, images, causal=True)):
        return [_finding(target, "image", differences, _CAUSAL_CURE)]
    written = written_normalisation(target.directory)
    if written is None:
        return [_finding(target, "image", differences, other_cause)]
    for name, other in _others(written).items():
        if _agrees(target, _differences(model, images, renormalise=(written, other))):
            evidence = f"the server's log-probabilities are those of {name} normalisation,"
            return [
                wrong_normalisation(target.directory, written, other, evidence),
                skipped(f"not checked, because of: {NORMALISATION} failed", check=f"{_CHECK}, image"),
            ]
    return [_finding(target, "image", differences, other_cause)]


def _agrees(target: Target, differences: np.ndarray, dtype: str = "") -> bool:
    """Whether differences are within the limits of a dtype, by default that of the server's weights."""
    if not len(differences):  # each completion began with the token of an image
        return True
    max_difference, max_mean = _LIMITS.get(dtype or target.dtype, _LIMITS["bfloat16"])
    return bool(differences.max() <= max_difference and differences.mean() <= max_mean)


def _finding(
    target: Target, kind: str, differences: np.ndarray, cure: str = "", *, control: np.ndarray | None = None
) -> Finding:
    """`control`: the differences if the model is given the pixels of other images."""
    check = f"{_CHECK}, {kind}"
    if not len(differences):
        return skipped("each completion began with the token of an image", check=check)
    seen = _seen(target, differences)
    if control is not None:
        seen += f"; {control.mean():.2g} on average with the pixels of other images"
    return ok(seen, check=check) if _agrees(target, differences) else failed(seen, cure, check=check)


def _seen(target: Target, differences: np.ndarray) -> str:
    max_difference, max_mean = _LIMITS.get(target.dtype, _LIMITS["bfloat16"])
    return (
        f"|log p(server) - log p(transformers)| at most {differences.max():.2g}, {differences.mean():.2g} on average "
        f"over {len(differences)} tokens; {max_difference:g} and {max_mean:g} allowed for {target.dtype} weights "
        f"({target.dtype_source})"
    )
