"""Converts items to items whose placeholder is one run of feature tokens, the only kind that vLLM's API can describe.

`/inference/v1/generate` accepts an offset and a length for each item, but no mask. An image with text around
its single run of features (Gemma 3) is described by that run. A Qwen3-VL video has one run for each step of
its temporal grid, each after a time stamp, even with a single step. Its model encodes every step separately
and assigns it the positions of an image, so each step is sent as an image, with the same patches, grid and
tokens. A video described by its run alone would crash the server: vLLM searches for <|vision_start|> from the
start of the range.

For some models vLLM splits images from one tensor of rows by a row count that transformers does not return;
such images get the layout and the count of the server's own items.
"""

from dataclasses import replace

import numpy as np

from renderers import MediaItem, PlaceholderRange
from renderers.media.item import PackedArray, TensorField
from renderers.placement import PlacedItem
from renderers.vision.patches import ScaledPixels
from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.sounds import in_server_layout
from rollouts.engines.vllm.tensors import tensor_type

# Names in vLLM's models for the number of rows of `pixel_values` that belong to an image.
_ROW_COUNTS = frozenset({"num_patches", "patches_per_image"})
_VIDEO_FIELDS = frozenset({"pixel_values_videos", "video_grid_thw"})
_IMAGE_FIELDS = {"pixel_values": TensorField("flat"), "image_grid_thw": TensorField("batched")}


def dense_items(item: MediaItem, placeholder: PlaceholderRange, capabilities: ServerCapabilities) -> list[PlacedItem]:
    """The items to send for one item, each with a range without text; empty if there are none such."""
    runs = _joined_runs(placeholder)
    if item.modality == "video" and runs != [(placeholder.offset, placeholder.end)]:
        return _video_steps(item, runs, capabilities)
    if len(runs) > 1:
        return []
    start, end = runs[0]
    if item.modality == "audio":
        sent = None if capabilities.sounds is None else in_server_layout(item, capabilities.sounds)
    else:
        sent = _in_server_layout(item, capabilities)
    return [(sent or item, PlaceholderRange(start, end - start))]


def _in_server_layout(item: MediaItem, capabilities: ServerCapabilities) -> MediaItem:
    """The item, with a batched image (3, height, width) reshaped to one row and a row count if the server has these."""
    expected = capabilities.image_fields
    counts = [] if expected is None else [name for name in expected if name in _ROW_COUNTS and name not in item.tensors]
    pixels = item.fields.get("pixel_values")
    if not counts or expected is None or item.modality != "image" or pixels is None:
        return item
    if expected.get("pixel_values") != "flat" or pixels.kind != "batched" or item["pixel_values"].ndim != 3:
        return item
    tensors: dict[str, np.ndarray | PackedArray] = {**item.tensors, "pixel_values": item["pixel_values"][None]}
    fields = {**item.fields, "pixel_values": TensorField("flat")}
    for name in counts:
        tensors[name] = np.array(1, dtype=np.int64)
        fields[name] = TensorField("batched")
    return replace(item, tensors=tensors, fields=fields)


def _joined_runs(placeholder: PlaceholderRange) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, end in placeholder.runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((start, end))
    return joined


def _video_steps(item: MediaItem, runs: list[tuple[int, int]], capabilities: ServerCapabilities) -> list[PlacedItem]:
    """One image for each step of a video's temporal grid; empty if runs, grid and server do not fit together."""
    if capabilities.merge_area is None or item.tensors.keys() != _VIDEO_FIELDS:
        return []
    grid = item["video_grid_thw"]
    if grid.shape != (3,) or tensor_type(item.tensors["pixel_values_videos"]).shape[:1] != (int(grid.prod()),):
        return []
    steps, height, width = (int(side) for side in grid)
    rows = height * width
    if steps != len(runs) or any((end - start) * capabilities.merge_area != rows for start, end in runs):
        return []
    tensor = item.tensors["pixel_values_videos"]
    scale = tensor.scale if isinstance(tensor, ScaledPixels) else None
    pixels = tensor.pixels if isinstance(tensor, ScaledPixels) else item["pixel_values_videos"]
    placed = []
    for step, (start, end) in enumerate(runs):
        step_pixels = pixels[step * rows : (step + 1) * rows]
        tensors: dict[str, np.ndarray | PackedArray] = {
            "pixel_values": step_pixels if scale is None else ScaledPixels(step_pixels, scale),
            "image_grid_thw": np.array((1, height, width), dtype=np.int64),
        }
        name, num_tokens = f"{item.mm_hash}-{step}", end - start
        image = MediaItem("image", name, item.source, tensors, num_tokens, item.scale, _IMAGE_FIELDS)
        placed.append((image, PlaceholderRange(start, num_tokens)))
    return placed
