"""Images: the server's tokens and pixels against ours, what it answers about them, and its cache of them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np

from renderers import RenderedTokens
from renderers.vision.normalise import normalised
from rollouts.cli.doctor.finding import Finding, Outcome, absent, failed, ok, skipped
from rollouts.cli.doctor.pixel_scale import (
    NORMALISATION,
    linear_map,
    processor_file,
    written_normalisation,
    wrong_normalisation,
)
from rollouts.cli.doctor.target import Patient, apart, fresh_image, sampled_in
from rollouts.cli.doctor.token_checks import first_difference
from rollouts.engines.vllm.http.response import response_error
from rollouts.engines.vllm.wire.kwargs_decoding import DecodedTensor, decode_item, encoded_entries
from rollouts.engines.vllm.wire.render_response import RenderAnswer, RenderedMedium, read_answer
from rollouts.engines.vllm.wire.tensors import tensor_dtype

_RENDERING = "rendering images"


async def images_of_server(patient: Patient) -> list[Finding]:
    """Tokens, normalisation and tensors of two images of different shapes, as the server makes them."""
    ours = patient.image_prompt(fresh_image(), fresh_image(96, 64))
    if len(ours.token_ids) >= patient.capabilities.max_model_len:
        ours = patient.image_prompt(fresh_image())
    reply = await patient.render(ours)
    findings = []
    if reply.status == 400:  # it may take one only
        ours = patient.image_prompt(fresh_image())
        reply, refused = await patient.render(ours), reply
        if reply.status == 200:
            said = response_error(_RENDERING, refused, _RENDERING).body
            cure = "start `vllm serve` with --limit-mm-per-prompt '{\"image\": 8}', or as many as an episode shows"
            findings.append(absent("images per prompt", f"the server refuses two: {said}", cure))
    if reply.status != 200:
        raise response_error(_RENDERING, reply, "comparing images")
    theirs = read_answer(reply.body, _RENDERING)
    tokens = await _tokens(patient, ours, theirs)
    findings.append(tokens)
    if tokens.outcome is not Outcome.OK:
        return [*findings, skipped("image features", "not checked, because of: image tokens failed")]
    normalisation = _visible_normalisation(patient, ours, theirs)
    if normalisation is not None:
        findings.append(normalisation)
        if normalisation.outcome is Outcome.FAILED:
            return [*findings, skipped("image features", f"not checked, because of: {NORMALISATION} failed")]
    return [*findings, _features(patient, ours, theirs)]


async def _tokens(patient: Patient, ours: RenderedTokens, theirs: RenderAnswer) -> Finding:
    """The whole prompt; where the templates differ, which is found already, only what stands for the images."""
    assert ours.multi_modal_data is not None
    places = [(where.offset, where.end) for _, where in ours.multi_modal_data.items_with_ranges()]
    their_places = [(medium.offset, medium.end) for medium in theirs.media]
    whole = patient.is_ok("text tokens")
    our_ids = ours.token_ids if whole else _between(ours.token_ids, places)
    their_ids = theirs.token_ids if whole else _between(theirs.token_ids, their_places)
    difference = await first_difference(patient, our_ids, their_ids)
    if difference is None and (len(places) != len(their_places) or (whole and places != their_places)):
        difference = f"the server puts images at {their_places}, the renderer at {places}"
    if difference is None:
        of_what = "ids" if whole else "ids of the images"
        return ok("image tokens", f"{len(our_ids)} {of_what}, all equal")
    return failed("image tokens", difference, _same_processor(patient))


def _between(ids: list[int], places: list[tuple[int, int]]) -> list[int]:
    return [one for start, end in places for one in ids[start:end]]


# Normalisation.


def _visible_normalisation(patient: Patient, ours: RenderedTokens, theirs: RenderAnswer) -> Finding | None:
    """The server's mean and deviation against ours, read off its floats; None where it shows none."""
    written = written_normalisation(patient.directory)
    if written is None or not (pairs := _float_pairs(ours, theirs, len(written.mean))):
        return None
    maps = [linear_map(mine, other, len(written.mean)) for mine, other in pairs]
    found = [each for each in maps if each is not None]
    if len(found) < len(maps):  # they differ in another way, which image features tells
        return None
    if all(each.is_identity(patient.capabilities.pixel_dtype or "") for each in found):
        return ok(NORMALISATION, f"the server's floats are those of {written}")
    return wrong_normalisation(patient.directory, written, found[0].of(written), "the server's floats are those of")


def _float_pairs(ours: RenderedTokens, theirs: RenderAnswer, channels: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """The floats of each image, ours and the server's, where both hold as many in a layout that is known."""
    pairs = []
    assert ours.multi_modal_data is not None
    for (item, _), medium in zip(ours.multi_modal_data.items_with_ranges(), theirs.media, strict=True):
        tensors = _decoded(medium)
        for name in tensors.keys() & item.keys():
            if not name.startswith("pixel_values") or tensors[name].dtype == "uint8":
                continue
            mine, other = normalised(item, name), _array(tensors[name])
            if mine.size == other.size and mine.dtype.kind == "f" and _has_channels(mine, channels):
                pairs.append((mine, other.reshape(mine.shape)))
    return pairs


def _has_channels(pixels: np.ndarray, channels: int) -> bool:
    """Whether they are patches (n, channels * k) or images (..., channels, height, width)."""
    shape: tuple[int, ...] = pixels.shape
    if len(shape) == 2:
        return shape[1] % channels == 0
    return len(shape) > 2 and shape[-3] == channels


async def unseen_normalisation(patient: Patient) -> Finding:
    """What is known of a server that does not show its floats, such as one that normalises on its device."""
    on_device = patient.capabilities.pixel_dtype == "uint8"
    written = written_normalisation(patient.directory)
    served, beside = await _served_directory(patient), patient.directory
    theirs = None if served is None else written_normalisation(served)
    if written is not None and theirs is not None and not theirs.is_near(written):
        return wrong_normalisation(patient.directory, written, theirs, f"{served}, which is served, has")
    seen = f"the server {'normalises on its device' if on_device else 'lays its floats out otherwise'}"
    seen += " and does not show its numbers"
    if served is not None and theirs is not None:
        seen += f"; {served}, from which it says that it serves, has those of {beside}"
    return skipped(NORMALISATION, f"{seen}; mismatch, image tells, where it is checked")


async def _served_directory(patient: Patient) -> Path | None:
    """The directory that the server names as its model, where it is on this machine and not --model itself."""
    if urlsplit(patient.connection.base_url).hostname not in ("127.0.0.1", "localhost", "::1"):
        return None
    reply = await patient.connection.request("GET", "/v1/models", name="asking which model is served")
    cards = reply.json().get("data") if reply.status == 200 else None
    roots = [card.get("root") for card in cards or () if card.get("id") == patient.capabilities.model]
    if not roots or not isinstance(roots[0], str):
        return None
    return await asyncio.to_thread(_other_directory, Path(roots[0]), patient.directory)


def _other_directory(served: Path, own: Path) -> Path | None:
    if not served.is_absolute() or not served.is_dir() or served.resolve() == own.resolve():
        return None
    return served


# Tensors.


def _features(patient: Patient, ours: RenderedTokens, theirs: RenderAnswer) -> Finding:
    """Our bytes against the server's, where they are what is sent."""
    if patient.image_mode != "features":
        return skipped("image features", f'media="auto" sends images of this model as {patient.image_mode}')
    form = patient.image_form(patient.request(ours))
    sent = json.loads(b"".join([b"{", *form.member(form.names.keys()), b"}"]))["features"]["kwargs_data"]["image"]
    for mine, medium in zip(sent, theirs.media, strict=True):
        if medium.encoded is None:
            return skipped(
                "image features",
                "the server does not show what its cache holds",
                "start `vllm serve` with --mm-processor-cache-gb 0 for this check",
            )
        # By name: servers write the names in an order of their own.
        if encoded_entries(mine) != encoded_entries(medium.encoded):
            return failed("image features", *_difference(patient, mine, medium.encoded))
    size = sum(len(mine) for mine in sent)
    dtype = patient.capabilities.pixel_dtype
    return ok("image features", f"{len(theirs.media)} images, {size} bytes, equal to the server's; {dtype} pixels")


def _difference(patient: Patient, mine: str, of_server: str) -> tuple[str, str]:
    """What differs between two encoded items, and the cure."""
    ours, theirs = decode_item(mine), decode_item(of_server)
    if ours.keys() != theirs.keys():
        return (
            f"the server makes {', '.join(sorted(theirs))} of an image, the renderer {', '.join(sorted(ours))}",
            f'send files: VLLMEngine(media="content_parts"); or start `vllm serve {patient.directory}` if it serves '
            "another model",
        )
    for name, mine_decoded in ours.items():
        other = theirs[name]
        if mine_decoded.dtype != other.dtype:
            return (
                f"{name} is {mine_decoded.dtype} with us and {other.dtype} with the server",
                "leave pixel_dtype out of ExpectedCapabilities; start `vllm serve` "
                f"{'without' if other.dtype == 'uint8' else 'with'} --no-mm-device-do-normalize on every server behind "
                "this address",
            )
        array, of_theirs = _array(mine_decoded), _array(other)
        if array.shape != of_theirs.shape:
            return f"{name} is {array.shape} with us and {of_theirs.shape} with the server", _same_processor(patient)
        if not np.array_equal(array, of_theirs):
            count = int(np.count_nonzero(array != of_theirs))
            return f"{count} of {array.size} values of {name} differ", _same_pixels(patient)
    return (
        "the same tensors, written otherwise",
        "pip install --upgrade mmrollouts: this vLLM writes features otherwise",
    )


def _decoded(medium: RenderedMedium) -> dict[str, DecodedTensor]:
    return {} if medium.encoded is None else decode_item(medium.encoded)


def _array(decoded: DecodedTensor) -> np.ndarray:
    tensor = decoded.tensor
    return tensor if isinstance(tensor, np.ndarray) else tensor.unpack()


def _same_processor(patient: Patient) -> str:
    return (
        f"copy {processor_file(patient.directory).name} from the directory that is served, or start `vllm serve` "
        + (f"{patient.directory} without --mm-processor-kwargs and --chat-template")
    )


def _same_pixels(patient: Patient) -> str:
    return (
        f"{_same_processor(patient)}; if few values differ, the two resample differently: "
        'load_renderer(..., config=RendererConfig(image_backend="torchvision")), or "pillow", as the server does'
    )


# Answers.


async def image_request(patient: Patient) -> Finding:
    """Two images must not answer alike."""
    first, second = patient.image_prompt(fresh_image()), patient.image_prompt(fresh_image())
    difference = apart(await patient.sample(first), await patient.sample(second))
    if difference > 1e-6:
        return ok("image request", f"two images answer differently (log-probabilities up to {difference:.2g} apart)")
    return failed(
        "image request",
        "two different images answer alike to the last bit: the server does not look at them",
        'send files: VLLMEngine(media="content_parts"); features may be normalised twice',
    )


async def image_pixels(patient: Patient) -> Finding:
    """Our pixels must be answered as what the server makes of the same file."""
    check = "image pixels"
    if patient.image_mode != "features":
        return await _pixels_of_server(patient, check)
    if not patient.capabilities.content_parts:
        return skipped(check, f"vLLM {patient.capabilities.version} takes no `content_parts` to compare with")
    rendered = patient.image_prompt(fresh_image())
    difference = apart(await patient.sample(rendered), await patient.sample(rendered, engine=patient.server_side))
    if difference <= patient.tolerance:
        return ok(check, f"answered as the server's own processing of the file (at most {difference:.2g} apart)")
    return failed(
        check,
        f"log-probabilities are up to {difference:.2g} from those after the server's own processing of the same file",
        'send files: VLLMEngine(media="content_parts")',
    )


async def _pixels_of_server(patient: Patient, check: str) -> Finding:
    """Where files are sent: whether the renderer, and so the trainer, makes the same pixels of them."""
    ours = patient.image_prompt(fresh_image())
    reply = await patient.render(ours)
    if reply.status != 200:
        raise response_error(_RENDERING, reply, "comparing pixels")
    assert ours.multi_modal_data is not None
    ((item, _),) = ours.multi_modal_data.items_with_ranges()
    (medium,) = read_answer(reply.body, _RENDERING).media
    tensors = _decoded(medium)
    names = sorted(name for name in tensors.keys() & item.keys() if name.startswith("pixel_values"))
    for name in names:
        raw = tensors[name].dtype == "uint8" and tensor_dtype(item.tensors[name]) == "uint8"
        mine, other = item[name] if raw else normalised(item, name), _array(tensors[name])
        if mine.size != other.size or (tensors[name].dtype == "uint8") != (mine.dtype == np.uint8):
            return skipped(check, f"the server lays {name} out otherwise: {other.shape}, the renderer {mine.shape}")
        difference = float(np.abs(mine.astype(np.float64) - other.reshape(mine.shape)).max())
        if difference > _FLOAT_STEPS.get(tensors[name].dtype, 0) * float(np.abs(mine).max()):
            return failed(check, f"{name} is up to {difference:.2g} from the server's", _same_pixels(patient))
    if not names:
        return skipped(
            check, f"the server shows no pixels under a name of the renderer's: {', '.join(sorted(tensors))}"
        )
    return ok(check, f"{', '.join(names)} of an image as the server makes them")


# How far two floats may be apart that were rounded to a type, relative to the largest.
_FLOAT_STEPS = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


# The cache.


async def image_cache(patient: Patient) -> Finding:
    """Known images go without their data."""
    check = "image cache"
    rendered = patient.image_prompt(fresh_image())
    answer = await patient.sample(rendered)
    request = patient.request(rendered)
    form = patient.image_form(request)
    reply = await patient.post_by_name(request, form)
    if reply.status != 200 and form.is_cache_miss(reply.status, reply.body.decode(errors="replace")):
        return failed(
            check,
            "an image that was just shown is not found by its name: every request has to carry its data",
            "start `vllm serve` without --mm-processor-cache-gb 0, and with --api-server-count 1: each API server has "
            "a cache of its own",
        )
    difference = apart(answer, sampled_in(reply, "a request with known media"))
    if difference <= patient.tolerance:
        return ok(check, f"an image shown by its name alone answers as the first time (at most {difference:.2g} apart)")
    return failed(
        check,
        f"the same image by its name alone answers {difference:.2g} from the first time",
        "the server's cache mixes up images: stop `vllm serve` and start it again",
    )


async def unknown_image(patient: Patient) -> Finding:
    """A name that the server has never heard must be refused in the way that sending again relies on."""
    check = "cache miss"
    request = patient.request(patient.image_prompt(fresh_image()), max_tokens=1)
    form = patient.image_form(request)
    reply = await patient.post_by_name(request, form)
    if await patient.health() != 200:
        return failed(
            check,
            "an image that it does not know took the server down",
            f"start `vllm serve` again, after pip install --upgrade vllm (this is {patient.capabilities.version})",
        )
    if reply.status == 200:
        return failed(
            check,
            "the server answers about an image that it never saw",
            f"pip install --upgrade vllm (this is {patient.capabilities.version}): its answers cannot be trusted",
        )
    if form.is_cache_miss(reply.status, reply.body.decode(errors="replace")):
        return ok(check, f"an unknown name is refused with {reply.status}, and the server lives: images are sent again")
    return failed(
        check,
        f"an unknown name is answered with {reply.status}, which does not say that the image has to be sent again",
        "pip install --upgrade mmrollouts: this version of vLLM tells a cache miss in another way",
    )
