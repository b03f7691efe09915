"""What the server is, how it was started, and how its connections behave."""

from __future__ import annotations

import asyncio
import http.client
import statistics
import time
from urllib.parse import urlsplit

from renderers import RendererError
from rollouts.cli.doctor.finding import Finding, absent, failed, ok, skipped
from rollouts.cli.doctor.target import SAMPLED, Patient, fresh_image
from rollouts.engines.vllm.capabilities import release_of
from rollouts.engines.vllm.http.limits import HttpLimits
from rollouts.engines.vllm.http.response import response_error
from rollouts.errors import EngineError

#: The versions whose wire is known: read in their sources, or talked to.
KNOWN_VERSIONS = ((0, 20), (0, 33))

_PINGS = 9

_KEEP_ALIVE_TRIES = 3


async def reachable(patient: Patient) -> Finding:
    seconds = []
    for _ in range(_PINGS):
        started = time.perf_counter()
        status = await patient.health()
        seconds.append(time.perf_counter() - started)
        if status != 200:
            return failed(
                "reachable",
                f"/health answers {status}: the server's engine is dead",
                "read its log, then start `vllm serve` again",
            )
    first, typical = seconds[0] * 1000, statistics.median(seconds[1:]) * 1000
    return ok("reachable", f"first answer after {first:.1f} ms, later ones {typical:.1f} ms")


async def keep_alive(patient: Patient) -> Finding:
    """Whether an idle connection lives as long as we would use it again."""
    idle = HttpLimits().keepalive_seconds
    # A machine that stalls may sleep past the server's time; a server that closes early does so every time.
    for _ in range(_KEEP_ALIVE_TRIES):
        if await asyncio.to_thread(_survives, patient.connection.base_url, idle + 0.25):
            return ok("keep-alive", f"a connection idle for {idle:g} s is still open")
    return failed(
        "keep-alive",
        f"the server, or a proxy before it, closes connections idle for {idle:g} s, after which we use them again",
        "start the server with VLLM_HTTP_TIMEOUT_KEEP_ALIVE=5 (its default) or more, and raise the proxy's; or pass a "
        "smaller HttpLimits(keepalive_seconds=...)",
    )


def _survives(base_url: str, seconds: float) -> bool:
    url = urlsplit(base_url)
    kind = http.client.HTTPSConnection if url.scheme == "https" else http.client.HTTPConnection
    connection = kind(url.hostname or "", url.port, timeout=10)
    try:
        for pause in (seconds, 0.0):
            connection.request("GET", f"{url.path}/health")
            connection.getresponse().read()
            if connection.sock is None:  # "Connection: close"
                return False
            connection.auto_open = 0  # from now on a closed connection is an error and not opened again
            time.sleep(pause)
    except (http.client.HTTPException, OSError):
        return False
    finally:
        connection.close()
    return True


async def version(patient: Patient) -> Finding:
    said = patient.capabilities.version
    release = release_of(said)
    if release is None:
        return absent("version", f"{said}: not a release", _VERSION_CURE)
    oldest, newest = KNOWN_VERSIONS
    if release[:2] < oldest:
        return failed("version", f"vLLM {said}", f'pip install "vllm>={oldest[0]}.{oldest[1]}" where the server runs')
    if release[:2] > newest:
        return failed("version", f"vLLM {said}, newer than any that is known here", _VERSION_CURE)
    return ok("version", f"vLLM {said}")


_VERSION_CURE = "if other checks fail too, its wire is another: pip install --upgrade mmrollouts"


async def served_model(patient: Patient) -> Finding:
    """Name and limit against the directory's config, and against what the checks themselves ask for."""
    capabilities = patient.capabilities
    text = patient.config.get("text_config", patient.config)
    positions = text.get("max_position_embeddings")
    seen = f"{capabilities.model}, {capabilities.max_model_len} tokens"
    if isinstance(positions, int) and capabilities.max_model_len > positions:
        return failed(
            "served model",
            f"{seen}, but config.json knows {positions} positions; beyond them a model answers garbage",
            f"start `vllm serve` with --max-model-len {positions}, or pass --model the directory that is served",
        )
    needed = await asyncio.to_thread(_longest_request, patient)
    if capabilities.max_model_len < needed:
        room = max(needed, min(positions, _PLENTY) if isinstance(positions, int) else _PLENTY)
        return failed(
            "served model",
            f"{seen}: a short prompt with one small image and its answer take {needed}"
            if "image" in patient.renderer.processors
            else f"{seen}: a short prompt and its answer take {needed}",
            f"start `vllm serve` with --max-model-len {room}",
        )
    return ok("served model", f"{seen} of {positions} that config.json allows" if positions else seen)


#: A limit that leaves room for a conversation.
_PLENTY = 8192


def _longest_request(patient: Patient) -> int:
    """The most tokens that a check's prompt and its completion have together."""
    images = [fresh_image()] if "image" in patient.renderer.processors else []
    prompt = patient.image_prompt(*images) if images else patient.text_prompt()
    return len(prompt.token_ids) + SAMPLED


async def scale_out(patient: Patient) -> Finding:
    if patient.capabilities.scale_out:
        return ok("token endpoint", "/inference/v1/generate answers")
    return failed(
        "token endpoint",
        "/inference/v1/generate does not answer: neither rollouts nor most of the checks are possible",
        "start `vllm serve` with --enable-scale-out",
    )


async def control_routes(patient: Patient) -> Finding:
    if patient.capabilities.control:
        return ok("control routes", "pause, resume, sleep and weight reloading are on")
    return absent(
        "control routes",
        "no pause, resume or weight reloading",
        "start the server with VLLM_SERVER_DEV_MODE=1 if weights are to be updated in it; never on an open network",
    )


async def running(patient: Patient) -> Finding:
    """A paused server answers everything but requests to generate, which wait."""
    if not await patient.control.is_paused():
        return ok("running", "neither paused nor asleep")
    url = patient.connection.base_url
    if await patient.control.is_sleeping():
        return failed("running", "the server sleeps: requests wait until it is woken up", f"curl -X POST {url}/wake_up")
    return failed("running", "the server is paused: requests wait until it is resumed", f"curl -X POST {url}/resume")


async def pause_and_resume(patient: Patient) -> Finding:
    """Freeze the server for a moment; nothing in flight is lost and no cache is cleared."""
    if await patient.health() != 200:
        return skipped("pause, resume", "the server died of a check before")
    control = patient.control
    try:
        await control.pause(mode="keep", clear_cache=False)
        paused = await control.is_paused()
    finally:
        await _resume(patient)
    if not paused or await control.is_paused():
        return failed(
            "pause, resume",
            "the server answered and did not do what it was asked",
            "read its log; a weight update now would go wrong",
        )
    return ok("pause, resume", "paused, with what is in flight kept, and resumed")


async def _resume(patient: Patient) -> None:
    """Whatever happens, do not leave it paused."""
    for attempt in range(5):
        try:
            await patient.control.resume()
            return
        except EngineError:
            if attempt == 4:
                raise
            await asyncio.sleep(1)


async def pixel_dtype(patient: Patient) -> Finding:
    """Which pixels the server wants, as read off its own processing, and how `media="auto"` sends images."""
    if "image" not in patient.renderer.processors:
        return skipped("pixel dtype", f"no images are processed here: {_why_no_images(patient)}")
    wanted = patient.capabilities.pixel_dtype
    if wanted is None:
        return await _no_pixels(patient)
    where = "on its device" if wanted == "uint8" else "in its processor, on the CPU"
    return ok(
        "pixel dtype", f'{wanted}: the server normalises {where}; media="auto" sends images as {patient.image_mode}'
    )


def _why_no_images(patient: Patient) -> str:
    try:
        patient.image_prompt(fresh_image())
    except RendererError as error:
        return str(error)
    return "the renderer has no processor"


async def _no_pixels(patient: Patient) -> Finding:
    """The model of --model takes images, and the server shows no pixels of one."""
    reply = await patient.render(patient.image_prompt(fresh_image()))
    if reply.status == 400:
        return absent(
            "pixel dtype",
            f"the model of --model takes images, the server none: {response_error('', reply, '/render').body}",
            "start `vllm serve` without --language-model-only, and with --limit-mm-per-prompt '{\"image\": 8}' or more",
        )
    return skipped(
        "pixel dtype",
        f"the server does not show what it makes of an image: /render answers {reply.status}",
        "start `vllm serve` with --enable-scale-out and --mm-processor-cache-gb 0",
    )
