"""One side of `benchmarks/runner_and_verifiers.py`: verifiers' own loop with PyPI's `renderers`.

Runs in the environment of verifiers. Arguments: base URL, model, turns, episodes, concurrency. Prints [turns, seconds,
CPU seconds of this process] as JSON, after a run of a few episodes that warms up caches and imports.
"""

import asyncio
import json
import sys
import time

import verifiers.v1 as vf
from verifiers.v1.configs.client import TrainClientConfig


async def main() -> None:
    base_url, model = sys.argv[1:3]
    turns, episodes, concurrency = map(int, sys.argv[3:6])
    taskset = {"id": "conversation-v1", "episodes": episodes, "turns": turns}
    env = vf.load_environment(vf.resolve_env_config({"taskset": taskset, "agent": {"runtime": {"type": "subprocess"}}}))
    client = TrainClientConfig(base_url=f"{base_url}/v1", api_key_var="NO_API_KEY", renderer_model_name=model)
    context = vf.ModelContext(model=model, client=client, sampling=vf.SamplingConfig(max_tokens=64))
    tasks = list(env.taskset)

    async def run(tasks: list) -> int:
        semaphore = asyncio.Semaphore(concurrency)
        ended = await asyncio.gather(*(env.run_slot(env.slots(task)[0], context, semaphore) for task in tasks))
        for episode in ended:
            if not episode.ok:
                raise SystemExit(f"{episode.errors} {[trace.errors for trace in episode.traces]}")
        played = sum(len(trace.assistant_messages) for episode in ended for trace in episode.traces)
        assert played == turns * len(tasks)
        return played

    async with env.serving():
        await run(tasks[:8])
        started, cpu = time.perf_counter(), time.process_time()
        played = await run(tasks)
        print(json.dumps([played, time.perf_counter() - started, time.process_time() - cpu]))


if __name__ == "__main__":
    asyncio.run(main())
