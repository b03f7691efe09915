"""`rollouts doctor URL --model DIR`: check a live vLLM server, with the cure beside every failure."""

from __future__ import annotations

import asyncio
import json
import logging
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from rollouts.cli.api_key import api_key_advice, api_key_from_environment
from rollouts.terminal.text import exit_with_error, print_line


def doctor(
    url: Annotated[str, typer.Argument(metavar="URL", help="The URL of the server: http://host:port.")],
    model: Annotated[Path, typer.Option(metavar="DIR", help="The directory of the model that the server serves.")],
    name: Annotated[
        str | None, typer.Option(metavar="NAME", help="The model name to request, if the server has several.")
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
    """Check a live vLLM server: flags, tokens, pixels, log-probabilities, cache, and agreement with transformers.

    Exits with 0 if nothing failed, 1 if something did, 2 if the checks could not run. Without --control it only sends
    requests like any other client; it never resets a cache.
    """
    from renderers import RendererError
    from rollouts.cli.doctor.finding import Outcome, print_findings, summary
    from rollouts.cli.doctor.run_checks import Options, run_checks
    from rollouts.errors import ApiKeyError, RolloutsError

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
        report = {"ok": not failures, "findings": [asdict(finding) for finding in findings]}
        sys.stdout.write(json.dumps(report) + "\n")
    else:
        print_findings(findings)
        print_line(summary(findings))
    if failures:
        raise typer.Exit(1)
