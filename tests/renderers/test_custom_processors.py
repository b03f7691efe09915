"""Processors that users pass to `load_renderer`, and what is refused of them."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from renderers import MediaItem, MediaPolicy, MediaSource, MediaStore, load_renderer
from renderers.errors import ConfigError, MediaError
from renderers.media.decoding import decode_image
from renderers.media.item import ExpansionPiece, TensorField
from renderers.messages import Modality
from renderers.vision.processor import StoringProcessor

MARKER = "<|image_pad|>"
FIELDS = {"pixel_values": TensorField("flat")}


class MeanColour(StoringProcessor):
    """One row, the mean colour, and `tokens` tokens. `change` replaces the item by another one."""

    modality: Modality = "image"
    marker = embed_token = MARKER

    def __init__(
        self,
        tokens: int = 3,
        change: Callable[[MediaItem], MediaItem] = lambda item: item,
        *,
        fingerprint: Any = "mean-1",
        policy: Any = None,
        store: Any = None,
    ) -> None:
        super().__init__(
            fingerprint, MediaPolicy() if policy is None else policy, MediaStore() if store is None else store
        )
        self.tokens = tokens
        self.change = change
        self.made: list[str] = []

    def make_item(self, source: MediaSource) -> MediaItem:
        self.made.append(source.digest)
        mean = np.asarray(decode_image(source, self.policy), np.float32).mean(axis=(0, 1))[None]
        item = MediaItem("image", self.mm_hash(source), source, {"pixel_values": mean}, self.tokens, None, FIELDS)
        return self.change(item)


class Videos(MeanColour):
    modality: Modality = "video"


def question(*colours: int) -> list[dict[str, Any]]:
    images = [np.full((8, 8, 3), colour, np.uint8) for colour in colours]
    return [{"role": "user", "content": [{"type": "image", "image": image} for image in images]}]


@pytest.mark.parametrize(
    "change",
    [
        lambda item: replace(item, mm_hash="another"),
        lambda item: replace(item, modality="video"),
        lambda item: replace(item, num_tokens=0),
        lambda item: replace(item, expansion=(ExpansionPiece(MARKER, 2, embed=True),)),
        lambda item: replace(item, expansion=(ExpansionPiece(MARKER, 3),)),
    ],
)
def test_an_item_that_contradicts_its_processor_is_refused(
    tiny_model_dir: Path, change: Callable[[MediaItem], MediaItem]
) -> None:
    renderer = load_renderer(tiny_model_dir, processors={"image": MeanColour(change=change)})
    with pytest.raises(MediaError, match=r"message 0, part 0: MeanColour.make_item returned an item with modality, "):
        renderer.render(question(10))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"processors": {"images": MeanColour()}}, "a key of processors is 'images'; it can be image, video"),
        ({"processors": {"image": Videos()}}, r"the modality of processors\['image'\] is 'video'; it can be 'image'"),
        (
            {"processors": {"image": MeanColour()}, "media_policy": MediaPolicy()},
            "media_policy is .*; it can be None with processors=, each of which has its own",
        ),
        ({"processors": {"image": MeanColour()}, "media_store": MediaStore()}, "media_store is .*; it can be None"),
    ],
)
def test_wrong_processors_are_refused_when_the_renderer_is_loaded(
    tiny_model_dir: Path, arguments: dict[str, Any], error: str
) -> None:
    with pytest.raises(ConfigError, match=error):
        load_renderer(tiny_model_dir, **arguments)


def test_an_expansion_of_several_pieces_is_placed(tiny_model_dir: Path) -> None:
    pieces = (ExpansionPiece(MARKER, 2, embed=True), ExpansionPiece("/"), ExpansionPiece(MARKER, 1, embed=True))
    processor = MeanColour(change=lambda item: replace(item, expansion=pieces))
    media = load_renderer(tiny_model_dir, processors={"image": processor}).render(question(10)).multi_modal_data
    assert media is not None
    (place,) = media.mm_placeholders["image"]
    assert place.embed_runs == ((0, 2), (3, 4))
