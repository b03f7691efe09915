"""Live progress bars on the terminal."""

from __future__ import annotations

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichProgress

from rollouts.demo.recipe import Recipe

_WIDTH_WITH_ALL_FIGURES = 88  # columns
_WIDTH_WITH_BAR = 112  # columns; on a narrower terminal the bar would leave too little room for the figures


class Progress(RichProgress):
    """One bar for the warm start, one for RL, and one line for each evaluation."""

    def __init__(self, console: Console, recipe: Recipe) -> None:
        super().__init__(
            TextColumn("{task.description}"),
            *([BarColumn(bar_width=24)] if console.width >= _WIDTH_WITH_BAR else []),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[figures]}"),
            refresh_per_second=2,
            console=console,
        )
        self._recipe = recipe
        self._warm = self.add_task("warm start", total=recipe.sft_max_steps, figures="")
        self._rl = self.add_task("RL", total=recipe.rl_steps, figures="", start=False)

    def update_warm_start(self, steps: int, loss: float, accuracy: float) -> None:
        done = accuracy >= self._recipe.sft_target
        self.update(
            self._warm,
            completed=steps,
            total=steps if done else self._recipe.sft_max_steps,
            figures=f"loss {loss:.3f}  accuracy {accuracy:.2f}",
        )

    def update_rl(self, step: int, accuracy: float, reward: float, mismatch: float, seconds: float) -> None:
        self.start_task(self._rl)
        figures = f"accuracy {accuracy:.3f}  mismatch {mismatch:.0e}"
        if self.console.width >= _WIDTH_WITH_ALL_FIGURES:
            figures += f"  reward {reward:.3f}  {seconds:.1f} s/step"
        self.update(self._rl, completed=step, figures=figures)

    def print_evaluation(self, step: int, accuracy: float) -> None:
        self.console.print(f"step {step:>3}: held-out first-try accuracy {accuracy:.3f}")
