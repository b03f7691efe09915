"""What all adapters check: the list of samples, parts that a type cannot hold, literal placeholder tokens."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from rollouts.error_texts import short_repr
from rollouts.errors import ArgumentError, SampleError
from rollouts.training.adapters.errors import AdapterError
from rollouts.training.adapters.media_arguments import mm_token_type_ids
from rollouts.training.samples import TrainingSample


def checked_samples(samples: object) -> tuple[TrainingSample, ...]:
    """Raises `SampleError` unless `samples` is a sequence of at least one `TrainingSample`."""
    if not isinstance(samples, Sequence) or not samples:
        raise SampleError("-", f"pass a list of at least one TrainingSample, not {short_repr(samples)}")
    for index, sample in enumerate(samples):
        if not isinstance(sample, TrainingSample):
            raise SampleError(str(index), f"{short_repr(sample)} is not a TrainingSample")
    return tuple(samples)


def refuse_parts(
    target: str, samples: Sequence[TrainingSample], lacking: Collection[str], omit: Collection[str]
) -> None:
    """Raise `AdapterError` for a sample with values in a part that the target lacks and `omit` does not name.

    A part has values if `logprobs` has a value other than 0, `advantages` one other than 1 (on trained tokens),
    `weight_spans` is not empty, or `routed_experts` is not None. Raises `ArgumentError` for an `omit` that names no
    part in `lacking`.
    """
    if isinstance(omit, str) or not set(omit) <= set(lacking):
        raise ArgumentError("omit", omit, f"pass a tuple of names out of {', '.join(map(repr, sorted(lacking)))}")
    for sample in samples:
        trained = sample.loss_mask
        has_values = {
            "logprobs": bool(np.any(sample.logprobs[trained])),
            "advantages": bool(np.any(sample.advantages[trained] != 1)),
            "weight_spans": bool(sample.weight_spans),
            "routed_experts": sample.routed_experts is not None,
        }
        for part in lacking:
            if has_values[part] and part not in omit:
                raise AdapterError(
                    target,
                    f"sample {sample.name}",
                    part,
                    "the type has no field for it",
                    f"Pass omit=({part!r},) to leave it out",
                )


def refuse_literal_placeholders(target: str, samples: Sequence[TrainingSample]) -> None:
    """Raise `AdapterError` for a placeholder token outside of all media, where a row of the same batch has media.

    Trainers that call transformers' forward find media by token id: such a token would be taken for a part of an image.
    """
    is_feature = [mm_token_type_ids(sample) > 0 for sample in samples]
    ids = np.unique(np.concatenate([sample.token_ids[mask] for sample, mask in zip(samples, is_feature, strict=True)]))
    for sample, mask in zip(samples, is_feature, strict=True):
        literal = np.isin(sample.token_ids, ids) & ~mask
        if literal.any():
            position = int(np.flatnonzero(literal)[0])
            raise AdapterError(
                target,
                f"sample {sample.name}",
                "token_ids",
                f"the token at position {position} has id {int(sample.token_ids[position])}, a placeholder token "
                "outside of all images and videos (the policy sampled it), and this trainer finds media by token id",
                "Leave the sample out, or train it with rollouts.training.token_logprobs, which finds media by range",
            )


def trained_values(sample: TrainingSample, name: str) -> np.ndarray:
    """The column `logprobs` or `advantages`, float32 (n,), 0 on tokens that are not trained."""
    return np.where(sample.loss_mask, getattr(sample, name), 0).astype(np.float32)


def first_trained(target: str, sample: TrainingSample) -> int:
    """The index of the first trained token, where the response begins. Raises `AdapterError` if there is none."""
    trained = np.flatnonzero(sample.loss_mask)
    if not len(trained):
        raise AdapterError(
            target,
            f"sample {sample.name}",
            "loss_mask",
            "no token is trained, so no response begins",
            "Leave the sample out",
        )
    return int(trained[0])


def weight_spans(sample: TrainingSample) -> list[tuple[str, int, int]]:
    """The weight versions as plain values, (version, start, end) for each span."""
    return [(span.version, span.start, span.end) for span in sample.weight_spans]


def routed_experts(samples: Sequence[TrainingSample]) -> dict[str, list[np.ndarray | None]]:
    """The entry `routed_experts` of a trainer's own dict, integers (n, layers, experts a token) for each row or None.

    Nothing where no sample has any.
    """
    experts = [sample.routed_experts for sample in samples]
    return {"routed_experts": experts} if any(each is not None for each in experts) else {}
