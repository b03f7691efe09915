"""What an orchestrator makes of the messages of a worker, and a worker of one that reads slowly."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import dataclass

import pytest
from runner_world import Counting
from test_runner_on_workers import finish

import rollouts.workers.link.link_worker as link_worker
from rollouts import EpisodeError, EpisodeLimits, SamplingParams, Task
from rollouts.errors import ArgumentError
from rollouts.testing import ScriptedEngine
from rollouts.workers import EpisodeFailure, EpisodeJob, EpisodeOutcome, EpisodeWorker, JobWaiting
from rollouts.workers.link import LinkWorkers
from rollouts.workers.link.link_workers import Outbox
from rollouts.workers.link.messages import Announced, CancelJob, JobFailed, WorkerHello, own_version
from transport import wire_type
from transport.link import LinkClient, LinkRefusedError

TIMES = {"heartbeat": 0.1, "peer_timeout": 2.0}


class Observer:
    def __init__(self):
        self.turns = []

    def assigned(self, worker):
        pass

    def waiting(self, turn, part):
        self.turns.append(turn)


def job(seed):
    return EpisodeJob("episode", Task("t"), 0, 0, seed, SamplingParams(), EpisodeLimits())


def outcome(sent):
    episode = sent.new_trajectory()
    episode.finish()
    return EpisodeOutcome(episode)


@asynccontextmanager
async def one_worker():
    """`LinkWorkers`, and a client that is a worker of one slot, whose messages the test sends."""
    async with LinkWorkers(**TIMES) as workers:
        client, connected = LinkClient(workers.address, **TIMES), asyncio.Event()
        workers.on_slots_changed(connected.set)
        await client.send_async(WorkerHello(own_version(), 1))
        await connected.wait()
        yield workers, client
        await asyncio.to_thread(client.close)


async def received(client, count):
    return [(await client.recv_async()).obj for _ in range(count)]


def test_a_job_that_begins_again_receives_neither_the_outcome_nor_the_progress_of_the_cancelled_one():
    async def run():
        async with one_worker() as (workers, client):
            first = asyncio.ensure_future(workers.run(job(1), Observer()))
            announced, first_job = await received(client, 2)
            first.cancel()
            await asyncio.wait([first])
            observer = Observer()
            second = asyncio.ensure_future(workers.run(job(2), observer))
            cancelled, announced_again, second_job = await received(client, 3)
            assert cancelled == CancelJob(announced.job)
            for number, its_job in ((announced.job, first_job), (announced_again.job, second_job)):
                await client.send_async([JobWaiting(number, its_job.seed, "engine")])
                await client.send_async(Announced(number))
                await client.send_async(outcome(its_job))
            assert (await second).seed == 2
            assert observer.turns == [2]

    finish(run)


def test_an_outcome_of_a_worker_that_ends_at_once_is_not_lost():
    async def run():
        async with one_worker() as (workers, client):
            running = asyncio.ensure_future(workers.run(job(1), Observer()))
            announced, its_job = await received(client, 2)
            client.send(Announced(announced.job))
            client.send(outcome(its_job))
            client.close()  # before the event loop has received any of it
            assert (await running).seed == 1
            assert workers.metrics()["worker_jobs_moved"] == 0

    finish(run)


def test_a_failure_and_an_outcome_of_another_episode_fail_the_job_alone():
    async def run():
        async with one_worker() as (workers, client):
            running = asyncio.ensure_future(workers.run(job(1), Observer()))
            announced, _ = await received(client, 2)
            await client.send_async(JobFailed(announced.job, EpisodeFailure("DecodeError", "it is broken", None)))
            with pytest.raises(EpisodeError, match="it is broken") as caught:
                await running
            assert (caught.value.trajectory.episode_id, caught.value.trajectory.seed) == ("episode", 1)
            running = asyncio.ensure_future(workers.run(job(1), Observer()))
            announced, _ = await received(client, 2)
            await client.send_async(Announced(announced.job))
            other = EpisodeJob("other", Task("t"), 0, 0, 1, SamplingParams(), EpisodeLimits())
            await client.send_async(outcome(other))
            with pytest.raises(EpisodeError, match="it is of episode other, not of episode"):
                await running

    finish(run)


@wire_type("tests.UnknownGreeting")
@dataclass(frozen=True)
class UnknownGreeting:
    """Cannot be decoded, as the greeting of another version."""

    version: str

    def __post_init__(self):
        if self.version == "other":
            raise ValueError("this cannot be decoded")


@pytest.mark.parametrize(
    ("greeting", "name", "value"),
    [
        (UnknownGreeting("same"), "version", "other"),
        (WorkerHello(own_version(), 1), "slots", 10**400),
        (WorkerHello(own_version(), 1), "configuration", "x" * 1_000_001),
    ],
)
def test_a_worker_whose_greeting_cannot_be_decoded_is_refused(greeting, name, value):
    object.__setattr__(greeting, name, value)

    async def run():
        async with LinkWorkers(**TIMES) as workers:
            client = LinkClient(workers.address, **TIMES)
            await client.send_async(greeting)
            with pytest.raises(LinkRefusedError, match="install one version of mmrollouts on both sides"):
                await client.recv_async()
            await asyncio.to_thread(client.close)

    finish(run)


@pytest.mark.parametrize("name", ["n" * 181, "two\nlines"])
def test_a_name_that_no_connection_can_have_is_refused_before_the_first(name):
    with pytest.raises(ArgumentError, match="printable text of at most 180 bytes"):
        asyncio.run(link_worker.run_link_worker(None, "tcp://127.0.0.1:9", name=name))


def test_progress_waits_in_one_message_while_the_orchestrator_does_not_read(renderer, monkeypatch):
    monkeypatch.setattr(link_worker, "_PROGRESS_SECONDS", 0.0)

    async def run():
        worker = EpisodeWorker(Counting, ScriptedEngine(lambda request: "yes", renderer=renderer), renderer)
        client = LinkClient("tcp://127.0.0.1:9", **TIMES)
        connection, reads, sent = link_worker._Connection(worker, client, ""), asyncio.Event(), []
        all_sent = asyncio.Event()

        async def send(message):
            await reads.wait()
            sent.append(message)
            if sum(map(len, sent)) == 200:
                all_sent.set()

        outbox = connection._outbox = Outbox(send)
        for turn in range(200):
            connection._report(JobWaiting(0, turn, "engine"))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        reads.set()
        await all_sent.wait()
        assert len(sent) <= 3, "one that was being sent, one that waited, and all others in one"
        assert [one.turn for message in sent for one in message] == list(range(200))
        await outbox.close()
        await asyncio.to_thread(client.__exit__, ValueError, ValueError(), None)
        await worker.close()

    finish(run)


def test_a_worker_that_is_cancelled_ends_although_its_orchestrator_does_not_read(renderer, monkeypatch):
    monkeypatch.setattr(link_worker, "_LEAVE_SECONDS", 0.01)

    class Unread:
        """A link whose queue is full after the greeting."""

        address = "tcp://127.0.0.1:9"

        def __init__(self):
            self.greeted = asyncio.Event()

        async def send_async(self, message):
            if self.greeted.is_set():
                await asyncio.Event().wait()
            self.greeted.set()

        async def recv_async(self):
            await asyncio.Event().wait()

    async def run():
        worker = EpisodeWorker(Counting, ScriptedEngine(lambda request: "yes", renderer=renderer), renderer)
        client = Unread()
        running = asyncio.ensure_future(link_worker._Connection(worker, client, "").run(connect_seconds=60))
        await client.greeted.wait()
        await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
        await worker.close()

    finish(run)
