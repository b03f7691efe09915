"""The table and the plots of the results."""

from __future__ import annotations

from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from rich.console import Console

from rollouts.demo.recipe import TARGETS
from rollouts.demo.run import Results
from rollouts.terminal.table import Column, print_table


def print_results(results: Results, console: Console) -> None:
    """Print a table with a row for each figure: its value before and after RL, and its target."""
    lift = results.after.accuracy - results.before.accuracy
    stale = results.stale_mismatches
    ratio = results.full_step_bytes / max(1, results.wire_bytes)
    before, after, blank = results.before, results.after, results.blank
    empty = ("", "", "", "")
    accuracies = f">= {results.recipe.target_accuracy} and +{TARGETS.lift}"
    size = f"{_megabytes(results.wire_bytes)} / {_megabytes(results.full_step_bytes)} ({ratio:.0f}x)"
    rows = [
        ("held-out first-try accuracy", f"{before.accuracy:.3f}", f"{after.accuracy:.3f} ({lift:+.3f})", accuracies),
        ("held-out mean reward", f"{before.reward:.3f}", f"{after.reward:.3f}", ""),
        ("control: images blanked", "", f"{blank.accuracy:.3f}", f"{TARGETS.blank_low} to {TARGETS.blank_high}"),
        empty,
        ("max mismatch (nats)", "", f"{results.max_mismatch:.2e}", f"< {TARGETS.max_mismatch:.0e}, every step"),
        ("mean mismatch (nats)", "", f"{results.mean_mismatch:.2e}", ""),
        *([("max mismatch just before each update", "", f"{min(stale):.2e} to {max(stale):.2e}", "")] if stale else []),
        empty,
        ("episodes / turns", "", f"{results.episodes:,} / {results.turns:,}", ""),
        ("tokens / of them sampled", "", f"{results.tokens:,} / {results.sampled_tokens:,}", ""),
        ("images shown / distinct", "", f"{results.images:,} / {results.distinct_images:,}", ""),
        ("bridged turns / refused", "", f"{results.bridged:,} / {results.bridge_refused:,}", ""),
        ("bytes over the wire / naive form", "", size, ""),
        ("trajectory file", "", _megabytes(results.file_bytes), ""),
        empty,
        ("time", "", f"{results.seconds:.0f} s", ""),
        ("peak memory, both processes", "", f"{results.peak_memory_gb:.2f} GB", f"< {TARGETS.max_memory_gb} GB"),
    ]
    headings = ("before RL", "after RL", "must reach")
    columns = [Column("figure", min_width=16), *(Column(heading, min_width=9) for heading in headings)]
    console.print(f"rollouts demo, seed {results.seed}")
    print_table(columns, rows, console)


def plot_curves(results: Results, path: Path) -> None:
    """Plot accuracy and mismatch by RL step to a PNG file."""
    figure = Figure(figsize=(11, 4))
    accuracy, mismatch = figure.subplots(1, 2)
    steps = [step.step for step in results.steps]
    accuracy.plot(steps, [step.train_accuracy for step in results.steps], color="0.7", label="training digits")
    held_out = {0: results.before.accuracy, **results.held_out}
    accuracy.plot(list(held_out), list(held_out.values()), marker="o", label="held-out digits")
    accuracy.axhline(results.blank.accuracy, linestyle=":", color="tab:red", label="held-out, images blanked")
    accuracy.set(xlabel="RL step", ylabel="first-try accuracy", ylim=(0, 1))
    accuracy.legend(loc="lower right")
    mismatch.semilogy(steps, [step.max_mismatch for step in results.steps], label="max")
    mismatch.semilogy(steps, [step.mean_mismatch for step in results.steps], label="mean")
    mismatch.axhline(TARGETS.max_mismatch, linestyle=":", color="tab:red", label="must stay below")
    mismatch.set(xlabel="RL step", ylabel="|log p(sampler) - log p(trainer)|")
    mismatch.legend(loc="center right")
    figure.tight_layout()
    FigureCanvasAgg(figure).print_figure(path, dpi=120)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
