"""`rollouts doctor URL --model DIR`: check a live server of vLLM or SGLang, with the cure beside every failure."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import typer

from renderers import RendererError, TemplateRenderer, load_renderer
from rollouts.cli.doctor import generation_checks, server_checks, sglang_checks
from rollouts.cli.doctor.image_rendering_checks import hidden_normalisation, image_rendering
from rollouts.cli.doctor.installation import describe_installation
from rollouts.cli.doctor.mismatch_check import mismatch
from rollouts.cli.doctor.sglang_checks import sglang_target
from rollouts.cli.doctor.sound_checks import sound_rendering, sound_request
from rollouts.cli.doctor.target import Finding, Outcome, Target, failed, print_findings, skipped, summary, weights_dtype
from rollouts.cli.doctor.token_checks import text_tokens
from rollouts.cli.serve import api_key_advice, api_key_from_environment
from rollouts.engines.http.connection import HttpLimits, ServerConnection
from rollouts.engines.server_kinds import kind_of_server
from rollouts.engines.vllm.capabilities import ExpectedCapabilities, ServerCapabilities, probe
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.errors import ApiKeyError, CapabilityError, EngineError, OverlongPromptError, RolloutsError
from rollouts.terminal.table import exit_with_error, print_json, print_line

# Run all checks of a server, one after the other. No check leaves the server changed.


# A person waits for the result: an unreachable server is reported after seconds.
_LIMITS = HttpLimits(retries=2, total_seconds=300)


class Check(NamedTuple):
    """One check.

    `name` is the name of each of its findings that has none of its own. It runs only if each check in `needs` passed:
    otherwise it would report the same fault again, or a wrong cause. A check in `unless_failed` prevents it only by a
    failure, and not by being skipped or absent.
    """

    name: str
    run: Callable[[Any], Awaitable[Finding | list[Finding]]]
    needs: tuple[str, ...] = ()
    unless_failed: tuple[str, ...] = ()


class Options(NamedTuple):
    """`control`: also pause the server for a moment. `reference_gigabytes`: transformers loads no larger checkpoint."""

    model: str | None = None
    api_key: str | None = None
    control: bool = False
    reference_gigabytes: float = 4.0


async def run_checks(base_url: str, directory: Path, options: Options) -> list[Finding]:
    """Findings in the order of the report. Raises `RendererError` and `EngineError` if nothing can be checked."""
    renderer = await asyncio.to_thread(load_renderer, directory)
    connection = ServerConnection(base_url, api_key=options.api_key, limits=_LIMITS)
    target: Target | None = None
    try:
        if await kind_of_server(connection) == "sglang":
            target = await sglang_target(connection, renderer, directory, api_key=options.api_key, limits=_LIMITS)
            checks = _sglang_checks(options)
        else:
            target = await _vllm_target(connection, renderer, directory, options)
            checks = _vllm_checks(options, hears="audio" in renderer.processors)
        findings = await outcome_of(Check("reachable", server_checks.reachable), target)
        keep_alive = Check("keep-alive", server_checks.keep_alive, ("reachable",))
        idle = asyncio.ensure_future(outcome_of(keep_alive, target))  # waits for seconds, while the other checks run
        try:
            others = [finding for check in checks for finding in await outcome_of(check, target)]
            return [finding.without(options.api_key) for finding in (*findings, *await idle, *others)]
        finally:
            idle.cancel()
    finally:
        if target is not None:
            await asyncio.gather(*(each.close() for each in {target.engine, target.server_side}))
        await connection.close()


async def _vllm_target(
    connection: ServerConnection, renderer: TemplateRenderer, directory: Path, options: Options
) -> Target:
    dtype, dtype_source = await weights_dtype(connection, directory)
    capabilities = await _capabilities(connection, options.model)
    engine, server_side = (
        VLLMEngine(connection.base_url, model=options.model, api_key=options.api_key, media=mode, limits=_LIMITS)
        for mode in ("auto", "content_parts")
    )
    return Target(
        engine=engine,
        server_side=server_side,
        control=engine.control,
        connection=connection,
        renderer=renderer,
        directory=directory,
        capabilities=capabilities,
        dtype=dtype,
        dtype_source=dtype_source,
    )


async def _capabilities(connection: ServerConnection, model: str | None) -> ServerCapabilities:
    """The capabilities, also of a server without the token endpoint: that is a finding, and other checks still run."""
    try:
        return await probe(connection, model=model)
    except ApiKeyError:
        raise
    except CapabilityError:
        with contextlib.suppress(CapabilityError):
            return await probe(connection, model=model, expected=ExpectedCapabilities(scale_out=False))
        raise


def _sglang_checks(options: Options) -> list[Check]:
    checks = [
        Check("version", sglang_checks.version, ("reachable",)),
        Check("served model", server_checks.served_model, ("reachable",)),
        Check("vocabulary", sglang_checks.vocabulary, ("reachable",)),
        Check("text request", generation_checks.text_request, ("vocabulary",)),
        Check("image request", sglang_checks.image_request, ("text request",)),
        Check("log-probabilities", sglang_checks.logprobs, ("text request",)),
        Check("seeds", sglang_checks.seeds, ("reachable",)),
        Check("metrics", sglang_checks.metrics, ("reachable",)),
        Check("abort", sglang_checks.aborting, ("text request",)),
        Check(
            "mismatch",
            partial(sglang_checks.agreement, max_gigabytes=options.reference_gigabytes),
            ("text request",),
            unless_failed=("log-probabilities",),
        ),
    ]
    if options.control:
        checks.append(Check("pause, resume", sglang_checks.pause_and_resume, ("reachable",)))
    return checks


def _vllm_checks(options: Options, *, hears: bool) -> list[Check]:
    limited_mismatch = partial(mismatch, max_gigabytes=options.reference_gigabytes)
    checks = [
        Check("version", server_checks.version, ("reachable",)),
        Check("served model", server_checks.served_model, ("reachable",)),
        Check("token endpoint", server_checks.scale_out, ("reachable",)),
        Check("control routes", server_checks.control_routes, ("reachable",)),
        Check("running", server_checks.running, ("control routes",)),
        Check("pixel dtype", server_checks.pixel_dtype, ("token endpoint",)),
        Check("text tokens", text_tokens, ("reachable",)),
        Check("image tokens", image_rendering, ("pixel dtype",)),
        Check("text request", generation_checks.text_request, ("token endpoint",), unless_failed=("running",)),
        Check("image request", generation_checks.image_request, ("text request", "pixel dtype")),
        Check(
            "image pixels",
            generation_checks.image_pixels,
            ("image request", "image tokens"),
            unless_failed=("image features", "image normalisation"),
        ),
        Check("image cache", generation_checks.image_cache, ("image request",)),
        Check("log-probabilities", generation_checks.logprobs_mode, ("text request",)),
        Check("abort", generation_checks.aborting, ("text request",)),
        Check("mismatch", limited_mismatch, ("text request",), unless_failed=("log-probabilities",)),
        Check("image normalisation", hidden_normalisation, ("image tokens",), unless_failed=("image features",)),
        # The last with an image: it has ended servers.
        Check("cache miss", generation_checks.unknown_image, ("image request",)),
    ]
    if hears:
        checks += [
            Check("sound tokens", sound_rendering, ("token endpoint",)),
            Check("sound request", sound_request, ("text request", "sound tokens")),
        ]
    if options.control:
        checks.append(Check("pause, resume", server_checks.pause_and_resume, ("running",)))
    return checks


async def outcome_of(check: Check, target: Target) -> list[Finding]:
    """The findings of a check; a reason not to run it, or an error in it, is a finding too."""
    if check.name in target.findings:  # an earlier check has reported it
        return []
    found = _prevented(check, target) or await _run(check, target)
    findings = [finding if finding.check else replace(finding, check=check.name) for finding in found]
    target.findings.update((finding.check, finding) for finding in findings)
    return findings


def _prevented(check: Check, target: Target) -> list[Finding]:
    """The finding of a check that another finding prevents, or none."""
    for name in (*check.needs, *check.unless_failed):
        finding = target.findings.get(name)
        if finding is None or finding.outcome is Outcome.OK:
            continue
        if name in check.needs or finding.outcome is Outcome.FAILED:
            # The first cause, not a check that was skipped because of it.
            cause = finding.seen if finding.seen.startswith(_NOT_CHECKED) else f"{_NOT_CHECKED}{name} {finding.outcome}"
            return [skipped(cause)]
    return []


_NOT_CHECKED = "not checked, because of: "


async def _run(check: Check, target: Target) -> list[Finding]:
    try:
        findings = await check.run(target)
    except OverlongPromptError as error:
        return [skipped(f"its prompt of {error.prompt_tokens} tokens does not fit into {error.limit}")]
    except (EngineError, RendererError) as error:
        return [failed(str(error), "read the server's log of this moment, then run `rollouts doctor` again")]
    return findings if isinstance(findings, list) else [findings]


def doctor(
    url: Annotated[str | None, typer.Argument(metavar="URL", help="The URL of the server: http://host:port.")] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The directory of the model that the server serves.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model name to request, if a vLLM server has several.")
    ] = None,
    api_key_env: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="The environment variable with the server's key.")
    ] = None,
    control: Annotated[
        bool, typer.Option("--control", help="Also pause and resume the server: other users wait for a moment.")
    ] = False,
    reference_gb: Annotated[
        float,
        typer.Option(
            min=0,
            metavar="GB",
            help="Score completions with transformers if the checkpoint is not larger than this many GB; 0: never.",
        ),
    ] = 4.0,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON: an object with all findings.")] = False,
) -> None:
    """Check a live server of vLLM or SGLang: flags, tokens, images, log-probabilities, agreement with transformers.

    Exits with 0 if nothing failed, 1 if something did, 2 if the checks could not run. Without --control it only sends
    requests like any other client; it never resets a cache.

    Without a URL it prints versions, extras, GPUs and the system, for bug reports, and exits with 1 if another
    distribution's `renderers` is installed beside mmrollouts.
    """
    if url is None:
        if not describe_installation(as_json=as_json):
            raise typer.Exit(1)
        return
    if model is None:
        exit_with_error("--model is missing: pass the directory of the model that the server serves")
    logging.getLogger("rollouts").addHandler(logging.NullHandler())  # the error at the end reports retries
    options = Options(name, api_key_from_environment(api_key_env), control, reference_gb)
    try:
        findings = asyncio.run(run_checks(url, model, options))
    except ApiKeyError:
        exit_with_error(f"could not run: {api_key_advice(url, api_key_env)}")
    except (RendererError, RolloutsError, ValueError) as error:  # ValueError: an invalid address
        message = str(error) if options.api_key is None else str(error).replace(options.api_key, "***")
        exit_with_error(f"could not run: {message}")
    failures = sum(finding.outcome is Outcome.FAILED for finding in findings)
    if as_json:
        print_json({"ok": not failures, "findings": [asdict(finding) for finding in findings]})
    else:
        print_findings(findings)
        print_line(summary(findings))
    if failures:
        raise typer.Exit(1)
