"""A run with a journal whose workers are killed all the time: `python journalled_workers.py MODEL_DIRECTORY`.

Lines of standard input and output, and the records `consumed` and `ended`, are those of `journalled_run.py`. The
workers are in the process of the run, and what goes to them and comes back is encoded and decoded. `killed` has a line
for each worker that was killed.
"""

import asyncio
import os
import random
from pathlib import Path
from typing import Any

from journalled_run import Gallery, consume, record, serve
from local_workers import EncodedWorker
from simulated_engine import SimulatedEngine

from rollouts.workers import EpisodeWorker, WorkerPool

NUM_WORKERS = 3
#: Every worker is killed again and again: no episode is given up for it.
MAX_LOSSES = 10**6
#: Bytes of the record of ended episodes between two kills of workers: 1 to 30 lines.
BETWEEN_KILLS = (1, 300)


async def replace_workers(pool: WorkerPool, directory: Path, ended: int, renderer: Any) -> None:
    """Begin workers, then kill one after the other, each followed by a new one."""
    killed = record(directory, "killed")
    engine = SimulatedEngine(seed=3, tokens=(2, 6), error_rate=0.02)
    workers: list[EncodedWorker] = []
    begun = 0
    while True:
        while len(workers) < NUM_WORKERS:
            name = f"worker-{begun}"
            begun += 1
            workers.append(EncodedWorker(name, EpisodeWorker(lambda task: Gallery(task, ended), engine, renderer)))
            pool.add(name, 4, workers[-1])
        enough = os.fstat(ended).st_size + random.randint(*BETWEEN_KILLS)
        while os.fstat(ended).st_size < enough:  # noqa: ASYNC110  environments write it from threads
            await asyncio.sleep(0.001)
        victim = workers.pop(random.randrange(NUM_WORKERS))
        victim.killed.set()
        pool.remove(victim.name, "killed by the test")
        os.write(killed, f"{victim.name}\n".encode())


async def run(directory: Path, renderer: Any) -> None:
    ended, pool = record(directory, "ended"), WorkerPool(max_losses=MAX_LOSSES)
    replacing = asyncio.ensure_future(replace_workers(pool, directory, ended, renderer))
    await consume(directory, None, None, None, workers=pool)
    replacing.cancel()


if __name__ == "__main__":
    serve(run)
