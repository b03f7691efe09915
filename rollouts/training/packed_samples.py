"""Training samples for another process, their images in one of the forms of `rollouts.trajectory.pixel_forms`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from renderers import MediaSource
from rollouts.engines.protocol import WeightSpan
from rollouts.training.samples import TrainingSample
from rollouts.trajectory.pixel_forms import PixelForm, Processors, check_form, pack_items, processors_of, without_source
from rollouts.trajectory.token_node import MediaReference
from transport import wire_type


@wire_type("rollouts.PackedSample")
@dataclass(frozen=True, slots=True, eq=False)
class PackedSample:
    """A `TrainingSample` with references, whose ranges count from its first token, in place of items."""

    token_ids: np.ndarray
    loss_mask: np.ndarray
    logprobs: np.ndarray
    advantages: np.ndarray
    media: tuple[MediaReference, ...]
    weight_spans: tuple[WeightSpan, ...]
    name: str


@wire_type("rollouts.PackedSamples")
@dataclass(frozen=True, slots=True, eq=False)
class PackedSamples:
    """Rows and, in the array forms, their media: `mm_hash` -> an encoded item, a blob like any source."""

    pixels: PixelForm
    rows: list[PackedSample]
    items: dict[str, MediaSource] = field(default_factory=dict)

    def samples(self, own: Processors | None = None) -> list[TrainingSample]:
        """The samples. `own` are the receiver's processors, needed where sources travelled.

        Raises `PixelMismatchError` where `own` derive other pixels, `PixelFormError` where there are none.
        """
        references = [reference for row in self.rows for reference in row.media]
        processors = processors_of(self.pixels, references, self.items, own)
        return [
            TrainingSample(
                row.token_ids,
                row.loss_mask,
                row.logprobs,
                row.advantages,
                tuple((reference.derive(processors), reference.placeholder) for reference in row.media),
                row.weight_spans,
                row.name,
            )
            for row in self.rows
        ]


def pack_samples(samples: Sequence[TrainingSample], *, pixels: PixelForm = "source") -> PackedSamples:
    """The samples with their media in one form; for `transport.encode` or a `CompactEncoder`.

    Raises `PixelFormError`.
    """
    check_form(pixels)
    items = () if pixels in ("source", "none") else (item for sample in samples for item, _ in sample.media)
    return PackedSamples(pixels, [_packed(sample, pixels) for sample in samples], pack_items(items, pixels))


def _packed(sample: TrainingSample, form: PixelForm) -> PackedSample:
    references = [MediaReference(item.modality, item.mm_hash, item.source, where) for item, where in sample.media]
    if form != "source":
        references = [without_source(reference) for reference in references]
    return PackedSample(
        sample.token_ids,
        sample.loss_mask,
        sample.logprobs,
        sample.advantages,
        tuple(references),
        sample.weight_spans,
        sample.name,
    )
