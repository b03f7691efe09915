"""Which way media travel: every kind of item, layout, server and mode, and what an error advises."""

import dataclasses
import io
import itertools
import re

import engine_inputs
import images
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from renderers import MediaItem, MediaSource, MultiModalData, PlaceholderRange
from renderers.media.decoding import array_to_raw, frames_to_raw
from renderers.media.item import ExpansionPiece, PixelScale, TensorField
from renderers.media.policy import MediaPolicy
from renderers.media.video_decoding import decode_video
from renderers.vision.patches import ScaledPixels, normalise
from rollouts import GenerateRequest, SamplingParams
from rollouts.engines.http.source_files import encode_avi
from rollouts.engines.vllm.dense_items import dense_items
from rollouts.engines.vllm.feature_decoding import decode_item
from rollouts.engines.vllm.feature_encoding import encode_features
from rollouts.engines.vllm.media_mode import content_objections, features_objections
from rollouts.engines.vllm.media_payload import ContentPartsPayload, FeaturesPayload, media_payload
from rollouts.engines.vllm.request_checks import check_request
from rollouts.errors import CapabilityError, InvalidRequestError, MalformedResultError

MARKER, EMBED, VIDEO_MARKER, TEXT = 301, 302, 303, 7
SCALE = PixelScale(fused=True)
GRID_FIELDS = {"pixel_values": "flat", "image_grid_thw": "batched"}
SERVER = dataclasses.replace(
    engine_inputs.SERVER,
    max_model_len=500,
    placeholder_ids={"image": EMBED},
    patch_values=24,
    image_fields=GRID_FIELDS,
)
#: Servers as they are met: by pixels, by what they tell, by what they take.
SERVERS = {
    "normalises": SERVER,
    "wants floats": dataclasses.replace(SERVER, pixel_dtype="bfloat16"),
    "tells no token": dataclasses.replace(SERVER, placeholder_ids={}),
    "tells nothing": dataclasses.replace(
        SERVER, placeholder_ids={}, merge_area=None, patch_values=None, image_fields=None
    ),
    "counts rows": dataclasses.replace(
        SERVER,
        pixel_dtype="float32",
        placeholder_ids={},
        merge_area=None,
        patch_values=None,
        image_fields={"pixel_values": "flat", "num_patches": "batched"},
    ),
    "text only": dataclasses.replace(SERVER, pixel_dtype=None, placeholder_ids={}, image_fields=None),
    "rust frontend": dataclasses.replace(
        SERVER,
        pixel_dtype=None,
        placeholder_ids={},
        merge_area=None,
        patch_values=None,
        image_fields=None,
        rust_frontend="0.33.0",
    ),
}
MODES = ("features", "content_parts", "auto")


def gif():
    file = io.BytesIO()
    frames = [Image.new("RGB", (4, 4), colour) for colour in ("red", "blue")]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return file.getvalue()


def frames(count, fps=4.0):
    pixels = np.random.default_rng(count).integers(0, 256, (count, 9, 13, 3), dtype=np.uint8)
    return frames_to_raw(pixels, fps)


SOURCES = {
    "image": {
        "file": images.png("black", (4, 4)),
        "array": array_to_raw(np.zeros((3, 3, 3), np.uint8)),
        "no file": b"?",
    },
    "video": {"file": gif(), "frames": frames(4), "one frame": frames(1), "no file": b"?"},
}
#: Tokens and runs of features of a placeholder for `steps` steps of 2 tokens, and the pieces that the marker becomes.
LAYOUTS = ("marker repeated", "one run", "a run for each step", "merged edges", "runs of other lengths")
PIXELS = ("uint8", "floats", "floats of uint8", "a row of a batch")


def layout(name, steps, modality):
    """(ids, range, expansion) of an item of `steps` steps of 2 features, from token 1 on."""
    marker = MARKER if modality == "image" else VIDEO_MARKER
    total = 2 * steps
    if name == "marker repeated":
        embed = EMBED if modality == "image" else VIDEO_MARKER
        return [embed] * total, PlaceholderRange(1, total), None
    pieces = (ExpansionPiece("<embed>", total, True),)
    if name in ("one run", "merged edges"):
        where = PlaceholderRange(1, total + 2, ((1, total + 1),), whole=name == "one run")
        return [marker, *[EMBED] * total, TEXT], where, pieces
    lengths = [2] * steps if name == "a run for each step" else [1, total - 1]
    ids, runs = [], []
    for length in lengths:
        ids.append(TEXT)
        runs.append((len(ids), len(ids) + length))
        ids += [EMBED] * length
    return [*ids, TEXT], PlaceholderRange(1, len(ids) + 1, tuple(runs)), pieces


def item_of(modality, source, pixels, steps, expansion):
    """`steps` temporal steps of 8 patches of 24 values, 4 patches a token."""
    suffix = "" if modality == "image" else "_videos"
    patches = np.random.default_rng(steps).integers(0, 256, (8 * steps, 24), dtype=np.uint8)
    scale = None
    if pixels == "uint8":
        tensor, scale = patches, SCALE
    elif pixels == "floats":
        tensor = normalise(patches, SCALE)
    elif pixels == "floats of uint8":
        tensor = ScaledPixels(patches, SCALE)
    else:
        tensor = np.zeros((3, 4, 4), np.float32)
    tensors = {f"pixel_values{suffix}": tensor}
    kinds = {f"pixel_values{suffix}": TensorField("batched" if pixels == "a row of a batch" else "flat")}
    if pixels != "a row of a batch":
        tensors[f"{modality}_grid_thw"] = np.array([steps, 4, 2] if modality == "video" else [1, 4, 2 * steps])
        kinds[f"{modality}_grid_thw"] = TensorField("batched")
    medium = MediaSource.of(source)
    return MediaItem(modality, f"{medium.digest}-x", medium, tensors, 2 * steps, scale, kinds, expansion)


def request_of(*, modality="image", source="file", pixels="uint8", name="marker repeated", steps=2, markers=True):
    if modality == "image":
        steps = 2
    ids, where, expansion = layout(name, steps, modality)
    item = item_of(modality, SOURCES[modality][source], pixels, steps, expansion)
    marker = ids[0] if name == "marker repeated" else (MARKER if modality == "image" else VIDEO_MARKER)
    return GenerateRequest(
        [TEXT, *ids, TEXT],
        SamplingParams(),
        MultiModalData.from_items([(item, where)]),
        placeholder_token_ids={modality: marker} if markers else {},
    )


CASES = [
    {"modality": modality, "source": source, "pixels": pixels, "name": name, "markers": markers}
    for modality in SOURCES
    for source in SOURCES[modality]
    for pixels, name, markers in itertools.product(PIXELS, LAYOUTS, (True, False))
]


def attempt(request, mode, server):
    """None where the mode takes the request, else the error."""
    try:
        check_request(request, server)
        media_payload(request, mode, server)
    except (CapabilityError, InvalidRequestError) as error:
        return error
    return None


@pytest.mark.parametrize("server", SERVERS)
def test_a_recommended_mode_works_and_auto_finds_every_working_mode(server):
    advised = 0
    for case in CASES:
        request = request_of(**case)
        errors = {mode: attempt(request, mode, SERVERS[server]) for mode in MODES}
        for mode, error in errors.items():
            for other in re.findall(r'media="(\w+)"', str(error or "")):
                advised += 1
                assert errors[other] is None, (case, mode, other, str(error))
                assert errors["auto"] is None, (case, mode)
        one_works = errors["features"] is None or errors["content_parts"] is None
        assert (errors["auto"] is None) == one_works, (case, str(errors["auto"]))
        if not one_works:
            assert "neither mode works" in str(errors["auto"]), (case, str(errors["auto"]))
            assert str(errors["features"]).partition(":")[2] == str(errors["auto"]).partition(":")[2]
    assert advised or server == "text only"


@given(st.sampled_from(CASES), st.sampled_from(CASES), st.sampled_from(sorted(SERVERS)))
def test_two_items_of_a_request_travel_one_way_or_the_error_names_both(first, second, server):
    one, two = request_of(**first), request_of(**second)
    ours, theirs = one.multi_modal_data.items_with_ranges(), two.multi_modal_data.items_with_ranges()
    if ours[0][0].mm_hash == theirs[0][0].mm_hash:
        return
    media = MultiModalData.from_items([*ours, (theirs[0][0], theirs[0][1].shifted(len(one.prompt_ids)))])
    both = GenerateRequest(
        [*one.prompt_ids, *two.prompt_ids],
        SamplingParams(),
        media,
        placeholder_token_ids={**two.placeholder_token_ids, **one.placeholder_token_ids},
    )
    error = attempt(both, "auto", SERVERS[server])
    ways = (features_objections, content_objections)
    objections = [way(both, SERVERS[server]) for way in ways]
    if error is None:
        assert not all(objections)
    elif all(objections) and "neither mode works" in str(error):
        for found in objections:
            assert str(found[0].item.mm_hash[:12]) in str(error)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("source", ["file", "frames", "one frame", "no file"])
@pytest.mark.parametrize("pixels", ["uint8", "floats of uint8"])
def test_each_step_of_a_video_with_time_stamps_travels_as_an_image_with_its_own_patches(source, pixels, count):
    """A video of one step too: described as a video by its run alone it takes the server down."""
    request = request_of(modality="video", source=source, pixels=pixels, name="a run for each step", steps=count)
    for wanted in ("uint8", "float32"):
        server = dataclasses.replace(SERVER, pixel_dtype=wanted)
        form = media_payload(request, "auto", server)
        assert isinstance(form, FeaturesPayload)
        ((item, where),) = request.multi_modal_data.items_with_ranges()
        steps = dense_items(item, where, server)
        assert [(place.offset, place.length) for _, place in steps] == [(2, 2), (5, 2), (8, 2)][:count]
        assert {sent.modality for sent, _ in steps} == {"image"}
        assert len(form.names) == count
        segments = encode_features(MultiModalData.from_items(steps), pixel_dtype=wanted)
        encoded = re.findall(rb'"([A-Za-z0-9+/=]{200,})"', b"".join(segments))
        rows = [decode_item(each)["pixel_values"].tensor for each in encoded]
        held = [row if isinstance(row, np.ndarray) else row.unpack() for row in rows]
        patches = np.random.default_rng(count).integers(0, 256, (8 * count, 24), dtype=np.uint8)
        expected = patches if wanted == "uint8" else normalise(patches, SCALE)
        assert np.array_equal(np.concatenate(held), expected)
        assert all(sent["image_grid_thw"].tolist() == [1, 4, 2] for sent, _ in steps)


@pytest.mark.parametrize("modality", ["image", "video"])
def test_a_marker_that_was_sampled_before_an_item_is_not_sent_as_a_source_file_in_whose_place_it_would_be(modality):
    marker = MARKER if modality == "image" else VIDEO_MARKER
    request = request_of(modality=modality, name="one run")
    ((item, where),) = request.multi_modal_data.items_with_ranges()
    before = dataclasses.replace(
        request,
        prompt_ids=[TEXT, marker, *request.prompt_ids],
        multi_modal_data=MultiModalData.from_items([(item, where.shifted(2))]),
        sampled=[(1, 2)],
    )
    after = dataclasses.replace(
        request,
        prompt_ids=[*request.prompt_ids, marker],
        sampled=[(len(request.prompt_ids), len(request.prompt_ids) + 1)],
    )
    assert "token 1 of the prompt is" in str(attempt(before, "content_parts", SERVER))
    assert attempt(after, "content_parts", SERVER) is None
    if modality == "image":
        assert attempt(before, "auto", SERVER) is None  # as features


def test_a_video_is_not_sent_to_the_rust_frontend_which_decodes_it_with_another_decoder():
    video = request_of(modality="video", source="frames", name="one run")
    assert "VLLM_USE_RUST_FRONTEND=0" in str(attempt(video, "auto", SERVERS["rust frontend"]))
    assert attempt(video, "auto", SERVER) is None


# Frames as a file.


@given(
    st.integers(2, 5),
    st.integers(1, 40),
    st.integers(1, 40),
    st.sampled_from([None, 0.5, 1.0, 2.5, 4.0, 24.0, 29.97, 30000 / 1001]),
)
def test_frames_come_out_of_their_file_bit_for_bit_and_at_their_speed(count, height, width, fps):
    pixels = np.random.default_rng(count * height).integers(0, 256, (count, height, width, 3), dtype=np.uint8)
    data = encode_avi(MediaSource.of(frames_to_raw(pixels, fps)))
    decoded, speed = decode_video(MediaSource.of(data), MediaPolicy())
    assert np.array_equal(decoded, pixels)
    assert speed == pytest.approx(fps or 24.0, rel=1e-9)


# What the server made of source files.


class Answered:
    """The part of a generation that a payload checks."""

    def __init__(self, prompt_ids, placeholders):
        self._made = list(prompt_ids), placeholders

    def prompt_expansion(self):
        return self._made


@pytest.mark.parametrize("around", [(0, 0), (1, 1), (0, 2)])
def test_a_server_may_count_tokens_around_the_features_into_its_range(around):
    """GLM-4V: vLLM's range of a video begins one token before the renderer's and ends one after it."""
    request = request_of(name="one run")
    (where,) = request.multi_modal_data.mm_placeholders["image"]
    (start, end), (before, after) = where.runs[0], around
    made = Answered(request.prompt_ids, {"image": [(start - before, end - start + before + after)]})
    ContentPartsPayload(request).check(made)


@pytest.mark.parametrize(
    "fault", ["another token", "shifted", "too short", "another modality", "one too many", "none at all"]
)
def test_an_expansion_that_differs_is_refused(fault):
    request = request_of(name="one run")
    (where,) = request.multi_modal_data.mm_placeholders["image"]
    start, end = where.runs[0]
    ids, ranges = list(request.prompt_ids), {"image": [(start, end - start)]}
    if fault == "another token":
        ids[0] += 1
    ranges = {
        "shifted": {"image": [(start + 1, end - start)]},
        "too short": {"image": [(start, end - start - 1)]},
        "another modality": {"video": ranges["image"]},
        "one too many": {"image": [*ranges["image"], (end, 1)]},
        "none at all": {},
    }.get(fault, ranges)
    form = media_payload(request, "content_parts", SERVER)
    with pytest.raises(MalformedResultError, match="Load the renderer from the directory that the server serves"):
        form.check(Answered(ids, ranges))
