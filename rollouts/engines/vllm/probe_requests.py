"""Requests that find out what a server is: its version, its model, and its rendering of a small image and a sound.

No request runs the model, so that a paused server answers them as well.
"""

import base64
import functools
import io
import uuid
from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image

from rollouts.engines.http.address import redacted
from rollouts.engines.http.capability_cache import PROBE_NAME, probe_request
from rollouts.engines.http.connection import ServerConnection
from rollouts.engines.http.responses import HttpResponse, response_error
from rollouts.engines.vllm.sounds import probe_sound_url
from rollouts.errors import CapabilityError

RENDER_PATH = "/v1/chat/completions/render"


class ServedModel(NamedTuple):
    """A model that a server offers: `root` is the directory or repository that it was loaded from."""

    name: str
    root: Any
    max_model_len: int | None


class ServerVersion(NamedTuple):
    """What `/version` reports: `vllm` is the engine's version, `rust_frontend` that of vLLM's Rust frontend before it.

    `vllm` is None where the route does not answer; then it is not known either whether there is a Rust
    frontend.
    """

    vllm: str | None
    rust_frontend: str | None = None


async def server_version(connection: ServerConnection) -> ServerVersion:
    """The versions of a server."""
    response = await probe_request(connection, "GET", "/version")
    content = json_object(response) if response.status == 200 else {}
    vllm, rust_frontend = (content.get(name) for name in ("version", "rust_frontend_version"))
    return ServerVersion(
        vllm if isinstance(vllm, str) and vllm else None, None if rust_frontend is None else str(rust_frontend)
    )


async def served_model(connection: ServerConnection, name: str | None) -> ServedModel:
    """The model of this name, or the first one. Raises `CapabilityError`."""
    response = await probe_request(connection, "GET", "/v1/models")
    if response.status != 200:
        error = response_error(PROBE_NAME, response, "asking which model is served")
        raise CapabilityError(PROBE_NAME, f"{error.reason}. Is this a vLLM?")
    listed = json_object(response).get("data")
    cards = [card for card in listed or () if isinstance(card, dict) and isinstance(card.get("id"), str)]
    if not cards:
        raise CapabilityError(PROBE_NAME, f"{connection.base_url}/v1/models lists no model. Is this a vLLM?")
    # The first is the model itself; the others are further names of it, or adapters with it as their parent.
    card = next((card for card in cards if name in (None, card["id"])), None)
    if card is None:
        names = ", ".join(card["id"] for card in cards)
        raise CapabilityError(PROBE_NAME, f"{connection.base_url} serves {redacted(names)}, not {name}")
    lengths = (each.get("max_model_len") for each in (card, *cards))
    return ServedModel(card["id"], card.get("root"), next((each for each in lengths if isinstance(each, int)), None))


async def render_message(connection: ServerConnection, model: str, content: Any) -> HttpResponse:
    """Let the server render one user message."""
    body = {"model": model, "messages": [{"role": "user", "content": content}]}
    return await probe_request(connection, "POST", RENDER_PATH, body)


async def render_probe(connection: ServerConnection, model: str, modality: Literal["image", "audio"]) -> HttpResponse:
    """Let the server render the probe image or sound, under a new cache name at every call."""
    url = _probe_image_url() if modality == "image" else probe_sound_url()
    part = {"type": f"{modality}_url", f"{modality}_url": {"url": url}, "uuid": f"render-probe-{uuid.uuid4().hex}"}
    return await render_message(connection, model, [part])


def json_object(response: HttpResponse) -> Mapping[str, Any]:
    """The body if it is a JSON object; {} for another value or none. Raises `MalformedResultError` for no JSON."""
    content = response.json() if response.body else {}
    return content if isinstance(content, dict) else {}


@functools.cache
def _probe_image_url() -> str:
    """A data URL of noise with odd sides (53 x 37): its tensors depend on resizing, rescaling and patch size alike."""
    row, column, channel = np.ogrid[:53, :37, :3]
    noise = (row * 73 + column * 151 + channel * 29 + row * column * 7) % 256
    file = io.BytesIO()
    Image.fromarray(noise.astype(np.uint8)).save(file, "PNG")
    return f"data:image/png;base64,{base64.b64encode(file.getbuffer()).decode()}"
