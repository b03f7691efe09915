"""What a vLLM server can do and what it wants, asked once: version, model, limits, pixels, placeholders, routes.

vLLM announces next to nothing of this, so most of it is read off how the server answers: a request to generate that
lacks what is required is refused with a list of the fields that the server knows, and `/render` of a small image
shows which pixels it would send itself. Nothing here runs the model; a paused server is probed as any other.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple, cast, get_args

from rollouts.engines.vllm.http.connection import ServerConnection
from rollouts.engines.vllm.http.response import HttpResponse, response_error
from rollouts.engines.vllm.server_probe import (
    PROBE_NAME,
    json_object,
    probe_request,
    render_probe_image,
    served_model,
    server_version,
)
from rollouts.engines.vllm.wire.feature_decoding import DecodedTensor, decode_item
from rollouts.engines.vllm.wire.render_response import parse_render_response, single_token
from rollouts.engines.vllm.wire.tensors import PixelDtype, tensor_shape
from rollouts.errors import CapabilityError, MalformedResultError

__all__ = ["ExpectedCapabilities", "PixelDtype", "ServerCapabilities", "probe", "release_of"]

log = logging.getLogger("rollouts.engines.vllm")

_GENERATE = "/inference/v1/generate"

#: Before this release no server normalised pixels on its device.
_DEVICE_NORMALISES = (0, 29)

#: Releases that are known to know `content_parts` and `output_mode`; the first may be older.
_RAW_MEDIA, _MODES = (0, 29), (0, 32)


@dataclass(frozen=True, slots=True)
class ServerCapabilities:
    """One server, as it was started.

    `version` is vLLM's ("0.32.0"; "unknown" where something in between hides it), `model` the name under which it
    serves a model, `max_model_len` the most tokens of prompt and completion together. `scale_out`:
    `/inference/v1/generate` answers. `pixel_dtype` is what its vision tower takes (see `features`), None where it takes
    no images. `placeholder_ids` names by modality the token that stands for one row of features, `merge_area` how
    many patches of pixels such a token stands for (4 for Qwen-VL; None where that is not fixed). `chat_logprobs`:
    log-probabilities come in the shape of chat completions, as they did up to vLLM 0.31. `content_parts`: it processes
    raw media itself. `control`: it has the routes of development mode (`ServerControl`). `patch_values`: numbers in one
    patch (1536 for Qwen3-VL; None where pixels are no patches). `image_fields`: the tensors that it makes of an image,
    each with how a batch is made of them (`TensorField.kind`); None where it does not tell.
    """

    version: str
    model: str
    max_model_len: int
    scale_out: bool
    pixel_dtype: PixelDtype | None
    placeholder_ids: Mapping[str, int]
    merge_area: int | None
    chat_logprobs: bool
    content_parts: bool
    control: bool
    patch_values: int | None = None
    image_fields: Mapping[str, str] | None = None


@dataclass(frozen=True, slots=True)
class ExpectedCapabilities:
    """What is known of a server beforehand; None is left to the probe.

    What is given here holds where the server does not tell; where it tells otherwise, `probe` raises `CapabilityError`.
    `scale_out=False` is for those who want to know about a server that does not generate.
    """

    version: str | None = None
    model: str | None = None
    max_model_len: int | None = None
    scale_out: bool | None = None
    pixel_dtype: PixelDtype | None = None
    placeholder_ids: Mapping[str, int] = field(default_factory=dict)
    merge_area: int | None = None
    chat_logprobs: bool | None = None
    content_parts: bool | None = None
    control: bool | None = None
    patch_values: int | None = None
    image_fields: Mapping[str, str] | None = None

    def __post_init__(self) -> None:
        if self.pixel_dtype is not None and self.pixel_dtype not in get_args(PixelDtype):
            raise CapabilityError(PROBE_NAME, f"pixel_dtype is {self.pixel_dtype!r}, not one of {_dtypes()}")
        for name in ("max_model_len", "merge_area", "patch_values"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise CapabilityError(PROBE_NAME, f"{name} is {value}; it is at least 1")


async def probe(
    connection: ServerConnection, *, model: str | None = None, expected: ExpectedCapabilities | None = None
) -> ServerCapabilities:
    """Ask a server what it is; five small requests, one of which lets it process an image of 64 x 64.

    `model` is the name of the model to use, needed only where the server serves several. Raises `CapabilityError` where
    the server cannot be used as it was started or contradicts `expected`, and what `ServerConnection.request` raises.
    """
    expected = expected or ExpectedCapabilities()
    version = await server_version(connection)
    served = await served_model(connection, model or expected.model)
    generate = await _generate_route(connection, expected.scale_out, version or expected.version)
    control = (await probe_request(connection, "GET", "/is_paused")).status == 200
    images = await _images(connection, served.name, version or expected.version)
    found: dict[str, Any] = {
        "version": version,
        "model": served.name,
        "max_model_len": served.max_model_len,
        "scale_out": generate is not None,
        "pixel_dtype": images.pixel_dtype,
        "placeholder_ids": images.placeholder_ids,
        "merge_area": images.merge_area,
        "patch_values": images.patch_values,
        "image_fields": images.image_fields,
        "chat_logprobs": None if generate is None or generate.modes is None else not generate.modes,
        "content_parts": None if generate is None else generate.content_parts,
        "control": control,
    }
    return _settled(connection, found, expected)


def _settled(
    connection: ServerConnection, found: Mapping[str, Any], expected: ExpectedCapabilities
) -> ServerCapabilities:
    """What the server says, completed by what was expected of it."""
    settled: dict[str, Any] = {}
    for each in fields(ServerCapabilities):
        said, wanted = found[each.name], getattr(expected, each.name)
        if isinstance(said, dict):
            expected_entries = wanted or {}
            clash = any(said.get(key, value) != value for key, value in expected_entries.items())
            settled[each.name] = {**expected_entries, **said}
        else:
            clash = said is not None and wanted is not None and not _agree(each.name, said, wanted)
            settled[each.name] = wanted if said is None else said
        if clash:
            raise CapabilityError(
                PROBE_NAME,
                f"{connection.base_url} says {each.name} {said!r}, ExpectedCapabilities says {wanted!r}. Leave "
                f"{each.name} out, or start the server as expected",
            )
    if settled["max_model_len"] is None:
        raise CapabilityError(
            PROBE_NAME, f"{connection.base_url} does not tell its max_model_len; give it in ExpectedCapabilities"
        )
    for name, fallback in (("version", "unknown"), ("chat_logprobs", False), ("content_parts", False)):
        if settled[name] is None:
            settled[name] = fallback
    return ServerCapabilities(**settled)


def _agree(name: str, said: Any, wanted: Any) -> bool:
    if name == "version":
        return release_of(said) == release_of(wanted) if release_of(wanted) else bool(said == wanted)
    return bool(said == wanted)


def release_of(version: str) -> tuple[int, ...] | None:
    """The release numbers of a version: "0.33.0rc1.dev5+gabc" is (0, 33, 0); None where there are none."""
    match = re.match(r"v?(\d+(?:\.\d+)+)", version)
    return None if match is None else tuple(int(part) for part in match[1].split("."))


# What may be asked of it.


class _GenerateRoute(NamedTuple):
    """Fields of a request that the server knows: raw media, and a choice of what is answered; None: it did not tell."""

    content_parts: bool | None
    modes: bool | None


async def _generate_route(
    connection: ServerConnection, expected: bool | None, version: str | None
) -> _GenerateRoute | None:
    """None where the route is off and that is expected."""
    # Lacks `sampling_params`, so no version of vLLM runs it.
    invalid = {"token_ids": [], "content_parts": 0, "output_mode": "?"}
    reply = await probe_request(connection, "POST", _GENERATE, invalid)
    if reply.status in (400, 422):
        if _refused_field(reply, "sampling_params"):
            return _GenerateRoute(_refused_field(reply, "content_parts"), _refused_field(reply, "output_mode"))
        release = release_of(version or "")  # something in between hides what was wrong with the request
        return _GenerateRoute(*(None if release is None else release[:2] >= since for since in (_RAW_MEDIA, _MODES)))
    if reply.status not in (403, 404, 405, 501):
        raise response_error(PROBE_NAME, reply, f"{_GENERATE} was asked for something that it must refuse")
    if expected is False:
        return None
    if reply.status == 403:
        raise CapabilityError(
            PROBE_NAME,
            f"{connection.base_url} refuses {_GENERATE}: start `vllm serve` with --enable-scale-out "
            f"({response_error(PROBE_NAME, reply, 'it answered').reason})",
        )
    raise CapabilityError(
        PROBE_NAME,
        f"{connection.base_url} has no {_GENERATE} (HTTP {reply.status}): it is a server that only renders, or no vLLM "
        "of 0.20 or later, or something in between lets only other routes through",
    )


def _refused_field(reply: HttpResponse, name: str) -> bool:
    """Whether a validation error is about this field of the body; fields that a server does not know are ignored."""
    return re.search(rf"body(?:\.|['\"], ?['\"]){name}\b", reply.body.decode(errors="replace")) is not None


# What it wants of images.


class _Images(NamedTuple):
    pixel_dtype: PixelDtype | None = None
    placeholder_ids: Mapping[str, int] = {}
    merge_area: int | None = None
    patch_values: int | None = None
    image_fields: Mapping[str, str] | None = None


async def _images(connection: ServerConnection, model: str, version: str | None) -> _Images:
    reply = await render_probe_image(connection, model)
    rendered = _rendered_image(reply) if reply.status == 200 else None
    if (found := rendered or await _configured_images(connection)) is not None:
        return found
    release = release_of(version or "")
    if reply.status in (403, 404, 405) and release is not None and release[:2] < _DEVICE_NORMALISES:
        return _Images("float32")  # which it casts to its own type
    log.info(
        "%s takes no images, or does not tell which: %s. If it does, say so with ExpectedCapabilities(pixel_dtype=, "
        "placeholder_ids=)",
        connection.base_url,
        response_error(PROBE_NAME, reply, "rendering an image").reason,
    )
    return _Images()


def _rendered_image(reply: HttpResponse) -> _Images | None:
    """What the server made of the image; None where its answer does not hold it."""
    answer = parse_render_response(reply.body, PROBE_NAME)
    medium = answer.media[0] if answer.media else None
    if medium is None or medium.encoded is None:
        return None
    try:
        tensors = decode_item(medium.encoded, name=PROBE_NAME)
    except MalformedResultError as error:  # such as lists of tensors; the server still takes source files
        log.warning("the tensors that the server makes of an image cannot be sent as features: %s", error.reason)
        return _Images()
    pixels = max(
        (each for each in tensors.values() if each.dtype in get_args(PixelDtype)),
        key=lambda each: each.tensor.nbytes,
        default=None,
    )
    if pixels is None:
        held = ", ".join(f"{name} ({each.dtype})" for name, each in tensors.items())
        log.warning("the server makes %s of an image, none of them %s; it gets source files", held, _dtypes())
        return _Images()
    token = single_token(answer.token_ids, medium.placeholder)
    shape, merge_area = tensor_shape(pixels.tensor), _merge_area(tensors, pixels, medium.placeholder.length)
    return _Images(
        cast(PixelDtype, pixels.dtype),
        {} if token is None else {medium.modality: token},
        merge_area,
        shape[1] if merge_area is not None and len(shape) == 2 else None,
        {name: each.field.kind for name, each in tensors.items()},
    )


def _merge_area(tensors: Mapping[str, DecodedTensor], pixels: DecodedTensor, tokens: int) -> int | None:
    """Patches per token, where pixels are a list of patches whose grid is given beside them."""
    patches = tensor_shape(pixels.tensor)[0]
    if not any(name.endswith("_grid_thw") for name in tensors) or patches % tokens:
        return None
    return patches // tokens


async def _configured_images(connection: ServerConnection) -> _Images | None:
    """What development mode tells of the configuration; None where it tells nothing."""
    reply = await probe_request(connection, "GET", "/server_info", params={"config_format": "json"})
    config = json_object(reply).get("vllm_config") if reply.status == 200 else None
    model = config.get("model_config") if isinstance(config, dict) else None
    if not isinstance(model, dict):
        return None
    multimodal = model.get("multimodal_config")
    if not isinstance(multimodal, dict) or multimodal.get("language_model_only") or _refuses_images(multimodal):
        return _Images()
    if multimodal.get("mm_device_do_normalize"):
        return _Images("uint8")
    dtype = str(model.get("dtype")).removeprefix("torch.")
    return _Images(cast(PixelDtype, dtype)) if dtype in get_args(PixelDtype) else None


def _refuses_images(multimodal: Mapping[str, Any]) -> bool:
    """Whether it was started with --limit-mm-per-prompt '{"image": 0}'."""
    limits = multimodal.get("limit_per_prompt")
    limit = limits.get("image") if isinstance(limits, dict) else None
    return (limit.get("count") if isinstance(limit, dict) else limit) == 0


def _dtypes() -> str:
    return ", ".join(get_args(PixelDtype))
