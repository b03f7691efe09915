"""Time and memory of comparing two stored runs.

python benchmarks/compare.py [TASKS]        250,000 tasks by default, of 4 samples each
"""

import json
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from rollouts.evaluation import compare_runs

SAMPLES = 4


def write_run(directory: Path, tasks: int, seed: int, success: float) -> None:
    """The lines of a run of `rollouts eval`; the difficulty of a task is the same in each run."""
    difficulty = np.random.default_rng(0).beta(2, 2, tasks)
    rewards = np.random.default_rng(seed).random((tasks, SAMPLES)) < difficulty[:, None] + success
    zeros = [0.0] * SAMPLES
    directory.mkdir()
    with open(directory / "metrics.jsonl", "w", encoding="utf-8") as file:
        for number, row in enumerate(rewards.astype(float).tolist()):
            line = {
                "task_id": f"task-{number:06d}",
                "task_data": {"question": f"What is {number} + {number}?", "answer": 2 * number},
                "total_rewards": row,
                "environment_rewards": row,
                "group_rewards": zeros,
                "reward_parts": {"exact": row},
                "attempts": [1] * SAMPLES,
                "done": SAMPLES,
                "truncated": 0,
                "failed": 0,
                "failed_episodes": [],
                "errors": [],
                "turns": SAMPLES,
                "length_stops": 0,
                "tokens": 400,
                "sampled_tokens": 200,
                "images": 0,
                "oldest_version": "0",
            }
            file.write(json.dumps(line) + "\n")


def main() -> None:
    tasks = int(sys.argv[1]) if len(sys.argv) > 1 else 250_000
    with tempfile.TemporaryDirectory() as folder:
        runs = [Path(folder) / "a", Path(folder) / "b"]
        for seed, (run, success) in enumerate(zip(runs, (0.0, 0.01), strict=True), 1):
            write_run(run, tasks, seed, success)
        started = time.perf_counter()
        difference = compare_runs(runs).against_baseline[0].differences.pass_at_k[1]
        seconds = time.perf_counter() - started
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    shown = difference.difference
    print(f"{tasks:,} tasks x {SAMPLES}, two runs: {seconds:.1f} s, peak memory {memory:.2f} GB")
    print(f"pass@1: {shown.value:+.4f}, 95 % interval {shown.low:+.4f} to {shown.high:+.4f}")


if __name__ == "__main__":
    main()
