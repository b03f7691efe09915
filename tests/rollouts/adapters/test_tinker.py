"""Tinker's own ModelInput and Datum: chunks of text and images."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from renderers import MediaSource
from rollouts.training import TrainingSample
from rollouts.training.adapters import (
    AdapterError,
    tinker_datum,
    tinker_model_input,
)

tinker = pytest.importorskip("tinker")

OMIT = ("weight_spans",)


def rendered_image(renderer, image):
    content = [{"type": "text", "text": "a"}, {"type": "image", "image": image}, {"type": "text", "text": "b"}]
    rendered = renderer.render([{"role": "user", "content": content}], add_generation_prompt=True)
    return rendered, rendered.multi_modal_data.items_with_ranges()


def photo(format: str, mode: str = "RGB", orientation: int = 1) -> bytes:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 64, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).convert(mode)
    exif = image.getexif()
    exif[0x0112] = orientation
    file = io.BytesIO()
    image.save(file, format=format, exif=exif)
    return file.getvalue()


@settings(max_examples=25)
@given(seed=st.integers(1, 30), images=st.integers(0, 3), supervised=st.booleans())
def test_a_datum_has_the_tokens_images_and_columns_of_its_sample(renderer, make_sample, seed, images, supervised):
    sample = make_sample(seed, images)
    if supervised:
        count = len(sample)
        columns = {"logprobs": np.zeros(count, np.float32), "advantages": np.ones(count, np.float32)}
        sample = TrainingSample(sample.token_ids, sample.loss_mask, media=sample.media, name=sample.name, **columns)
    datum = tinker_datum(sample, loss="cross_entropy" if supervised else "policy", omit=OMIT)
    chunks = tinker.ModelInput.model_validate_json(datum.model_input.model_dump_json()).chunks
    ids, is_image, files = [], [], []
    for chunk in chunks:
        is_text = chunk.type == "encoded_text"
        count = chunk.length if is_text else chunk.expected_tokens
        ids += chunk.tokens if is_text else [0] * count
        is_image += [not is_text] * count
        files += [] if is_text else [chunk.data]
    is_image = np.array([*is_image, False])
    assert ids == np.where(is_image, 0, sample.token_ids)[:-1].tolist()
    for data, (item, place) in zip(files, sample.media, strict=True):
        assert is_image[place.offset : place.end].all()
        again = renderer.processors["image"].process(MediaSource.of(data))
        assert np.array_equal(again["pixel_values"], item["pixel_values"])
    assert is_image.sum() == sum(place.length for _, place in sample.media)
    inputs = {name: values.to_numpy().tolist() for name, values in datum.loss_fn_inputs.items()}
    assert inputs.pop("target_tokens") == np.where(is_image, 0, sample.token_ids)[1:].tolist()
    advantages, logprobs, mask = (
        (values * sample.loss_mask)[1:].tolist() for values in (sample.advantages, sample.logprobs, sample.loss_mask)
    )
    expected = {"advantages": advantages, "logprobs": logprobs, "mask": mask}
    assert inputs == ({"weights": advantages} if supervised else expected)


@pytest.mark.parametrize("format", ["PNG", "JPEG"])
def test_a_plain_file_is_sent_byte_for_byte(renderer, format):
    data = photo(format)
    rendered, media = rendered_image(renderer, data)
    model_input = tinker_model_input(rendered.token_ids, media)
    chunk = model_input.chunks[1]
    assert (chunk.data, chunk.format) == (data, format.lower())


@pytest.mark.parametrize(
    "data",
    [photo("JPEG", orientation=6), photo("WEBP"), photo("PNG", mode="RGBA"), photo("PNG", mode="P"), photo("BMP")],
    ids=["turned by EXIF", "WebP", "transparency", "palette", "BMP"],
)
def test_what_readers_decode_differently_becomes_a_png_of_the_pixels_that_the_renderer_saw(renderer, data):
    rendered, media = rendered_image(renderer, data)
    model_input = tinker_model_input(rendered.token_ids, media)
    chunk = model_input.chunks[1]
    assert chunk.format == "png"
    with Image.open(io.BytesIO(chunk.data)) as image:
        assert image.mode == "RGB"
    again = renderer.processors["image"].process(MediaSource.of(chunk.data))
    assert np.array_equal(again["pixel_values"], media[0][0]["pixel_values"])


def test_an_image_at_the_end_cannot_be_cut(make_sample):
    sample = make_sample(1, images=1)
    end = sample.media[0][1].end
    columns = {name: getattr(sample, name)[:end] for name in ("token_ids", "loss_mask", "logprobs", "advantages")}
    with pytest.raises(AdapterError, match="its last token belongs to an image"):
        tinker_datum(TrainingSample(**columns, media=sample.media, name="cut"))
