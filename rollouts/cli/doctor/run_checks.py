"""All checks of a server, one after the other; none leaves it otherwise than it was."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import NamedTuple

from renderers import RendererError, load_renderer
from rollouts.cli.doctor import reference_check
from rollouts.cli.doctor.finding import Finding, Outcome, failed, skipped
from rollouts.cli.doctor.generation_checks import aborting, logprobs_mode, text_request
from rollouts.cli.doctor.image_checks import (
    image_cache,
    image_pixels,
    image_request,
    images_of_server,
    unknown_image,
    unseen_normalisation,
)
from rollouts.cli.doctor.server_checks import (
    control_routes,
    keep_alive,
    pause_and_resume,
    pixel_dtype,
    reachable,
    running,
    scale_out,
    served_model,
    version,
)
from rollouts.cli.doctor.target import Patient, weights_dtype
from rollouts.cli.doctor.token_checks import text_tokens
from rollouts.engines.vllm.capabilities import ExpectedCapabilities, ServerCapabilities, probe
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.engines.vllm.http.connection import ServerConnection
from rollouts.engines.vllm.http.limits import HttpLimits
from rollouts.errors import ApiKeyError, CapabilityError, EngineError, OverlongPromptError

# Somebody waits for the answer: a server that is not there is reported after seconds.
_LIMITS = HttpLimits(retries=2, total_seconds=300)


class Check(NamedTuple):
    """A line of the table below.

    `name` is that of its finding, or of the first one. It runs only if each of `needs` was found in order: what it
    found otherwise would be the same fault again, or untrue. `unless_failed` stop it only by a failure; they may be
    skipped or absent.
    """

    name: str
    run: Callable[[Patient], Awaitable[Finding | list[Finding]]]
    needs: tuple[str, ...] = ()
    unless_failed: tuple[str, ...] = ()


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
    engine = VLLMEngine(base_url, model=options.model, api_key=options.api_key, media="auto", limits=_LIMITS)
    server_side = VLLMEngine(
        base_url, model=options.model, api_key=options.api_key, media="content_parts", limits=_LIMITS
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
        findings = await all_findings(patient, options)
        return [finding.without(options.api_key) for finding in findings]
    finally:
        await asyncio.gather(engine.close(), server_side.close(), connection.close())


async def _capabilities(connection: ServerConnection, model: str | None) -> ServerCapabilities:
    """Also of a server that does not generate, which is a finding and no reason to stop."""
    try:
        return await probe(connection, model=model)
    except ApiKeyError:
        raise
    except CapabilityError as error:
        try:
            return await probe(connection, model=model, expected=ExpectedCapabilities(scale_out=False))
        except CapabilityError:
            raise error from None


async def all_findings(patient: Patient, options: Options) -> list[Finding]:
    """What each check found, or why it was not made; kept in `patient.known`, too."""
    first = await outcome_of(Check("reachable", reachable), patient)
    # Waits for seconds, beside the others.
    idle = asyncio.ensure_future(outcome_of(Check("keep-alive", keep_alive, ("reachable",)), patient))
    try:
        findings = []
        for check in _checks(options):
            findings += await outcome_of(check, patient)
        return [*first, *await idle, *findings]
    finally:
        idle.cancel()


def _checks(options: Options) -> list[Check]:
    async def mismatch(patient: Patient) -> list[Finding]:
        return await reference_check.mismatch(patient, max_gigabytes=options.reference_gigabytes)

    generates, shows = ("text request",), ("image request",)
    checks = [
        Check("version", version, ("reachable",)),
        Check("served model", served_model, ("reachable",)),
        Check("token endpoint", scale_out, ("reachable",)),
        Check("control routes", control_routes, ("reachable",)),
        Check("running", running, ("control routes",)),
        Check("pixel dtype", pixel_dtype, ("token endpoint",)),
        Check("text tokens", text_tokens, ("reachable",)),
        Check("image tokens", images_of_server, ("pixel dtype",)),
        Check("text request", text_request, ("token endpoint",), unless_failed=("running",)),
        Check("image request", image_request, ("text request", "pixel dtype")),
        Check(
            "image pixels",
            image_pixels,
            ("image request", "image tokens"),
            unless_failed=("image features", "image normalisation"),
        ),
        Check("image cache", image_cache, shows),
        Check("log-probabilities", logprobs_mode, generates),
        Check("abort", aborting, generates),
        Check("mismatch", mismatch, generates, unless_failed=("log-probabilities",)),
        Check("image normalisation", unseen_normalisation, ("image tokens",)),
        Check("cache miss", unknown_image, shows),  # the last to show an image: servers have died of it
    ]
    if options.control:
        checks.append(Check("pause, resume", pause_and_resume, ("running",)))
    return checks


async def outcome_of(check: Check, patient: Patient) -> list[Finding]:
    """What a check found; what kept it from being made, or stopped it, is a finding too."""
    if check.name in patient.known:  # an earlier check has found it out on its way
        return []
    found = _kept_from(check, patient) or await _found(check, patient)
    patient.known.update((finding.check, finding) for finding in found)
    return found


def _kept_from(check: Check, patient: Patient) -> list[Finding]:
    """The finding for a check that cannot be made, or none."""
    for name in (*check.needs, *check.unless_failed):
        finding = patient.known.get(name)
        if finding is None or finding.outcome is Outcome.OK:
            continue
        if name in check.needs or finding.outcome is Outcome.FAILED:
            # The first cause, not the last link of the chain.
            cause = finding.seen if finding.seen.startswith(_NOT_CHECKED) else f"{_NOT_CHECKED}{name} {finding.outcome}"
            return [skipped(check.name, cause)]
    return []


_NOT_CHECKED = "not checked, because of: "


async def _found(check: Check, patient: Patient) -> list[Finding]:
    try:
        found = await check.run(patient)
    except OverlongPromptError as error:
        return [skipped(check.name, f"its prompt of {error.prompt_tokens} tokens does not fit into {error.limit}")]
    except (EngineError, RendererError) as error:
        return [failed(check.name, str(error), "read the server's log at this time, then run `rollouts doctor` again")]
    return found if isinstance(found, list) else [found]
