"""Finds how a processor of transformers lays out its tensors, by running it on media one at a time and as a batch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from renderers.errors import LoadError, MediaError
from renderers.media.item import PixelScale, TensorField
from renderers.vision.batching import combine, same_bits
from renderers.vision.hf_calling import PROCESSOR_ERRORS, Clip, Medium, ProcessorOutput, ProcessorRunner
from renderers.vision.normalise import ScaledPixels

# (width, height): small, wide and tall, so that each image is larger than another in some direction and a processor
# that cuts images into tiles cuts them into different numbers.
_IMAGES = ((97, 61), (1031, 331), (317, 911))
_CLIPS = ((160, 96), (96, 176))
# At this speed, processors that sample two frames a second take every frame. The number of frames gives several chunks
# to processors that cut videos into chunks.
_CLIP_FPS = 2.0
_CLIP_FRAMES = 9
# Text around the marker, which shows that no tensor depends on the text.
_TEXT = "one {} two three"


@dataclass(frozen=True)
class Layout:
    """How the tensors of single items become those of a batch, and which token stands for a row of features.

    `example` is the text that the processor puts in place of the marker of one probe. `scales` turn the processor's
    output without rescale and normalise into its floats, bit for bit, for the tensors that they name.
    """

    fields: Mapping[str, TensorField]
    embed_token: str
    example: str
    scales: Mapping[str, PixelScale]


def probe(runner: ProcessorRunner, *, min_frames: int, embed_tokens: Sequence[str]) -> Layout:
    """Find the layout of a processor. Raises a `LoadError` that names the tensor without a layout.

    `min_frames` is the number of frames that the processor needs; `embed_tokens` are those that config.json names.
    """
    media: list[Medium]
    if runner.modality == "image":
        media = [Image.fromarray(_noise(width, height)) for width, height in _IMAGES]
    else:
        frames = max(min_frames, _CLIP_FRAMES)
        media = [_clip(width, height, frames + more) for more, (width, height) in enumerate(_CLIPS)]
    try:
        single = [runner.run([medium]) for medium in media]
        batch = runner.run(media, text=_TEXT)
    except PROCESSOR_ERRORS as error:
        raise LoadError(f"{runner.name} does not process {runner.modality}s one at a time: {error}") from error
    if list(batch.replacements) != [output.replacements[0] for output in single]:
        raise LoadError(
            f"{runner.name} puts other text in place of {runner.marker!r} when {runner.modality}s are processed "
            "together; items that were processed alone would be wrong for such a model"
        )
    fields = _fields(runner, single, batch)
    embed_token = _embed_token(runner, single, embed_tokens)
    return Layout(fields, embed_token, single[0].replacements[0], _scales(runner, media, single, fields))


def _scales(
    runner: ProcessorRunner,
    media: Sequence[Medium],
    single: Sequence[ProcessorOutput],
    fields: Mapping[str, TensorField],
) -> dict[str, PixelScale]:
    """By tensor, the scale that turns uint8 patches into exactly the processor's floats; empty where none does.

    The probes contain every value of every channel, and rescale and normalise treat each value by itself.
    """
    part = runner.part
    if not getattr(part, "do_rescale", False) or not getattr(part, "do_normalize", False):
        return {}
    try:
        factor, mean, std = (
            float(part.rescale_factor),
            tuple(map(float, part.image_mean)),
            tuple(map(float, part.image_std)),
        )
        raw = [runner.run([medium], raw=True) for medium in media]
    except PROCESSOR_ERRORS:  # the class has no such settings or no such option: its floats are kept
        return {}
    if not (len(mean) == len(std) == 3 and factor > 0 and all(std)):
        return {}
    if any(one.replacements != other.replacements for one, other in zip(raw, single, strict=True)):
        return {}
    for scale in (PixelScale(factor, mean, std, fused) for fused in (True, False)):
        names = [
            _scaled_names(scale, one.tensors, other.tensors, fields) for one, other in zip(raw, single, strict=True)
        ]
        if names[0] and all(each == names[0] for each in names):
            return dict.fromkeys(names[0], scale)
    return {}


def _scaled_names(
    scale: PixelScale,
    raw: Mapping[str, np.ndarray],
    floats: Mapping[str, np.ndarray],
    fields: Mapping[str, TensorField],
) -> list[str] | None:
    """The names of tensors whose floats the scale makes of uint8 patches; None where another tensor differs."""
    if raw.keys() != floats.keys():
        return None
    names = []
    for name, pixels in raw.items():
        if same_bits(pixels, floats[name]):
            continue
        if pixels.dtype != np.uint8 or fields[name].kind != "flat" or pixels.ndim < 2:
            return None
        # Rows are 3 * k values, channel by channel, or have an axis of channels.
        if pixels.shape[1] % 3 if pixels.ndim == 2 else pixels.shape[1] != 3:
            return None
        if not same_bits(ScaledPixels(pixels, scale).unpack(), floats[name]):
            return None
        names.append(name)
    return names


def _fields(
    runner: ProcessorRunner, single: Sequence[ProcessorOutput], batch: ProcessorOutput
) -> dict[str, TensorField]:
    names = batch.tensors.keys()
    for output in single:
        if output.tensors.keys() != names:
            raise LoadError(
                f"{runner.name} returns {', '.join(output.tensors)} for one {runner.modality} and "
                f"{', '.join(names)} for several; only processors that return the same tensors are supported"
            )
    return {
        name: _field(runner, name, [output.tensors[name] for output in single], batch.tensors[name]) for name in names
    }


def _field(runner: ProcessorRunner, name: str, single: Sequence[np.ndarray], batch: np.ndarray) -> TensorField:
    """The field that combines the tensors of single items into exactly the tensor of the batch."""
    for field in _candidates(single, batch):
        try:
            combined = combine([item_tensor(name, array, field) for array in single], field)
        except MediaError:
            continue
        if same_bits(combined, batch):
            return field
    shapes = ", ".join(str(array.shape) for array in single)
    raise LoadError(
        f"{runner.name} returns {name!r} in the shapes {shapes} for single {runner.modality}s and {batch.shape} for "
        "all together, which is neither their rows one after another nor stacked and padded: values or layout depend "
        "on the rest of the batch, so items that were processed alone would be wrong"
    )


def _candidates(single: Sequence[np.ndarray], batch: np.ndarray) -> list[TensorField]:
    """The fields that the shapes allow. One row per item may be flat or batched; models read it as batched."""
    if batch.ndim == 0 or any(array.ndim != batch.ndim for array in single):
        return [TensorField("shared")]
    candidates = [TensorField("flat"), TensorField("shared")]
    if len(batch) == len(single) and all(len(array) == 1 for array in single):
        padded = [row for row, array in zip(batch, single, strict=True) if row.shape != array.shape[1:]]
        candidates.insert(0, TensorField("batched", float(padded[0].flat[-1]) if padded else None))
    return candidates


def item_tensor(name: str, array: np.ndarray, field: TensorField) -> np.ndarray:
    """The tensor of one item from that of a batch of one: without the batch axis, where `field` has one."""
    if field.kind != "batched":
        return array
    if len(array) != 1:
        raise MediaError(
            f"the processor returned {len(array)} rows of {name!r}; when it was loaded it returned one row for every "
            "probe. How such rows of several items are combined is not known"
        )
    return np.asarray(array[0])


def _embed_token(runner: ProcessorRunner, single: Sequence[ProcessorOutput], named: Sequence[str]) -> str:
    """The most frequent control token. `named` are the tokens that config.json gives to the model."""
    counts: Counter[str] = Counter()
    for output in single:
        for piece in runner.pieces(output.replacements[0]):
            if runner.is_control(piece.text):
                counts[piece.text] += piece.times
    if not counts:
        raise LoadError(
            f"{runner.name} puts {single[0].replacements[0][:80]!r} in place of {runner.marker!r}, without a control "
            "token of its tokenizer: load the tokenizer that belongs to this processor"
        )
    (token, count), *others = counts.most_common(2)
    tied = bool(others) and others[0][1] == count
    if tied or (named and token not in named):
        raise LoadError(
            f"cannot tell which token stands for the features of a {runner.modality}: {runner.name} prints "
            f"{dict(counts)}, config.json names {', '.join(named) or 'none'}"
        )
    return token


def _clip(width: int, height: int, frames: int) -> Clip:
    return Clip(np.stack([_noise(width, height + index)[:height] for index in range(frames)]), _CLIP_FPS)


def _noise(width: int, height: int) -> np.ndarray:
    """uint8 (height, width, 3) of random values."""
    values = np.random.default_rng(width * 10_000 + height).integers(0, 256, (height, width, 3))
    return values.astype(np.uint8)
