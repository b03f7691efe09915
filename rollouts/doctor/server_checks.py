"""What the server is, how it was started, and how its connections behave."""

from __future__ import annotations

import asyncio
import http.client
import statistics
import time
from urllib.parse import urlsplit

from rollouts.doctor.finding import Finding, absent, failed, ok
from rollouts.doctor.patient import Patient
from rollouts.engines.vllm.capabilities import release_of
from rollouts.engines.vllm.connection import HttpLimits
from rollouts.errors import EngineError

#: The versions whose wire is known: read in their sources, or talked to.
KNOWN_VERSIONS = ((0, 20), (0, 33))

_PINGS = 9

_KEEP_ALIVE_TRIES = 3


async def reachable(patient: Patient) -> Finding:
    seconds = []
    for _ in range(_PINGS):
        started = time.perf_counter()
        reply = await patient.connection.request("GET", "/health", name="asking for its health")
        seconds.append(time.perf_counter() - started)
        if reply.status != 200:
            return failed(
                "reachable", f"/health answers {reply.status}", "its engine is dead: read its log, start it anew"
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
        "raise VLLM_HTTP_TIMEOUT_KEEP_ALIVE (5 s by default), or pass a smaller HttpLimits(keepalive_seconds=...)",
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
        return failed("version", f"vLLM {said}", f"at least {oldest[0]}.{oldest[1]} is needed: upgrade the server")
    if release[:2] > newest:
        return failed("version", f"vLLM {said}, newer than any that is known here", _VERSION_CURE)
    return ok("version", f"vLLM {said}")


_VERSION_CURE = "the other checks tell whether its wire is another; upgrade mmrollouts if it is"


async def served_model(patient: Patient) -> Finding:
    """Name and limit against the directory's config."""
    capabilities = patient.capabilities
    text = patient.config.get("text_config", patient.config)
    positions = text.get("max_position_embeddings")
    seen = f"{capabilities.model}, {capabilities.max_model_len} tokens"
    if isinstance(positions, int) and capabilities.max_model_len > positions:
        return failed(
            "served model",
            f"{seen}, but config.json knows {positions} positions",
            "serve the model of --model, or lower --max-model-len: beyond its positions a model answers garbage",
        )
    return ok("served model", f"{seen} of {positions} that config.json allows" if positions else seen)


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


async def pause_and_resume(patient: Patient) -> Finding:
    """Freeze the server for a moment; nothing in flight is lost and no cache is cleared."""
    control = patient.control
    if await control.is_paused():
        return failed("pause, resume", "the server is paused already, by somebody else", "resume it: POST /resume")
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
    """Which pixels the server wants, as read off its own processing."""
    wanted = patient.capabilities.pixel_dtype
    if wanted is None:
        return ok("pixel dtype", "none: the server takes no pictures")
    where = "on its device" if wanted == "uint8" else "in its processor, on the CPU"
    return ok("pixel dtype", f"{wanted}: the server normalises {where}")
