"""What a processor of transformers does to media, found by running it on images and clips alone and together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from renderers.errors import LoadError, MediaError
from renderers.media.item import TensorField
from renderers.media.pixel_scale import PixelScale
from renderers.vision.batching import combine, same_bits
from renderers.vision.hf_calling import PROCESSOR_ERRORS, Clip, Medium, ProcessorOutput, ProcessorRunner
from renderers.vision.normalise import ScaledPixels

# (width, height): small, wide and tall, so that each image is larger than another in some direction and a processor
# that cuts images into tiles cuts them into different numbers.
_IMAGES = ((97, 61), (1031, 331), (317, 911))
_CLIPS = ((160, 96), (96, 176))
# Processors that sample two frames a second take all of them. Several chunks for those that cut videos into chunks.
_CLIP_FPS = 2.0
_CLIP_FRAMES = 9
# Beside the marker, to see that no tensor depends on the text.
_TEXT = "one {} two three"


@dataclass(frozen=True)
class Layout:
    """How the tensors of one item become those of a batch, and which token stands for a row of features.

    `example` is the text that the processor puts in place of the marker of one probe. `scale` makes the processor's
    floats of what it gives without rescale and normalise, bit for bit, in the tensors `raw_names`; None where no scale
    does.
    """

    fields: Mapping[str, TensorField]
    embed_token: str
    example: str
    scale: PixelScale | None = None
    raw_names: frozenset[str] = frozenset()


def probe(runner: ProcessorRunner, *, least_frames: int, embed_tokens: Sequence[str]) -> Layout:
    """Find the layout of a processor, or raise a `LoadError` that names the tensor at fault.

    `least_frames`: fewer frames make no video for it; `embed_tokens`: what config.json names, if there is one.
    """
    media = _images() if runner.modality == "image" else _clips(max(least_frames, _CLIP_FRAMES))
    try:
        alone = [runner.run([medium]) for medium in media]
        together = runner.run(media, text=_TEXT)
    except PROCESSOR_ERRORS as error:
        raise LoadError(f"{runner.name} does not process {runner.modality}s one at a time: {error}") from error
    if list(together.replacements) != [output.replacements[0] for output in alone]:
        raise LoadError(
            f"{runner.name} puts other text in place of {runner.marker!r} where {runner.modality}s are processed together; such "
            "a model cannot be given items that were processed alone"
        )
    fields = _fields(runner, alone, together)
    embed_token = _embed_token(runner, alone, embed_tokens)
    scale, raw_names = _scale(runner, media, alone, fields)
    return Layout(fields, embed_token, alone[0].replacements[0], scale, raw_names)


def _scale(
    runner: ProcessorRunner,
    media: Sequence[Medium],
    alone: Sequence[ProcessorOutput],
    fields: Mapping[str, TensorField],
) -> tuple[PixelScale | None, frozenset[str]]:
    """How floats are made of uint8 patches, and in which tensors, as far as the probes show it bit for bit.

    The probes hold every value of every channel, and rescale and normalise look at one value at a time.
    """
    settings = _scale_settings(runner.part)
    if settings is None:
        return None, frozenset()
    try:
        raw = [runner.run([medium], raw=True) for medium in media]
    except PROCESSOR_ERRORS:
        return None, frozenset()  # a class that takes no such option; its floats are what there is
    if any(one.replacements != other.replacements for one, other in zip(raw, alone, strict=True)):
        return None, frozenset()
    for fused in (True, False):
        scale = PixelScale(*settings, fused)
        names = [
            _scaled_names(scale, one.tensors, other.tensors, fields) for one, other in zip(raw, alone, strict=True)
        ]
        if names[0] and all(each == names[0] for each in names):
            return scale, names[0]
    return None, frozenset()


def _scale_settings(part: Any) -> tuple[float, tuple[float, ...], tuple[float, ...]] | None:
    """Factor, mean and deviation of a processor that rescales and normalises three channels."""
    if not getattr(part, "do_rescale", False) or not getattr(part, "do_normalize", False):
        return None
    try:
        factor = float(part.rescale_factor)
        mean = tuple(float(value) for value in part.image_mean)
        std = tuple(float(value) for value in part.image_std)
    except (AttributeError, TypeError, ValueError):
        return None
    return (factor, mean, std) if len(mean) == len(std) == 3 and factor > 0 and all(std) else None


def _scaled_names(
    scale: PixelScale,
    raw: Mapping[str, np.ndarray],
    floats: Mapping[str, np.ndarray],
    fields: Mapping[str, TensorField],
) -> frozenset[str] | None:
    """The tensors of uint8 patches that the scale makes the floats of; None where another tensor differs."""
    if raw.keys() != floats.keys():
        return None
    names = set()
    for name, pixels in raw.items():
        if same_bits(pixels, floats[name]):
            continue
        if pixels.dtype != np.uint8 or fields[name].kind != "flat" or not _has_channels(pixels, len(scale.mean)):
            return None
        if not same_bits(ScaledPixels(pixels, scale).unpack(), floats[name]):
            return None
        names.add(name)
    return frozenset(names)


def _has_channels(pixels: np.ndarray, channels: int) -> bool:
    """Whether rows are channels * k values, channel by channel, or have an axis of channels."""
    if pixels.ndim == 2:
        return bool(pixels.shape[1] % channels == 0)
    return pixels.ndim > 2 and bool(pixels.shape[1] == channels)


def _fields(
    runner: ProcessorRunner, alone: Sequence[ProcessorOutput], together: ProcessorOutput
) -> dict[str, TensorField]:
    names = together.tensors.keys()
    for output in alone:
        if output.tensors.keys() != names:
            raise LoadError(
                f"{runner.name} returns {', '.join(output.tensors)} for one {runner.modality} and "
                f"{', '.join(names)} for several; only processors that return the same are read"
            )
    return {
        name: _field(runner, name, [output.tensors[name] for output in alone], together.tensors[name]) for name in names
    }


def _field(runner: ProcessorRunner, name: str, alone: Sequence[np.ndarray], together: np.ndarray) -> TensorField:
    """The kind of tensor that makes `together` of the single ones, bit for bit."""
    for field in _candidates(alone, together):
        try:
            combined = combine([item_tensor(name, array, field) for array in alone], field)
        except MediaError:
            continue
        if same_bits(combined, together):
            return field
    shapes = ", ".join(str(array.shape) for array in alone)
    raise LoadError(
        f"{runner.name} makes {name!r} of shapes {shapes} of single {runner.modality}s and {together.shape} of all together, "
        "which is neither their rows one after another nor stacked and padded: their values or their layout depend on "
        "what else is in the batch, so that items processed alone would be wrong"
    )


def _candidates(alone: Sequence[np.ndarray], together: np.ndarray) -> list[TensorField]:
    """Kinds that the shapes allow. One row a medium can be either of two; stacked is what the models read it as."""
    if together.ndim == 0 or any(array.ndim != together.ndim for array in alone):
        return [TensorField("shared")]
    candidates = [TensorField("flat"), TensorField("shared")]
    if len(together) == len(alone) and all(len(array) == 1 for array in alone):
        padded = [row for row, array in zip(together, alone, strict=True) if row.shape != array.shape[1:]]
        candidates.insert(0, TensorField("batched", float(padded[0].flat[-1]) if padded else None))
    return candidates


def item_tensor(name: str, array: np.ndarray, field: TensorField) -> np.ndarray:
    """The tensor of one item from that of a batch of one: without the batch axis, where `field` has one."""
    if field.kind != "batched":
        return array
    if len(array) != 1:
        raise MediaError(
            f"the processor makes {len(array)} rows of {name!r} here where it made one of each probe: how such rows "
            "of several items are put together is not known"
        )
    return np.asarray(array[0])


def _embed_token(runner: ProcessorRunner, alone: Sequence[ProcessorOutput], named: Sequence[str]) -> str:
    """The control token that is repeated most. `named` are those that config.json gives the model to look for."""
    counts: Counter[str] = Counter()
    for output in alone:
        for piece in runner.pieces(output.replacements[0]):
            if runner.is_control(piece.text):
                counts[piece.text] += piece.times
    if not counts:
        raise LoadError(
            f"{runner.name} puts {alone[0].replacements[0][:80]!r} in place of {runner.marker!r}, without a control token of "
            "its tokenizer: load the tokenizer that belongs to this processor"
        )
    (token, count), *others = counts.most_common(2)
    tied = bool(others) and others[0][1] == count
    if tied or (named and token not in named):
        raise LoadError(
            f"cannot tell which token stands for the features of a {runner.modality}: {runner.name} prints {dict(counts)}, "
            f"config.json names {', '.join(named) or 'none'}"
        )
    return token


def _images() -> list[Medium]:
    return [Image.fromarray(_noise(width, height)) for width, height in _IMAGES]


def _clips(least_frames: int) -> list[Medium]:
    return [
        Clip(np.stack([_noise(width, height + index)[:height] for index in range(least_frames + more)]), _CLIP_FPS)
        for more, (width, height) in enumerate(_CLIPS)
    ]


def _noise(width: int, height: int) -> np.ndarray:
    """uint8 (height, width, 3) in which no two pixels of any use are alike."""
    values = np.random.default_rng(width * 10_000 + height).integers(0, 256, (height, width, 3))
    return values.astype(np.uint8)
