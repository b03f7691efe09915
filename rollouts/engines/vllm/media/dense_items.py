"""Media as this wire can describe them: items whose placeholder is one run of feature tokens, without text in between.

`/inference/v1/generate` takes an offset and a length for each item and no mask. An image with text around its one run
of features (Gemma 3) is described by the run alone. A Qwen3-VL video is a run with a time stamp before it for each step
of its temporal grid, also where it has only one step; its model encodes each step by itself and gives it the positions
of an image, so each step travels as an image of its own, with the same patches, grid and tokens. Described by its run
alone such a video would take the server down: vLLM looks for <|vision_start|> from the beginning of the range on.

vLLM cuts the images of some models out of one tensor of rows by a count that transformers does not return; such
images get the layout and the count that the server's own items have.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from renderers import MediaItem, PlaceholderRange
from renderers.media.item import PackedArray, TensorField
from renderers.placement import PlacedItem
from renderers.vision.normalise import ScaledPixels
from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.wire.tensors import tensor_shape

# What vLLM's models call the number of rows of `pixel_values` that belong to an image.
_ROW_COUNTS = frozenset({"num_patches", "patches_per_image"})
_VIDEO_FIELDS = frozenset({"pixel_values_videos", "video_grid_thw"})
_IMAGE_FIELDS = {"pixel_values": TensorField("flat"), "image_grid_thw": TensorField("batched")}


def dense_items(item: MediaItem, where: PlaceholderRange, capabilities: ServerCapabilities) -> list[PlacedItem]:
    """The items that stand for one item on the wire, each with a dense range; empty where the wire has no form for it.

    The checks of `media_checks.check_placement` must have passed.
    """
    runs = _joined_runs(where)
    dense = runs == [(where.offset, where.end)]
    if item.modality == "video" and not dense:
        return _steps(item, runs, capabilities)
    if len(runs) == 1:
        start, end = runs[0]
        return [(_in_server_layout(item, capabilities), PlaceholderRange(start, end - start))]
    return []


def _in_server_layout(item: MediaItem, capabilities: ServerCapabilities) -> MediaItem:
    """An image that is one row of a batch, (3, height, width), as a tensor of one row with the number of its rows."""
    wanted = capabilities.image_fields
    counts = [] if wanted is None else [name for name in wanted if name in _ROW_COUNTS and name not in item.tensors]
    pixels = item.fields.get("pixel_values")
    if not counts or wanted is None or item.modality != "image" or pixels is None:
        return item
    if wanted.get("pixel_values") != "flat" or pixels.kind != "batched" or item["pixel_values"].ndim != 3:
        return item
    tensors: dict[str, np.ndarray | PackedArray] = {**item.tensors, "pixel_values": item["pixel_values"][None]}
    fields = {**item.fields, "pixel_values": TensorField("flat")}
    for name in counts:
        tensors[name] = np.array(1, dtype=np.int64)
        fields[name] = TensorField("batched")
    return replace(item, tensors=tensors, fields=fields)


def _joined_runs(where: PlaceholderRange) -> list[tuple[int, int]]:
    """The runs of feature tokens; those that follow each other without a gap are one."""
    joined: list[tuple[int, int]] = []
    for start, end in where.runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def _steps(item: MediaItem, runs: list[tuple[int, int]], capabilities: ServerCapabilities) -> list[PlacedItem]:
    """One image for each step of a video's temporal grid; empty where runs, grid and server do not allow that."""
    if capabilities.merge_area is None or item.tensors.keys() != _VIDEO_FIELDS:
        return []
    grid = item["video_grid_thw"]
    if grid.shape != (3,) or tensor_shape(item.tensors["pixel_values_videos"])[:1] != (int(grid.prod()),):
        return []
    steps, height, width = (int(side) for side in grid)
    rows = height * width
    if steps != len(runs) or any((end - start) * capabilities.merge_area != rows for start, end in runs):
        return []
    pixels = item.tensors["pixel_values_videos"]
    if not isinstance(pixels, ScaledPixels):
        pixels = item["pixel_values_videos"]
    step_grid = np.array((1, height, width), dtype=np.int64)
    placed = []
    for step, (start, end) in enumerate(runs):
        own = slice(step * rows, (step + 1) * rows)
        tensors: dict[str, np.ndarray | PackedArray] = {
            "pixel_values": ScaledPixels(pixels.pixels[own], pixels.scale)
            if isinstance(pixels, ScaledPixels)
            else pixels[own],
            "image_grid_thw": step_grid,
        }
        image = MediaItem(
            "image", f"{item.mm_hash}-{step}", item.source, tensors, end - start, item.scale, _IMAGE_FIELDS
        )
        placed.append((image, PlaceholderRange(start, end - start)))
    return placed


def request_dense_items(placed: Sequence[PlacedItem], capabilities: ServerCapabilities) -> list[PlacedItem]:
    """The items of a whole request on the wire, in prompt order."""
    return list(itertools.chain.from_iterable(dense_items(item, where, capabilities) for item, where in placed))
