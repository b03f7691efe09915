"""What is refused before it is sent: requests that take a server down, and those that it answers with garbage."""

from __future__ import annotations

import math
import time
from dataclasses import replace

import numpy as np
import pytest
from engine_inputs import PAD, SERVER
from hypothesis import given
from hypothesis import strategies as st

from renderers import MediaItem, MediaSource, MultiModalData, PlaceholderRange
from renderers.media.item import PixelScale, TensorField
from renderers.vision.patches import StillPatches
from rollouts import GenerateRequest, SamplingParams
from rollouts.engines.vllm.features import ServerTensor
from rollouts.engines.vllm.request_checks import check_request
from rollouts.errors import CapabilityError, InvalidRequestError, OverlongPromptError

VIDEO_PAD, VOCABULARY = 398, 448
QWEN = {"pixel_values": TensorField("flat"), "image_grid_thw": TensorField("batched")}


def image(rows=4, columns=6, name="first", **changes):
    packed = np.zeros((rows * columns, 3, 256), np.uint8)
    tensors = {"pixel_values": StillPatches(packed, 2), "image_grid_thw": np.array([1, rows, columns])}
    item = MediaItem(
        "image", name, MediaSource.of(name.encode()), tensors, rows * columns // 4, PixelScale(fused=True), QWEN
    )
    return replace(item, **changes)


def with_tensors(**tensors):
    item = image()
    return replace(item, tensors={**item.tensors, **tensors})


def without(name):
    item = image()
    return replace(item, tensors={key: tensor for key, tensor in item.tensors.items() if key != name})


def request(ids=(1, 2, 3), media=None, *, sampling=None, **more):
    return GenerateRequest(list(ids), sampling or SamplingParams(), media, **more)


def shown(item=None, *, offset=3, length=6, ids=None, **more):
    """A prompt of 12 tokens with an image of 6 at 3."""
    ids = [1, 2, 3, *[PAD] * 6, 4, 5, 6] if ids is None else ids
    media = MultiModalData.from_items([(image() if item is None else item, PlaceholderRange(offset, length))])
    return request(ids, media, **more)


def check(request, server=SERVER, vocab_size=VOCABULARY, **more):
    check_request(request, server, vocab_size=vocab_size, **more)


def refused(request, *words, kind=InvalidRequestError, **more):
    with pytest.raises(kind) as refusal:
        check(request, **more)
    assert refusal.value.request_id == request.request_id
    for word in words:
        assert str(word) in str(refusal.value)


# What passes.


def test_a_prompt_of_text_and_one_with_an_image_pass():
    check(request())
    check(shown())
    check(shown(), server=replace(SERVER, pixel_dtype="bfloat16"))
    check(replace(request(), prompt_ids=np.arange(5, dtype=np.int32)))
    check(replace(request(), prompt_ids=(1, 2)))
    check(request(range(99)))


def test_a_server_without_media_takes_text():
    check(request(), server=replace(SERVER, pixel_dtype=None, placeholder_ids={}, merge_area=None))


def test_two_images_side_by_side_and_one_shown_twice_pass():
    first, second = image(), image(2, 2, "second")
    media = MultiModalData.from_items(
        [(first, PlaceholderRange(1, 6)), (second, PlaceholderRange(7, 1)), (first, PlaceholderRange(9, 6))]
    )
    check(request([1, *[PAD] * 7, 2, *[PAD] * 6], media))


# Token ids.


def test_an_empty_prompt_is_refused():
    refused(request([]), "empty")
    refused(replace(request(), prompt_ids=np.array([], dtype=np.int64)), "empty")


@pytest.mark.parametrize(
    ("ids", "words"),
    [
        ([1, 448, 2], ["token 1", 448]),
        ([1, 2, 999999], ["token 2", 999999]),
        ([-1, 2], ["token 0", -1]),
    ],
)
def test_ids_that_are_no_tokens_are_refused_with_their_place(ids, words):
    refused(request(ids), *words)


def test_without_a_vocabulary_size_negative_ids_are_refused_all_the_same():
    check(request([10**6]), vocab_size=None)
    refused(request([-1]), -1, vocab_size=None)


def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers():
    for length in (100, 101, 5000):
        with pytest.raises(OverlongPromptError) as refusal:
            check(request([1] * length))
        assert (refusal.value.prompt_tokens, refusal.value.limit) == (length, 100)


# Where media are: every one of these a server answers with garbage, or dies of.


def test_a_placeholder_one_token_short_is_refused():
    refused(shown(length=5), "6 tokens")


def test_a_placeholder_one_token_long_is_refused_though_a_pad_stands_there():
    refused(shown(length=7, ids=[1, 2, 3, *[PAD] * 7, 4, 5]), "6 tokens")


def test_a_placeholder_one_token_off_is_refused():
    refused(shown(offset=4), "token 9", 4, PAD)
    refused(shown(offset=2), "token 2", 3, PAD)


def test_a_placeholder_past_the_end_or_before_the_start_is_refused():
    refused(shown(offset=7), "outside of the 12 tokens")
    refused(shown(offset=-1), "outside of the 12 tokens")


def test_placeholders_that_overlap_are_refused():
    media = MultiModalData.from_items(
        [(image(), PlaceholderRange(1, 6)), (image(name="second"), PlaceholderRange(5, 6))]
    )
    refused(request([1, *[PAD] * 10], media), "before the end of the previous one at 7")


def test_placeholders_out_of_order_are_refused():
    media = MultiModalData.from_items(
        [(image(), PlaceholderRange(8, 6)), (image(name="second"), PlaceholderRange(1, 6))]
    )
    refused(request([1, *[PAD] * 6, 2, *[PAD] * 6], media), "prompt order")


@pytest.mark.parametrize(
    "where", [PlaceholderRange(3.0, 6), PlaceholderRange(3, np.int64(6)), PlaceholderRange(True, 6)]
)
def test_placeholders_that_are_not_two_ints_are_refused(where):
    refused(request([1, 2, 3, *[PAD] * 6], MultiModalData.from_items([(image(), where)])), "two ints")


def test_an_item_without_tokens_is_refused():
    item = image(num_tokens=0)
    refused(request([1], MultiModalData.from_items([(item, PlaceholderRange(1, 0))])), "0 tokens")


def test_pads_without_an_image_are_refused():
    refused(request([1, PAD, 2]), "token 1", PAD, "no placeholder")
    refused(shown(ids=[1, 2, 3, *[PAD] * 7, 4, 5]), "token 9", "multi_modal_data")


def test_a_pad_that_was_sampled_is_text():
    check(request([1, PAD, 2], sampled=[(1, 2)]))
    check(shown(ids=[PAD, 2, 3, *[PAD] * 6, 4, 5, PAD], sampled=[(0, 2), (10, 12)]))
    refused(request([1, PAD, 2, PAD], sampled=[(1, 3)]), "token 3")


def test_a_marker_that_was_never_expanded_is_refused():
    refused(request([1, VIDEO_PAD], placeholder_token_ids={"video": VIDEO_PAD}), "token 1", "video")


@pytest.mark.parametrize("sampled", [(-1, 2), (2, 1), (1, 4)])
def test_sampled_runs_outside_of_the_prompt_are_refused(sampled):
    refused(request([1, PAD, 2], sampled=[sampled]), "sampled")


# Lists and names.


def test_lists_of_media_that_do_not_agree_are_refused():
    item, where = image(), PlaceholderRange(3, 6)
    ids = [1, 2, 3, *[PAD] * 6]
    for media, word in [
        (MultiModalData({"image": ["first"]}, {}, {"image": [item]}), "different modalities"),
        (MultiModalData({}, {"image": [where]}, {"image": [item]}), "different modalities"),
        (MultiModalData({"image": ["first", "x"]}, {"image": [where]}, {"image": [item]}), "2 hashes"),
        (MultiModalData({"image": ["first"]}, {"image": [where] * 2}, {"image": [item]}), "2 placeholders"),
        (MultiModalData({"image": ["first"]}, {"image": [where]}, {"image": []}), "0 images"),
        (MultiModalData({"image": ["second"]}, {"image": [where]}, {"image": [item]}), "'second'"),
        (MultiModalData({"video": ["first"]}, {"video": [where]}, {"video": [item]}), "is image"),
    ]:
        refused(request(ids, media), word)


def test_an_item_without_a_hash_is_refused():
    refused(shown(image(name="")), "mm_hash")


def test_one_hash_for_two_images_is_refused():
    """The server would answer from the first."""
    other = replace(image(), source=MediaSource.of(b"another"))
    media = MultiModalData.from_items([(image(), PlaceholderRange(0, 6)), (other, PlaceholderRange(6, 6))])
    refused(request([PAD] * 12, media), "two different media")


def test_one_hash_for_two_sizes_of_an_image_is_refused():
    other = replace(image(2, 2), source=image().source)
    media = MultiModalData.from_items([(image(), PlaceholderRange(0, 6)), (other, PlaceholderRange(6, 1))])
    refused(request([PAD] * 7, media), "two different media")


# What media hold.


def test_more_or_fewer_rows_than_the_grid_says_are_refused():
    for rows in (20, 23, 25, 0):
        refused(shown(with_tensors(pixel_values=np.zeros((rows, 1536), np.uint8))), f"({rows}, 1536)", "24 rows")


def test_pixels_that_are_no_rows_are_refused():
    refused(shown(with_tensors(pixel_values=np.zeros((24, 3, 512), np.uint8))), "(24, 3, 512)")


@pytest.mark.parametrize("grid", [[4, 6], [[1, 4, 6]], [1, 4, -6], [0, 4, 6], [1.0, 4.0, 6.0]])
def test_grids_that_are_not_three_counts_are_refused(grid):
    refused(shown(with_tensors(image_grid_thw=np.array(grid))), "three patch counts")


def test_a_grid_too_large_for_64_bits_does_not_wrap_around_to_the_right_number():
    refused(shown(with_tensors(image_grid_thw=np.array([2**32, 2**32, 24]))), "rows")


def test_a_grid_that_means_another_number_of_tokens_is_refused():
    packed = StillPatches(np.zeros((20, 3, 256), np.uint8), 2)
    item = with_tensors(image_grid_thw=np.array([1, 4, 5]), pixel_values=packed)
    refused(shown(item), "6 tokens for 20 patches")


def test_missing_tensors_are_refused():
    refused(shown(without("pixel_values")), "no pixel_values")
    refused(shown(without("image_grid_thw")), "no image_grid_thw")
    refused(shown(image(tensors={})), "no tensors")


def test_a_tensor_without_a_field_and_one_of_an_unknown_type_are_refused():
    refused(shown(with_tensors(more=np.zeros(3))), "fields")
    item = with_tensors(image_grid_thw=np.array(["a", "b", "c"]))
    refused(shown(item), "image_grid_thw", "str")


def test_floats_for_a_server_that_normalises_itself_are_refused():
    """It would normalise them again: HTTP 200, and every image looks the same."""
    item = replace(with_tensors(pixel_values=np.zeros((24, 1536), np.float32)), scale=None)
    refused(shown(item), "float32", "wants uint8", kind=CapabilityError)
    check(shown(item), server=replace(SERVER, pixel_dtype="float32"))
    check(shown(item), server=replace(SERVER, pixel_dtype="bfloat16"))


def test_raw_pixels_without_a_scale_are_refused_by_a_server_that_wants_floats():
    item = image(scale=None)
    check(shown(item))
    refused(
        shown(item), "uint8", "wants bfloat16", server=replace(SERVER, pixel_dtype="bfloat16"), kind=CapabilityError
    )


def test_tensors_of_a_server_are_refused_by_one_that_wants_another_type():
    raw = np.zeros(24 * 1536 * 2, np.uint8)
    item = replace(with_tensors(pixel_values=ServerTensor("bfloat16", (24, 1536), raw)), scale=None)
    check(shown(item), server=replace(SERVER, pixel_dtype="bfloat16"))
    for wanted in ("uint8", "float32"):
        refused(shown(item), "bfloat16", wanted, server=replace(SERVER, pixel_dtype=wanted), kind=CapabilityError)


def test_a_modality_that_the_server_does_not_take_is_refused():
    refused(
        shown(), "takes no media", server=replace(SERVER, pixel_dtype=None, placeholder_ids={}), kind=CapabilityError
    )
    video = replace(
        image(),
        modality="video",
        tensors={"pixel_values_videos": image().tensors["pixel_values"], "video_grid_thw": np.array([1, 4, 6])},
        fields={"pixel_values_videos": TensorField("flat"), "video_grid_thw": TensorField("batched")},
    )
    ids = [1, 2, 3, *[VIDEO_PAD] * 6]
    refused(shown(video, ids=ids), "video", "is not known", "placeholder_token_ids", kind=CapabilityError)
    check(shown(video, ids=ids, placeholder_token_ids={"image": PAD, "video": VIDEO_PAD}))
    check(shown(video, ids=ids), server=replace(SERVER, placeholder_ids={"image": PAD, "video": VIDEO_PAD}))


def test_where_the_server_does_not_tell_its_placeholder_the_renderers_counts():
    quiet = replace(SERVER, placeholder_ids={})
    check(shown(placeholder_token_ids={"image": PAD}), server=quiet)
    refused(shown(placeholder_token_ids={"image": PAD}, offset=2), "token 2", server=quiet)
    refused(shown(), "not known", server=quiet, kind=CapabilityError)


def test_placeholders_with_text_in_between_are_refused_as_features_and_pass_as_content_parts():
    media = MultiModalData.from_items([(image(), PlaceholderRange(0, 8, ((0, 3), (5, 8))))])
    sparse = request([*[PAD] * 3, 1, 2, *[PAD] * 3], media, placeholder_token_ids={"image": PAD})
    refused(sparse, "text in between", 'media="content_parts"', kind=CapabilityError)
    check(sparse, media="content_parts")
    check(sparse, media="auto")


def test_placeholders_whose_runs_cover_them_are_not_sparse():
    media = MultiModalData.from_items([(image(), PlaceholderRange(0, 6, ((0, 2), (2, 6))))])
    check(request([PAD] * 6, media))


# Sampling.


def sampled(**fields):
    return request(sampling=SamplingParams(**fields))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"temperature": 0.0, "n": 4}, ["n is 4", "temperature 0"]),
        ({"temperature": 0.001}, ["0.001", "0.01"]),
        ({"temperature": 2.5}, ["2.5"]),
        ({"seed": -1}, ["-1"]),
        ({"seed": 2**63}, [2**63]),
        ({"max_tokens": 2**63}, ["max_tokens", 2**63]),
        ({"stop_token_ids": (448,)}, [448]),
        ({"stop_token_ids": (-1,)}, [-1]),
    ],
)
def test_sampling_that_vllm_refuses_or_changes_is_refused(fields, words):
    refused(sampled(**fields), *words)


def test_the_protocol_itself_refuses_fewer_than_one_token():
    with pytest.raises(InvalidRequestError, match="max_tokens"):
        SamplingParams(max_tokens=0)


@pytest.mark.parametrize(
    "name",
    ["temperatur", "top_q", "cache_salt", "best_of", "use_beam_search", "guided_json", "_eos_token_id"],
)
def test_extra_options_that_vllm_would_ignore_are_refused(name):
    refused(sampled(extra={name: 1}), name, "min_p")


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("temperature", "field of SamplingParams"),
        ("max_tokens", "field of SamplingParams"),
        ("logprobs", "top_logprobs"),
        ("prompt_logprobs", "GenerateRequest.prompt_logprobs"),
        ("stream_interval", "the engine"),
        ("output_kind", "the engine"),
        ("detokenize", "not text"),
        ("stop", "stop_token_ids"),
        ("trace_decode_token_ids", "instead of sampling"),
        ("routed_experts_prompt_start", "missing"),
    ],
)
def test_extra_options_that_would_break_the_answer_are_refused_with_the_reason(name, why):
    refused(sampled(extra={name: 1}), name, why)


def test_extra_options_that_make_sense_pass():
    check(sampled(extra={"min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 256}))


@pytest.mark.parametrize("least", [257, -1, 1.5])
def test_a_minimum_that_cannot_be_reached_is_refused(least):
    refused(sampled(max_tokens=256, extra={"min_tokens": least}), "min_tokens")


@pytest.mark.parametrize("priority", [2**63, -(2**63) - 1])
def test_priorities_of_more_than_64_bits_are_refused(priority):
    refused(request(priority=priority), "priority")
    check(request(priority=-(2**63)))


@pytest.mark.parametrize("name", ["", "a b", "a\r\nX-Evil: 1", "ä", "x" * 257])
def test_names_that_cannot_travel_in_a_header_are_refused(name):
    with pytest.raises(InvalidRequestError, match="request_id"):
        check(request(request_id=name))
    refused(request(session_id=name), "session_id")


# All of it.


@given(st.integers(-2, 14), st.integers(0, 9), st.lists(st.sampled_from([1, PAD]), min_size=1, max_size=14))
def test_only_a_placeholder_that_lies_on_all_pads_and_nothing_else_passes(offset, length, ids):
    right = [place for place, token in enumerate(ids) if token == PAD] == list(range(offset, offset + length))
    asked = shown(offset=offset, length=length, ids=ids)
    if right and length == 6:
        check(asked)
    else:
        refused(asked)


def test_a_prompt_of_30000_tokens_with_20_images_is_checked_well_within_a_millisecond():
    items = [image(name=f"image {number}") for number in range(20)]
    placed = [(item, PlaceholderRange(1000 * place, 6)) for place, item in enumerate(items)]
    ids = [1] * 30_000
    for _, where in placed:
        ids[where.offset : where.end] = [PAD] * 6
    asked = replace(request(), prompt_ids=np.array(ids), multi_modal_data=MultiModalData.from_items(placed))
    server = replace(SERVER, max_model_len=32_768)
    best = math.inf
    for _ in range(20):
        start = time.thread_time()
        check(asked, server=server)
        best = min(best, time.thread_time() - start)
    assert best < 0.003  # 0.5 ms on an idle machine; a loop over the tokens takes ten times as long


def test_patches_of_another_model_are_refused():
    """The right grid and rows, and 1,176 numbers a patch: the engine dies of it."""
    refused(shown(with_tensors(pixel_values=np.zeros((24, 1176), np.uint8))), 1176, 1536)
