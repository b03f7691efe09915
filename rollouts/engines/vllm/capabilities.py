"""What a vLLM server can do, probed once: its version, model, limits, pixel dtype, placeholder tokens and routes.

vLLM publishes almost none of this, so most of it is derived from responses: a generate request without its
required field is refused with a list of fields that the server knows, and `/render` of a small image contains
the tensors that the server makes itself.
"""

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple, cast, get_args

from rollouts.engines.http.capability_cache import PROBE_NAME, probe_request
from rollouts.engines.http.connection import ServerConnection
from rollouts.engines.http.responses import HttpResponse, response_error
from rollouts.engines.vllm.feature_decoding import DecodedTensor, decode_item
from rollouts.engines.vllm.probe_requests import render_probe, served_model, server_version
from rollouts.engines.vllm.render_response import parse_render_response, single_token
from rollouts.engines.vllm.sounds import SoundFormat, sound_format
from rollouts.engines.vllm.tensors import PixelDtype, tensor_type
from rollouts.errors import CapabilityError, MalformedResultError

log = logging.getLogger("rollouts.engines.vllm")
_GENERATE = "/inference/v1/generate"


@dataclass(frozen=True, slots=True)
class ServerCapabilities:
    """The capabilities of one server process.

    `version`: of vLLM ("0.32.0"; "unknown" where a proxy hides it). `model`: the name of the served model.
    `max_model_len`: maximum of prompt and completion tokens together. `scale_out`: `/inference/v1/generate`
    is enabled. `pixel_dtype`: dtype of the pixels that it takes as features; None if it takes no images.
    `placeholder_ids`: by modality, the token that stands for one row of features. `merge_area`: patches per
    such token (4 for Qwen-VL; None if not fixed). `control`: it has the routes of development mode
    (`ServerControl`). `patch_values`: numbers in one patch (1536 for Qwen3-VL; None if pixels are not
    patches). `image_fields`: the tensors that it makes of an image, with their `TensorField.kind`; None if
    not known. `rust_frontend`: the version of vLLM's Rust frontend, which serves HTTP in place of vLLM's own
    ("unknown" where a proxy hides it); None without it. It drops features that are sent to it, with HTTP 200.
    `sounds`: the tensors that it makes of a sound; None if not known. `sound_refusal`: why it takes no sound;
    None if it takes them, or if that is not known.
    """

    engine: ClassVar[str] = "vLLM"

    version: str
    model: str
    max_model_len: int
    scale_out: bool
    pixel_dtype: PixelDtype | None
    placeholder_ids: Mapping[str, int]
    merge_area: int | None
    control: bool
    patch_values: int | None = None
    image_fields: Mapping[str, str] | None = None
    rust_frontend: str | None = None
    sounds: SoundFormat | None = None
    sound_refusal: str | None = None

    @property
    def cuts_likeliest(self) -> bool:
        """Whether a list of the k likeliest tokens begins with the sampled one and is cut to k, as up to vLLM 0.32."""
        release = release_of(self.version)
        return release is None or release < (0, 33)


async def probe(
    connection: ServerConnection, *, model: str | None = None, needs_generate: bool = True
) -> ServerCapabilities:
    """Find out the capabilities of a server with six small requests, two of which render a small image and a
    short sound.

    `model` selects one of several served models. Raises `CapabilityError` if the server cannot be used with
    its start options (without `needs_generate` also one that does not generate can be), and all errors of
    `ServerConnection.request`.
    """
    version = await server_version(connection)
    served = await served_model(connection, model)
    if served.max_model_len is None:
        raise CapabilityError(PROBE_NAME, f"{connection.base_url} does not report its max_model_len. Is this a vLLM?")
    generate = await _generate_route(connection, needs_generate)
    control = (await probe_request(connection, "GET", "/is_paused")).status == 200
    rust_frontend = version.rust_frontend
    if rust_frontend is None and generate == "rust":
        rust_frontend = "unknown"
    images, sounds = _ImageCapabilities(), _SoundCapabilities()
    if rust_frontend is None:
        images = await _probe_images(connection, served.name)
        sounds = await _probe_sounds(connection, served.name)
    return ServerCapabilities(
        version=version.vllm or "unknown",
        model=served.name,
        max_model_len=served.max_model_len,
        scale_out=generate is not None,
        pixel_dtype=images.pixel_dtype,
        placeholder_ids={**images.placeholder_ids, **sounds.placeholder_ids},
        merge_area=images.merge_area,
        control=control,
        patch_values=images.patch_values,
        image_fields=images.image_fields,
        rust_frontend=rust_frontend,
        sounds=sounds.format,
        sound_refusal=sounds.refusal,
    )


def release_of(version: str) -> tuple[int, ...] | None:
    """The release numbers of a version: "0.33.0rc1.dev5+gabc" is (0, 33, 0); None where there are none."""
    match = re.match(r"v?(\d+(?:\.\d+)+)", version)
    return None if match is None else tuple(int(part) for part in match[1].split("."))


# The generate route.


async def _generate_route(connection: ServerConnection, is_needed: bool) -> Literal["vllm", "rust"] | None:
    """Whose generate route the server has; None if the route is disabled and not needed."""
    # Without `sampling_params`, so that no version of vLLM runs it.
    response = await probe_request(connection, "POST", _GENERATE, {"token_ids": [], "content_parts": 0})
    if response.status in (400, 422):  # the Rust frontend names the first field alone
        return "rust" if b"into the target type: content_parts" in response.body else "vllm"
    if response.status not in (403, 404, 405, 501):
        raise response_error(PROBE_NAME, response, f"{_GENERATE} did not refuse an invalid request")
    if not is_needed:
        return None
    if response.status == 403:
        raise CapabilityError(
            PROBE_NAME,
            f"{connection.base_url} refuses {_GENERATE}: start `vllm serve` with --enable-scale-out "
            f"({response_error(PROBE_NAME, response, 'it answered').reason})",
        )
    raise CapabilityError(
        PROBE_NAME,
        f"{connection.base_url} has no {_GENERATE} (HTTP {response.status}): it is a server that only "
        "renders, not vLLM 0.31 or later, or behind a proxy that blocks this route. For an SGLang server "
        "use SGLangEngine, in "
        'commands --engine sglang, in files kind = "sglang"',
    )


# Images.


class _ImageCapabilities(NamedTuple):
    pixel_dtype: PixelDtype | None = None
    placeholder_ids: Mapping[str, int] = {}
    merge_area: int | None = None
    patch_values: int | None = None
    image_fields: Mapping[str, str] | None = None


async def _probe_images(connection: ServerConnection, model: str) -> _ImageCapabilities:
    response = await render_probe(connection, model, "image")
    rendered = _rendered_image(response) if response.status == 200 else None
    if rendered is not None:
        return rendered
    log.info(
        "%s takes no images, or does not report their format: %s",
        connection.base_url,
        response_error(PROBE_NAME, response, "rendering an image").reason,
    )
    return _ImageCapabilities()


def _rendered_image(response: HttpResponse) -> _ImageCapabilities | None:
    """The capabilities that the tensors of the rendered image show; None if the response has no tensors."""
    rendered = parse_render_response(response.body, PROBE_NAME)
    image = rendered.media[0] if rendered.media else None
    if image is None or image.encoded is None:
        return None
    try:
        tensors = decode_item(image.encoded, name=PROBE_NAME)
    except MalformedResultError as error:  # such as lists of tensors; source files still work
        log.warning("the tensors that the server makes of an image cannot be sent as features: %s", error.reason)
        return _ImageCapabilities()
    # The largest tensor of a dtype of pixels: others, such as grids, are small.
    pixels = max(
        (each for each in tensors.values() if each.dtype in get_args(PixelDtype)),
        key=lambda each: each.tensor.nbytes,
        default=None,
    )
    if pixels is None:
        listed = ", ".join(f"{name} ({each.dtype})" for name, each in tensors.items())
        log.warning("no tensor of an image of the server has a known dtype of pixels: %s; use source files", listed)
        return _ImageCapabilities()
    token = single_token(rendered.token_ids, image.placeholder)
    shape, merge_area = tensor_type(pixels.tensor).shape, _merge_area(tensors, pixels, image.placeholder.length)
    return _ImageCapabilities(
        cast(PixelDtype, pixels.dtype),
        {} if token is None else {image.modality: token},
        merge_area,
        shape[1] if merge_area is not None and len(shape) == 2 else None,
        {name: each.field.kind for name, each in tensors.items()},
    )


def _merge_area(tensors: Mapping[str, DecodedTensor], pixels: DecodedTensor, tokens: int) -> int | None:
    """Patches per token, if the pixels are a list of patches with a grid in another tensor."""
    patches = tensor_type(pixels.tensor).shape[0]
    if not any(name.endswith("_grid_thw") for name in tensors) or patches % tokens:
        return None
    return patches // tokens


# Sounds.


class _SoundCapabilities(NamedTuple):
    format: SoundFormat | None = None
    refusal: str | None = None
    placeholder_ids: Mapping[str, int] = {}


async def _probe_sounds(connection: ServerConnection, model: str) -> _SoundCapabilities:
    response = await render_probe(connection, model, "audio")
    # It takes no sounds; every other failure leaves that open.
    if response.status == 400:
        return _SoundCapabilities(refusal=response_error(PROBE_NAME, response, "rendering a sound").reason)
    if response.status != 200:  # no such route, or a rate that the server cannot resample to that of its model
        return _SoundCapabilities()
    rendered = parse_render_response(response.body, PROBE_NAME)
    sound = next((media for media in rendered.media if media.modality == "audio"), None)
    if sound is None or sound.encoded is None:
        return _SoundCapabilities()
    token = single_token(rendered.token_ids, sound.placeholder)
    ids = {} if token is None else {"audio": token}
    try:
        tensors = decode_item(sound.encoded, name=PROBE_NAME)
    except MalformedResultError as error:  # such as lists of tensors; source files still work
        log.warning("the tensors that the server makes of a sound cannot be sent as features: %s", error.reason)
        return _SoundCapabilities(placeholder_ids=ids)
    return _SoundCapabilities(sound_format(tensors, sound.placeholder.length), None, ids)
