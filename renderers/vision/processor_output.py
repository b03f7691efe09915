"""An item as the transformers processor of the model returns it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from renderers.media.item import MediaItem
from renderers.vision.normalise import normalised


@dataclass(frozen=True, eq=False)
class ProcessorOutput(Mapping[str, np.ndarray]):
    """A mapping from tensor name to array, as a transformers processor returns it for one image or video.

    Pixels are float32, made each time they are read; a tensor of which the item is one row of the batch has a leading
    axis of length 1, so that the tensors of several items are concatenated along axis 0. `item` holds the tensors in
    their canonical form: uint8 pixels, without that axis.
    """

    item: MediaItem

    def __getitem__(self, name: str) -> np.ndarray:
        tensor = self.item.tensors[name]
        is_pixels = self.item.scale is not None and (not isinstance(tensor, np.ndarray) or tensor.dtype == np.uint8)
        array = normalised(self.item, name) if is_pixels else self.item[name]
        field = self.item.fields.get(name)
        return array[None] if field is not None and field.kind == "batched" else array

    def __iter__(self) -> Iterator[str]:
        return iter(self.item.tensors)

    def __len__(self) -> int:
        return len(self.item.tensors)

    def __eq__(self, other: object) -> bool:
        """Whether both are views of equal items."""
        return isinstance(other, ProcessorOutput) and self.item == other.item

    def __hash__(self) -> int:
        return hash(self.item)
