"""Our encoded features against vLLM's: those that a real server renders, and those of its own encoder and decoder."""

import base64
import json
import os
import subprocess
from collections.abc import Callable, Iterator

import numpy as np
import pytest
from images import png_url

from renderers import MediaItem, MediaSource, load_renderer
from renderers.media.item import TensorField
from rollouts.engines.vllm.feature_decoding import decode_item, encoded_entries
from rollouts.engines.vllm.feature_encoding import encode_features, encode_item
from rollouts.errors import MalformedResultError

PIXEL_DTYPE = {
    "float32": "uint8",
    "bfloat16": "uint8",
    "float32-host-normalise": "float32",
    "bfloat16-host-normalise": "bfloat16",
}
every_mode = pytest.mark.parametrize("vllm_server", list(PIXEL_DTYPE), indirect=True)

SIZES = [
    *((256, 192), (320, 320), (64, 64), (512, 512), (1, 1), (1, 150), (150, 1), (33, 47), (640, 480), (480, 640)),
    *((1024, 1024), (1000, 37), (37, 1000), (225, 224), (800, 600), (31, 33), (97, 389), (700, 701), (128, 896)),
    (1280, 720),
]


def images(sizes):
    """Noise that no server has seen: for an image in its cache the server returns no data."""
    random = np.random.default_rng(int.from_bytes(os.urandom(8), "little"))
    return [random.integers(0, 256, (height, width, 3), dtype=np.uint8) for width, height in sizes]


def rendered_by(server, shown):
    """The ids and features that the server itself makes of a message with images."""
    parts = [{"type": "image_url", "image_url": {"url": png_url(pixels)}} for pixels in shown]
    body = {"messages": [{"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}]}
    answer = server.http.post("/v1/chat/completions/render", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def rendered_by_us(server, shown):
    parts = [{"type": "image", "image": pixels} for pixels in shown]
    message = {"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}
    return load_renderer(server.model_dir).render([message], add_generation_prompt=True)


def assert_same_bytes(ours, theirs):
    """Compare bytes except for the order of the names, which differs between processes of the server."""
    written, expected = encoded_entries(ours), encoded_entries(theirs)
    assert written == expected
    head = bytes([0x80 + len(expected)])
    in_their_order = b"".join(
        bytes([0xA0 + len(name)]) + name.encode() + written[name] for name in expected
    )  # names of fewer than 32 letters
    assert base64.b64encode(head + in_their_order) == theirs.encode()


def assert_same_features(server, shown):
    theirs, ours = rendered_by(server, shown), rendered_by_us(server, shown)
    assert ours.token_ids == theirs["token_ids"]
    segments = encode_features(ours.multi_modal_data, pixel_dtype=PIXEL_DTYPE[server.mode])
    made = json.loads(b"".join(segments))
    assert made["mm_placeholders"] == theirs["features"]["mm_placeholders"]
    assert len(made["kwargs_data"]["image"]) == len(shown)
    for mine, other in zip(made["kwargs_data"]["image"], theirs["features"]["kwargs_data"]["image"], strict=True):
        assert other is not None, "the server's cache knew this image"
        assert_same_bytes(mine, other)
    return theirs["features"]["kwargs_data"]["image"]


@every_mode
@pytest.mark.parametrize("size", SIZES, ids=[f"{width}x{height}" for width, height in SIZES])
def test_an_image_is_encoded_as_the_server_does(vllm_server, size):
    assert_same_features(vllm_server, images([size]))


@every_mode
@pytest.mark.parametrize("count", [2, 3, 8])
def test_several_images_of_one_prompt_are_encoded_as_the_server_does(vllm_server, count):
    assert_same_features(vllm_server, images(SIZES[:count]))


@pytest.mark.parametrize("vllm_server", ["float32"], indirect=True)
def test_one_changed_pixel_is_noticed(vllm_server):
    """The planted fault for the comparison above."""
    (shown,) = images([(256, 192)])
    theirs = rendered_by(vllm_server, [shown])["features"]["kwargs_data"]["image"][0]
    shown[100, 100, 0] ^= 1
    media = rendered_by_us(vllm_server, [shown]).multi_modal_data
    (item,) = media.media_items["image"]
    ours = b"".join(encode_item(item, pixel_dtype="uint8", siblings=[item])).decode()
    with pytest.raises(AssertionError):
        assert_same_bytes(ours, theirs)


# Every kind of field and type, by vLLM's own encoder and decoder in its own environment.

VLLM_SCRIPT = """
import json, os, sys
answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what else is printed is no answer
import torch
from vllm.entrypoints.scale_out.token_in_token_out.mm_serde import decode_mm_kwargs_item, encode_mm_kwargs_item
from vllm.multimodal.inputs import (
    MultiModalBatchedField, MultiModalFlatField, MultiModalKwargsItem, MultiModalFieldElem, MultiModalSharedField,
)

FIELDS = {
    "batched": MultiModalBatchedField(),
    "kept": MultiModalBatchedField(keep_on_cpu=True),
    "flat": MultiModalFlatField(slices=[(slice(0, 3),), (slice(3, 6),)]),
    "shared": MultiModalSharedField(batch_size=2),
}

def write(item):
    print(encode_mm_kwargs_item(item), file=answers, flush=True)

for line in sys.stdin:
    case = json.loads(line)
    if "read" in case:
        item = decode_mm_kwargs_item(case["read"])
        write(MultiModalKwargsItem({key: item[key] for key in sorted(item)}))
        continue
    elems = {}
    for name, kind, shape, dtype, seed in case["write"]:
        values = torch.arange(seed, seed + torch.Size(shape).numel()).reshape(shape)
        elems[name] = MultiModalFieldElem(data=values.to(getattr(torch, dtype)), field=FIELDS[kind])
    write(MultiModalKwargsItem(elems))
"""

TYPES = ("uint8", "int8", "int16", "int32", "int64", "bool", "float16", "float32", "float64", "bfloat16")
SHAPES = {"batched": [(), (1,), (2, 3), (3, 336, 5)], "flat": [(3,), (3, 7), (3, 2, 2)], "shared": [(4,), (1, 1)]}


@pytest.fixture(scope="module")
def ask_vllm(vllm_venv, tmp_path_factory) -> Iterator[Callable[[list[dict]], list[str]]]:
    """A function that lets vLLM write or read items, in one process for all tests."""
    log = tmp_path_factory.mktemp("codec") / "errors.log"
    with (
        log.open("w") as errors,
        subprocess.Popen(
            [vllm_venv / "bin" / "python", "-c", VLLM_SCRIPT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"},
            text=True,
        ) as process,
    ):

        def ask(cases: list[dict]) -> list[str]:
            written = []
            for case in cases:
                print(json.dumps(case), file=process.stdin, flush=True)
                written.append(process.stdout.readline().removesuffix("\n"))
            assert all(written), log.read_text()[-3000:]
            return written

        yield ask


def values_of(shape, dtype, seed):
    values = np.arange(seed, seed + np.prod(shape, dtype=int)).reshape(shape)
    return values.astype("float32" if dtype == "bfloat16" else dtype)


def test_every_kind_of_field_and_type_is_written_as_vllm_writes_it(ask_vllm):
    cases, items, wanted = [], [], []
    for dtype in TYPES:
        tensors, fields, described = {}, {}, []
        for kind, shapes in SHAPES.items():
            for number, shape in enumerate(shapes):
                name = f"{kind}_{number}"
                tensors[name] = values_of(shape, dtype, number)
                fields[name] = TensorField(kind)
                described.append((name, kind, shape, dtype, number))
        items.append(MediaItem("image", dtype, MediaSource.of(b""), tensors, 1, None, fields))
        # Without casting, which another test covers: the server wants the dtype that the item has.
        wanted.append(dtype if dtype in ("float16", "float32", "bfloat16") else "uint8")
        cases.append({"write": sorted(described)})
    theirs = ask_vllm(cases)
    for item, other, pixel_dtype in zip(items, theirs, wanted, strict=True):
        ours = b"".join(encode_item(item, pixel_dtype=pixel_dtype, siblings=[item, item])).decode()
        assert encoded_entries(ours) == encoded_entries(other), item.mm_hash
        assert ours == other, item.mm_hash


def test_what_vllm_writes_is_read_and_what_we_write_vllm_reads(ask_vllm):
    cases = [{"write": [("kept", "kept", (3,), "int64", 1), ("pixels", "flat", (3, 4), dtype, 0)]} for dtype in TYPES]
    theirs = ask_vllm(cases)
    ours = []
    for dtype, other in zip(TYPES, theirs, strict=True):
        decoded = decode_item(other)
        tensors = {name: entry.tensor for name, entry in decoded.items()}
        for name, shape, kind, seed in (("kept", (3,), "int64", 1), ("pixels", (3, 4), dtype, 0)):
            held = tensors[name]
            array = held if isinstance(held, np.ndarray) else held.unpack()
            assert np.array_equal(array, values_of(shape, kind, seed)), (dtype, name)
        item = MediaItem(
            "image", "h", MediaSource.of(b""), tensors, 1, None, {name: entry.field for name, entry in decoded.items()}
        )
        ours.append(b"".join(encode_item(item, pixel_dtype="uint8", siblings=[item, item])).decode())
    assert ours == theirs
    assert ask_vllm([{"read": one} for one in ours]) == ours


def test_a_truncated_real_item_is_refused(ask_vllm):
    (whole,) = ask_vllm([{"write": [("pixels", "flat", (3, 4), "uint8", 0)]}])
    raw = base64.b64decode(whole)
    for end in range(len(raw)):
        with pytest.raises(MalformedResultError):
            decode_item(base64.b64encode(raw[:end]))
