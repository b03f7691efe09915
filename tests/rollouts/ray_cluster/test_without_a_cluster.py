"""What needs no cluster: frames as Ray pickles them, progress in batches, and actors that could not be reached."""

import asyncio
import pickle
from itertools import count
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from renderers import MediaSource
from renderers.errors import MediaError
from rollouts import EpisodeLimits, SamplingParams, Task
from rollouts.errors import ArgumentError, RolloutsError
from rollouts.ray import ObjectMedia, RayWorkers, worker_actor
from rollouts.ray.actor_worker import ActorWorker
from rollouts.ray.object_media import ObjectFrames
from rollouts.ray.worker_actor import ProgressBatch, ProgressLog, ProgressReader, WorkerActor
from rollouts.testing import ScriptedEngine
from rollouts.workers import EpisodeJob


@given(st.lists(st.binary(max_size=50), max_size=5))
def test_frames_of_any_sizes_come_back(contents):
    read = pickle.loads(pickle.dumps(ObjectFrames(contents), protocol=5))
    assert [bytes(frame) for frame in read.frames] == contents


class Seen:
    def __init__(self) -> None:
        self.turns: list[int] = []

    def waiting(self, turn, part) -> None:
        self.turns.append(turn)

    def turn_finished(self, *arguments) -> None:
        raise AssertionError


@given(st.lists(st.sampled_from(["event", "batch", "late batch"]), max_size=40))
def test_each_event_is_reported_once_whatever_batches_arrive(steps):
    """Batches arrive in order, and those that have not arrived with the result of the job are not waited for."""
    log, seen, number = ProgressLog(), Seen(), 0
    reader = ProgressReader(seen)
    in_time = True
    for step in steps:
        if step == "event":
            log.events.append(("waiting", number, "engine"))
            number += 1
        elif (batch := log.batch()) is not None:
            in_time = in_time and step == "batch"
            if in_time:
                reader.read(batch)
    reader.read(ProgressBatch(0, tuple(log.events)))
    assert seen.turns == list(range(number))


async def value(result: ObjectFrames) -> ObjectFrames:
    await asyncio.sleep(0)
    return result


async def test_media_that_two_episodes_wait_for_are_fetched_once_and_again_if_the_first_fetch_fails():
    sources = {source.digest: source for source in map(MediaSource.of, (b"one", b"two"))}
    asked: list[list[str]] = []

    def fetch(digests):
        asked.append(list(digests))
        return [asyncio.ensure_future(value(ObjectFrames([sources[digest].data]))) for digest in digests]

    async def fails(digests):
        raise ConnectionError

    def fetch_from_lost(digests):
        return [asyncio.ensure_future(fails(digests)) for _ in digests]

    media = ObjectMedia()
    lost = asyncio.ensure_future(media.receive(sources, fetch_from_lost))
    await asyncio.sleep(0)
    found = await asyncio.gather(media.receive(sources, fetch), media.receive(sources, fetch))
    with pytest.raises(ConnectionError):
        await lost
    first, second = found
    assert asked == [list(sources)]
    assert first == second == sources


def test_media_with_another_digest_are_refused():
    async def main():
        digest = MediaSource.of(b"one").digest
        await ObjectMedia().receive([digest], lambda _: [asyncio.ensure_future(value(ObjectFrames([b"other"])))])

    with pytest.raises(MediaError):
        asyncio.run(main())


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("num_workers", 0),
        ("episodes_per_worker", 1.5),
        ("start_seconds", -1),
        ("max_losses", 0),
        ("actor_options", {"max_task_retries": 3}),
    ],
)
def test_a_wrong_argument_is_refused_by_its_name(name, wrong):
    right = {"make_environment": int, "make_engine": int, "make_renderer": int, "num_workers": 1}
    with pytest.raises(ArgumentError, match=name):
        RayWorkers(**{**right, name: wrong})


def test_without_a_connection_to_ray_no_cluster_is_started():
    async def main():
        async with RayWorkers(int, int, int, num_workers=1):
            pass

    with pytest.raises(RolloutsError, match=r"rollouts.ray.connect\(\)"):
        asyncio.run(main())


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

    engine = ScriptedEngine(lambda request: "yes", renderer=renderer)
    actor = WorkerActor(lambda task: None, lambda: engine, lambda: renderer, 1)
    assert not (await actor.start()).error
    await actor.set_update("abort")
    assert actor._worker._settings.pauses.is_updating
    await actor.start()
    assert not actor._worker._settings.pauses.is_updating
    await actor.stop()
