"""Tinker's own ModelInput and Datum: chunks of text and images, and the way back."""

import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from renderers import MediaPolicy, load_renderer
from rollouts.training import TrainingSample
from rollouts.training.adapters import (
    AdapterError,
    sample_from_tinker_datum,
    tinker_datum,
    tinker_model_input,
    tokens_from_tinker,
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
def test_a_sample_comes_back_from_its_datum(renderer, make_sample, seed, images, supervised):
    sample = make_sample(seed, images)
    if supervised:
        count = len(sample)
        columns = {"logprobs": np.zeros(count, np.float32), "advantages": np.ones(count, np.float32)}
        sample = TrainingSample(sample.token_ids, sample.loss_mask, media=sample.media, name=sample.name, **columns)
    datum = tinker_datum(sample, loss="cross_entropy" if supervised else "policy", omit=OMIT)
    through = tinker.Datum(
        model_input=tinker.ModelInput.model_validate_json(datum.model_input.model_dump_json()),
        loss_fn_inputs=datum.loss_fn_inputs,
    )
    again = sample_from_tinker_datum(through, renderer, name=sample.name)
    trained = sample.loss_mask
    assert again.token_ids.tolist() == sample.token_ids.tolist()
    assert again.loss_mask.tolist() == trained.tolist()
    assert again.logprobs[trained].tolist() == sample.logprobs[trained].tolist()
    assert again.advantages[trained].tolist() == sample.advantages[trained].tolist()
    assert [place for _, place in again.media] == [place for _, place in sample.media]
    for (item, _), (original, _) in zip(again.media, sample.media, strict=True):
        assert np.array_equal(item["pixel_values"], original["pixel_values"])


@pytest.mark.parametrize("format", ["PNG", "JPEG"])
def test_a_plain_file_is_sent_byte_for_byte_and_comes_back_with_the_same_hash(renderer, format):
    data = photo(format)
    rendered, media = rendered_image(renderer, data)
    model_input = tinker_model_input(rendered.token_ids, media)
    chunk = model_input.chunks[1]
    assert (chunk.data, chunk.format) == (data, format.lower())
    ids, again = tokens_from_tinker(model_input, renderer)
    assert ids.tolist() == rendered.token_ids
    assert again[0][0].mm_hash == media[0][0].mm_hash


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
    _, again = tokens_from_tinker(model_input, renderer)
    assert np.array_equal(again[0][0]["pixel_values"], media[0][0]["pixel_values"])


def test_an_image_at_the_end_cannot_be_cut(make_sample):
    sample = make_sample(1, images=1)
    end = sample.media[0][1].end
    columns = {name: getattr(sample, name)[:end] for name in ("token_ids", "loss_mask", "logprobs", "advantages")}
    with pytest.raises(AdapterError, match="its last token belongs to an image"):
        tinker_datum(TrainingSample(**columns, media=sample.media, name="cut"))


def changed(datum, **columns):
    return tinker.Datum(model_input=datum.model_input, loss_fn_inputs={**datum.loss_fn_inputs, **columns})


def test_a_datum_that_no_sample_can_hold_is_refused_by_its_part(renderer, make_sample):
    datum = tinker_datum(make_sample(2, images=1), omit=OMIT)
    count = datum.model_input.length
    shifted = np.roll(datum.loss_fn_inputs["target_tokens"].to_numpy(), 1)
    with pytest.raises(AdapterError, match=r"datum d: target_tokens: target \d+ is \d+, and the next token"):
        sample_from_tinker_datum(changed(datum, target_tokens=shifted), renderer, name="d")
    with pytest.raises(AdapterError, match=rf"logprobs: it is absent or of shape \(1,\); its input has {count} tokens"):
        sample_from_tinker_datum(changed(datum, logprobs=np.zeros(1, np.float32)), renderer)
    without = {key: value for key, value in datum.loss_fn_inputs.items() if key != "mask"}
    with pytest.raises(AdapterError, match=r"mask: it is absent .* with mask or weights"):
        sample_from_tinker_datum(tinker.Datum(model_input=datum.model_input, loss_fn_inputs=without), renderer)
    with pytest.raises(AdapterError, match="its input has 0 tokens"):
        sample_from_tinker_datum(tinker.Datum(model_input=tinker.ModelInput.empty()), renderer)


def pointer(location: object, expected_tokens: int | None = None):
    chunk = tinker.types.ImageAssetPointerChunk(format="png", location=str(location), expected_tokens=expected_tokens)
    return tinker.ModelInput(chunks=[tinker.EncodedTextChunk(tokens=[1, 2]), chunk])


def test_an_image_that_a_chunk_names_is_read_as_far_as_the_media_policy_allows(tiny_model_dir, renderer, tmp_path):
    file = tmp_path / "x.png"
    file.write_bytes(photo("PNG"))
    reader = load_renderer(tiny_model_dir, media_policy=MediaPolicy(allowed_directories=(tmp_path,)))
    ids, ((item, placeholder),) = tokens_from_tinker(pointer(file), reader)
    _, ((original, _),) = rendered_image(renderer, photo("PNG"))
    assert item.mm_hash == original.mm_hash
    assert (placeholder.offset, placeholder.length, len(ids)) == (2, original.num_tokens, 2 + original.num_tokens)
    assert tokens_from_tinker(pointer(file.as_uri(), original.num_tokens), reader)[0].tolist() == ids.tolist()
    with pytest.raises(AdapterError, match=r"chunks\[1\]: expected_tokens: it expects 99 tokens"):
        tokens_from_tinker(pointer(file, 99), reader)


def test_an_image_that_cannot_be_read_is_named_by_its_chunk(tiny_model_dir, renderer, tmp_path):
    reader = load_renderer(tiny_model_dir, media_policy=MediaPolicy(allowed_directories=(tmp_path,)))
    with pytest.raises(AdapterError, match=r"chunks\[1\]: location: .*is not followed under this media policy"):
        tokens_from_tinker(pointer(tmp_path / "x.png"), renderer)  # its policy allows nothing
    with pytest.raises(AdapterError, match=r"chunks\[1\]: location: .*https://example.org/x.png"):
        tokens_from_tinker(pointer("https://example.org/x.png"), reader)
    with pytest.raises(AdapterError, match=r"chunks\[1\]: location: .*absent.png"):
        tokens_from_tinker(pointer(tmp_path / "absent.png"), reader)
    (tmp_path / "x.png").write_bytes(b"no image")
    with pytest.raises(AdapterError, match=r"chunks\[1\]: location: "):
        tokens_from_tinker(pointer(tmp_path / "x.png"), reader)
    broken = tinker.types.ImageChunk(data=b"no image", format="png")
    with pytest.raises(AdapterError, match=r"chunks\[0\]: data: "):
        tokens_from_tinker(tinker.ModelInput(chunks=[broken]), reader)


def test_a_chunk_of_sound_is_refused(renderer):
    with pytest.raises(AdapterError, match=r"chunks\[0\]: chunks: a chunk of type dmel"):
        tokens_from_tinker(tinker.ModelInput(chunks=[tinker.types.DmelChunk(dmel=b"")]), renderer)
