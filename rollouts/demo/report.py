"""The table and the curves at the end."""

from __future__ import annotations

from pathlib import Path

from rich.table import Table

from rollouts.demo.recipe import TARGETS
from rollouts.demo.run import Results


def results_table(results: Results) -> Table:
    """One row a figure: what was measured, and what it must reach."""
    table = Table(title=f"rollouts demo, seed {results.seed}", title_justify="left")
    for column in ("", "before RL", "after RL", "must reach"):
        table.add_column(column)
    lift = results.after.accuracy - results.before.accuracy
    table.add_row(
        "held-out first-try accuracy",
        f"{results.before.accuracy:.3f}",
        f"{results.after.accuracy:.3f} ({lift:+.3f})",
        f">= {results.recipe.target_accuracy} and +{TARGETS.lift}",
    )
    table.add_row("held-out mean reward", f"{results.before.reward:.3f}", f"{results.after.reward:.3f}", "")
    table.add_row(
        "control: images blanked", "", f"{results.blank.accuracy:.3f}", f"{TARGETS.blank_low} to {TARGETS.blank_high}"
    )
    table.add_section()
    table.add_row("max mismatch (nats)", "", f"{results.max_mismatch:.2e}", f"< {TARGETS.max_mismatch:.0e}, every step")
    table.add_row("mean mismatch (nats)", "", f"{results.mean_mismatch:.2e}", "")
    if stale := results.stale_mismatches:
        table.add_row("max mismatch just before each update", "", f"{min(stale):.2e} to {max(stale):.2e}", "")
    table.add_section()
    table.add_row("episodes / turns", "", f"{results.episodes:,} / {results.turns:,}", "")
    table.add_row("tokens / of them sampled", "", f"{results.tokens:,} / {results.sampled_tokens:,}", "")
    table.add_row("images shown / distinct", "", f"{results.images:,} / {results.distinct_images:,}", "")
    table.add_row("bridged turns / refused", "", f"{results.bridged:,} / {results.bridge_refused:,}", "")
    ratio = results.naive_bytes / max(1, results.wire_bytes)
    table.add_row(
        "bytes over the wire / naive form",
        "",
        f"{_megabytes(results.wire_bytes)} / {_megabytes(results.naive_bytes)} ({ratio:.0f}x)",
        "",
    )
    table.add_row("trajectory file", "", _megabytes(results.file_bytes), "")
    table.add_section()
    table.add_row("time", "", f"{results.seconds:.0f} s", "")
    table.add_row(
        "peak memory, both processes", "", f"{results.peak_memory_gb:.2f} GB", f"< {TARGETS.max_memory_gb} GB"
    )
    return table


def plot_curves(results: Results, path: Path) -> None:
    """Accuracy and mismatch by RL step, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (accuracy, mismatch) = pyplot.subplots(1, 2, figsize=(11, 4))
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
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.1f} MB"
