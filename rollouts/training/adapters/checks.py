"""What adapters check of their samples: a sample that a trainer's type cannot hold is an `AdapterError`."""

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import chain
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch

from renderers.errors import MediaError
from renderers.installation import install_command
from renderers.vision.patches import StillPatches
from rollouts.errors import ArgumentError, RolloutsError, SampleError
from rollouts.models.media_inputs import item_tensors
from rollouts.training.adapters.arrays import media_types
from rollouts.training.samples import TrainingSample

LEAVE_OUT: Final = "Leave the sample out (the `index` of this error)"

Violations = Iterator[tuple[str, str]]
"""For each part of a sample that does not fit its name, and the reason with a cure."""


class AdapterError(RolloutsError):
    """A sample that a trainer's type cannot hold, or an object of such a type that no sample can be made of.

    `target` names the type, `row` the sample or the object, `part` the part of it that does not fit; `index`
    is the place of the sample in the list that was given, None where no single one is at fault.

    Cure: change the part of the sample that the text names, as the text says.
    """

    def __init__(
        self, target: str, row: str | TrainingSample, part: str, reason: str, index: int | None = None
    ) -> None:
        self.target = target
        self.row = row if isinstance(row, str) else f"sample {row.name}"
        self.part = part
        self.index = index
        super().__init__(f"{target}: {self.row}: {part}: {reason}")


#: Columns that types of other trainers have no meaning for, with what to do.
_OURS = {
    "teacher_logprobs": "replace(sample, teacher_logprobs=None, teacher_top_ids=None, teacher_top_logprobs=None)",
    "sampling_mask": "sample without top_p, top_k and other options that leave ids out",
}


def check_samples(
    target: str,
    samples: Sequence[TrainingSample],
    *checks: Callable[[TrainingSample], Violations],
    media_by_id: bool = True,
    takes_teacher: bool = False,
) -> None:
    """Raise `AdapterError`, with the `index` of the sample, for the first that does not pass all of `checks`.

    With `media_by_id`, a trainer that calls transformers' forward, samples are refused too that this would
    compute otherwise. Raises `SampleError` for no samples, and for one with a teacher unless `takes_teacher`.
    """
    if not samples:
        raise SampleError(None, "pass a list of at least one TrainingSample")
    if media_by_id:
        ids = np.unique(np.concatenate([sample.token_ids[media_types(sample) > 0] for sample in samples]))
        checks = (partial(_stock_forward, placeholder_ids=ids), *checks)
    for index, sample in enumerate(samples):
        for name, cure in ({} if takes_teacher else _OURS).items():
            if getattr(sample, name) is not None:
                raise SampleError(sample.name, f"trainers of others take no {name}; {cure}")
        for part, reason in chain.from_iterable(check(sample) for check in checks):
            raise AdapterError(target, sample, part, reason, index)


def without_parts(lacking: Collection[str], omit: Collection[str]) -> Callable[[TrainingSample], Violations]:
    """The check that a sample has no values in a part that a type lacks (`lacking`) and `omit` does not name.

    A part has values if `logprobs` has a value other than 0, `advantages` one other than 1 (on trained
    tokens), `weight_spans` is not empty, or `routed_experts` or `top_logprobs` is not None. Raises
    `ArgumentError` for an `omit` that names no part in `lacking`.
    """
    if isinstance(omit, str) or not set(omit) <= set(lacking):
        raise ArgumentError("omit", omit, f"pass a tuple of names out of {', '.join(map(repr, sorted(lacking)))}")
    return partial(_values, parts=[part for part in lacking if part not in omit])


def _values(sample: TrainingSample, parts: Collection[str]) -> Violations:
    has_values = {
        "logprobs": np.any(sample.logprobs[sample.loss_mask]),
        "advantages": np.any(sample.advantages[sample.loss_mask] != 1),
        "weight_spans": sample.weight_spans,
        "routed_experts": sample.routed_experts is not None,
        "top_logprobs": sample.top_logprobs is not None,
    }
    for part in parts:
        if has_values[part]:
            yield part, f"the type has no field for it. Pass omit=({part!r},) to leave it out"


def fits_response_of_images(sample: TrainingSample, tensors: Collection[str]) -> Violations:
    """The check that a token is trained, and that the media have no other tensors than a type has fields for."""
    yield from has_response(sample)
    for name in (name for item, _ in sample.media for name in item if name not in tensors):
        fields = ", ".join(tensors)
        yield "media", f"its media have the tensor {name}; the type has fields for {fields} only. {LEAVE_OUT}"


def has_response(sample: TrainingSample) -> Violations:
    if not sample.loss_mask.any():
        yield "loss_mask", f"no token is trained, so no response begins. {LEAVE_OUT}"


def _stock_forward(sample: TrainingSample, placeholder_ids: np.ndarray) -> Violations:
    """What transformers' forward computes otherwise than the sampler: it finds media by token id."""
    for item, _ in sample.media:
        if item.modality == "video" and item.has_sound:
            yield (
                "media",
                f"video {item.mm_hash[:12]} has the tokens of its sound among its own (use_audio_in_video), of which "
                f"the trainer would compute other positions. {LEAVE_OUT}, or train it with "
                "rollouts.training.token_logprobs",
            )
        for name, tensor in item.tensors.items():
            is_raw = isinstance(tensor, np.ndarray) and tensor.dtype == np.uint8 and name.startswith("pixel_values")
            if item.scale is None and (is_raw or isinstance(tensor, StillPatches)):
                yield (
                    "media",
                    f"{name}: raw uint8 pixels without a scale that makes floats of them. "
                    "Pass ServerRenderer(scale=PixelScale(...)) with the numbers of preprocessor_config.json",
                )
    is_text = media_types(sample) == 0
    for position in np.flatnonzero(np.isin(sample.token_ids, placeholder_ids) & is_text):
        yield (
            "token_ids",
            f"the token at position {position} has id {sample.token_ids[position]}, a placeholder token "
            "outside of all media (the policy sampled it), and this trainer finds media by token id. "
            f"{LEAVE_OUT}, or train it with rollouts.training.token_logprobs, which finds media by range",
        )


def media_arguments(target: str, samples: Sequence[TrainingSample], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of the samples' media by the names of the model's arguments; empty without media.

    Uint8 pixels are normalised; floats have `dtype`, integers (grids) keep theirs. Several items are combined
    in order, as their `fields` describe. Raises `AdapterError` where they cannot be combined.
    """
    try:
        return item_tensors([item for sample in samples for item, _ in sample.media], dtype)
    except MediaError as error:
        names = ", ".join(sample.name for sample in samples if sample.media)
        reason = f"{error!s}. Process their media with the processors of one renderer"
        raise AdapterError(target, f"{names:.200}", "media", reason) from error


def trainer_module(name: str, given: ModuleType | None = None) -> Any:
    """`given`, or else the module `name`. Raises `ImportError` where it cannot be imported."""
    try:
        return given or import_module(name)
    except ImportError as error:
        raise ImportError(
            f"the module {name} cannot be imported ({error}). Install the trainer's package (datasets, TRL, msgspec: "
            f"{install_command('trainers')}), or pass the module that has its types as `types`"
        ) from error
