"""`rollouts doctor URL --model DIR`: check a live server of vLLM or SGLang, with the cure beside every failure."""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated, Final

import typer
from rich.text import Text

from renderers import RendererError, load_renderer
from rollouts.cli.doctor import generation_checks, server_checks
from rollouts.cli.doctor.installation import describe_installation
from rollouts.cli.doctor.mismatch_check import mismatch
from rollouts.cli.doctor.rendering_checks import rendering
from rollouts.cli.doctor.target import MEDIA, Finding, Outcome, Target, weights_dtype
from rollouts.cli.doctor.token_checks import text_tokens, tokenizer
from rollouts.cli.options import api_key_advice, api_key_from_environment
from rollouts.engines.http.connection import HttpLimits, ServerConnection
from rollouts.engines.server_kinds import kind_of_server, server_engine
from rollouts.engines.sglang.capabilities import probe as probe_sglang
from rollouts.engines.vllm.capabilities import probe
from rollouts.errors import ApiKeyError, ContextLengthError, EngineError, RolloutsError
from rollouts.terminal.table import Column, Row, print_table
from rollouts.terminal.text import exit_with_error, print_json, print_line, printable_line

# A person waits for the result: an unreachable server is reported after seconds.
_LIMITS = HttpLimits(retries=2, total_seconds=300)
_STYLES: Final[Mapping[Outcome, str]] = {"ok": "green", "failed": "bold red", "absent": "yellow", "skipped": "dim"}


async def run_checks(
    base_url: str, directory: Path, *, api_key: str | None = None, reference_gigabytes: float = 4.0
) -> dict[str, Finding]:
    """Findings by the name of the check, in the order of the report.

    transformers loads no checkpoint of more than `reference_gigabytes`. Raises `RendererError` and
    `EngineError` if nothing can be checked.
    """
    renderer = await asyncio.to_thread(load_renderer, directory)
    connection = ServerConnection(base_url, api_key=api_key, limits=_LIMITS)
    try:
        kind = await kind_of_server(connection)
        # Also of a server without the token endpoint: that is a finding, and other checks still run.
        probed = probe(connection, needs_generate=False) if kind == "vllm" else probe_sglang(connection)
        capabilities = await probed
        dtype = await weights_dtype(connection, directory)
        async with server_engine(kind, base_url, api_key=api_key, limits=_LIMITS) as engine:
            target = Target(kind, engine, connection, renderer, directory, capabilities, dtype)
            await _run_all(target, reference_gigabytes)
        shown = connection.without_key  # a response of the server may quote it
        return {
            check: Finding(outcome, shown(seen), shown(cure))
            for check, (outcome, seen, cure) in target.findings.items()
        }
    except EngineError as error:
        error.redact(connection.without_key)
        raise
    finally:
        await connection.close()


async def _run_all(target: Target, reference_gigabytes: float) -> None:
    check = partial(run_check, target)
    is_vllm, processors = target.kind == "vllm", target.renderer.processors
    await check("server", server_checks.server)
    await check("served model", server_checks.served_model, ["server"])
    if is_vllm:
        await check("token endpoint", server_checks.scale_out, ["server"])
        await check("control routes", server_checks.control_routes, ["server"])
    else:
        await check("vocabulary", server_checks.vocabulary, ["server"])
    await check("tokenizer", tokenizer, ["server"])
    if is_vllm:
        await check("text tokens", text_tokens, ["tokenizer"])
        for modality, medium in MEDIA.items():
            if modality in processors:
                run = partial(rendering, modality=modality)
                await check(f"{medium} rendering", run, ["token endpoint", "text tokens"])
    needs = ["server", "vocabulary", "token endpoint", "control routes"]
    await check("text request", generation_checks.text_request, needs)
    if is_vllm:
        await check("stop token", generation_checks.stop_token, ["text request"])
    await check("log-probabilities", generation_checks.logprobs_mode, ["text request"])
    for modality, medium in MEDIA.items():
        tower = "vision_config" if modality == "image" else "audio_config"
        if modality in processors or tower in target.config:
            run = partial(generation_checks.media_request, modality=modality)
            await check(f"{medium} request", run, ["text request"], unless=f"{medium} rendering")
    run = partial(mismatch, max_gigabytes=reference_gigabytes)
    await check("mismatch", run, ["text request", "log-probabilities"])


async def run_check(
    target: Target,
    name: str,
    run: Callable[[Target], Awaitable[Finding]],
    needs: Sequence[str] = (),
    unless: str = "",
) -> None:
    """Add the finding of a check; a reason not to run it, or an error in it, is one too.

    It does not run where a check in `needs` failed or did not run, nor where `unless` failed or lacks an
    option: it would report the same fault again, or a wrong cause.
    """
    for other in (*needs, unless):
        before = target.findings.get(other)  # None: a check of another kind of server, or of other media
        if before is not None and before.outcome in ("failed", "absent" if other == unless else "skipped"):
            reason = f"not checked, because of: {other} failed" if before.outcome == "failed" else before.seen
            target.findings[name] = Finding("skipped", reason)
            return
    try:
        target.findings[name] = await run(target)
    except ContextLengthError as error:
        reason = f"its prompt of {error.prompt_tokens} tokens does not fit into {error.limit}"
        target.findings[name] = Finding("skipped", reason)
    except (EngineError, RendererError) as error:
        cure = "read the server's log of this moment, then run `rollouts doctor` again"
        target.findings[name] = Finding("failed", str(error), cure)


def doctor(
    url: Annotated[str | None, typer.Argument(metavar="URL", help="The URL of the server: http://host:port.")] = None,
    model: Annotated[
        Path | None, typer.Option(metavar="DIR", help="The directory of the model that the server serves.")
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

    Exits with 0 if nothing failed, 1 if something did, 2 if the checks could not run. It only sends requests
    like any other client.

    Without URL and model it prints versions and the system, for bug reports, and exits with 1 if
    another distribution's `renderers` is installed beside mmrollouts.
    """
    if url is None and model is None:
        if not describe_installation(as_json=as_json):
            raise typer.Exit(1)
        return
    if url is None or model is None:
        exit_with_error("pass both: the URL of the server, http://host:port, and --model DIR, the model that it serves")
    logging.getLogger("rollouts").addHandler(logging.NullHandler())  # the error at the end reports retries
    api_key = api_key_from_environment(api_key_env)
    try:
        findings = asyncio.run(run_checks(url, model, api_key=api_key, reference_gigabytes=reference_gb))
    except ApiKeyError:
        exit_with_error(f"could not run: {api_key_advice(url, api_key_env)}")
    except (RendererError, RolloutsError, ValueError) as error:  # ValueError: an invalid address
        exit_with_error(f"could not run: {error}")
    counts = Counter(finding.outcome for finding in findings.values())
    if as_json:
        found = {check: finding._asdict() for check, finding in findings.items()}
        print_json({"ok": not counts["failed"], "findings": found})
    else:
        print_findings(findings)
        print_line(", ".join(f"{counts[outcome]} {outcome}" for outcome in _STYLES if counts[outcome]))
    if counts["failed"]:
        raise typer.Exit(1)


def print_findings(findings: Mapping[str, Finding]) -> None:
    """Print a row for each finding, with the cure below what was seen."""
    rows: list[Row] = []
    for check, (outcome, seen, cure) in findings.items():
        text = Text(printable_line(seen))
        if cure:
            text.append(f"\n-> {printable_line(cure)}", "bold" if outcome == "failed" else "")
        rows.append([check, Text(outcome, _STYLES[outcome]), text])
    print_table([Column("check", wraps=True), Column("outcome"), Column("seen", wraps=True)], rows)
