"""Chunks of the Tinker API become the tokens, ranges and pixels that the model's renderer makes."""

import functools
import io
import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import transformers
from hf_families import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from model_families import MEDIA_FAMILIES, text_config
from PIL import Image

from renderers import MediaPolicy, load_renderer
from renderers.placement import item_placement_error
from rollouts.serve.errors import RequestError
from rollouts.tinker.inputs import InputReader
from rollouts.tinker.requests import ImageChunk, ImagePointerChunk, TextChunk


def file_of(seed, width, height, format="png"):
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, format=format)
    return file.getvalue()


def text(*ids):
    return TextChunk(np.array(ids, np.int32))


def image(data, expected=None, format="png"):
    return ImageChunk(data, format, expected)


@functools.cache
def directory_of(family):
    """The processor of a family; its directory is removed at the end of the process."""
    temporary = tempfile.TemporaryDirectory(prefix=family)
    directory_of.kept = [*getattr(directory_of, "kept", []), temporary]
    if family == "kimi-k2.5":
        return next(each for each in FAMILIES if each.name == family).save(Path(temporary.name))
    processor, config = MEDIA_FAMILIES[family]()
    processor.save_pretrained(temporary.name)
    config.save_pretrained(temporary.name)
    return Path(temporary.name)


@functools.cache
def reader_of(family):
    return InputReader(directory_of(family))


@pytest.fixture
def reader():
    return reader_of("qwen3_vl")


def conversation(*parts):
    content = [
        {"type": "image", "image": part} if isinstance(part, bytes) else {"type": "text", "text": part}
        for part in parts
    ]
    return [{"role": "user", "content": content}]


def chunks_of(rendered, *, counted):
    """Chunks that are cut at the ranges of the images."""
    chunks, position = [], 0
    for item, place in rendered.multi_modal_data.items_with_ranges():
        chunks.append(text(*rendered.token_ids[position : place.offset]))
        chunks.append(image(bytes(item.source.data), place.length if counted else None))
        position = place.end
    return [*chunks, text(*rendered.token_ids[position:])]


def assert_equal_input(found, rendered):
    assert found.token_ids.dtype == np.int64
    assert found.token_ids.tolist() == list(rendered.token_ids)
    expected = rendered.multi_modal_data.items_with_ranges()
    assert [place for _, place in found.media] == [place for _, place in expected]
    for (item, _), (other, _) in zip(found.media, expected, strict=True):
        assert item.keys() == other.keys()
        assert all(np.array_equal(item[name], other[name]) for name in item)


@pytest.mark.parametrize("family", [*MEDIA_FAMILIES, "kimi-k2.5"])
def test_chunks_are_what_the_renderer_makes_of_the_same_message(family):
    parts = ("a", file_of(0, 72, 40), "b c", file_of(1, 32, 48), file_of(0, 72, 40), "d")
    rendered = load_renderer(directory_of(family)).render(conversation(*parts))
    # Without a count, an image is all that the processor makes of it: of Gemma 3, line breaks that are text here.
    for counted in (True,) if family == "gemma3" else (True, False):
        assert_equal_input(reader_of(family).read("prompt", chunks_of(rendered, counted=counted)), rendered)


@pytest.mark.parametrize(
    ("family", "before", "after", "count"),
    [
        ("internvl", ["<img>"], ["</img>"], 12),
        ("gemma4", ["<|image>"], ["<image|>"], 66),
        ("pixtral", [], ["[IMG_END]"], 44),
    ],
)
def test_a_client_that_counts_features_writes_the_tokens_around_them_as_text(family, before, after, count):
    reader, data = reader_of(family), file_of(0, 72, 40)
    ids = [[reader.tokenizer.control_id(token) for token in tokens] for tokens in (before, after)]
    own = reader.read("prompt", [text(5), text(*ids[0]), image(data, count), text(*ids[1], 6)])
    whole = reader.read("prompt", [text(5), image(data), text(6)])
    assert own.token_ids.tolist() == whole.token_ids.tolist()
    ((_, place),), ((_, whole_place),) = own.media, whole.media
    assert (place.offset, place.length, place.runs) == (1 + len(before), count, whole_place.runs)


@pytest.fixture
def cookbook(monkeypatch):
    """The renderers of tinker-cookbook, from a directory of packages that is the last place that is searched."""
    packages = os.environ.get("MMROLLOUTS_TRAINER_PACKAGES")
    if packages:
        monkeypatch.setattr(sys, "path", [*sys.path, packages])
    return pytest.importorskip("tinker_cookbook.renderers")


@pytest.mark.parametrize("name", ["qwen3_vl", "qwen3_vl_instruct", "qwen3_5", "qwen3_5_disable_thinking"])
def test_ids_of_a_renderer_of_tinker_cookbook_pass_unchanged(name, cookbook):
    directory = directory_of("qwen3_5" if "5" in name else "qwen3_vl")
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    theirs = cookbook.get_renderer(name, tokenizer, transformers.AutoImageProcessor.from_pretrained(directory))
    pictures = [Image.open(io.BytesIO(file_of(seed, 40 + 40 * seed, 64))) for seed in range(3)]
    content = [{"type": "text", "text": "Which?"}, *({"type": "image", "image": each} for each in pictures)]
    prompt = theirs.build_generation_prompt(
        [{"role": "user", "content": content}, {"role": "assistant", "content": "x"}]
    )
    marker = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    expected, ranges, chunks = [], [], []
    for chunk in prompt.chunks:
        if chunk.type == "image":
            ranges.append((len(expected), chunk.length))
            chunks.append(image(chunk.data, chunk.expected_tokens, chunk.format))
        else:
            chunks.append(text(*chunk.tokens))
        expected += [marker] * chunk.length if chunk.type == "image" else chunk.tokens
    found = InputReader(directory).read("prompt", chunks)
    assert len(ranges) == 3
    assert found.token_ids.tolist() == expected
    assert [(place.offset, place.length) for _, place in found.media] == ranges


CHUNKS = st.one_of(
    st.lists(st.integers(0, 2**31 - 1), max_size=5).map(lambda ids: text(*ids)),
    st.sampled_from([image(file_of(seed, 32 + 8 * seed, 32), format="png") for seed in range(3)]),
)


@pytest.mark.slow
@settings(max_examples=30)
@given(
    rows=st.lists(st.lists(CHUNKS, max_size=6), max_size=3), family=st.sampled_from(["qwen3_vl", "gemma3", "idefics3"])
)
def test_any_chunks_become_their_tokens_one_after_another(rows, family):
    reader = reader_of(family)
    alone = {id(chunk): reader.read("alone", [chunk]) for row in rows for chunk in row}
    found = reader.read_rows([(f"data[{number}]", row) for number, row in enumerate(rows)])
    assert len(found) == len(rows)
    for row, (token_ids, media) in zip(rows, found, strict=True):
        parts = [alone[id(chunk)] for chunk in row]
        assert token_ids.tolist() == [token for part in parts for token in part.token_ids.tolist()]
        assert item_placement_error(media, len(token_ids)) is None
        starts = np.cumsum([0, *(len(part.token_ids) for part in parts)])[:-1]
        assert [place for _, place in media] == [
            part.media[0][1].shifted(int(start)) for part, start in zip(parts, starts, strict=True) if part.media
        ]
        assert [item for item, _ in media] == [part.media[0][0] for part in parts if part.media]


# What is refused, and where.


def refusal(reader, *chunks):
    with pytest.raises(RequestError) as caught:
        reader.read_rows([("data[0].model_input", [text(1)]), ("data[1].model_input", [text(1), *chunks])])
    assert caught.value.status == 400
    prefix = "data[1].model_input[1]"
    assert str(caught.value).startswith(prefix)
    return str(caught.value).removeprefix(prefix)


def test_bytes_of_another_format_than_named_are_refused(reader):
    data = file_of(0, 32, 32, "jpeg")
    assert "has the format 'png', and its bytes are image/jpeg; " in refusal(reader, image(data))
    assert "its bytes are image/webp" in refusal(reader, image(file_of(0, 32, 32, "webp"), format="jpeg"))
    for unknown in (b"", b"text", b"mmpx" + bytes(100)):
        assert "of no known type; send a PNG or JPEG" in refusal(reader, image(unknown))
    assert reader.read("prompt", [image(data, 4, "jpeg")]).media[0][0].source.data == data


def test_an_image_that_cannot_be_decoded_is_refused_at_its_place(reader):
    data = file_of(0, 64, 64)
    message = refusal(reader, image(data[: len(data) // 2]))
    assert message.endswith("; send the bytes of a PNG or JPEG")
    good = image(file_of(1, 32, 32))
    with pytest.raises(RequestError, match=r"^prompt\[3\]: "):
        reader.read("prompt", [good, text(1), good, image(data[:-60]), good])


@pytest.mark.parametrize("limit", [{"max_bytes": 2000}, {"max_pixels": 1000}, {"max_aspect_ratio": 1.5}])
def test_the_limits_of_the_media_policy_hold(limit):
    reader = InputReader(directory_of("qwen3_vl"), media_policy=MediaPolicy(**limit))
    message = refusal(reader, image(file_of(0, 72, 40)))
    assert str(next(iter(limit))) in message
    assert message.endswith("; send a smaller image")
    assert reader.read("prompt", [image(file_of(0, 16, 16))]).media


@pytest.mark.parametrize(
    "location", ["https://example.org/a.png", "http://127.0.0.1/a.png", "/etc/hostname", "tinker://a"]
)
def test_images_at_urls_and_paths_are_not_followed_without_a_policy(reader, location):
    assert "policy" in refusal(reader, ImagePointerChunk(location, "png", None))


def test_a_policy_allows_paths(tmp_path):
    data = file_of(0, 72, 40)
    (tmp_path / "a.png").write_bytes(data)
    policy = MediaPolicy(allowed_directories=(tmp_path,))
    reader = InputReader(directory_of("qwen3_vl"), media_policy=policy)
    found = reader.read("prompt", [text(1), ImagePointerChunk(str(tmp_path / "a.png"), "png", 8)])
    assert found.media == reader.read("prompt", [text(1), image(data)]).media
    assert "has the format 'jpeg'" in refusal(reader, ImagePointerChunk(str(tmp_path / "a.png"), "jpeg", 8))
    assert "expects 7 tokens" in refusal(reader, ImagePointerChunk(str(tmp_path / "a.png"), "png", 7))


@pytest.fixture(scope="module")
def text_directory(tmp_path_factory):
    """A text model with a tokenizer, and no chat template."""
    directory = tmp_path_factory.mktemp("text")
    tokenizer = MEDIA_FAMILIES["qwen3_vl"]()[0].tokenizer
    tokenizer.chat_template = None
    tokenizer.save_pretrained(directory)
    text_config("qwen3").save_pretrained(directory)
    return directory


def test_a_text_model_reads_text_and_refuses_images(text_directory):
    reader = InputReader(text_directory)
    found = reader.read("prompt", [text(7, 8), text(), text(9)])
    assert (found.token_ids.tolist(), list(found.media)) == ([7, 8, 9], [])
    message = refusal(reader, image(file_of(0, 32, 32)))
    assert "reads only text" in message
    assert message.endswith("; send text only")
