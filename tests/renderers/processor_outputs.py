"""Images, clips and the outputs of the processors of transformers, for the tests of HFProcessor."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hf_families import FAMILIES, Family
from PIL import Image

from renderers import MediaPolicy, MediaSource, MediaStore
from renderers.media.decoding import image_to_raw
from renderers.media.item import ExpansionPiece, MediaItem
from renderers.vision.hf_processor import HFProcessor, load_hf_processors

TEXT_KEYS = {"input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids"}
SIZES = [(210, 60), (70, 420)]


def families(kept: Callable[[Family], bool] = lambda family: True) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(
        "family",
        [
            pytest.param(
                family,
                id=family.name,
                marks=pytest.mark.skipif(not family.runs_here, reason=f"its processor needs {family.needs}"),
            )
            for family in FAMILIES
            if kept(family)
        ],
    )


def load_processors(directory: Path) -> Mapping[str, HFProcessor]:
    return load_hf_processors(directory, policy=MediaPolicy(), store=MediaStore())


def noise(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def source(image: Image.Image) -> MediaSource:
    return MediaSource.of(image_to_raw(image))


def clip(frames: int, width: int, height: int) -> np.ndarray:
    return np.random.default_rng(frames).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def process_each(processor: HFProcessor, images: Sequence[Image.Image]) -> list[MediaItem]:
    return [processor.process(source(image)) for image in images]


def batch_output(processor: Any, images: Sequence[Image.Image], **options: Any) -> dict[str, torch.Tensor]:
    """What the model's own processor returns for samples of one image each, without what it makes of their text."""
    output = processor(
        images=[[image] for image in images],
        text=[processor.image_token] * len(images),
        text_kwargs={"return_tensors": None},
        images_kwargs={"return_tensors": "pt"},
        **options,
    )
    return {name: tensor for name, tensor in output.items() if name not in TEXT_KEYS}


def with_expansions(prompt: str, items: Sequence[MediaItem], marker: str) -> str:
    """The prompt with the pieces of the items in place of the markers."""
    before, *behind = prompt.split(marker)
    pieces = [item.expansion or (ExpansionPiece(marker, item.num_tokens, embed=True),) for item in items]
    shown = ["".join(piece.text * piece.times for piece in each) for each in pieces]
    return before + "".join(text + rest for text, rest in zip(shown, behind, strict=True))


def check_equal(ours: Mapping[str, np.ndarray], theirs: Mapping[str, torch.Tensor]) -> None:
    """Bit for bit. bfloat16, which numpy lacks, is held as float32."""
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        expected = tensor.float() if tensor.dtype == torch.bfloat16 else tensor
        assert ours[name].dtype == expected.numpy().dtype
        assert ours[name].shape == tuple(expected.shape)
        assert ours[name].tobytes() == expected.numpy().tobytes()


def copy_with_config(directory: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a processor directory whose processor_config.json was changed."""
    target.mkdir()
    for file in directory.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "processor_config.json").read_text())
    change(config)
    (target / "processor_config.json").write_text(json.dumps(config))
    return target
