"""The `rollouts` command."""

from __future__ import annotations

import os
import time
from importlib.util import find_spec
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
    quick: Annotated[bool, typer.Option("--quick", help="Fewer RL steps: about 80 seconds.")] = False,
    seed: Annotated[int, typer.Option(min=0, help="Decides everything: weights, digits, samples.")] = 0,
    out: Annotated[Path, typer.Option(help="Where model, trajectories, curves and figures go.")] = Path("demo-out"),
    check: Annotated[bool, typer.Option("--check", help="Exit with 1 if a figure misses its target.")] = False,
) -> None:
    """Watch a tiny vision-language model learn to read digits, from random weights, on this machine."""
    console = Console()
    missing = [name for name in ("torch", "transformers", "sklearn", "matplotlib") if find_spec(name) is None]
    if missing:
        console.print(f'the demo needs {", ".join(missing)}: pip install "mmrollouts\\[demo]"')
        raise typer.Exit(2)
    # Two processes take turns on the same cores; threads that spin while the other one works would slow it down.
    # Read when torch is imported, here and in the child.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from rollouts.demo.recipe import FULL, QUICK
    from rollouts.demo.trainer_process import TrainerProcess, collect_garbage_rarely

    recipe = QUICK if quick else FULL
    started = time.perf_counter()
    try:
        # Started before anything heavy is imported here, so that both processes load torch at the same time.
        with TrainerProcess(out / "model", recipe, seed) as trainer:
            from rollouts.demo.progress import Progress
            from rollouts.demo.report import plot_curves, results_table
            from rollouts.demo.run import run_demo

            collect_garbage_rarely()
            with Progress(console, recipe) as progress:
                results = run_demo(recipe=recipe, seed=seed, out=out, trainer=trainer, progress=progress)
    except KeyboardInterrupt:
        console.print(f"interrupted; the episodes so far are in {out / 'trajectories.mmr'}")
        raise typer.Exit(130) from None
    results.seconds = time.perf_counter() - started
    results.save(out / "results.json")
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
