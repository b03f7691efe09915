"""Version, options, state and connections of the server."""

from __future__ import annotations

import asyncio
import http.client
import statistics
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from renderers import RendererError
from rollouts.cli.doctor.target import (
    SAMPLED_TOKENS,
    Finding,
    Target,
    absent,
    failed,
    fresh_image,
    image_limit,
    ok,
    skipped,
)
from rollouts.engines.http.connection import HttpLimits
from rollouts.engines.http.exchange import response_error
from rollouts.engines.vllm.capabilities import release_of
from rollouts.errors import EngineError

#: The oldest and the newest version whose wire format is known, from their sources or from tests.
KNOWN_VERSIONS = ((0, 31), (0, 33))

_PINGS = 9
_KEEP_ALIVE_TRIES = 3
_CONVERSATION_TOKENS = 8192  # a token limit that has room for a conversation


async def reachable(target: Target) -> Finding:
    seconds = []
    for _ in range(_PINGS):
        started = time.perf_counter()
        status = await target.health()
        seconds.append(time.perf_counter() - started)
        if status != 200:
            cure = f"read its log, then start `{target.command}` again"
            return failed(f"/health answers {status}: the server's engine is dead", cure)
    first, typical = seconds[0] * 1000, statistics.median(seconds[1:]) * 1000
    return ok(f"first response after {first:.1f} ms, later ones {typical:.1f} ms")


async def keep_alive(target: Target) -> Finding:
    """Whether an idle connection stays open for as long as the engine uses it again."""
    idle = HttpLimits().keepalive_seconds
    # A machine under load may sleep past the server's limit by chance; a server with a shorter limit closes every time.
    for _ in range(_KEEP_ALIVE_TRIES):
        if await asyncio.to_thread(_stays_open, target.connection.base_url, idle + 0.25):
            return ok(f"a connection idle for {idle:g} s is still open")
    return failed(
        f"the server, or a proxy before it, closes connections that are idle for {idle:g} s; the engine reuses them",
        "start the server with VLLM_HTTP_TIMEOUT_KEEP_ALIVE=5 (SGLang: SGLANG_TIMEOUT_KEEP_ALIVE=5; the default) or "
        "more, and raise the proxy's; or pass a smaller HttpLimits(keepalive_seconds=...)",
    )


def _stays_open(base_url: str, seconds: float) -> bool:
    url = urlsplit(base_url)
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = kind(url.hostname or "", url.port, timeout=10)
    try:
        for pause in (seconds, 0.0):
            connection.request("GET", f"{url.path}/health")
            connection.getresponse().read()
            if connection.sock is None:  # "Connection: close"
                return False
            connection.auto_open = 0  # a closed connection is an error from here on, and is not opened again
            time.sleep(pause)
    except (http.client.HTTPException, OSError):
        return False
    finally:
        connection.close()
    return True


async def version(target: Target) -> Finding:
    reported, rust = target.capabilities.version, target.capabilities.rust_frontend
    seen = f"vLLM {reported}" if rust is None else f"vLLM {reported} behind its Rust frontend {rust}"
    release = release_of(reported)
    if release is None:
        return absent(f"{reported}: not a release", _VERSION_CURE)
    oldest, newest = KNOWN_VERSIONS
    if release[:2] < oldest:
        return failed(seen, f'pip install "vllm>={oldest[0]}.{oldest[1]}" where the server runs')
    if release[:2] > newest:
        return failed(f"{seen}, newer than the versions that mmrollouts knows", _VERSION_CURE)
    return ok(seen)


_VERSION_CURE = "if other checks fail too, its wire format has changed: update mmrollouts"


async def served_model(target: Target) -> Finding:
    """Compare the token limit with config.json, and with the longest request of the checks."""
    capabilities = target.capabilities
    positions = _positions(target.config.get("text_config", target.config))
    seen = f"{capabilities.model}, {capabilities.max_model_len} tokens"
    if isinstance(positions, int) and capabilities.max_model_len > positions:
        return failed(
            f"{seen}, but config.json has {positions} positions; beyond them the completions of a model are garbage",
            f"start `{target.command}` with {target.length_option} {positions}, or pass --model the directory that "
            "is served",
        )
    if target.has_images:
        prompt, content = await asyncio.to_thread(target.image_prompt, fresh_image()), " with one small image"
    else:
        prompt, content = target.text_prompt(), ""
    needed = len(prompt.token_ids) + SAMPLED_TOKENS
    if capabilities.max_model_len < needed:
        room = min(positions, _CONVERSATION_TOKENS) if isinstance(positions, int) else _CONVERSATION_TOKENS
        return failed(
            f"{seen}: a short prompt{content} and its completion take {needed}",
            f"start `{target.command}` with {target.length_option} {max(needed, room)}",
        )
    return ok(f"{seen} of {positions} that config.json allows" if positions else seen)


def _positions(config: Mapping[str, Any]) -> int | None:
    """The positions that a configuration allows, after scaling of its rotary embeddings; None if it has no number."""
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int):
        return None
    scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
    longest = positions
    for each in (scaling, *scaling.values()):  # a kind of layers may have a scaling of its own
        if isinstance(each, Mapping) and isinstance(factor := each.get("factor"), int | float):
            # `max_position_embeddings` is the number before or after scaling, by model and version.
            longest = max(longest, int(factor * (each.get("original_max_position_embeddings") or positions)))
    return longest


async def scale_out(target: Target) -> Finding:
    if target.capabilities.scale_out:
        return ok("/inference/v1/generate answers")
    return failed(
        "/inference/v1/generate does not answer: rollouts and most of the checks are impossible",
        "start `vllm serve` with --enable-scale-out",
    )


async def control_routes(target: Target) -> Finding:
    if target.capabilities.control:
        return ok("pause, resume, sleep and weight reloading are on")
    return absent(
        "no pause, resume or weight reloading",
        "start the server with VLLM_SERVER_DEV_MODE=1 if weights are to be updated in it; never on an open network",
    )


async def running(target: Target) -> Finding:
    """A paused server answers all requests except those to generate, which wait."""
    if not await target.control.is_paused():
        return ok("neither paused nor asleep")
    url = target.connection.base_url
    if await target.control.is_sleeping():
        return failed("the server is asleep: requests wait until it is woken up", f"curl -X POST {url}/wake_up")
    return failed("the server is paused: requests wait until it is resumed", f"curl -X POST {url}/resume")


async def pause_and_resume(target: Target) -> Finding:
    """Pause the server for a moment; requests in flight are kept and no cache is cleared."""
    if await target.health() != 200:
        return skipped("an earlier check has ended the server's engine")
    control = target.control
    try:
        await control.pause(mode="keep", clear_cache=False)
        paused = await control.is_paused()
    finally:
        await _resume(target)
    if not paused or await control.is_paused():
        return failed(
            "the server accepted the request and did not pause or resume",
            "read its log before you update weights in it",
        )
    return ok("paused, with requests in flight kept, and resumed")


async def _resume(target: Target) -> None:
    """Resume the server, with retries: it must not stay paused."""
    for attempt in range(5):
        try:
            await target.control.resume()
            return
        except EngineError:
            if attempt == 4:
                raise
            await asyncio.sleep(1)


async def pixel_dtype(target: Target) -> Finding:
    """The dtype of pixels that the server takes, and the mode in which `media="auto"` sends images."""
    if not target.has_images:
        try:
            target.image_prompt(fresh_image())
        except RendererError as error:
            return skipped(f"no images are processed here: {error}")
        return skipped("no images are processed here: the renderer has no processor")
    if target.capabilities.rust_frontend is not None:
        return ok("the Rust frontend takes no pixels: images are sent as PNG files of the pixels that training uses")
    dtype = target.capabilities.pixel_dtype
    if dtype is None:
        return await _no_pixels(target)
    where = "on its device" if dtype == "uint8" else "in its processor, on the CPU"
    return ok(f'{dtype}: the server normalises {where}; media="auto" sends images as {target.image_mode}')


async def _no_pixels(target: Target) -> Finding:
    """The finding where the model of --model takes images and the server shows no pixels of one."""
    response = await target.render(target.image_prompt(fresh_image()))
    if response.status == 400:
        reason = response_error("", response, "/render").body
        return absent(
            f"the model of --model takes images, the server none: {reason}",
            "start `vllm serve` without --language-model-only, and with --limit-mm-per-prompt '{\"image\": 8}' or more"
            if image_limit(reason) == 0
            else f"start `vllm serve {target.directory}` if it serves another model; else read its log of this moment",
        )
    return skipped(
        f"the server does not show its pixels of an image: /render answers {response.status}",
        "start `vllm serve` with --enable-scale-out and --mm-processor-cache-gb 0",
    )
