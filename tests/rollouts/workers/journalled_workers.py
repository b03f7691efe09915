"""A run with a journal and workers for tests that kill them: `python journalled_workers.py MODEL ROLE ADDRESS`.

MODEL is a model directory. A line on standard input is a directory; the role's process for the run of that directory
is forked, and its id is printed. The role is "orchestrator", whose exit status is printed when it has ended, or
"worker". The records of a run are those of `journalled_run.py`: `consumed` by the consumer, `ended` by the environments
of all workers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

from journalled_run import GROUP_SIZE, NUM_TASKS, Gallery, digest_of, skipped
from simulated_engine import SimulatedEngine

from renderers import load_renderer
from rollouts import SamplingParams
from rollouts.runner import Journal, RetryPolicy, Runner, Task
from rollouts.workers import EpisodeWorker
from rollouts.workers.link import LinkWorkers, run_link_worker

FLAGS = os.O_WRONLY | os.O_CREAT | os.O_APPEND
#: Every worker is killed again and again: no episode is given up for it.
MAX_LOSSES = 10**6


async def orchestrate(directory: Path, address: str) -> None:
    consumed = os.open(directory / "consumed", FLAGS)
    async with LinkWorkers(address, max_losses=MAX_LOSSES, heartbeat=0.2, peer_timeout=5.0) as workers:
        runner = Runner(
            None,
            None,
            None,
            sampling=SamplingParams(max_tokens=6),
            group_size=GROUP_SIZE,
            concurrency=12,
            retry=RetryPolicy(kinds=("engine", "environment"), first_delay=0.001),
            skip_group=skipped,
            journal=Journal.open(directory / "journal"),
            workers=workers,
        )
        async with runner:
            async for group in runner.stream(Task(f"t{number}", number) for number in range(NUM_TASKS)):
                os.write(consumed, f"{group.task.task_id} {digest_of(group)}\n".encode())


async def work(directory: Path, address: str, renderer: Any) -> None:
    ended = os.open(directory / "ended", FLAGS)
    engine = SimulatedEngine(seed=3, tokens=(2, 6), error_rate=0.02)
    worker = EpisodeWorker(lambda task: Gallery(task, ended), engine, renderer, slots=4)
    await run_link_worker(worker, address, wait_seconds=60.0, heartbeat=0.2, peer_timeout=5.0)


def main() -> None:
    model_directory, role, address = sys.argv[1:]
    renderer = load_renderer(model_directory)
    if role == "worker":
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    print("ready", flush=True)
    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            status = 1
            try:
                directory = Path(line.strip())
                if role == "worker":
                    asyncio.run(work(directory, address, renderer))
                else:
                    asyncio.run(orchestrate(directory, address))
                status = 0
            finally:
                os._exit(status)
        print(process, flush=True)
        if role == "orchestrator":
            print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


if __name__ == "__main__":
    main()
