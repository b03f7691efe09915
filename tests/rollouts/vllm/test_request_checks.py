"""What is refused before it is sent: requests that take a server down, and those that it answers with garbage."""

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
from rollouts.engines.vllm.media_payload import media_payload
from rollouts.engines.vllm.request_checks import check_request
from rollouts.engines.vllm.tensors import ServerTensor
from rollouts.errors import CapabilityError, InvalidRequestError

VIDEO_PAD = 398
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


def check(request, server=SERVER, media="features"):
    check_request(request, server)
    media_payload(request, media, server)


def refused(request, *words, kind=InvalidRequestError, **more):
    with pytest.raises(kind) as refusal:
        check(request, **more)
    assert refusal.value.request_id == request.request_id
    for word in words:
        assert str(word) in str(refusal.value)


def sampled(**fields):
    return request(sampling=SamplingParams(**fields))


# What passes.


def test_prompts_of_text_and_with_images_pass():
    check(request())
    check(shown())
    check(shown(), server=replace(SERVER, pixel_dtype="bfloat16"))
    check(replace(request(), prompt_ids=np.arange(5, dtype=np.int32)))
    check(request(range(99)))
    check(request(), server=replace(SERVER, pixel_dtype=None, placeholder_ids={}, merge_area=None))
    check(sampled(extra={"min_p": 0.1, "repetition_penalty": 1.1, "ignore_eos": True, "min_tokens": 256}))
    second = image(2, 2, "second")
    two_and_one_again = placed((image(), 1, 6), (second, 7, 1), (image(), 9, 6))
    check(request([1, *[PAD] * 7, 2, *[PAD] * 6], two_and_one_again))
    runs_that_cover_it = MultiModalData.from_items([(image(), PlaceholderRange(0, 6, ((0, 2), (2, 6))))])
    check(request([PAD] * 6, runs_that_cover_it))


def placed(*items):
    return MultiModalData.from_items([(item, PlaceholderRange(offset, length)) for item, offset, length in items])


def lists(hashes, placeholders, items, modality="image"):
    """Three lists of media that may not agree, beside a prompt with one image at 3."""
    named = [{modality: each} if each is not None else {} for each in (hashes, placeholders, items)]
    return request([1, 2, 3, *[PAD] * 6], MultiModalData(*named))


WHERE = PlaceholderRange(3, 6)

#: What takes a server down, or is answered with garbage.
REFUSED = {
    "an empty prompt": (request([]), ["empty"]),
    "an id below 0": (request([-1, 2]), ["token 0", -1]),
    # Where media are.
    "a placeholder one token short": (shown(length=5), ["6 tokens"]),
    "a placeholder one token off": (shown(offset=4), ["token 9", 4, PAD]),
    "a placeholder past the end": (shown(offset=7), ["outside of the 12 tokens"]),
    "placeholders that overlap": (
        request([1, *[PAD] * 10], placed((image(), 1, 6), (image(name="second"), 5, 6))),
        ["before the end of the previous one at 7"],
    ),
    "placeholders out of order": (
        request([1, *[PAD] * 6, 2, *[PAD] * 6], placed((image(), 8, 6), (image(name="second"), 1, 6))),
        ["prompt order"],
    ),
    "an item without tokens": (request([1], placed((image(num_tokens=0), 1, 0))), ["0 tokens"]),
    "a pad without an image": (request([1, PAD, 2]), ["token 1", PAD, "no placeholder"]),
    "a pad beside an image": (shown(ids=[1, 2, 3, *[PAD] * 7, 4, 5]), ["token 9", "multi_modal_data"]),
    "a marker that was not expanded": (
        request([1, VIDEO_PAD], placeholder_token_ids={"video": VIDEO_PAD}),
        ["token 1", "video"],
    ),
    "sampled tokens outside of the prompt": (request([1, PAD, 2], sampled=[(1, 4)]), ["sampled"]),
    # Lists and names.
    "no ranges": (lists(["first"], None, [image()]), ["different modalities"]),
    "two hashes of one image": (lists(["first", "x"], [WHERE], [image()]), ["2 hashes"]),
    "no image": (lists(["first"], [WHERE], []), ["0 images"]),
    "another hash": (lists(["second"], [WHERE], [image()]), ["'second'"]),
    "an image among videos": (lists(["first"], [WHERE], [image()], "video"), ["is image"]),
    "one hash for two images": (
        request([PAD] * 12, placed((image(), 0, 6), (replace(image(), source=MediaSource.of(b"another")), 6, 6))),
        ["two different media"],
    ),
    "one hash for two sizes of an image": (
        request([PAD] * 7, placed((image(), 0, 6), (replace(image(2, 2), source=image().source), 6, 1))),
        ["two different media"],
    ),
    # What media hold.
    "fewer rows than the grid says": (
        shown(with_tensors(pixel_values=np.zeros((20, 1536), np.uint8))),
        ["(20, 1536)", "24 rows"],
    ),
    "pixels that are no rows": (shown(with_tensors(pixel_values=np.zeros((24, 3, 512), np.uint8))), ["(24, 3, 512)"]),
    "a grid of two numbers": (shown(with_tensors(image_grid_thw=np.array([4, 6]))), ["three patch counts"]),
    "a grid past 64 bits": (shown(with_tensors(image_grid_thw=np.array([2**32, 2**32, 24]))), ["rows"]),
    "a grid of another number of tokens": (
        shown(
            with_tensors(
                image_grid_thw=np.array([1, 4, 5]), pixel_values=StillPatches(np.zeros((20, 3, 256), np.uint8), 2)
            )
        ),
        ["6 tokens for 20 patches"],
    ),
    "patches of another model": (shown(with_tensors(pixel_values=np.zeros((24, 1176), np.uint8))), [1176, 1536]),
    "no pixels": (shown(without("pixel_values")), ["no pixel_values"]),
    "no grid": (shown(without("image_grid_thw")), ["no image_grid_thw"]),
    "a tensor without a field": (shown(with_tensors(more=np.zeros(3))), ["fields"]),
    "a tensor of text": (shown(with_tensors(image_grid_thw=np.array(["a", "b", "c"]))), ["image_grid_thw", "str"]),
    # Sampling.
    "samples that are equal": (sampled(temperature=0.0, n=4), ["n is 4", "temperature 0"]),
    "a temperature that vLLM raises": (sampled(temperature=0.001), ["0.001", "0.01"]),
    "a seed that means none": (sampled(seed=-1), ["-1"]),
    "an option that vLLM would ignore": (sampled(extra={"top_q": 1}), ["top_q", "min_p"]),
    "an option that is a field": (sampled(extra={"temperature": 1}), ["temperature", "field of SamplingParams"]),
    "an option about text": (sampled(extra={"detokenize": 1}), ["detokenize", "not text"]),
    "stop strings": (sampled(extra={"stop": 1}), ["stop", "stop_token_ids"]),
    "a minimum past the maximum": (sampled(max_tokens=256, extra={"min_tokens": 257}), ["min_tokens"]),
    "an empty request id": (request(request_id=""), ["request_id"]),
    "a request id that is not ASCII": (request(request_id="ä"), ["request_id"]),
    "a session id with a line end": (request(session_id="a\r\nX-Evil: 1"), ["session_id"]),
    "a session id that is too long": (request(session_id="x" * 257), ["session_id"]),
}


@pytest.mark.parametrize(("asked", "words"), REFUSED.values(), ids=REFUSED)
def test_what_takes_a_server_down_or_is_answered_with_garbage_is_refused(asked, words):
    refused(asked, *words)


def test_a_pad_that_was_sampled_is_text():
    check(request([1, PAD, 2], sampled=[(1, 2)]))
    check(shown(ids=[PAD, 2, 3, *[PAD] * 6, 4, 5, PAD], sampled=[(0, 2), (10, 12)]))


# What another server would take.


FLOATS = shown(replace(with_tensors(pixel_values=np.zeros((24, 1536), np.float32)), scale=None))
BFLOAT16 = ServerTensor("bfloat16", (24, 1536), np.zeros(24 * 1536 * 2, np.uint8))
OF_A_SERVER = shown(replace(with_tensors(pixel_values=BFLOAT16), scale=None))


@pytest.mark.parametrize(
    ("asked", "server", "words"),
    [
        # It would normalise them again: HTTP 200, and every image looks the same.
        (FLOATS, {"pixel_dtype": "uint8"}, ["float32", "wants uint8"]),
        (shown(image(scale=None)), {"pixel_dtype": "bfloat16"}, ["uint8", "wants bfloat16"]),
        (OF_A_SERVER, {"pixel_dtype": "uint8"}, ["bfloat16", "uint8"]),
        (OF_A_SERVER, {"pixel_dtype": "float32"}, ["bfloat16", "float32"]),
        (shown(), {"pixel_dtype": None, "placeholder_ids": {}}, ["takes no media"]),
        (shown(), {"placeholder_ids": {}}, ["not known"]),
    ],
)
def test_media_of_which_the_server_makes_something_else_are_refused(asked, server, words):
    refused(asked, *words, server=replace(SERVER, **server), kind=CapabilityError)


@given(st.integers(-2, 14), st.integers(0, 9), st.lists(st.sampled_from([1, PAD]), min_size=1, max_size=14))
def test_only_a_placeholder_that_lies_on_all_pads_and_nothing_else_passes(offset, length, ids):
    right = [place for place, token in enumerate(ids) if token == PAD] == list(range(offset, offset + length))
    asked = shown(offset=offset, length=length, ids=ids)
    if right and length == 6:
        check(asked)
    else:
        refused(asked)
