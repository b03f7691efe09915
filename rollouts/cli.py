"""The `rollouts` command."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_show_locals=False)


@app.callback()
def commands() -> None:
    """Exact multi-turn, multimodal rollouts."""


@app.command()
def demo(
    quick: Annotated[bool, typer.Option("--quick", help="Fewer RL steps: about a minute.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Decides everything: weights, digits, samples.")] = 0,
    out: Annotated[Path, typer.Option(help="Where model, trajectories, curves and figures go.")] = Path("demo-out"),
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if a figure misses its target.")] = False,
) -> None:
    """Watch a tiny vision-language model learn to read digits, from random weights, on this machine."""
    # Two processes take turns on the same cores; threads that spin while the other one works would slow it down.
    # Read when torch is imported, here and in the child.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    console = Console()
    try:
        from rollouts.demo.progress import Progress
        from rollouts.demo.recipe import FULL, QUICK
        from rollouts.demo.report import plot_curves, results_table
        from rollouts.demo.run import run_demo
    except ImportError as error:
        raise typer.BadParameter(f'{error}. Install what the demo needs: pip install "mmrollouts[demo]"') from error

    recipe = QUICK if quick else FULL
    try:
        with Progress(console, recipe) as progress:
            results = run_demo(recipe=recipe, seed=seed, out=out, progress=progress)
    except KeyboardInterrupt:
        console.print(f"interrupted; the episodes so far are in {out / 'trajectories.mmr'}")
        raise typer.Exit(130) from None
    plot_curves(results, out / "curves.png")
    console.print(results_table(results))
    console.print(f"in {out}: curves.png, trajectories.mmr, results.json, model/")
    missed = results.missed_targets()
    for words in missed:
        console.print(f"[red]missed:[/red] {words}")
    if check and missed:
        raise typer.Exit(1)


def main() -> None:
    app()
