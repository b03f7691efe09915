"""What the listeners of a runner cost: microseconds of CPU for each turn of an episode.

    python benchmarks/observability.py

Each listener gets the events of 2,000 episodes of 8 turns, 64 of which run at the same time: the six events of a turn
(four waits, of which one is for the parsed completion, and the end), and a share of the two of the episode.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator, Sequence

from rollouts.observability import PrometheusEndpoint, RunMetrics
from rollouts.runner.events import EpisodeEnded, EpisodeStarted, EpisodeWaiting, RunnerEvent, TurnFinished

CONCURRENCY = 64


def events(first: int, episodes: int, turns: int) -> Iterator[RunnerEvent]:
    """Episodes that run at the same time, turn by turn."""
    ids = [f"task-{number // 8}/{number % 8}.0" for number in range(first, first + episodes)]
    for episode_id in ids:
        yield EpisodeStarted(episode_id, "task", 0, 0)
    for turn in range(turns):
        for episode_id in ids:
            for part in ("renderer", "engine", "renderer", "environment.step"):
                yield EpisodeWaiting(episode_id, turn, part)
            yield TurnFinished(episode_id, turn, 1000, 100, 2, 1.5, 0.01, 0.2)
    for episode_id in ids:
        yield EpisodeEnded(episode_id, "done", 1.0, "", 9.0)


def seconds(listener: Callable[[RunnerEvent], object], batches: Sequence[Sequence[RunnerEvent]]) -> float:
    started = time.process_time()
    for batch in batches:
        for event in batch:
            listener(event)
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--turns", type=int, default=8)
    options = parser.parse_args()
    batches = [list(events(first, CONCURRENCY, options.turns)) for first in range(0, options.episodes, CONCURRENCY)]
    played = len(batches) * CONCURRENCY * options.turns
    listeners = {"no work (the call of a function)": lambda event: None, "RunMetrics": RunMetrics()}
    for name, listener in listeners.items():
        best = min(seconds(listener, batches) for _ in range(3))
        print(f"{name:36}{1e6 * best / played:8.2f} us per turn")
    metrics = RunMetrics()
    for batch in batches:
        for event in batch[: CONCURRENCY * options.turns]:
            metrics(event)
    registry = PrometheusEndpoint(metrics).registry
    from prometheus_client import generate_latest

    started = time.process_time()
    for _ in range(20):
        generate_latest(registry)
    print(f"{'a request of Prometheus':36}{1e3 * (time.process_time() - started) / 20:8.2f} ms")


if __name__ == "__main__":
    main()
