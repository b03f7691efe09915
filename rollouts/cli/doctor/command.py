"""`rollouts doctor URL --model DIR`: check a live server of vLLM or SGLang, with the cure beside every failure."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from renderers import RendererError, TemplateRenderer, load_renderer
from rollouts.cli.doctor import generation_checks, server_checks
from rollouts.cli.doctor.installation import describe_installation
from rollouts.cli.doctor.mismatch_check import mismatch
from rollouts.cli.doctor.rendering_checks import image_rendering, sound_rendering
from rollouts.cli.doctor.target import Finding, Outcome, Target, failed, print_findings, skipped, summary, weights_dtype
from rollouts.cli.doctor.token_checks import text_tokens, tokenizer
from rollouts.cli.serve import api_key_advice, api_key_from_environment
from rollouts.engines.http.connection import HttpLimits, ServerConnection
from rollouts.engines.server_kinds import kind_of_server
from rollouts.engines.sglang import SGLangEngine
from rollouts.engines.sglang.capabilities import probe as probe_sglang
from rollouts.engines.vllm.capabilities import ExpectedCapabilities, ServerCapabilities, probe
from rollouts.engines.vllm.engine import VLLMEngine
from rollouts.errors import ApiKeyError, CapabilityError, EngineError, OverlongPromptError, RolloutsError
from rollouts.terminal.text import exit_with_error, print_json, print_line

# A person waits for the result: an unreachable server is reported after seconds.
_LIMITS = HttpLimits(retries=2, total_seconds=300)


class Check(NamedTuple):
    """One check.

    `name` is the name of each of its findings that has none of its own. It does not run where a check in `needs` failed
    or did not run, nor where one in `unless` failed or lacks an option: it would report the same fault again, or a
    wrong cause.
    """

    name: str
    run: Callable[[Target], Awaitable[Finding | list[Finding]]]
    needs: tuple[str, ...] = ()
    unless: tuple[str, ...] = ()


class Options(NamedTuple):
    """`reference_gigabytes`: transformers loads no larger checkpoint."""

    model: str | None = None
    api_key: str | None = None
    reference_gigabytes: float = 4.0


async def run_checks(base_url: str, directory: Path, options: Options) -> list[Finding]:
    """Findings in the order of the report. Raises `RendererError` and `EngineError` if nothing can be checked."""
    renderer = await asyncio.to_thread(load_renderer, directory)
    connection = ServerConnection(base_url, api_key=options.api_key, limits=_LIMITS)
    target: Target | None = None
    try:
        target = await _target(connection, renderer, directory, options)
        checks = _checks(target, options)
        findings = [finding for check in checks for finding in await outcome_of(check, target)]
        shown = connection.without_key  # a response of the server may quote it
        return [replace(finding, seen=shown(finding.seen), cure=shown(finding.cure)) for finding in findings]
    except EngineError as error:
        error.redact(connection.without_key)
        raise
    finally:
        if target is not None:
            await target.engine.close()
        await connection.close()


async def _target(
    connection: ServerConnection, renderer: TemplateRenderer, directory: Path, options: Options
) -> Target:
    dtype = await weights_dtype(connection, directory)
    if await kind_of_server(connection) == "sglang":
        engine = SGLangEngine(connection.base_url, api_key=options.api_key, limits=_LIMITS)
        return Target("SGLang", engine, connection, renderer, directory, await probe_sglang(connection), dtype)
    capabilities = await _capabilities(connection, options.model)
    served = VLLMEngine(connection.base_url, model=options.model, api_key=options.api_key, limits=_LIMITS)
    return Target("vLLM", served, connection, renderer, directory, capabilities, dtype)


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


def _checks(target: Target, options: Options) -> list[Check]:
    limited_mismatch = partial(mismatch, max_gigabytes=options.reference_gigabytes)
    image_request = partial(generation_checks.media_request, modality="image", name="image")
    sound_request = partial(generation_checks.media_request, modality="audio", name="sound")
    checks = [
        Check("reachable", server_checks.reachable),
        Check("version", server_checks.version, ("reachable",)),
        Check("served model", server_checks.served_model, ("reachable",)),
        Check("vocabulary", server_checks.vocabulary, ("reachable",)),
        Check("token endpoint", server_checks.scale_out, ("reachable",)),
        Check("control routes", server_checks.control_routes, ("reachable",)),
        Check("media", server_checks.media),
        Check("tokenizer", tokenizer, ("reachable",)),
        Check("text tokens", text_tokens, ("tokenizer",)),
        Check("image tokens", image_rendering, ("token endpoint", "text tokens")),
        Check("sound tokens", sound_rendering, ("token endpoint", "text tokens")),
        Check("text request", generation_checks.text_request, ("vocabulary", "token endpoint", "control routes")),
        Check("stop token", generation_checks.stop_token, ("text request",)),
        Check("log-probabilities", generation_checks.logprobs_mode, ("text request",)),
        Check("image request", image_request, ("text request",), unless=("image tokens", "image features")),
        Check("sound request", sound_request, ("text request",), unless=("sound tokens", "sound features")),
        Check("mismatch", limited_mismatch, ("text request", "log-probabilities")),
    ]
    of_vllm = ("token endpoint", "control routes", "text tokens", "image tokens", "sound tokens", "stop token")
    left_out = {"vocabulary"} if target.kind == "vLLM" else {*of_vllm}
    left_out |= {"image tokens", "image request"} if "image" not in target.renderer.processors else set()
    left_out |= {"sound tokens", "sound request"} if "audio" not in target.renderer.processors else set()
    return [check for check in checks if check.name not in left_out]


async def outcome_of(check: Check, target: Target) -> list[Finding]:
    """The findings of a check; a reason not to run it, or an error in it, is a finding too."""
    found = _prevented(check, target) or await _run(check, target)
    findings = [finding if finding.check else replace(finding, check=check.name) for finding in found]
    target.findings.update((finding.check, finding) for finding in findings)
    return findings


def _prevented(check: Check, target: Target) -> list[Finding]:
    """The finding of a check that another finding prevents, or none."""
    for name in (*check.needs, *check.unless):
        if (finding := target.findings.get(name)) is None:  # a check of another kind of server, or of other media
            continue
        if finding.outcome is Outcome.FAILED:
            return [skipped(f"{_NOT_CHECKED}{name} failed")]
        if finding.outcome is Outcome.ABSENT and name in check.unless:
            return [skipped(finding.seen)]
        if finding.seen.startswith(_NOT_CHECKED) and name in check.needs:
            return [skipped(finding.seen)]  # the first cause
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

    Exits with 0 if nothing failed, 1 if something did, 2 if the checks could not run. It only sends requests like any
    other client.

    Without URL and model it prints versions, extras, GPUs and the system, for bug reports, and exits with 1 if another
    distribution's `renderers` is installed beside mmrollouts.
    """
    if url is None and model is None:
        if not describe_installation(as_json=as_json):
            raise typer.Exit(1)
        return
    if url is None or model is None:
        exit_with_error("pass both: the URL of the server, http://host:port, and --model DIR, the model that it serves")
    logging.getLogger("rollouts").addHandler(logging.NullHandler())  # the error at the end reports retries
    options = Options(name, api_key_from_environment(api_key_env), reference_gb)
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
