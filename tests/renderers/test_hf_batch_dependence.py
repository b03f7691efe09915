"""Processors whose output for one image depends on the rest of the batch are refused when they are probed."""

import threading
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import transformers
from processor_outputs import load_processors, noise, source

from renderers.errors import (
    LoadError,
    MediaError,
)
from renderers.media.item import TensorField
from renderers.vision.hf_probing import probe
from renderers.vision.hf_runner import ProcessorRunner

pytestmark = pytest.mark.usefixtures("one_torch_thread")

Fault = Callable[[dict[str, Any], list[str]], None]


def batch_statistics(output: dict[str, Any], texts: list[str]) -> None:
    output["pixel_values"] = output["pixel_values"] - output["pixel_values"].mean()


def padding_in_front(output: dict[str, Any], texts: list[str]) -> None:
    output["pixel_values"] = output["pixel_values"].flip(-1)


def rows_out_of_order(output: dict[str, Any], texts: list[str]) -> None:
    output["image_sizes"] = output["image_sizes"].flip(0)


def tensors_of_the_text(output: dict[str, Any], texts: list[str]) -> None:
    output["image_positions"] = torch.tensor([[text.index("[IMG]")] for text in texts])


def numbers_in_the_batch(output: dict[str, Any], texts: list[str]) -> None:
    output["image_numbers"] = torch.arange(len(texts))[:, None]


def another_type_together(output: dict[str, Any], texts: list[str]) -> None:
    if len(texts) > 1:
        output["image_sizes"] = output["image_sizes"].int()


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (batch_statistics, "pixel_values"),
        (padding_in_front, "pixel_values"),
        (rows_out_of_order, "image_sizes"),
        (tensors_of_the_text, "image_positions"),
        (numbers_in_the_batch, "image_numbers"),
        (another_type_together, "image_sizes"),
    ],
)
def test_tensors_that_depend_on_the_rest_of_the_batch_are_refused_by_name(
    fault: Fault, name: str, reference_processor: Any
) -> None:
    with pytest.raises(LoadError, match=f"Faulty returns '{name}'.*depend on the rest of the batch"):
        probe_with(reference_processor, fault)


def test_a_processor_that_replaces_by_means_of_its_own_is_refused(reference_processor: Any) -> None:
    class Own(transformers.PixtralProcessor):
        def __call__(self, images: Any = None, text: Any = None, **options: Any) -> Any:
            return transformers.BatchFeature({"pixel_values": torch.zeros(len(text), 3, 4, 4)})

    real = reference_processor("pixtral")
    own = Own(real.image_processor, real.tokenizer, patch_size=16)
    with pytest.raises(LoadError, match=r"Own does not replace '\[IMG\]' by get_text_with_replacements"):
        probe(ProcessorRunner(own, "image", "[IMG]", threading.Lock()), min_frames=1, embed_tokens=())


def test_a_tensor_that_is_equal_for_all_images_is_a_shared_field(reference_processor: Any) -> None:
    def fault(output: dict[str, Any], texts: list[str]) -> None:
        output["patch_size"] = torch.tensor(16)
        output["means"] = torch.tensor([0.25, 0.5])

    fields = probe_with(reference_processor, fault)
    assert fields["patch_size"].kind == fields["means"].kind == "shared"


def probe_with(reference_processor: Callable[[str], Any], fault: Fault) -> Mapping[str, TensorField]:
    """Probe Pixtral's processor with a fault planted in what it returns."""

    class Faulty(transformers.PixtralProcessor):
        def __call__(self, images: Any = None, text: Any = None, **options: Any) -> Any:
            output = super().__call__(images=images, text=text, **options)
            fault(output.data, text)
            return output

    real = reference_processor("pixtral")
    faulty = Faulty(real.image_processor, real.tokenizer, patch_size=16)
    return probe(ProcessorRunner(faulty, "image", "[IMG]", threading.Lock()), min_frames=1, embed_tokens=()).fields


@pytest.mark.slow
def test_an_image_with_more_rows_than_the_probe_images_is_refused(
    processor_directory: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 3 makes one row an image; what several would become in a batch was never seen."""
    processor = load_processors(processor_directory("gemma3"))["image"]
    monkeypatch.setattr(
        transformers.Gemma3Processor,
        "images_kwargs",
        {
            "do_pan_and_scan": True,
            "pan_and_scan_min_crop_size": 32,
            "pan_and_scan_max_num_crops": 4,
            "pan_and_scan_min_ratio_to_activate": 1.2,
        },
    )
    with pytest.raises(MediaError, match="3 rows of 'pixel_values'; when it was loaded it returned one"):
        processor.process(source(noise(200, 100)))


def test_tensors_that_only_batches_have_are_refused(reference_processor: Any) -> None:
    def fault(output: dict[str, Any], texts: list[str]) -> None:
        if len(texts) > 1:
            output["batch_mask"] = torch.ones(len(texts), 1)

    with pytest.raises(LoadError, match=r"pixel_values, image_sizes for one image and .*batch_mask for several"):
        probe_with(reference_processor, fault)
