"""How the tensors that a processor makes of single items become those of a batch, found out on probes."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from renderers.errors import LoadError, MediaError
from renderers.media.item import PixelScale, TensorField
from renderers.messages import PLURALS
from renderers.vision.batching import combine, same_bits
from renderers.vision.hf_runner import (
    PROCESSOR_ERRORS,
    Clip,
    ClipWithSound,
    Medium,
    ProcessorOutput,
    ProcessorRunner,
    Sound,
)
from renderers.vision.patches import ScaledPixels

_CLIPS = ((160, 96), (96, 176))
_CLIP_FRAMES = 9
# Seconds: no multiples of each other or of a frame.
_SOUNDS = (0.73, 1.97, 3.1)

Tensors = Mapping[str, np.ndarray]
#: Name of a mask -> the tensor whose rows it marks, and its type.
Masks = Mapping[str, tuple[str, np.dtype[Any]]]


@dataclass(frozen=True)
class Layout:
    """How the tensors of single items become those of a batch, and which token stands for a row of features.

    `example` is the text that the processor puts in place of the marker of one probe. `scales` turn the
    processor's output without rescale and normalise into its floats, bit for bit, for the tensors that they
    name. `masks` are those that the processor makes only for several sounds.
    """

    fields: Mapping[str, TensorField]
    embed_token: str
    example: str
    scales: Mapping[str, PixelScale]
    masks: Masks

    def tensors(self, output: ProcessorOutput) -> dict[str, np.ndarray]:
        """The tensors of one item in a batch of one, with the masks of `masks`: all ones."""
        return _with_masks(output.tensors, self.masks)


def probe(runner: ProcessorRunner, *, min_frames: int, embed_tokens: Sequence[str]) -> Layout:
    """Find the layout of a processor. Raises a `LoadError` that names the tensor without a layout.

    `min_frames` is the number of frames that the processor needs; `embed_tokens` are those that config.json
    names.
    """
    media: list[Medium]
    if runner.modality == "image":
        # (width, height): small, wide and tall, so that each image is larger than another in some direction and a
        # processor that cuts images into tiles cuts them into different numbers.
        media = [Image.fromarray(_noise(width, height)) for width, height in ((97, 61), (1031, 331), (317, 911))]
    elif runner.modality == "audio":
        # One is longer than the window, 30 s, into which some processors cut sounds.
        short, middle, long = _SOUNDS
        lengths = (short, long + (getattr(runner.part, "chunk_length", None) or 0), middle)
        media = [sound(round(seconds * runner.part.sampling_rate)) for seconds in lengths]
    else:
        frames = max(min_frames, _CLIP_FRAMES)
        media = [_clip(width, height, frames + more) for more, (width, height) in enumerate(_CLIPS)]
    try:
        single = [runner.run([medium]) for medium in media]
        # Text around the marker, which shows that no tensor depends on the text.
        batch = runner.run(media, text="one {} two three")
    except PROCESSOR_ERRORS as error:
        raise LoadError(f"{runner.name} does not process {PLURALS[runner.modality]} one at a time: {error}") from error
    if list(batch.replacements) != [output.replacements[0] for output in single]:
        raise LoadError(
            f"{runner.name} puts other text in place of {runner.marker!r} when {PLURALS[runner.modality]} are "
            "processed together; items that were processed alone would be wrong for such a model"
        )
    masks: Masks = _missing_masks(single, batch) if runner.modality == "audio" else {}
    fields = _fields(runner, [_with_masks(output.tensors, masks) for output in single], batch.tensors, masks)
    embed_token = _embed_token(runner, single, embed_tokens)
    return Layout(fields, embed_token, single[0].replacements[0], _scales(runner, media, single, fields), masks)


def layout_with_sound(videos: Layout, sounds: Layout, runner: ProcessorRunner, of_sounds: ProcessorRunner) -> Layout:
    """The layout of a processor's videos together with their sound.

    `videos` and `runner` are the layout and the runner of its videos, `sounds` and `of_sounds` those of its
    sounds. Raises `LoadError` for a processor that makes other tensors of a video with its sound than of
    both apart, or does not put tokens of both in its place.
    """
    clip, own = _clip(*_CLIPS[0], 2 * _CLIP_FRAMES), sound(round(_SOUNDS[1] * runner.sampling_rate))
    try:
        joint = runner.run([ClipWithSound(clip, own)])
        apart = {**runner.run([clip]).tensors, **of_sounds.run([own]).tensors}
    except PROCESSOR_ERRORS as error:
        raise LoadError(f"{runner.name} does not process a video with its sound: {error}") from error
    same = joint.tensors.keys() == apart.keys() and all(same_bits(joint.tensors[name], apart[name]) for name in apart)
    tokens = {piece.text for piece in runner.pieces(joint.replacements[0])}
    if not same or not tokens >= {videos.embed_token, sounds.embed_token}:
        raise LoadError(
            f"{runner.name} puts {joint.replacements[0][:80]!r} in place of a video with its sound, and returns the "
            f"tensors {', '.join(joint.tensors)}; apart they are {', '.join(apart)}"
        )
    fields = {**videos.fields, **sounds.fields}
    return Layout(fields, videos.embed_token, joint.replacements[0], videos.scales, sounds.masks)


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
    """The tensors whose floats the scale makes of uint8 patches; None where another one differs."""
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


def _fields(runner: ProcessorRunner, single: Sequence[Tensors], batch: Tensors, masks: Masks) -> dict[str, TensorField]:
    names = batch.keys()
    for tensors in single:
        if tensors.keys() != names:
            raise LoadError(
                f"{runner.name} returns {', '.join(tensors)} for one {runner.modality} and "
                f"{', '.join(names)} for several; only processors that return the same tensors are supported"
            )
    found = {name: _field([tensors[name] for tensors in single], batch[name]) for name in names}
    if runner.modality == "audio" and None in found.values():
        padded = _padded_fields(runner, single, batch, masks)
        found = {name: padded.get(name) if field is None else field for name, field in found.items()}
    fields = {name: field for name, field in found.items() if field is not None}
    for name in names - fields.keys():
        shapes = ", ".join(str(tensors[name].shape) for tensors in single)
        raise LoadError(
            f"{runner.name} returns {name!r} in the shapes {shapes} for single {PLURALS[runner.modality]} and "
            f"{batch[name].shape} for all together, which is neither their rows one after another nor stacked and "
            "padded: values or layout depend on the rest of the batch, so items that were processed alone would be "
            "wrong"
        )
    return fields


def _field(single: Sequence[np.ndarray], batch: np.ndarray) -> TensorField | None:
    """The field that combines the tensors of single items into exactly the tensor of the batch."""
    for field in _candidates(single, batch):
        try:
            combined = combine([item_tensor("", array, field) for array in single], field)
        except (MediaError, ValueError):
            continue
        if same_bits(combined, batch):
            return field
    return None


def _padded_fields(
    runner: ProcessorRunner, single: Sequence[Tensors], batch: Tensors, masks: Masks
) -> dict[str, TensorField]:
    """The fields of tensors in which the last frames of a sound differ when a longer one is in the batch.

    Most processors pad the samples and then compute frames, so frames at the end of a sound reach into the padding, and
    the padding itself is the logarithm of silence. The frames of a sound alone are those that the model would read
    without any batch, and towers read them so from a batch if what follows is zero and masked. Sounds of one length
    need no padding: only a tensor that a batch of them leaves as it is has a field.
    """
    alike = [sound(round(_SOUNDS[0] * runner.part.sampling_rate), seed) for seed in range(2)]
    alone = [_with_masks(runner.run([each]).tensors, masks) for each in alike]
    together = runner.run(alike).tensors
    fields: dict[str, TensorField] = {}
    for name, rows in batch.items():
        arrays = [tensors[name] for tensors in single]
        largest = tuple(map(max, zip(*(array.shape for array in arrays), strict=True)))
        stacked = np.concatenate([tensors[name] for tensors in alone])
        if rows.shape == (len(single), *largest[1:]) and same_bits(stacked, together[name]):
            masked = any(
                _marks(batch[mask], rows) and all(_marks(tensors[mask], tensors[name]) for tensors in single)
                for mask in batch
            )
            fields[name] = TensorField("batched", 0.0 if masked else None)
    return fields


def _marks(mask: np.ndarray, rows: np.ndarray) -> bool:
    """Whether `mask` (items, frames) is ones, then zeros, for each item, and `rows` have its frames."""
    if mask.ndim != 2 or mask.dtype.kind not in "bi" or mask.shape[1] not in rows.shape[1:]:
        return False
    return bool(((mask == 0) | (mask == 1)).all() and (np.diff(mask.astype(np.int8)) <= 0).all())


def _missing_masks(single: Sequence[ProcessorOutput], batch: ProcessorOutput) -> Masks:
    """The masks of `Layout.masks`: a batch marks the frames of each sound, all those of the sound alone."""
    masks: dict[str, tuple[str, np.dtype[Any]]] = {}
    for name in batch.tensors.keys() - single[0].tensors.keys():
        mask = batch.tensors[name]
        for of, rows in batch.tensors.items():
            lengths = [output.tensors[of].shape[1:2] for output in single if of in output.tensors]
            if of != name and rows.ndim > 2 and _marks(mask, rows) and lengths == [(n,) for n in mask.sum(1)]:
                masks[name] = (of, mask.dtype)
    return masks


def _with_masks(tensors: Tensors, masks: Masks) -> dict[str, np.ndarray]:
    missing = {name: np.ones(tensors[of].shape[:2], dtype) for name, (of, dtype) in masks.items()}
    return {**tensors, **missing}


def _candidates(single: Sequence[np.ndarray], batch: np.ndarray) -> list[TensorField]:
    """The fields that the shapes allow. One row per item is batched, as models read it."""
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
    # At this speed, processors that sample two frames a second take every frame. The number of frames gives several
    # chunks to processors that cut videos into chunks.
    return Clip(np.stack([_noise(width, height + index)[:height] for index in range(frames)]), 2.0)


def sound(count: int, seed: int = 0) -> Sound:
    """Noise of so many samples."""
    return Sound(np.random.default_rng(seed).uniform(-0.5, 0.5, count).astype(np.float32))


def _noise(width: int, height: int) -> np.ndarray:
    values = np.random.default_rng(width * 10_000 + height).integers(0, 256, (height, width, 3))
    return values.astype(np.uint8)
