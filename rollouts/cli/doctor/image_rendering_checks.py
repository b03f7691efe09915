"""The server's tokens, normalisation and tensors of images, as /render shows them, compared with the renderer's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import numpy as np

from renderers import RenderedTokens
from renderers.process.files import read_json
from renderers.vision.patches import normalised
from rollouts.cli.doctor.target import (
    RENDERING,
    Finding,
    Outcome,
    Target,
    absent,
    failed,
    fresh_image,
    image_limit,
    images_of,
    ok,
    skipped,
)
from rollouts.cli.doctor.token_checks import first_difference
from rollouts.engines.http.exchange import HttpResponse, response_error
from rollouts.engines.vllm.features import DecodedTensor, decode_item, encoded_entries, tensor_type
from rollouts.engines.vllm.generate import RenderResponse, parse_render_response

# The image_mean and image_std of a server: estimated from its floats, or read from a directory.


#: The name of the check.
NORMALISATION = "image normalisation"

# A linear map is estimated from at least so many pixels. Pixels that are 0 on both sides may be padding: not counted.
_MIN_PIXELS = 16
# The share of the variance that may remain after the linear map.
_MAX_RESIDUAL = 1e-3
# The largest distance of a factor from 1, and of an offset from 0, for floats that were rounded to a dtype.
_NORMALISED_ROUNDING = {"float32": 1e-3, "float16": 3e-3}
_DEFAULT_ROUNDING = 0.02


class Normalisation(NamedTuple):
    """float = (pixel in 0..1 - mean) / std, by channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __str__(self) -> str:
        mean, std = ([round(number, 4) for number in numbers] for numbers in self)
        return f"image_mean {mean}, image_std {std}"

    def is_near(self, other: Normalisation) -> bool:
        return bool(np.allclose([*self.mean, *self.std], [*other.mean, *other.std], atol=1e-3))


class LinearMap(NamedTuple):
    """theirs = factor * ours + offset, float64 (channels,) each."""

    factor: np.ndarray
    offset: np.ndarray

    def is_identity(self, dtype: str) -> bool:
        """Whether both sides hold the same floats, as far as torch's `dtype` can tell."""
        tolerance = _NORMALISED_ROUNDING.get(dtype, _DEFAULT_ROUNDING)
        return bool(np.allclose(self.factor, 1, atol=tolerance) and np.allclose(self.offset, 0, atol=tolerance))

    def of(self, ours: Normalisation) -> Normalisation:
        """Their normalisation, given ours."""
        std = ours.std / self.factor
        return Normalisation(tuple((ours.mean - self.offset * std).tolist()), tuple(std.tolist()))


def written_normalisation(directory: Path) -> Normalisation | None:
    """The image_mean and image_std in the files of a model directory; None if there are none, or no valid ones."""
    content = read_json(processor_file(directory))
    image = content.get("image_processor") or content
    mean, std = _numbers(image.get("image_mean")), _numbers(image.get("image_std"))
    if not mean or len(mean) != len(std) or image.get("do_normalize") is False:
        return None
    return Normalisation(mean, std)


def processor_file(directory: Path) -> Path:
    """The file of a model directory of which image_mean and image_std are read, as by transformers and servers."""
    joint = directory / "processor_config.json"
    return joint if read_json(joint).get("image_processor") else directory / "preprocessor_config.json"


def wrong_normalisation(directory: Path, written: Normalisation, theirs: Normalisation, evidence: str) -> Finding:
    """`evidence`: the beginning of the sentence that ends with the server's normalisation."""
    return failed(
        f"{evidence} {theirs}; {directory} has {written}",
        f"write the model's own image_mean and image_std into {processor_file(directory)}, or start "
        f"`vllm serve {directory}`",
        check=NORMALISATION,
    )


def _numbers(value: Any) -> tuple[float, ...]:
    """The numbers of a list as floats; empty if the value is not a list of numbers."""
    if not isinstance(value, list) or not all(isinstance(each, int | float) for each in value):
        return ()
    return tuple(map(float, value))


def linear_map(ours: np.ndarray, theirs: np.ndarray, channels: int) -> LinearMap | None:
    """The map from our floats of an image to the server's; None if there is no such map.

    Both of one shape: patches (n, channels * k), or (..., channels, height, width).
    """
    lines = []
    by_channel = (_with_channel_axis(pixels, channels).transpose(1, 0, 2) for pixels in (ours, theirs))
    for x, y in zip(*by_channel, strict=True):
        counted = (x != 0) | (y != 0)
        x, y = x[counted], y[counted]
        if len(x) < _MIN_PIXELS or np.ptp(x) == 0:
            return None
        factor, offset = np.polyfit(x, y, 1)
        if np.var(y - (factor * x + offset)) > _MAX_RESIDUAL * np.var(y) or factor <= 0:
            return None
        lines.append((factor, offset))
    return LinearMap(*np.array(lines).T)


def renormalised(pixels: np.ndarray, used: Normalisation, wanted: Normalisation) -> np.ndarray:
    """Floats with the normalisation `used`, converted to `wanted`: float32, the same shape."""
    mean, std, new_mean, new_std = (np.array(numbers)[:, None] for numbers in (*used, *wanted))
    unit = _with_channel_axis(pixels, len(used.mean)) * std + mean
    converted: np.ndarray = ((unit - new_mean) / new_std).reshape(pixels.shape)
    return converted.astype(np.float32)


def _with_channel_axis(pixels: np.ndarray, channels: int) -> np.ndarray:
    """float64 (n, channels, values)."""
    values = pixels.shape[1] // channels if pixels.ndim == 2 else pixels.shape[-2] * pixels.shape[-1]
    return pixels.reshape(-1, channels, values).astype(np.float64)


# The largest difference between floats that were rounded to a dtype, relative to the largest float.
_ROUNDING = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1e-2}


async def image_rendering(target: Target) -> list[Finding]:
    """Tokens, normalisation and tensors of two images of different shapes, as the server renders them."""
    if (missing := target.lacks("does not render; requests with images compare the tokens")) is not None:
        return [missing]
    images = fresh_image(), fresh_image(96, 64)
    ours = target.image_prompt(*images)
    if len(ours.token_ids) >= target.capabilities.max_model_len:
        ours = target.image_prompt(images[0])
    response = await target.render(ours)
    findings = []
    if response.status == 400:
        ours, response, refusal = await _smaller_rendering(target, images, response)
        if refusal is not None:
            findings.append(refusal)
    if response.status != 200:
        raise response_error(RENDERING, response, "comparing images")
    theirs = parse_render_response(response.body, RENDERING)
    tokens = await _tokens(target, ours, theirs)
    findings.append(tokens)
    if tokens.outcome is not Outcome.OK:
        return [*findings, skipped("not checked, because of: image tokens failed", check="image features")]
    normalisation = _compared_normalisation(target, ours, theirs)
    if normalisation is not None:
        findings.append(normalisation)
        if normalisation.outcome is Outcome.FAILED:
            return [*findings, skipped(f"not checked, because of: {NORMALISATION} failed", check="image features")]
    return [*findings, _features(target, ours, theirs)]


async def _smaller_rendering(
    target: Target, images: Sequence[np.ndarray], refused: HttpResponse
) -> tuple[RenderedTokens, HttpResponse, Finding | None]:
    """A prompt that the server renders after it refused two adjacent images, and what the refusal means for users.

    The second prompt has text between the images, the third one image only.
    """
    reason = response_error(RENDERING, refused, RENDERING).body
    if image_limit(reason) is None:
        ours = target.image_prompt(*images, separated=True)
        response = await target.render(ours, separated=True)
        if response.status == 200:
            finding = absent(
                f"the server renders no two images without text between them: {reason}",
                "put text between images where the server renders the messages (/render, ServerRenderer); prompts of "
                "load_renderer, which the engine sends, need none",
                check="adjacent images",
            )
            return ours, response, finding
    ours = target.image_prompt(images[0])
    response = await target.render(ours)
    if response.status != 200:
        return ours, response, None
    if image_limit(reason) is None:
        cure = "read the server's log of this moment; episodes with one image are served"
    else:
        cure = "start `vllm serve` with --limit-mm-per-prompt '{\"image\": 8}', or as many images as an episode has"
    return ours, response, absent(f"the server refuses two: {reason}", cure, check="images per prompt")


async def _tokens(target: Target, ours: RenderedTokens, theirs: RenderResponse) -> Finding:
    """Compare the whole prompt; if the text tokens are known to differ, only the tokens of the images.

    A server may count the tokens around the features of an image (its begin and end) to the image's range. Where the
    ids are equal, its range must contain the features of our image with the same index.
    """
    our_features = [(placeholder.runs[0][0], placeholder.runs[-1][1]) for _, placeholder in images_of(ours)]
    their_ranges = [(medium.placeholder.offset, medium.placeholder.end) for medium in theirs.media]
    whole_prompt = target.is_ok("text tokens")
    if whole_prompt:
        our_ids, their_ids = ours.token_ids, theirs.token_ids
    else:
        edges = {ours.token_ids[at] for start, end in our_features for at in (start, end - 1)}
        our_ids = _ids_in(ours.token_ids, our_features)
        their_ids = _ids_in(theirs.token_ids, [_between(theirs.token_ids, each, edges) for each in their_ranges])
    difference = await first_difference(target, our_ids, their_ids)
    agree = len(our_features) == len(their_ranges) and all(
        start <= first and last <= end for (first, last), (start, end) in zip(our_features, their_ranges, strict=True)
    )
    if difference is None and not (agree if whole_prompt else len(our_features) == len(their_ranges)):
        difference = f"the server puts images at {their_ranges}, the renderer their features at {our_features}"
    if difference is None:
        kind = "ids" if whole_prompt else "ids of the images"
        return ok(f"{len(our_ids)} {kind}, all equal", check="image tokens")
    return failed(difference, _same_processor_cure(target), check="image tokens")


def _ids_in(ids: Sequence[int], ranges: Sequence[tuple[int, int]]) -> list[int]:
    return [token for start, end in ranges for token in ids[start:end]]


def _between(ids: Sequence[int], where: tuple[int, int], edges: Collection[int]) -> tuple[int, int]:
    """The part of a range from the first to the last of the tokens `edges`; the range itself without any."""
    found = [at for at in range(*where) if ids[at] in edges]
    return (found[0], found[-1] + 1) if found else where


# Pixels.


def _pixels(ours: RenderedTokens, theirs: RenderResponse) -> Iterator[tuple[str, np.ndarray, np.ndarray, str]]:
    """For each pixel tensor of each image: its name, our values, the server's, and torch's name of the server's dtype.

    Ours are normalised unless both sides hold uint8.
    """
    for (item, _), medium in zip(images_of(ours), theirs.media, strict=True):
        tensors = {} if medium.encoded is None else decode_item(medium.encoded)
        for name in sorted(tensors.keys() & item.keys()):
            if name.startswith("pixel_values"):
                raw = tensors[name].dtype == tensor_type(item.tensors[name]).dtype == "uint8"
                our_values = item[name] if raw else normalised(item, name)
                yield name, our_values, _as_array(tensors[name]), tensors[name].dtype


async def rendered_pixels(target: Target) -> Finding:
    """Where files are sent: whether the renderer, and so the trainer, makes the same pixels of them as the server."""
    ours = target.image_prompt(fresh_image())
    response = await target.render(ours)
    if response.status != 200:
        raise response_error(RENDERING, response, "comparing pixels")
    names = []
    for name, our_pixels, their_pixels, dtype in _pixels(ours, parse_render_response(response.body, RENDERING)):
        if our_pixels.size != their_pixels.size or (dtype == "uint8") != (our_pixels.dtype == np.uint8):
            return skipped(
                f"{name} has the shape {their_pixels.shape} in the server and {our_pixels.shape} in the renderer: "
                "the layouts cannot be compared"
            )
        difference = float(np.abs(our_pixels.astype(np.float64) - their_pixels.reshape(our_pixels.shape)).max())
        if difference > _ROUNDING.get(dtype, 0) * float(np.abs(our_pixels).max()):
            return failed(f"{name} is up to {difference:.2g} from the server's", _same_pixels_cure(target))
        names.append(name)
    if not names:
        return skipped("the server shows no pixels under a name of the renderer's")
    return ok(f"{', '.join(names)} of an image equal the server's")


# Normalisation.


def _compared_normalisation(target: Target, ours: RenderedTokens, theirs: RenderResponse) -> Finding | None:
    """Compare the server's image_mean and image_std, estimated from its floats; None if it shows no floats."""
    written = written_normalisation(target.directory)
    if written is None:
        return None
    channels = len(written.mean)
    maps = [
        linear_map(our_floats, their_floats.reshape(our_floats.shape), channels)
        for _, our_floats, their_floats, dtype in _pixels(ours, theirs)
        if dtype != "uint8" and our_floats.dtype.kind == "f" and our_floats.size == their_floats.size
        if _has_channels(our_floats, channels)
    ]
    found = [each for each in maps if each is not None]
    if not maps or len(found) < len(maps):  # of pixels that differ by more than that, "image features" reports it
        return None
    if all(each.is_identity(target.capabilities.pixel_dtype or "") for each in found):
        return ok(f"the server's floats are those of {written}", check=NORMALISATION)
    return wrong_normalisation(target.directory, written, found[0].of(written), "the server's floats are those of")


def _has_channels(pixels: np.ndarray, channels: int) -> bool:
    """Whether the shape is that of patches (n, channels * k) or of images (..., channels, height, width)."""
    shape: tuple[int, ...] = pixels.shape
    if len(shape) == 2:
        return shape[1] % channels == 0
    return len(shape) > 2 and shape[-3] == channels


async def hidden_normalisation(target: Target) -> Finding:
    """What is known about a server that does not show its floats, such as one that normalises on its device."""
    written = written_normalisation(target.directory)
    served = await _served_directory(target)
    theirs = None if served is None else written_normalisation(served)
    if written is not None and theirs is not None and not theirs.is_near(written):
        return wrong_normalisation(target.directory, written, theirs, f"{served}, which is served, has")
    on_device = target.capabilities.pixel_dtype == "uint8"
    seen = f"the server {'normalises on its device' if on_device else 'has another layout of its floats'}"
    seen += " and does not show its image_mean and image_std"
    if theirs is not None:
        seen += f"; {served}, the directory that it serves by its own report, has those of {target.directory}"
    return skipped(f"{seen}; the check `mismatch, image` covers it where it runs", check=NORMALISATION)


async def _served_directory(target: Target) -> Path | None:
    """The directory that the server reports as its model, if it is on this machine and is not --model itself."""
    if urlsplit(target.connection.base_url).hostname not in ("127.0.0.1", "localhost", "::1"):
        return None
    response = await target.connection.request("GET", "/v1/models", name="asking which model is served")
    cards = response.json().get("data") if response.status == 200 else None
    roots = [card.get("root") for card in cards or () if card.get("id") == target.capabilities.model]
    if not roots or not isinstance(roots[0], str):
        return None
    return await asyncio.to_thread(_other_directory, Path(roots[0]), target.directory)


def _other_directory(served: Path, own: Path) -> Path | None:
    if not served.is_absolute() or not served.is_dir() or served.resolve() == own.resolve():
        return None
    return served


# Tensors.


def _features(target: Target, ours: RenderedTokens, theirs: RenderResponse) -> Finding:
    """Compare the encoded tensors that the engine sends with those that the server makes of the same images."""
    if target.image_mode != "features":
        return skipped(f'media="auto" sends images of this model as {target.image_mode}', check="image features")
    payload = target.image_payload(target.request(ours))
    sent = json.loads(b"".join([b"{", *payload.body_field(payload.names.keys()), b"}"]))["features"]["kwargs_data"][
        "image"
    ]
    for our_item, medium in zip(sent, theirs.media, strict=True):
        if medium.encoded is None:
            return skipped(
                "the server does not show tensors that are in its cache",
                "start `vllm serve` with --mm-processor-cache-gb 0 for this check",
                check="image features",
            )
        # By name: servers write the names in an order of their own. A tensor that the server does not make (one with
        # which transformers' class counts images) is not read by its model.
        our_entries, their_entries = encoded_entries(our_item), encoded_entries(medium.encoded)
        if {name: our_entries.get(name) for name in their_entries} != their_entries:
            return failed(*_difference(target, our_item, medium.encoded), check="image features")
    size = sum(len(our_item) for our_item in sent)
    dtype = target.capabilities.pixel_dtype
    return ok(
        f"{len(theirs.media)} images, {size} bytes, equal to the server's; {dtype} pixels", check="image features"
    )


def _difference(target: Target, our_item: str, their_item: str) -> tuple[str, str]:
    """The difference between two encoded items, and its cure."""
    ours, theirs = decode_item(our_item), decode_item(their_item)
    if not theirs.keys() <= ours.keys():
        return (
            f"the server makes the tensors {', '.join(sorted(theirs))} of an image, the renderer "
            f"{', '.join(sorted(ours))}",
            f'send files: VLLMEngine(media="content_parts"); or start `vllm serve {target.directory}` if it serves '
            "another model",
        )
    for name, their_tensor in theirs.items():
        our_tensor = ours[name]
        if our_tensor.dtype != their_tensor.dtype:
            flag = "without" if their_tensor.dtype == "uint8" else "with"
            return (
                f"{name} is {our_tensor.dtype} in the renderer and {their_tensor.dtype} in the server",
                f"leave pixel_dtype out of ExpectedCapabilities; start `vllm serve` {flag} "
                "--no-mm-device-do-normalize on every server behind this address",
            )
        our_array, their_array = _as_array(our_tensor), _as_array(their_tensor)
        if our_array.shape != their_array.shape:
            return (
                f"{name} has the shape {our_array.shape} in the renderer and {their_array.shape} in the server",
                _same_processor_cure(target),
            )
        if not np.array_equal(our_array, their_array):
            count = int(np.count_nonzero(our_array != their_array))
            return f"{count} of {our_array.size} values of {name} differ", _same_pixels_cure(target)
    return (
        "the tensors are equal and their encodings differ",
        "update mmrollouts: this vLLM encodes features in another way",
    )


def _as_array(decoded: DecodedTensor) -> np.ndarray:
    tensor = decoded.tensor
    return tensor if isinstance(tensor, np.ndarray) else tensor.unpack()


def _same_processor_cure(target: Target) -> str:
    return (
        f"copy {processor_file(target.directory).name} from the directory that is served, or start `vllm serve "
        f"{target.directory}` without --mm-processor-kwargs and --chat-template"
    )


def _same_pixels_cure(target: Target) -> str:
    return (
        f"{_same_processor_cure(target)}; if few values differ, the two resample differently: "
        'load_renderer(..., config=RendererOptions(image_backend="torchvision")), or "pillow", as the server does'
    )
