"""What all adapters check of their samples, and the columns that they take, as rows of one length."""

from __future__ import annotations

import io
from collections.abc import Callable, Collection, Mapping, Sequence
from importlib import import_module
from types import ModuleType
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import torch
from PIL import ExifTags, Image

from renderers import MediaSource
from renderers.errors import MediaError
from renderers.media.decoding import PILLOW_ERRORS, decode_image
from renderers.media.policy import MediaPolicy
from renderers.media.sniffing import sniff
from renderers.rendered import TOKEN_TYPE_IDS
from renderers.vision.patches import StillPatches
from rollouts.errors import ArgumentError, RolloutsError, SampleError
from rollouts.models.media_inputs import item_tensors
from rollouts.training.samples import TrainingSample

LEAVE_OUT: Final = "Leave the sample out (the `index` of this error)"


class AdapterError(RolloutsError):
    """A sample that a trainer's type cannot hold, or an object of such a type that no sample can be made of.

    `target` names the type, `row` the sample or the object, `part` the part of it that does not fit; `index`
    is the place of the sample in the list that was given, None where no single one is at fault.

    Cure: change the part of the sample that the text names, as the text says.
    """

    def __init__(self, target: str, row: str | TrainingSample, part: str, reason: str) -> None:
        self.target = target
        self.row = row if isinstance(row, str) else f"sample {row.name}"
        self.part = part
        self.index: int | None = None
        super().__init__(f"{target}: {self.row}: {part}: {reason}")


def media_arguments(target: str, samples: Sequence[TrainingSample], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of the samples' media by the names of the model's arguments; empty without media.

    Uint8 pixels are normalised; floats have `dtype`, integers (grids) keep theirs. Several items are combined in order,
    as their `fields` describe. The samples are those of `check_samples`. Raises `AdapterError` where their media cannot
    be combined.
    """
    try:
        return item_tensors([item for sample in samples for item, _ in sample.media], dtype)
    except MediaError as error:
        names = ", ".join(sample.name for sample in samples if sample.media)
        raise AdapterError(
            target, f"{names:.200}", "media", f"{error!s}. Process their media with the processors of one renderer"
        ) from error


def refuse_other_arguments(target: str, sample: TrainingSample, supported: Collection[str]) -> None:
    """Raise `AdapterError` for a tensor of the media that the target has no field for."""
    for name in (name for item, _ in sample.media for name in item):
        if name not in supported:
            raise AdapterError(
                target,
                sample,
                "media",
                f"its media have the tensor {name}; the type has fields for {', '.join(supported)} only. {LEAVE_OUT}",
            )


def mm_token_type_ids(sample: TrainingSample) -> np.ndarray:
    """Int64 (n,): 1 on the feature tokens of images, 2 on those of videos, 3 on those of sounds, 0 elsewhere;
    by range, not by token id."""
    types = np.zeros(len(sample), dtype=np.int64)
    for item, placeholder in sample.media:
        for modality, start, end in placeholder.runs_of(item):
            types[start:end] = TOKEN_TYPE_IDS[modality]
    return types


def trainer_module(name: str, given: ModuleType | None = None) -> Any:
    """`given`, or else the module `name`. Raises `ImportError` where it cannot be imported."""
    if given is not None:
        return given
    try:
        return import_module(name)
    except ImportError as error:
        raise ImportError(
            f"the module {name} cannot be imported ({error}). Install the trainer's package, or pass the module "
            "that has its types as `types`"
        ) from error


def _refuse_sound_of_video(target: str, sample: TrainingSample) -> None:
    """Raise `AdapterError` for a video with its sound: trainers call the forward without use_audio_in_video."""
    for item, _ in sample.media:
        if item.modality == "video" and item.has_sound:
            raise AdapterError(
                target,
                sample,
                "media",
                f"video {item.mm_hash[:12]} has the tokens of its sound among its own (use_audio_in_video), of which "
                f"the trainer would compute other positions. {LEAVE_OUT}, or train it with "
                "rollouts.training.token_logprobs",
            )


def _refuse_pixels_without_scale(target: str, sample: TrainingSample) -> None:
    for item, _ in sample.media:
        for name, tensor in item.tensors.items():
            is_pixels = isinstance(tensor, StillPatches) or (
                isinstance(tensor, np.ndarray) and tensor.dtype == np.uint8 and name.startswith("pixel_values")
            )
            if is_pixels and item.scale is None:
                raise AdapterError(
                    target,
                    sample,
                    "media",
                    f"{name}: raw uint8 pixels without a scale that makes floats of them. "
                    "Pass ServerRenderer(scale=PixelScale(...)) with the numbers of preprocessor_config.json",
                )


def checked_samples(samples: Sequence[TrainingSample], *, takes_teacher: bool = False) -> tuple[TrainingSample, ...]:
    """The samples. Raises `SampleError` for none, and for one with a teacher unless `takes_teacher`."""
    if not samples:
        raise SampleError(None, "pass a list of at least one TrainingSample")
    for sample in samples:
        if sample.teacher_logprobs is not None and not takes_teacher:
            cure = "replace(sample, teacher_logprobs=None, teacher_top_ids=None, teacher_top_logprobs=None)"
            raise SampleError(sample.name, f"trainers of others take no columns of a teacher; remove them: {cure}")
    return tuple(samples)


def check_samples(
    target: str, samples: Sequence[TrainingSample], *checks: Callable[[str, TrainingSample], object]
) -> tuple[TrainingSample, ...]:
    """The samples, each of which the target can hold: it passes `checks(target, sample)`, and those of all batches.

    Raises `AdapterError`, with the `index` of the sample, for the first other one.
    """
    given = checked_samples(samples)
    placeholder_ids = np.unique(np.concatenate([one.token_ids[mm_token_type_ids(one) > 0] for one in given]))
    for index, sample in enumerate(given):
        try:
            _refuse_sound_of_video(target, sample)
            _refuse_literal_placeholders(target, sample, placeholder_ids)
            _refuse_pixels_without_scale(target, sample)
            for each in checks:
                each(target, sample)
        except AdapterError as error:
            error.index = index
            raise
    return given


def refuse_parts(target: str, sample: TrainingSample, lacking: Collection[str], omit: Collection[str]) -> None:
    """Raise `AdapterError` for a sample with values in a part that the target lacks and `omit` does not name.

    A part has values if `logprobs` has a value other than 0, `advantages` one other than 1 (on trained tokens),
    `weight_spans` is not empty, or `routed_experts` or `top_logprobs` is not None. Raises `ArgumentError` for an `omit`
    that names no part in `lacking`.
    """
    if isinstance(omit, str) or not set(omit) <= set(lacking):
        raise ArgumentError("omit", omit, f"pass a tuple of names out of {', '.join(map(repr, sorted(lacking)))}")
    trained = sample.loss_mask
    has_values = {
        "logprobs": bool(np.any(sample.logprobs[trained])),
        "advantages": bool(np.any(sample.advantages[trained] != 1)),
        "weight_spans": bool(sample.weight_spans),
        "routed_experts": sample.routed_experts is not None,
        "top_logprobs": sample.top_logprobs is not None,
    }
    for part in lacking:
        if has_values[part] and part not in omit:
            raise AdapterError(
                target, sample, part, f"the type has no field for it. Pass omit=({part!r},) to leave it out"
            )


def _refuse_literal_placeholders(target: str, sample: TrainingSample, ids: np.ndarray) -> None:
    """Raise `AdapterError` for a token of `ids`, those of a batch's media, outside of all media of the sample.

    Trainers that call transformers' forward find media by token id: such a token would be taken for a part of an image.
    """
    literal = np.isin(sample.token_ids, ids) & (mm_token_type_ids(sample) == 0)
    if literal.any():
        position = int(np.flatnonzero(literal)[0])
        raise AdapterError(
            target,
            sample,
            "token_ids",
            f"the token at position {position} has id {int(sample.token_ids[position])}, a placeholder token "
            "outside of all media (the policy sampled it), and this trainer finds media by token id. "
            f"{LEAVE_OUT}, or train it with rollouts.training.token_logprobs, which finds media by range",
        )


def trained_values(sample: TrainingSample, name: str) -> np.ndarray:
    """The column `logprobs` or `advantages`, float32 (n,), 0 on tokens that are not trained."""
    return np.where(sample.loss_mask, getattr(sample, name), 0).astype(np.float32)


def first_trained(target: str, sample: TrainingSample) -> int:
    """The index of the first trained token, where the response begins. Raises `AdapterError` if there is none."""
    trained = np.flatnonzero(sample.loss_mask)
    if not len(trained):
        raise AdapterError(target, sample, "loss_mask", f"no token is trained, so no response begins. {LEAVE_OUT}")
    return int(trained[0])


def weight_spans(sample: TrainingSample) -> list[tuple[str, int, int]]:
    """The weight versions as plain values, (version, start, end) for each span."""
    return [(span.version, span.start, span.end) for span in sample.weight_spans]


def optional_columns(samples: Sequence[TrainingSample]) -> dict[str, list[np.ndarray | None]]:
    """Entries of a trainer's own dict, each with an array or None for a row; those that no sample has are absent.

    `routed_experts`, integers (n, layers, experts a token); `top_ids` int32 and `top_logprobs` float32 (n, k), those of
    `TrainingSample.top_logprobs`.
    """
    columns = {
        "routed_experts": [sample.routed_experts for sample in samples],
        "top_ids": [None if sample.top_logprobs is None else sample.top_logprobs.token_ids for sample in samples],
        "top_logprobs": [None if sample.top_logprobs is None else sample.top_logprobs.logprobs for sample in samples],
    }
    return {name: rows for name, rows in columns.items() if any(row is not None for row in rows)}


def padded(rows: Sequence[np.ndarray], fill: Any, dtype: npt.DTypeLike, side: Literal["left", "right"]) -> torch.Tensor:
    """Rows (n_i,) as one tensor (rows, largest n_i) of `dtype`, padded on `side` with `fill`."""
    width = max(len(row) for row in rows)
    table = np.full((len(rows), width), fill, dtype=dtype)
    for line, row in zip(table, rows, strict=True):
        if side == "left":
            line[width - len(row) :] = row
        else:
            line[: len(row)] = row
    return torch.from_numpy(table)


def presence(lengths: Sequence[int], side: Literal["left", "right"]) -> torch.Tensor:
    """Int64 (rows, longest): 1 on the tokens of rows padded on `side`, 0 on padding."""
    return padded([np.ones(length, dtype=np.int64) for length in lengths], 0, np.int64, side)


ImageFormat = Literal["png", "jpeg"]


def image_file(source: MediaSource) -> tuple[bytes, ImageFormat]:
    """The bytes of a PNG or JPEG, and its format.

    A PNG or JPEG of plain RGB or grey pixels is returned as it is. One that is turned by EXIF data or has transparent
    pixels, other formats and raw pixels become a PNG of the RGB pixels that `decode_image` makes: readers differ in
    what they do with such files. Raises `MediaError` for a source that cannot be decoded.
    """
    formats: Mapping[str, ImageFormat] = {"image/png": "png", "image/jpeg": "jpeg"}
    image_format = formats.get(sniff(source.data) or "")
    if image_format is not None and _is_plain(source.data):
        return bytes(source.data), image_format
    file = io.BytesIO()
    decode_image(source, MediaPolicy()).save(file, format="PNG")
    return file.getvalue(), "png"


def _is_plain(data: bytes | memoryview) -> bool:
    """Whether the file has RGB or grey pixels of 8 bits, upright and opaque."""
    try:
        with Image.open(io.BytesIO(data), formats=("PNG", "JPEG")) as image:
            upright = image.getexif().get(ExifTags.Base.Orientation, 1) == 1
            return image.mode in ("L", "RGB") and upright and "transparency" not in image.info
    except PILLOW_ERRORS:
        return False
