"""Episodes and samples for another process: what travels in each form, and what the receiver makes of it."""

import copy
import pickle
from pathlib import Path
from typing import Any

import images
import numpy as np
import pytest

from renderers import MediaItem, MediaSource, Message, PlaceholderRange, TemplateRenderer, load_renderer
from renderers.media.item import TensorField
from renderers.vision.patches import normalised
from rollouts import MediaReference, TokenNode, Trajectory, Turn
from rollouts.engines.protocol import FinishReason
from rollouts.errors import ArgumentError, PixelMismatchError, RolloutsError
from rollouts.training import samples_from_trajectory
from rollouts.trajectory.packed_episodes import AbsentSource, PackedEpisodes, PixelForm, pack_episodes
from transport import RecordReader, RecordWriter, decode, decode_frames, encode, encode_frames

ARRAYS: list[PixelForm] = ["uint8", "float32"]


def png(seed: int) -> bytes:
    return images.png(np.random.default_rng(seed).integers(0, 256, (72, 100, 3), dtype=np.uint8))


def make_episode(renderer: TemplateRenderer, *seeds: int) -> Trajectory:
    """One image a prompt node."""
    nodes: list[TokenNode] = []
    turns: list[Turn] = []
    for seed in seeds:
        source = MediaSource.of(png(seed))
        item = renderer.processors["image"].process(source)
        count = item.num_tokens + 2
        asked: Message = {"role": "user", "content": [{"type": "image", "image": source}]}
        nodes.append(
            TokenNode(
                len(nodes) - 1,
                np.arange(count, dtype=np.int32),
                np.zeros(count, bool),
                np.empty(0, np.float32),
                media=(MediaReference("image", item.mm_hash, source, PlaceholderRange(1, item.num_tokens)),),
                messages=(asked,),
            )
        )
        nodes.append(
            TokenNode(len(nodes) - 1, np.array([5, 6], np.int32), np.ones(2, bool), np.array([-1, -2], np.float32))
        )
        turns.append(Turn(len(nodes) - 1, FinishReason.STOP, {"role": "assistant", "content": "x"}, 1.0))
    return Trajectory("e", nodes=nodes, turns=turns)


@pytest.fixture
def episode(renderer: TemplateRenderer) -> Trajectory:
    return make_episode(renderer, 1, 2)


def other_renderer(directory: Path, tiny_model_dir: Path) -> TemplateRenderer:
    """The same model with another pixel limit: another fingerprint."""
    import json
    import shutil

    shutil.copytree(tiny_model_dir, directory)
    path = directory / "preprocessor_config.json"
    config = json.loads(path.read_text())
    config["image_std"] = [0.25, 0.5, 0.5]
    path.write_text(json.dumps(config))
    return load_renderer(directory)


def sources_in(frames: list[Any]) -> int:
    """How many of the images' files are somewhere in a message."""
    data = b"".join(map(bytes, frames))
    return sum(png(seed) in data for seed in (1, 2))


def test_a_receiver_with_another_processor_is_told_both_fingerprints(
    episode: Trajectory, renderer: TemplateRenderer, tiny_model_dir: Path, tmp_path: Path
) -> None:
    other = other_renderer(tmp_path / "model", tiny_model_dir)
    packed = decode(encode(pack_episodes([episode])))
    with pytest.raises(PixelMismatchError) as caught:
        packed.processors(other.processors)
    ours, theirs = (one.processors["image"].fingerprint for one in (renderer, other))
    assert ours != theirs
    assert ours in str(caught.value)
    assert theirs in str(caught.value)


@pytest.mark.parametrize("form", ARRAYS)
def test_pixels_travel_without_their_sources_and_train_without_a_processor(
    episode: Trajectory, renderer: TemplateRenderer, form: Any
) -> None:
    before = encode(episode)
    frames = encode_frames(pack_episodes([episode], pixels=form, processors=renderer.processors))
    assert sources_in(frames) == 0
    assert encode(episode) == before, "the episode was changed"
    packed = decode_frames(frames)
    (sample,) = samples_from_trajectory(packed.episodes[0], advantage=1.0, processors=packed.processors())
    (expected,) = samples_from_trajectory(episode, advantage=1.0, processors=renderer.processors)
    floats, exact = (
        np.concatenate([normalised(item, "pixel_values") for item, _ in one.media]) for one in (sample, expected)
    )
    assert floats.dtype == np.float32
    np.testing.assert_array_equal(floats, exact)
    for (item, where), (original, original_where) in zip(sample.media, expected.media, strict=True):
        assert (item.mm_hash, item.num_tokens, item.fields) == (
            original.mm_hash,
            original.num_tokens,
            original.fields,
        )
        assert where == original_where
        np.testing.assert_array_equal(item["image_grid_thw"], original["image_grid_thw"])


def test_a_source_by_name_only_says_so_and_survives_copies_pickle_and_files(tmp_path: Path) -> None:
    absent = AbsentSource(MediaSource.of(b"x").digest)
    for other in (copy.copy(absent), copy.deepcopy(absent), pickle.loads(pickle.dumps(absent))):
        assert other == absent
    with RecordWriter(tmp_path / "f.mmr") as out:
        out.append(absent)
    with RecordReader(tmp_path / "f.mmr") as reader:
        assert reader[0] == absent
    with pytest.raises(RolloutsError, match=absent.digest):
        _ = absent.data
    with pytest.raises(RolloutsError, match="were not sent"):
        absent.verify()


FLOAT_FIELDS = {"sizes": TensorField("batched", 0.0)}


class FloatProcessor:
    """As a model's own processor is: floats, no scale."""

    modality = "image"
    fingerprint = "f"

    def __init__(self, pixels: np.ndarray) -> None:
        self.pixels = pixels

    def mm_hash(self, source: MediaSource) -> str:
        return f"{source.digest}-f"

    def process(self, source: MediaSource) -> MediaItem:
        tensors = {"pixel_values": self.pixels, "sizes": np.array([3, 4])}
        return MediaItem(
            "image", self.mm_hash(source), source, tensors, 1, None, {"sizes": TensorField("batched", 0.0)}
        )


def test_floats_of_a_models_own_processor_travel_as_they_are() -> None:
    pixels = np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 0.1], np.float32)
    processors: Any = {"image": FloatProcessor(pixels)}
    source = MediaSource.of(b"image")
    media = (MediaReference("image", f"{source.digest}-f", source, PlaceholderRange(0, 1)),)
    episode = Trajectory(
        "t", nodes=[TokenNode(-1, np.array([1], np.int32), np.zeros(1, bool), np.empty(0, np.float32), media=media)]
    )
    packed = decode(encode(pack_episodes([episode], pixels="float32", processors=processors)))
    item = media[0].derive(packed.processors())
    assert item.fields == FLOAT_FIELDS
    assert item["pixel_values"].tobytes() == pixels.tobytes()
    with pytest.raises(RolloutsError, match="floats"):
        pack_episodes([episode], pixels="uint8", processors=processors)


def test_what_is_no_form_and_what_lacks_processors_is_refused(episode: Trajectory) -> None:
    with pytest.raises(ArgumentError, match="pass one of"):
        pack_episodes([episode], pixels="jpeg")  # type: ignore[arg-type]
    with pytest.raises(RolloutsError, match="no processor for images"):
        pack_episodes([episode], pixels="uint8")
    with pytest.raises(RolloutsError, match="no processor for images"):
        pack_episodes([episode]).processors()


def test_pixels_that_did_not_come_are_named(episode: Trajectory, renderer: TemplateRenderer) -> None:
    packed = pack_episodes([episode], pixels="uint8", processors=renderer.processors)
    lacking = PackedEpisodes(packed.pixels, packed.episodes, dict(list(packed.items.items())[:1]))
    with pytest.raises(RolloutsError, match="were not sent"):
        lacking.processors()


def test_pixels_under_another_images_name_are_refused(episode: Trajectory, renderer: TemplateRenderer) -> None:
    packed = pack_episodes([episode], pixels="uint8", processors=renderer.processors)
    first, second = packed.items
    for hostile in (packed.items[second], MediaSource.of(encode({"pixel_values": 5}))):
        mixed = PackedEpisodes(packed.pixels, packed.episodes, {**packed.items, first: hostile})
        reference = next(iter(episode.all_media()))
        assert reference.mm_hash == first
        with pytest.raises(RolloutsError, match=reference.source.digest):
            reference.derive(mixed.processors())
