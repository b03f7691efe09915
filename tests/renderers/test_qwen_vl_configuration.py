"""Qwen-VL configurations: which backend they select, which values are refused, and the hash of an item."""

import json
from pathlib import Path
from typing import Any

import pytest
from processor_outputs import noise, source
from qwen_vl_reference import BACKENDS, QWEN3_VL, processor
from transformers import AutoImageProcessor

from renderers.vision.processor import ImageBackend
from renderers.vision.qwen_vl import QwenVLConfig, is_qwen_vl_image_config

CHANGES: list[dict[str, Any]] = [
    {"patch_size": 14},
    {"temporal_patch_size": 1},
    {"merge_size": 1},
    {"size": {"shortest_edge": 65537, "longest_edge": 16777216}},
    {"min_pixels": 1},
    {"max_pixels": 10**6},
    {"resample": 2},
    {"rescale_factor": 1 / 256},
    {"image_processor_type": "Qwen2VLImageProcessorPil"},
    {"image_mean": [0.5, 0.5, 0.4]},
    {"image_std": [0.5, 0.4, 0.5]},
]


def test_the_hash_changes_with_every_number_of_the_processor_and_with_the_source() -> None:
    picture = source(noise(8, 8))
    hashes = [processor({**QWEN3_VL, **change}).mm_hash(picture) for change in [{}, *CHANGES]]
    hashes.append(processor(QWEN3_VL).mm_hash(source(noise(8, 9))))
    assert len(set(hashes)) == len(CHANGES) + 2
    assert processor(dict(QWEN3_VL)).mm_hash(picture) == hashes[0]


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("Qwen2VLImageProcessor", "torchvision"),
        ("Qwen2VLImageProcessorFast", "torchvision"),
        ("Qwen2VLImageProcessorPil", "pillow"),
    ],
)
def test_the_backend_is_the_one_that_transformers_loads(tmp_path: Path, kind: str, expected: ImageBackend) -> None:
    config = {**QWEN3_VL, "image_processor_type": kind}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    assert QwenVLConfig.from_dict(config, path="c").backend == expected
    assert is_qwen_vl_image_config(config)
    if kind != "Qwen2VLImageProcessorPil":  # the automatic class takes that name only with backend="pil"
        assert type(AutoImageProcessor.from_pretrained(tmp_path)) is BACKENDS[expected]
