"""Pixels held as uint8 where a scale computes the processor's floats from them, else as floats."""

import threading
from typing import Any

import numpy as np
import pytest
from processor_outputs import load_processors, noise, source

from renderers.errors import (
    MediaError,
)
from renderers.vision.hf_probing import probe
from renderers.vision.hf_runner import ProcessorRunner

pytestmark = pytest.mark.usefixtures("one_torch_thread")


@pytest.mark.parametrize("fault", ["another mean", "one pixel", "no rescale option", "gamma"])
def test_uint8_pixels_are_not_held_when_the_scale_computes_other_floats(fault: str, reference_processor: Any) -> None:
    """A processor that does something else between resize and the floats than its settings say."""
    reference = reference_processor("glm-4.5v")

    class Altered(ProcessorRunner):
        def run(self, media: Any, *, text: str = "{}", raw: bool = False) -> Any:
            if raw and fault == "no rescale option":
                raise TypeError("unexpected keyword do_rescale")
            outcome = super().run(media, text=text, raw=raw)
            pixels = outcome.tensors["pixel_values"].copy()
            if raw and fault == "one pixel":
                pixels[-1, -1] ^= 1
            elif not raw and fault == "another mean":
                pixels += np.float32(0.01)
            elif not raw and fault == "gamma":
                pixels = np.sign(pixels) * np.abs(pixels) ** np.float32(1.1)
            return outcome._replace(tensors={**outcome.tensors, "pixel_values": pixels})

    for kind, scaled in ((ProcessorRunner, True), (Altered, False)):
        processor = kind(reference, "image", reference.image_token, threading.Lock())
        layout = probe(processor, min_frames=1, embed_tokens=["<|image|>"])
        assert layout.scales.keys() == ({"pixel_values"} if scaled else set())


def test_an_image_that_is_not_uint8_before_the_scale_is_refused(
    processor_directory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = load_processors(processor_directory("glm-4.5v"))["image"]
    plain = processor._runner.run

    def run(media: Any, **options: Any) -> Any:
        outcome = plain(media, **options)
        return outcome._replace(tensors={name: array.astype(np.float32) for name, array in outcome.tensors.items()})

    monkeypatch.setattr(processor._runner, "run", run)
    with pytest.raises(MediaError, match="as float32; when it was loaded it returned uint8"):
        processor.process(source(noise(60, 40)))
