"""All checks of a server, one after the other; none leaves it otherwise than it was."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from renderers import RendererError, load_renderer
from rollouts.doctor import reference_check
from rollouts.doctor.finding import Finding, failed
from rollouts.doctor.generation_checks import (
    aborting,
    cache,
    logprobs_mode,
    picture_request,
    text_request,
)
from rollouts.doctor.patient import Patient, weights_dtype
from rollouts.doctor.server_checks import (
    control_routes,
    keep_alive,
    pause_and_resume,
    pixel_dtype,
    reachable,
    scale_out,
    served_model,
    version,
)
from rollouts.doctor.token_checks import picture_tokens_and_features, text_tokens
from rollouts.engines.vllm.capabilities import ExpectedCapabilities, ServerCapabilities, probe
from rollouts.engines.vllm.connection import HttpLimits, ServerConnection
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.engines.vllm.media_forms import MediaMode
from rollouts.errors import CapabilityError, EngineError

# Somebody waits for the answer: a server that is not there is reported after seconds.
_LIMITS = HttpLimits(retries=2, total_seconds=300)
_MEDIA: tuple[MediaMode, MediaMode] = ("features", "content_parts")

Check = Callable[[Patient], Awaitable[Finding | list[Finding]]]


class Options(NamedTuple):
    """`control` pauses the server for a moment; checkpoints past `reference_gigabytes` are not scored again here."""

    model: str | None = None
    api_key: str | None = None
    control: bool = False
    reference_gigabytes: float = 4.0


async def examine(base_url: str, directory: Path, options: Options) -> list[Finding]:
    """Findings in the order of the report. Raises `RendererError` and `EngineError` where nothing can be checked."""
    renderer = await asyncio.to_thread(load_renderer, directory)
    connection = ServerConnection(base_url, api_key=options.api_key, limits=_LIMITS)
    engine, server_side = (
        VLLMEngine(base_url, model=options.model, api_key=options.api_key, media=media, limits=_LIMITS)
        for media in _MEDIA
    )
    try:
        dtype, dtype_source = await weights_dtype(connection, directory)
        patient = Patient(
            engine=engine,
            server_side=server_side,
            control=engine.control,
            connection=connection,
            renderer=renderer,
            directory=directory,
            capabilities=await _capabilities(connection, options.model),
            dtype=dtype,
            dtype_source=dtype_source,
        )
        findings = await _all_findings(patient, options)
        return [finding.without(options.api_key) for finding in findings]
    finally:
        await asyncio.gather(engine.close(), server_side.close(), connection.close())


async def _capabilities(connection: ServerConnection, model: str | None) -> ServerCapabilities:
    """Also of a server that does not generate, which is a finding and no reason to stop."""
    try:
        return await probe(connection, model=model)
    except CapabilityError as error:
        try:
            return await probe(connection, model=model, expected=ExpectedCapabilities(scale_out=False))
        except CapabilityError:
            raise error from None


async def _all_findings(patient: Patient, options: Options) -> list[Finding]:
    idle = asyncio.ensure_future(_run(keep_alive, patient))  # waits for seconds, beside the others
    try:
        findings = []
        for check in _checks(patient, options):
            findings += await _run(check, patient)
        return [*findings[:1], *await idle, *findings[1:]]
    finally:
        idle.cancel()


def _checks(patient: Patient, options: Options) -> list[Check]:
    checks: list[Check] = [
        reachable,
        version,
        served_model,
        scale_out,
        control_routes,
        pixel_dtype,
        text_tokens,
        picture_tokens_and_features,
    ]
    if not patient.capabilities.scale_out:
        return checks
    checks += [text_request, picture_request, cache, logprobs_mode, aborting]

    async def mismatch(patient: Patient) -> list[Finding]:
        return await reference_check.mismatch(patient, max_gigabytes=options.reference_gigabytes)

    checks.append(mismatch)
    if options.control and patient.capabilities.control:
        checks.append(pause_and_resume)
    return checks


async def _run(check: Check, patient: Patient) -> list[Finding]:
    """What a check found; what stopped it is a finding too."""
    try:
        found = await check(patient)
    except (EngineError, RendererError) as error:
        name = check.__name__.replace("_", " ")
        return [failed(name, str(error), "read what it says, and the server's log at this time")]
    return found if isinstance(found, list) else [found]
