"""Workers in the process of a test. What goes to them and comes back is encoded and decoded, as between processes."""

import asyncio

from rollouts.workers import EpisodeWorker, ProgressObserver, WorkerGoneError, WorkerPool, report_progress
from transport import decode, encode


class EncodedWorker:
    """A `RemoteWorker` on an `EpisodeWorker` of this process. `kill` lets its calls fail as those of a dead process."""

    def __init__(self, name: str, worker: EpisodeWorker) -> None:
        self.name = name
        self.worker = worker
        self.killed = asyncio.Event()
        self.updates: list[object] = []

    async def run(self, job, observer):
        received = decode(encode(job))

        def send(progress):
            if not self.killed.is_set():
                report_progress(progress, observer)

        running = asyncio.ensure_future(self.worker.run(received, ProgressObserver(send)))
        killing = asyncio.ensure_future(self.killed.wait())
        try:
            await asyncio.wait([running, killing], return_when=asyncio.FIRST_COMPLETED)
            if self.killed.is_set():
                raise WorkerGoneError(self.name, "killed by the test")
            return decode(encode(running.result()))
        finally:
            ended = [each for each in (running, killing) if not each.done()]
            for each in ended:
                each.cancel()
            if ended:
                await asyncio.wait(ended)

    def set_update(self, in_flight):
        self.updates.append(in_flight)
        self.worker.set_update(in_flight)


def local_pool(make_worker, count=2, *, slots=4, **options) -> tuple[WorkerPool, dict[str, EncodedWorker]]:
    """A pool of `count` workers, and the workers by name."""
    pool = WorkerPool(**options)
    workers = {f"worker-{number}": EncodedWorker(f"worker-{number}", make_worker()) for number in range(count)}
    for name, worker in workers.items():
        pool.add(name, slots, worker)
    return pool, workers
