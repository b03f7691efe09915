"""An image or a video as the model sees it: tensors, their names, and the tokens that stand for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple, Protocol

import numpy as np

from renderers.media.pixel_scale import PixelScale
from renderers.media.source import MediaSource

Modality = Literal["image", "video"]


class PackedArray(Protocol):
    """An array kept smaller than it is: `unpack` makes the array, `nbytes` is what is held."""

    @property
    def nbytes(self) -> int: ...

    def unpack(self) -> np.ndarray: ...


class TensorField(NamedTuple):
    """How the tensor of one item becomes part of the tensor of a batch.

    flat: the item has rows of its own, concatenated along axis 0; batched: the item is one row of the batch, stacked
    along a new axis 0, rows of different shapes padded at their ends with `pad`; shared: equal for all, held once.
    Names as in vLLM's `MultiModalFieldConfig`.
    """

    kind: Literal["flat", "batched", "shared"]
    pad: float | None = None


class ExpansionPiece(NamedTuple):
    """A part of what replaces a media marker: `times` times a control token, or text (once).

    `embed` says that each of these tokens stands for one row of the vision tower's output.
    """

    text: str
    times: int = 1
    embed: bool = False


@dataclass(frozen=True, eq=False)
class MediaItem(Mapping[str, np.ndarray]):
    """One image or video: a read-only mapping from tensor name to array, and where it came from.

    For Qwen-VL `item["pixel_values"]` holds canonical uint8 patches (after resize, before rescale and normalise) of
    shape (t*h*w, 3 * temporal_patch * patch * patch), `item["image_grid_thw"]` is int64 of shape (3,); a video has
    `pixel_values_videos` and `video_grid_thw`. `fields` says for each name how items are put together in a batch.
    `mm_hash` names exactly these pixels: the source's digest and the fingerprint of the processor that made them.
    `scale` makes floats of uint8 pixels (`renderers.vision.normalise`); None where the model takes the tensors as they
    are.

    `num_tokens` is the number of tokens that stand for the item's features. `expansion` is what the media marker
    becomes where that is more than the marker `num_tokens` times (None).
    """

    modality: Modality
    mm_hash: str
    source: MediaSource
    tensors: Mapping[str, np.ndarray | PackedArray] = field(repr=False)
    num_tokens: int
    scale: PixelScale | None
    fields: Mapping[str, TensorField] = field(default_factory=dict, repr=False)
    expansion: tuple[ExpansionPiece, ...] | None = field(default=None, repr=False)

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self.tensors[name]
        return tensor if isinstance(tensor, np.ndarray) else tensor.unpack()

    def __iter__(self) -> Iterator[str]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the tensors as they are held, without the source."""
        return sum(tensor.nbytes for tensor in self.tensors.values())
