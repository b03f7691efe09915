"""Jobs of one episode at a worker: each begins when those before it have ended."""

import asyncio

from runner_world import Counting, assert_no_task_is_left
from test_runner_on_workers import finish

from rollouts import EpisodeLimits, SamplingParams, Task
from rollouts.testing import ScriptedEngine
from rollouts.workers import EpisodeJob, EpisodeWorker


def test_an_episode_begins_again_after_the_cleanup_of_all_its_cancelled_runs(renderer):
    async def run():
        began, cleans_up, may_end = asyncio.Event(), asyncio.Event(), asyncio.Event()
        order = []

        class Slow(Counting):
            """The first run waits until it is cancelled, and then cleans up until the test lets it end."""

            async def reset(self, seed):
                order.append("reset")
                if not began.is_set():
                    began.set()
                    try:
                        await asyncio.Event().wait()
                    finally:
                        cleans_up.set()
                        await may_end.wait()
                        order.append("cleaned up")
                return super().reset(seed)

        worker = EpisodeWorker(Slow, ScriptedEngine(lambda request: "yes", renderer=renderer), renderer)
        job = EpisodeJob("episode", Task("t"), 0, 0, 1, SamplingParams(max_tokens=8), EpisodeLimits())
        first = asyncio.ensure_future(worker.run(job))
        await began.wait()
        second = asyncio.ensure_future(worker.run(job))
        await cleans_up.wait()
        third = asyncio.ensure_future(worker.run(job))
        await asyncio.wait([second])
        assert second.cancelled()
        for _ in range(50):  # in which the third run begins, if it does not wait
            await asyncio.sleep(0)
        may_end.set()
        assert (await third).failure is None
        assert order == ["reset", "cleaned up", "reset"]
        assert first.cancelled()
        await worker.close()
        assert_no_task_is_left()

    finish(run)
