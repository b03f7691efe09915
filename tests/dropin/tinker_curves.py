"""Draws the curves of docs/tinker.md: python tests/dropin/tinker_curves.py OUT docs/images

OUT is what `tinker_recipes.py --out OUT` has kept.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

# The file, and for each plot its label and the metrics in it.
_CURVES = {
    "sl": {"nats a token": {"train_mean_nll": "training"}},
    "vlm": {
        "nats a token": {"train_mean_nll": "training", "test/nll": "held-out"},
        "accuracy on held-out digits": {"accuracy": "greedy answers"},
    },
    "math": {"reward": {"env/all/reward/total": "mean of all groups"}},
}


def draw(out: Path, name: str, target: Path) -> None:
    (path,) = (out / name).rglob("metrics.jsonl")
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    plots = _CURVES[name]
    figure = Figure(figsize=(4.5 * len(plots), 2.8))
    for axes, (label, metrics) in zip(figure.subplots(1, len(plots), squeeze=False)[0], plots.items(), strict=True):
        for metric, line in metrics.items():
            points = [(row["step"], row[metric]) for row in rows if metric in row]
            axes.plot(*zip(*points, strict=True), label=line)
        if label == "nats a token" and (own := out / f"{name}-own-losses").exists():
            axes.plot(np.loadtxt(own), "--", label="training, in a loop of our own")
        axes.set(xlabel="step", ylabel=label)
        if label == "nats a token":
            axes.set_yscale("log")
        else:
            axes.set_ylim(0, 1)
        axes.legend()
    figure.tight_layout()
    figure.savefig(target / f"tinker-{name}.png", dpi=80)


if __name__ == "__main__":
    for name in _CURVES:
        draw(Path(sys.argv[1]), name, Path(sys.argv[2]))
