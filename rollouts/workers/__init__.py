"""Workers play the episodes of a `Runner` in other processes: the same runner, its attempts elsewhere.

A worker process has an `EpisodeWorker`, made of environments, an engine and a renderer of its own. The process of the
runner has a `WorkerPool`, which gives it `EpisodeJob`s and returns trajectories:

    workers = RayWorkers(make_environment, make_engine, make_renderer, num_workers=4)
    async with workers, Runner(None, engine, None, sampling=sampling, workers=workers) as runner:
        ...

A pool gives jobs to free workers, and those of a lost worker to another one.
"""

from rollouts.workers.episode_worker import EpisodeJob, EpisodeOutcome, EpisodeWorker
from rollouts.workers.protocol import (
    JobObserver,
    Progress,
    ProgressObserver,
    WorkerGoneError,
    WorkersClosedError,
    report_progress,
)
from rollouts.workers.worker_pool import RemoteWorker, WorkerPool

__all__ = [
    "EpisodeJob",
    "EpisodeOutcome",
    "EpisodeWorker",
    "JobObserver",
    "Progress",
    "ProgressObserver",
    "RemoteWorker",
    "WorkerGoneError",
    "WorkerPool",
    "WorkersClosedError",
    "report_progress",
]
