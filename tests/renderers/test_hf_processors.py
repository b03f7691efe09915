"""Items made by the processors of transformers, one at a time, equal what those processors make of all together."""

from __future__ import annotations

import functools
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hf_families import FAMILIES, Family
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoProcessor
from transformers.video_utils import VideoMetadata

from renderers import MediaPolicy, MediaSource, MediaStore, load_renderer
from renderers.errors import (
    InvalidFileError,
    LoadError,
    MediaDecodeError,
    MediaError,
    MissingExtraError,
    MissingTokenError,
)
from renderers.media.item import ExpansionPiece, MediaItem, TensorField
from renderers.media.raw import image_to_raw
from renderers.media.raw_video import frames_to_raw
from renderers.vision.batching import batch_tensors
from renderers.vision.hf_calling import ProcessorRunner
from renderers.vision.hf_probing import probe
from renderers.vision.hf_processor import HFProcessor, load_hf_processors
from renderers.vision.normalise import ScaledPixels

BY_NAME = {family.name: family for family in FAMILIES}
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


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Test processes that share the cores take several times as long when each has torch use all of them."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return functools.cache(lambda name: BY_NAME[name].save(tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="session")
def own(directories: Callable[[str], Path]) -> Callable[[str], Any]:
    """The processor that transformers loads of a family's directory: the truth."""
    return functools.cache(lambda name: AutoProcessor.from_pretrained(directories(name)))


@pytest.fixture(scope="session")
def loaded(directories: Callable[[str], Path]) -> Callable[[str], Mapping[str, HFProcessor]]:
    return functools.cache(lambda name: load(directories(name)))


def load(directory: Path) -> Mapping[str, HFProcessor]:
    return load_hf_processors(directory, policy=MediaPolicy(), store=MediaStore())


def noise(width: int, height: int) -> Image.Image:
    values = np.random.default_rng(width * 1000 + height).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(values)


def source(image: Image.Image) -> MediaSource:
    return MediaSource.of(image_to_raw(image))


def clip(frames: int, width: int, height: int) -> np.ndarray:
    return np.random.default_rng(frames).integers(0, 256, (frames, height, width, 3), dtype=np.uint8)


def processed(processor: HFProcessor, images: Sequence[Image.Image]) -> list[MediaItem]:
    return [processor.process(source(image)) for image in images]


def together(processor: Any, images: Sequence[Image.Image], **options: Any) -> dict[str, torch.Tensor]:
    """What the model's own processor returns for samples of one image each, without what it makes of their text."""
    output = processor(
        images=[[image] for image in images],
        text=[processor.image_token] * len(images),
        text_kwargs={"return_tensors": None},
        images_kwargs={"return_tensors": "pt"},
        **options,
    )
    return {name: tensor for name, tensor in output.items() if name not in TEXT_KEYS}


def spliced(prompt: str, items: Sequence[MediaItem], marker: str) -> str:
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


# uint8 pixels, where a scale makes the processor's floats of them.


def pixels_of(item: MediaItem) -> str:
    return next(name for name in item if name.startswith("pixel_values"))


@families(lambda family: family.name in ("glm-4.5v", "glm-4.6v", "kimi-k2.5", "qwen2-vl", "internvl3"))
def test_floats_that_are_a_scale_of_uint8_pixels_are_held_as_those(family: Family, own: Any, loaded: Any) -> None:
    pictures = [noise(*size) for size in SIZES]
    reference = together(own(family.name), pictures)
    items = processed(loaded(family.name)["image"], pictures)
    for item in items:
        held = item.tensors[pixels_of(item)]
        assert isinstance(held, ScaledPixels)
        assert held.pixels.dtype == np.uint8
        assert not held.pixels.flags.writeable
        assert 4 * held.nbytes == item[pixels_of(item)].nbytes
    check_equal(batch_tensors(items), reference)


@families(lambda family: family.name in ("gemma3", "llava-next", "idefics3", "pixtral", "llama4"))
def test_floats_that_are_padded_or_no_scale_of_pixels_stay_floats(family: Family, loaded: Any) -> None:
    for item in processed(loaded(family.name)["image"], [noise(*size) for size in SIZES]):
        assert isinstance(item.tensors["pixel_values"], np.ndarray)
        assert item["pixel_values"].dtype == np.float32


@pytest.mark.parametrize("fault", ["another mean", "one pixel", "no rescale option", "gamma"])
def test_pixels_that_the_scale_does_not_make_the_floats_of_are_not_held_as_uint8(fault: str, own: Any) -> None:
    """A processor that does something else between resize and the floats than its settings say."""
    reference = own("glm-4.5v")

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
        assert (layout.scale is not None) is scaled
        assert layout.raw_names == (frozenset({"pixel_values"}) if scaled else frozenset())


def test_an_image_that_is_not_uint8_before_the_scale_is_refused(
    directories: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    processor = load(directories("glm-4.5v"))["image"]
    plain = processor._runner.run

    def run(media: Any, **options: Any) -> Any:
        outcome = plain(media, **options)
        return outcome._replace(tensors={name: array.astype(np.float32) for name, array in outcome.tensors.items()})

    monkeypatch.setattr(processor._runner, "run", run)
    with pytest.raises(MediaError, match="makes float32 and not uint8"):
        processor.process(source(noise(60, 40)))


# One at a time and together.


@families()
def test_ids_of_spliced_expansions_are_those_of_the_models_own_processor(family: Family, own: Any, loaded: Any) -> None:
    reference, ours = own(family.name), loaded(family.name)["image"]
    images = [noise(*size) for size in SIZES]
    # Line breaks beside the markers: tokenizers merge them with what stands at the edge of an expansion.
    parts = [{"type": "text", "text": "See\n"}, {"type": "image"}, {"type": "image"}, {"type": "text", "text": "\n  ?"}]
    prompt = reference.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    assert prompt.count(ours.marker) == 2  # what the template prints is what the processor replaces
    expected = reference(images=images, text=prompt, text_kwargs={"return_tensors": None})["input_ids"][0]

    items = processed(ours, images)
    assert reference.tokenizer(spliced(prompt, items, ours.marker))["input_ids"] == expected
    embed_id = reference.tokenizer.convert_tokens_to_ids(family.embed)
    assert sum(item.num_tokens for item in items) == expected.count(embed_id)
    assert ours.embed_token == family.embed


@pytest.mark.parametrize("name", ["gemma3", "idefics3", "internvl3", "kimi-k2.5"])
def test_rendered_ids_are_those_of_the_models_own_processor(name: str, own: Any, directories: Any) -> None:
    images = [noise(*size) for size in SIZES]
    parts = [{"type": "text", "text": "See\n"}, {"type": "image"}, {"type": "image"}, {"type": "text", "text": "\n  ?"}]
    prompt = own(name).apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    expected = own(name)(images=images, text=prompt, text_kwargs={"return_tensors": None})["input_ids"][0]

    shown = [parts[0], *({"type": "image", "image": image} for image in images), parts[3]]
    rendered = load_renderer(directories(name)).render([{"role": "user", "content": shown}])
    assert rendered.token_ids == expected


@families()
def test_a_batch_of_items_holds_the_tensors_of_the_models_own_processor(family: Family, own: Any, loaded: Any) -> None:
    images = [noise(*size) for size in SIZES]
    items = processed(loaded(family.name)["image"], images)
    check_equal(batch_tensors(items), together(own(family.name), images))
    assert all(item.scale is None for item in items)
    assert not any(array.flags.writeable for item in items for array in item.values())


@families()
def test_a_model_makes_as_many_rows_of_features_as_there_are_embed_tokens(family: Family, loaded: Any) -> None:
    items = processed(loaded(family.name)["image"], [noise(*size) for size in SIZES])
    tensors = {name: torch.from_numpy(array) for name, array in batch_tensors(items).items()}
    with torch.no_grad():
        output = family.tower().eval().get_image_features(**tensors)
    features = output.last_hidden_state if output.pooler_output is None else output.pooler_output
    several = features if isinstance(features, (list, tuple)) else [features]
    rows = sum(each.reshape(-1, each.shape[-1]).shape[0] for each in several)
    assert rows == sum(item.num_tokens for item in items)


@pytest.mark.parametrize("name", ["pixtral", "llava-next", "kimi-k2.5"])
def test_batches_of_any_sizes_are_those_of_the_models_own_processor(name: str, own: Any, loaded: Any) -> None:
    @given(st.lists(st.tuples(st.integers(2, 300), st.integers(2, 300)), min_size=1, max_size=4))
    @settings(max_examples=8, deadline=None)
    def check(sizes: list[tuple[int, int]]) -> None:
        images = [noise(*size) for size in sizes]
        check_equal(batch_tensors(processed(loaded(name)["image"], images)), together(own(name), images))

    check()


def test_tiles_of_two_images_of_one_sample_are_those_of_two_samples(own: Any, loaded: Any) -> None:
    """Idefics3 lays them out as one row of tiles a sample, and drops what is all zero before its vision tower."""
    reference = own("idefics3")
    images = [noise(*size) for size in SIZES]
    one_sample = reference(images=images, text=reference.image_token * 2, images_kwargs={"return_tensors": "pt"})
    ours = batch_tensors(processed(loaded("idefics3")["image"], images))["pixel_values"]
    tiles = ours.reshape(-1, *ours.shape[2:])
    kept = tiles[(tiles != 0).any(axis=(1, 2, 3))]
    assert kept.tobytes() == one_sample["pixel_values"].numpy().tobytes()


@families(lambda family: family.video_embed is not None and family.name != "smolvlm")
def test_videos_are_those_of_the_models_own_processor(family: Family, own: Any, loaded: Any) -> None:
    reference, ours = own(family.name), loaded(family.name)["video"]
    clips = [clip(33, 112, 70), clip(40, 64, 84)]
    items = [ours.process(MediaSource.of(frames_to_raw(frames, fps=4.0))) for frames in clips]
    parts = [{"type": "text", "text": "See\n"}, {"type": "video"}, {"type": "video"}, {"type": "text", "text": "0 ?"}]
    prompt = reference.apply_chat_template([{"role": "user", "content": parts}], tokenize=False)
    assert prompt.count(ours.marker) == 2
    metadata = [VideoMetadata(len(frames), 4.0, *frames.shape[2:0:-1], len(frames) / 4) for frames in clips]
    for frames, each in zip(clips, metadata, strict=True):
        each.frames_indices = list(range(len(frames)))
    expected = reference(videos=clips, text=prompt, videos_kwargs={"return_tensors": "pt", "video_metadata": metadata})
    ids = expected.pop("input_ids")[0]

    assert reference.tokenizer(spliced(prompt, items, ours.marker))["input_ids"] == ids
    embed_id = reference.tokenizer.convert_tokens_to_ids(family.video_embed)
    assert sum(item.num_tokens for item in items) == ids.count(embed_id)
    theirs = {name: tensor for name, tensor in expected.items() if name not in TEXT_KEYS}
    check_equal(batch_tensors(items), theirs)


@pytest.mark.skipif(not BY_NAME["smolvlm"].runs_here, reason="SmolVLM's processor needs num2words")
def test_videos_whose_text_depends_on_the_rest_of_the_batch_are_refused(loaded: Any) -> None:
    """SmolVLM announces the number of frames after padding: that of the longest video in the batch."""
    video = MediaSource.of(frames_to_raw(clip(9, 32, 32), fps=4.0))
    with pytest.raises(MediaError, match="other text in place of '<video>'") as caught:
        loaded("smolvlm")["video"].process(video)
    assert caught.value.digest == video.digest


def test_an_image_is_processed_once(loaded: Any) -> None:
    processor = loaded("kimi-k2.5")["image"]
    picture = source(noise(33, 44))
    assert processor.process(picture) is processor.process(MediaSource.of(bytes(picture.data)))


def test_threads_get_what_one_thread_gets(directories: Any, loaded: Any) -> None:
    sizes = [(20 + 7 * index, 150 - 5 * index) for index in range(16)]
    alone = {size: loaded("pixtral")["image"].process(source(noise(*size))) for size in sizes}
    processor = load(directories("pixtral"))["image"]
    start = threading.Barrier(8)

    def work(order: int) -> list[tuple[tuple[int, int], MediaItem]]:
        start.wait()
        turned = sizes[order:] + sizes[:order]
        return [(size, processor.process(source(noise(*size)))) for size in turned]

    with ThreadPoolExecutor(8) as threads:
        for size, item in [pair for pairs in threads.map(work, range(8)) for pair in pairs]:
            assert item.expansion == alone[size].expansion
            assert {name: item[name].tobytes() for name in item} == {
                name: array.tobytes() for name, array in alone[size].items()
            }


# Fingerprints.


def changed(directory: Path, target: Path, change: Callable[[dict[str, Any]], None]) -> Path:
    """A copy of a processor directory whose processor_config.json was changed."""
    target.mkdir()
    for file in directory.iterdir():
        (target / file.name).write_bytes(file.read_bytes())
    config = json.loads((target / "processor_config.json").read_text())
    change(config)
    (target / "processor_config.json").write_text(json.dumps(config))
    return target


def test_a_fingerprint_tells_processors_apart_by_every_number_that_changes_pixels(
    directories: Any, loaded: Any, tmp_path: Path
) -> None:
    def other_mean(config: dict[str, Any]) -> None:
        config["image_processor"]["image_mean"][1] += 0.25

    def other_size(config: dict[str, Any]) -> None:
        config["image_processor"]["size"]["longest_edge"] = 512

    def other_tokens(config: dict[str, Any]) -> None:
        config["spatial_merge_size"] = 2

    def other_separator(config: dict[str, Any]) -> None:
        config["image_break_token"] = "[INST]"

    known = loaded("pixtral")["image"].fingerprint
    found = {known}
    for index, change in enumerate((other_mean, other_size, other_tokens, other_separator)):
        found.add(load(changed(directories("pixtral"), tmp_path / str(index), change))["image"].fingerprint)
    assert len(found) == 5
    assert len(known) == 16
    assert set(known) <= set("0123456789abcdef")
    assert load(changed(directories("pixtral"), tmp_path / "same", lambda _: None))["image"].fingerprint == known


def test_images_and_videos_are_fingerprinted_by_their_own_settings(
    directories: Any, loaded: Any, tmp_path: Path
) -> None:
    def other_frames(config: dict[str, Any]) -> None:
        config["video_processor"]["patch_size"] = 16

    other = load(changed(directories("kimi-k2.5"), tmp_path / "other", other_frames))
    known = loaded("kimi-k2.5")
    assert other["image"].fingerprint == known["image"].fingerprint != known["video"].fingerprint
    assert other["video"].fingerprint != known["video"].fingerprint


def test_a_fingerprint_is_the_same_in_another_process(directories: Any, loaded: Any) -> None:
    code = (
        "import sys\nfrom renderers import MediaPolicy, MediaStore\n"
        "assert not {'torch', 'transformers', 'PIL'} & sys.modules.keys()\n"
        "from renderers.vision.hf_processor import load_hf_processors\n"
        "print(load_hf_processors(sys.argv[1], policy=MediaPolicy(), store=MediaStore())['image'].fingerprint)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(directories("llava-next"))],
        env={**os.environ, "PYTHONHASHSEED": "7", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert run.stdout.strip() == loaded("llava-next")["image"].fingerprint


# What is refused.


@pytest.mark.parametrize(
    ("filename", "name"),
    [
        ("processor_config.json", "AutoProcessor"),
        ("preprocessor_config.json", "AutoImageProcessor"),
        ("tokenizer_config.json", "AutoTokenizer"),
        ("tokenizer_config.json", "planted.Planted"),
        ("config.json", "AutoProcessor"),
    ],
)
def test_code_of_a_directory_is_refused_and_not_run(
    directories: Any, tmp_path: Path, filename: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = changed(directories("pixtral"), tmp_path / "model", lambda config: None)
    witness = tmp_path / "was-run"
    (directory / "planted.py").write_text(f"open({str(witness)!r}, 'w')\nclass Planted: pass\n")
    path = directory / filename
    config = json.loads(path.read_text()) if path.is_file() else {}
    config["auto_map"] = {name: "planted.Planted"} if name.startswith("Auto") else ["planted.Planted", None]
    config.pop("processor_class", None)
    path.write_text(json.dumps(config))

    monkeypatch.setattr("builtins.input", lambda *_: "y")  # who is asked might say yes
    with pytest.raises(InvalidFileError, match=f"{filename}.*{name}.* is code of the repository.*-hf"):
        load(directory)
    assert not witness.exists()


def test_the_planted_code_would_run_if_it_were_trusted(
    directories: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transformers.dynamic_module_utils, "HF_MODULES_CACHE", str(tmp_path / "modules"))
    witness = tmp_path / "was-run"

    def plant(config: dict[str, Any]) -> None:
        del config["processor_class"]
        config["auto_map"] = {"AutoProcessor": "planted.Planted"}

    directory = changed(directories("pixtral"), tmp_path / "model", plant)
    (directory / "planted.py").write_text(f"open({str(witness)!r}, 'w')\nclass Planted: pass\n")
    with pytest.raises(AttributeError, match="register_for_auto_class"):
        AutoProcessor.from_pretrained(directory, trust_remote_code=True)
    assert witness.exists()


def test_loading_touches_no_network(directories: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    directory = directories("gemma4")

    def refuse(*arguments: Any, **_: Any) -> None:
        raise AssertionError(f"network: {arguments}")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    assert set(load(directory)) == {"image", "video"}


def test_an_audio_tokenizer_of_another_repository_is_refused(directories: Any, tmp_path: Path) -> None:
    def plant(config: dict[str, Any]) -> None:
        config["audio_tokenizer"] = {"audio_tokenizer_name_or_path": "someone/something"}

    with pytest.raises(InvalidFileError, match=r"processor_config\.json: audio_tokenizer names another model"):
        load(changed(directories("pixtral"), tmp_path / "model", plant))


@pytest.mark.parametrize("package", ["torch", "torchvision", "transformers"])
def test_a_missing_package_is_named_with_the_extra_that_installs_it(
    directories: Any, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(MissingExtraError, match=rf"{package}.*pip install 'mmrollouts\[processors\]'"):
        load(directories("pixtral"))


@pytest.mark.skipif(BY_NAME["smolvlm"].runs_here, reason="num2words is installed")
def test_a_processor_that_needs_a_package_of_its_own_says_so(tmp_path: Path, directories: Any) -> None:
    def plant(config: dict[str, Any]) -> None:
        config["processor_class"] = "SmolVLMProcessor"
        config["image_processor"]["image_processor_type"] = "SmolVLMImageProcessor"
        config["video_processor"]["video_processor_type"] = "SmolVLMVideoProcessor"

    with pytest.raises(MissingExtraError, match="num2words"):
        load(changed(directories("kimi-k2.5"), tmp_path / "model", plant))


def test_a_processor_file_that_is_no_json_is_named(directories: Any, tmp_path: Path) -> None:
    directory = changed(directories("pixtral"), tmp_path / "model", lambda config: None)
    (directory / "processor_config.json").write_text("{")
    with pytest.raises(InvalidFileError, match=r"processor_config\.json: not readable as JSON"):
        load(directory)


def test_a_processor_class_that_transformers_lacks_is_refused(directories: Any, tmp_path: Path) -> None:
    def plant(config: dict[str, Any]) -> None:
        config["processor_class"] = "NoSuchProcessor"

    with pytest.raises(LoadError, match=r"not a processor of text and images; its files name .*NoSuchProcessor"):
        load(changed(directories("pixtral"), tmp_path / "model", plant))


def test_a_processor_that_loads_as_a_tokenizer_only_is_refused(directories: Any, tmp_path: Path) -> None:
    directory = changed(directories("pixtral"), tmp_path / "model", lambda config: None)
    (directory / "processor_config.json").unlink()
    path = directory / "tokenizer_config.json"
    config = json.loads(path.read_text())
    del config["processor_class"]
    path.write_text(json.dumps(config))
    with pytest.raises(LoadError, match="name no processor_class"):
        load(directory)


def test_settings_that_the_processor_rejects_are_refused(directories: Any, tmp_path: Path) -> None:
    def plant(config: dict[str, Any]) -> None:
        config["image_processor"]["size"] = {"nonsense": 3}

    with pytest.raises(LoadError, match=r"cannot load the processor of .*model: .*nonsense"):
        load(changed(directories("pixtral"), tmp_path / "model", plant))


def test_a_tokenizer_that_cannot_be_read_is_refused(directories: Any, tmp_path: Path) -> None:
    directory = changed(directories("pixtral"), tmp_path / "model", lambda config: None)
    (directory / "tokenizer.json").write_text('{"added_tokens": [], "model": {"type": "nonsense"}}')
    with pytest.raises(LoadError, match="cannot load the processor"):
        load(directory)


def test_a_marker_that_is_no_control_token_is_refused(directories: Any, tmp_path: Path) -> None:
    def plant(config: dict[str, Any]) -> None:
        config["image_token"] = "[IMAGE]"

    with pytest.raises(MissingTokenError, match=r"\[IMAGE\].*PixtralProcessor"):
        load(changed(directories("pixtral"), tmp_path / "model", plant))


def test_a_model_that_looks_for_another_token_is_refused(directories: Any, own: Any, tmp_path: Path) -> None:
    directory = changed(directories("pixtral"), tmp_path / "model", lambda config: None)
    ids = own("pixtral").tokenizer.get_vocab()
    (directory / "config.json").write_text(json.dumps({"image_token_index": ids["[IMG]"]}))
    assert load(directory)["image"].embed_token == "[IMG]"
    (directory / "config.json").write_text(json.dumps({"image_token_index": ids["[IMG_END]"]}))
    with pytest.raises(LoadError, match=r"config\.json names \[IMG_END\]"):
        load(directory)


def test_images_that_the_processor_rejects_name_their_digest(directories: Any) -> None:
    # Longer than 200:1, which this policy allows and the processor does not.
    policy = MediaPolicy(max_aspect_ratio=1000)
    processor = load_hf_processors(directories("qwen2-vl"), policy=policy, store=MediaStore())["image"]
    picture = source(noise(601, 2))
    with pytest.raises(MediaError, match=f"{picture.digest[:12]}.*aspect ratio") as caught:
        processor.process(picture)
    assert caught.value.digest == picture.digest


def test_bytes_that_are_no_image_are_refused_before_the_processor_runs(loaded: Any) -> None:
    with pytest.raises(MediaDecodeError):
        loaded("pixtral")["image"].process(MediaSource.of(b"no image"))


# Planted faults: processors that cannot be run one image at a time.

Fault = Callable[[dict[str, Any], list[str]], None]


def batch_statistics(output: dict[str, Any], texts: list[str]) -> None:
    output["pixel_values"] = output["pixel_values"] - output["pixel_values"].mean()


def padding_in_front(output: dict[str, Any], texts: list[str]) -> None:
    output["pixel_values"] = output["pixel_values"].flip(-1)


def padding_to_a_multiple(output: dict[str, Any], texts: list[str]) -> None:
    if len(texts) > 1:
        output["pixel_values"] = torch.nn.functional.pad(output["pixel_values"], (0, 7))


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
        (padding_to_a_multiple, "pixel_values"),
        (rows_out_of_order, "image_sizes"),
        (tensors_of_the_text, "image_positions"),
        (numbers_in_the_batch, "image_numbers"),
        (another_type_together, "image_sizes"),
    ],
)
def test_tensors_that_depend_on_the_rest_of_the_batch_are_refused_by_name(fault: Fault, name: str, own: Any) -> None:
    with pytest.raises(LoadError, match=f"Faulty makes '{name}'.*depend on what else is in the batch"):
        probe_with(own, fault)


def test_tensors_that_only_batches_have_are_refused(own: Any) -> None:
    def fault(output: dict[str, Any], texts: list[str]) -> None:
        if len(texts) > 1:
            output["batch_mask"] = torch.ones(len(texts), 1)

    with pytest.raises(LoadError, match=r"pixel_values, image_sizes for one image and .*batch_mask for several"):
        probe_with(own, fault)


def test_a_value_that_is_no_tensor_is_refused_by_name(own: Any) -> None:
    def fault(output: dict[str, Any], texts: list[str]) -> None:
        output["names"] = ["a"] * len(texts)

    with pytest.raises(LoadError, match="names is a list, not a tensor"):
        probe_with(own, fault)


def test_a_processor_that_does_not_report_its_replacement_is_refused(own: Any) -> None:
    def fault(output: dict[str, Any], texts: list[str]) -> None:
        del output["text_replacement_offsets"]

    with pytest.raises(LoadError, match="does not report the replacement of"):
        probe_with(own, fault)


def test_a_tensor_that_all_images_share_is_held_once(own: Any) -> None:
    def fault(output: dict[str, Any], texts: list[str]) -> None:
        output["patch_size"] = torch.tensor(16)
        output["means"] = torch.tensor([0.25, 0.5])

    fields = probe_with(own, fault)
    assert fields["patch_size"].kind == fields["means"].kind == "shared"


def probe_with(own: Callable[[str], Any], fault: Fault) -> Mapping[str, TensorField]:
    """Probe Pixtral's processor with a fault planted in what it returns."""

    class Faulty(transformers.PixtralProcessor):
        def __call__(self, images: Any = None, text: Any = None, **options: Any) -> Any:
            output = super().__call__(images=images, text=text, **options)
            fault(output.data, text)
            return output

    real = own("pixtral")
    faulty = Faulty(real.image_processor, real.tokenizer, patch_size=16)
    return probe(ProcessorRunner(faulty, "image", "[IMG]", threading.Lock()), min_frames=1, embed_tokens=()).fields


def test_more_rows_than_any_probe_had_are_refused(directories: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gemma 3 makes one row an image; what several would become in a batch was never seen."""
    processor = load(directories("gemma3"))["image"]
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
    with pytest.raises(MediaError, match="3 rows of 'pixel_values' here where it made one"):
        processor.process(source(noise(200, 100)))
