"""`rollouts demo`: train a tiny vision-language model on this machine and compare its figures with their targets."""

from __future__ import annotations

import os
import time
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from renderers import load_renderer
from renderers.installation import install_command
from rollouts.cli.command_group import INTERRUPTED
from rollouts.cli.options import TrainedEngineKind, api_key_advice, api_key_from_environment, check_engine
from rollouts.demo.recipe import RECIPE, Recipe
from rollouts.engines.http.address import parse_address
from rollouts.episodes.errors import EpisodeError
from rollouts.errors import ApiKeyError, CapabilityError, ServerUnreachableError
from rollouts.terminal.interrupts import defer_interrupts
from rollouts.terminal.text import exit_with_error, print_line

if TYPE_CHECKING:
    from rollouts.demo.run import Results


#: The time for the report at the end, and after Ctrl-C.
REPORT_SECONDS = 30.0
INTERRUPTED_REPORT_SECONDS = 5.0


def demo(
    seed: Annotated[
        int, typer.Option(min=0, metavar="N", help="Decides the first weights, the digits, and how samples are drawn.")
    ] = 0,
    out: Annotated[
        Path, typer.Option(metavar="DIRECTORY", help="The directory for model, trajectories and figures.")
    ] = Path("demo-out"),
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if a figure misses its target.")] = False,
    engine: Annotated[
        TrainedEngineKind, typer.Option(help="Where completions are sampled: in this process, or by a vLLM server.")
    ] = TrainedEngineKind.LOCAL,
    base_url: Annotated[
        str,
        typer.Option(
            metavar="URL", help="The URL of the vLLM server, which must serve the directory `model` of --out."
        ),
    ] = "",
    api_key_env: Annotated[
        str | None, typer.Option(metavar="VARIABLE", help="The environment variable with the server's key.")
    ] = None,
) -> None:
    """Watch a tiny vision-language model learn to read digits, from random weights, on this machine."""
    console = Console()
    missing = [name for name in ("torch", "transformers", "sklearn") if find_spec(name) is None]
    if missing:
        print_line(f"the demo needs {', '.join(missing)}: {install_command('demo')}")
        raise typer.Exit(2)
    check_engine(engine, base_url)
    _check_address(base_url)
    # Two processes use the same cores in turn; threads that spin while the other process works would slow it down.
    # The variable is read when torch is imported, in this process and in its child.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    started = time.perf_counter()
    console.print(f"importing torch and making a model of random weights; then {RECIPE.rl_steps} steps of RL")
    results = _run(console, RECIPE, seed=seed, out=out, base_url=base_url, api_key_env=api_key_env)
    with defer_interrupts():
        from rollouts.demo.run import print_results

    results.seconds = time.perf_counter() - started
    results.save(out / "figures.json")
    print_results(results, console)
    console.print(f"in {out}: trajectories.mmr, figures.json, model/", markup=False, soft_wrap=True)
    _write_report(out, seconds=REPORT_SECONDS)
    missed = results.missed_targets()
    for target in missed:
        console.print(f"[red]missed:[/red] {target}")
    if check and missed:
        raise typer.Exit(1)


def _write_report(out: Path, seconds: float) -> None:
    from rollouts.cli.report import write_report_at_the_end

    write_report_at_the_end(out, renderer=load_renderer(out / "model"), seconds=seconds)


def _check_address(base_url: str) -> None:
    if base_url:
        try:
            parse_address(base_url, api_key=None)
        except ValueError as error:
            raise typer.BadParameter(str(error)) from None


def _run(console: Console, recipe: Recipe, *, seed: int, out: Path, base_url: str, api_key_env: str | None) -> Results:
    """Run the demonstration; without `base_url`, completions are sampled in this process."""
    from rollouts.demo.process import (
        TrainerProcess,
        collect_garbage_rarely,
        episodes_file,
        has_episodes,
        prepare_output,
    )

    api_key = api_key_from_environment(api_key_env)
    started_at = time.time()
    if episodes_file(out).exists():
        note = f"in {out} is an earlier run, which is replaced (--out names another directory)"
        console.print(note, markup=False, soft_wrap=True)
    prepare_output(out)
    try:
        # Started before this process imports torch and transformers: both processes import them at the same time.
        with TrainerProcess(out / "model", recipe, seed) as trainer:
            with defer_interrupts():
                import sklearn.datasets  # noqa: F401, used later by `rollouts.demo.task`

                from rollouts.demo.run import Demo, Progress, local_policy
                from rollouts.demo.trainer import ServerPolicy, serve_command

            collect_garbage_rarely()
            make_policy = partial(ServerPolicy, base_url, api_key) if base_url else local_policy
            progress = Progress(console, recipe)
            demonstration = Demo(
                recipe=recipe, seed=seed, out=out, trainer=trainer, progress=progress, make_policy=make_policy
            )
            return demonstration.run()
    except (EpisodeError, ServerUnreachableError, CapabilityError) as error:
        cause = error.__cause__ if isinstance(error, EpisodeError) else error
        if not isinstance(cause, ServerUnreachableError | CapabilityError):
            raise
        while isinstance(cause.__cause__, ServerUnreachableError):  # the request that failed first
            cause = cause.__cause__
        if isinstance(cause, ApiKeyError):
            exit_with_error(api_key_advice(base_url, api_key_env))
        console.print(str(cause), markup=False)
        console.print(f"start the server with\n  {serve_command(out / 'model')}", markup=False, soft_wrap=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        if not has_episodes(out, started_at):
            console.print("interrupted before the first episode")
        else:
            message = f"interrupted; the episodes so far are in {episodes_file(out)}"
            console.print(message, markup=False, soft_wrap=True)
            _write_report(out, seconds=INTERRUPTED_REPORT_SECONDS)
        raise typer.Exit(INTERRUPTED) from None
