"""Qwen-VL configurations, images, and the comparison with the processors of transformers."""

import copy
from typing import Any

import numpy as np
from PIL import Image
from processor_outputs import source
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor

from renderers import MediaPolicy, MediaSource, MediaStore
from renderers.vision.patches import normalised
from renderers.vision.processor import ImageBackend
from renderers.vision.qwen_vl import QwenVLConfig, QwenVLProcessor

BACKENDS: dict[ImageBackend, type[Any]] = {"torchvision": Qwen2VLImageProcessor, "pillow": Qwen2VLImageProcessorPil}
# What the files for images and for videos have in common.
QWEN3_PATCHES: dict[str, Any] = {
    "patch_size": 16,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
QWEN2_PATCHES: dict[str, Any] = {
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
QWEN3_VL: dict[str, Any] = {
    **QWEN3_PATCHES,
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "size": {"shortest_edge": 65536, "longest_edge": 16777216},
}
QWEN2_VL: dict[str, Any] = {
    **QWEN3_VL,
    **QWEN2_PATCHES,
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 3136,
    "max_pixels": 200_000,
}
CONFIGS = {"Qwen3-VL": QWEN3_VL, "Qwen2-VL": QWEN2_VL}


def processor(config: dict[str, Any], backend: ImageBackend | None = None) -> QwenVLProcessor:
    kind = config["image_processor_type"] if backend is None else BACKENDS[backend].__name__
    read = QwenVLConfig.from_dict({**config, "image_processor_type": kind}, path="c")
    return QwenVLProcessor(read, policy=MediaPolicy(), store=MediaStore())


def reference_processor(config: dict[str, Any], backend: ImageBackend) -> Any:
    arguments = copy.deepcopy(config)  # it writes min_pixels into the `size` that it is given
    del arguments["image_processor_type"]
    return BACKENDS[backend](**arguments)


def theirs_of(reference: Any, image: Image.Image, **steps: bool) -> dict[str, np.ndarray]:
    return {name: np.asarray(value) for name, value in reference(images=[image], return_tensors="pt", **steps).items()}


def check_equal(
    config: dict[str, Any], reference: Any, image: Image.Image, backend: ImageBackend, data: MediaSource | None = None
) -> None:
    ours = processor(config, backend).process(data or source(image))
    pixels, floats = ours["pixel_values"], normalised(ours, "pixel_values")
    for steps, mine in (({"do_rescale": False, "do_normalize": False}, pixels), ({}, floats)):
        theirs = theirs_of(reference, image, **steps)
        assert ours["image_grid_thw"].tolist() == theirs["image_grid_thw"][0].tolist()
        np.testing.assert_array_equal(mine, theirs["pixel_values"])
    assert (pixels.dtype, floats.dtype, ours["image_grid_thw"].dtype) == (np.uint8, np.float32, np.int64)
    assert ours.num_tokens == int(np.prod(ours["image_grid_thw"])) // config["merge_size"] ** 2
