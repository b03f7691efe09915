"""Actors that could not be reached for a while, and how many calls they run at once; neither needs a cluster."""

from __future__ import annotations

import asyncio
from itertools import count
from types import SimpleNamespace

from rollouts import EpisodeLimits, SamplingParams, Task
from rollouts.ray import ObjectMedia, worker_actor
from rollouts.ray.actor_worker import ActorWorker
from rollouts.ray.worker_actor import WorkerActor, WorkerParts
from rollouts.testing import ScriptedEngine
from rollouts.workers import EpisodeJob


class HeldActor:
    """A handle of an actor whose jobs never end; has the numbers of their calls."""

    def __init__(self):
        self.calls = []
        self.called = asyncio.Event()
        self.run = SimpleNamespace(remote=self._run)
        self.cancel = SimpleNamespace(remote=lambda call: None)

    async def _run(self, call, job, media):
        self.calls.append(call)
        self.called.set()
        await asyncio.Event().wait()


async def test_an_actor_that_serves_again_receives_no_number_of_a_call_twice():
    actor, calls = HeldActor(), count()
    for _ in range(2):
        worker = ActorWorker("a", actor, ObjectMedia(), calls)
        job = EpisodeJob("episode", Task("t"), 0, 0, 1, SamplingParams(), EpisodeLimits())
        running = asyncio.ensure_future(worker.run(job, None))
        await actor.called.wait()
        actor.called.clear()
        running.cancel()
        await asyncio.wait([running])
    assert actor.calls == [0, 1]


async def test_a_start_ends_an_update_whose_end_was_not_reported(renderer, monkeypatch):
    context = SimpleNamespace(get_node_id=lambda: "node")
    monkeypatch.setattr(worker_actor.ray, "get_runtime_context", lambda: context)

    parts = WorkerParts(
        lambda task: None, lambda: ScriptedEngine(lambda request: "yes", renderer=renderer), lambda: renderer
    )
    actor = WorkerActor(parts, 1)
    assert not (await actor.start()).error
    await actor.set_update("abort")
    assert actor._worker._settings.pauses.is_updating
    await actor.start()
    assert not actor._worker._settings.pauses.is_updating
    await actor.stop()
