"""Workers that connect over ZeroMQ (`transport.link`), from this machine or others. Extra `zmq`.

async with LinkWorkers("tcp://127.0.0.1:7100") as workers:              # the process of the runner
    async with Runner(None, engine, None, sampling=sampling, workers=workers) as runner:
        ...

await run_link_worker(EpisodeWorker(make_environment, engine, renderer), "tcp://127.0.0.1:7100")   # a worker
"""

from rollouts.workers.link.keys import OrchestratorLostError, read_orchestrator_keys, read_worker_keys, write_key_files
from rollouts.workers.link.link_worker import run_link_worker
from rollouts.workers.link.link_workers import LinkWorkers

__all__ = [
    "LinkWorkers",
    "OrchestratorLostError",
    "read_orchestrator_keys",
    "read_worker_keys",
    "run_link_worker",
    "write_key_files",
]
