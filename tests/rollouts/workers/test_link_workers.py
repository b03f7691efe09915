"""Workers that are linked by ZeroMQ: episodes, media, refusals, and losses of either side."""

from __future__ import annotations

import asyncio
import logging
import os
import stat
import tomllib
from contextlib import asynccontextmanager
from dataclasses import dataclass

import numpy as np
import pytest
from runner_world import Counting, HeldEngine, assert_no_task_is_left, groups_of, outcomes, run_groups, tasks
from test_runner_on_workers import content, finish

import rollouts.workers.link.link_worker as link_worker
from rollouts import SamplingParams, StepResult, Task
from rollouts.errors import RolloutsError
from rollouts.runner import Runner
from rollouts.testing import ScriptedEngine
from rollouts.workers import EpisodeWorker
from rollouts.workers.link import (
    LinkWorkers,
    OrchestratorLostError,
    read_orchestrator_keys,
    read_worker_keys,
    run_link_worker,
    write_key_files,
)
from rollouts.workers.link.keys import KeyFileError
from transport import DecodeLimits, wire_type
from transport.link import LinkAddressError, LinkClient, LinkLimits, LinkRefusedError

TIMES = {"heartbeat": 0.1, "peer_timeout": 2.0}


def scripted(renderer):
    return ScriptedEngine(lambda request: "yes", renderer=renderer)


@asynccontextmanager
async def linked(renderer, make_environment=Counting, *, engine=None, count=2, slots=4, are_accepted=True, **options):
    """Linked workers in this process, once they are connected: the `LinkWorkers`, and the tasks of the workers."""
    async with LinkWorkers(**TIMES, **options) as workers:
        running, connected = [], asyncio.Event()
        workers.on_slots_changed(lambda: workers.num_slots == count * slots and connected.set())
        for number in range(count):
            worker = EpisodeWorker(make_environment, engine or scripted(renderer), renderer, slots=slots)
            call = run_link_worker(worker, workers.address, name=f"worker-{number}", wait_seconds=20, **TIMES)
            running.append(asyncio.ensure_future(call))
        if are_accepted:
            await connected.wait()
        yield workers, running
    await asyncio.gather(*running, return_exceptions=True)


def new_runner(workers, **options):
    return Runner(None, None, None, sampling=SamplingParams(max_tokens=8), workers=workers, **options)


def run_linked(renderer, source, make_environment=Counting, *, group_size=1, **options):
    """The groups of a whole run by task id, the runner, and the counters of the link."""

    async def run():
        async with linked(renderer, make_environment, **options) as (workers, running):
            async with new_runner(workers, group_size=group_size, seed=5) as runner:
                groups = {group.task.task_id: group for group in await groups_of(runner, source)}
            stats = workers._server.stats()
        assert [call.result() for call in running] == [None] * len(running)
        assert_no_task_is_left()
        return groups, runner, stats

    return finish(run)


def test_groups_of_linked_workers_are_those_of_a_runner_alone(renderer):
    alone, local = run_groups(renderer, tasks(6), group_size=3, seed=5)
    elsewhere, remote, _ = run_linked(renderer, tasks(6), group_size=3)
    assert {name: content(group) for name, group in alone.items()} == {
        name: content(group) for name, group in elsewhere.items()
    }
    counted = ("turns", "prompt_tokens", "completion_tokens", "episodes_ended/done")
    assert [remote.metrics()[name] for name in counted] == [local.metrics()[name] for name in counted]


def test_streams_of_the_same_tasks_at_one_time_receive_the_groups_of_a_runner_alone(renderer):
    alone, _ = run_groups(renderer, tasks(3), group_size=2, seed=5)

    async def run():
        async with (
            linked(renderer) as (workers, _),
            new_runner(workers, group_size=2, seed=5) as runner,
            new_runner(workers, group_size=2, seed=5) as other,
        ):
            return await asyncio.gather(*(groups_of(one, tasks(3)) for one in (runner, runner, other)))

    for groups in finish(run):
        assert {group.task.task_id: content(group) for group in groups} == {
            name: content(group) for name, group in alone.items()
        }


class Picture(Counting):
    """Shows one of two pictures in each turn."""

    def show(self, number):
        pixels = np.random.default_rng(number).integers(0, 256, (32, 32, 3), dtype=np.uint8)
        return [{"role": "user", "content": [{"type": "image", "image": pixels}, {"type": "text", "text": "this?"}]}]

    def reset(self, seed):
        return self.show(0)

    def step(self, assistant):
        self.taken += 1
        return StepResult(self.show(1), reward=1.0, done=self.taken == 3)


def test_a_picture_crosses_each_connection_once(renderer):
    groups, _, stats = run_linked(renderer, tasks(8), Picture, group_size=2)
    episodes = [episode for group in groups.values() for episode in group.episodes]
    assert [len(list(episode.all_media())) for episode in episodes] == [3] * 16
    assert stats.media_received == 2 * 2, "two pictures, from each of two workers"


@wire_type("tests.Fragile")
@dataclass(frozen=True)
class Fragile:
    """Cannot be decoded after `break_next`."""

    name: str

    def __post_init__(self):
        if self.name in Fragile.broken:
            raise ValueError("this cannot be decoded")


Fragile.broken = set()


class Informing(Counting):
    """Returns the data of its task as info."""

    def step(self, assistant):
        Fragile.broken.add("outcome")
        return StepResult(reward=1.0, done=True, info={"data": self.task.data})


@pytest.mark.parametrize("what", ["job", "outcome"])
def test_what_cannot_be_decoded_fails_its_episode_alone(renderer, what):
    source = [Task("good"), Task("bad", Fragile(what)), Task("also good")]
    Fragile.broken.add("job")
    try:
        groups, runner, _ = run_linked(renderer, source, Informing)
    finally:
        Fragile.broken.clear()
    assert groups["good"].episodes[0].done
    assert groups["also good"].episodes[0].done
    assert "this cannot be decoded" in groups["bad"].episodes[0].error
    assert outcomes(runner) == {"done": 2, "failed": 1}


def test_an_outcome_that_is_too_large_fails_its_episode_alone(renderer):
    class Large(Counting):
        def step(self, assistant):
            text = "long " * 100_000 if self.task.task_id == "t1" else ""
            return StepResult(reward=1.0, done=True, info={"text": text})

    limits = LinkLimits(decode=DecodeLimits(max_total_bytes=200_000))
    groups, runner, _ = run_linked(renderer, tasks(3), Large, limits=limits)
    assert "MessageTooLargeError" in groups["t1"].episodes[0].error
    assert outcomes(runner) == {"done": 2, "failed": 1}


def test_a_worker_of_another_version_is_refused_with_both_versions(renderer, monkeypatch, caplog):
    monkeypatch.setattr(link_worker, "own_version", lambda: "0.0.9")

    async def run():
        async with linked(renderer, count=1, are_accepted=False) as (_workers, (call,)):
            with pytest.raises(
                LinkRefusedError, match=r"the worker has mmrollouts 0\.0\.9, the orchestrator \d"
            ) as caught:
                await call
        assert "install one version on both" in str(caught.value)

    with caplog.at_level(logging.WARNING, "rollouts.workers"):
        finish(run)
    assert "worker-0/1 is refused: the worker has mmrollouts 0.0.9" in caplog.text


def test_a_worker_of_another_configuration_is_refused(renderer):
    async def run():
        async with LinkWorkers(configuration="one", **TIMES) as workers:
            worker = EpisodeWorker(Counting, scripted(renderer), renderer)
            with pytest.raises(LinkRefusedError, match="configuration differs"):
                await run_link_worker(worker, workers.address, configuration="another", **TIMES)

    finish(run)


def test_a_stranger_that_sends_something_else_is_refused():
    async def run():
        async with LinkWorkers(**TIMES) as workers:
            client = LinkClient(workers.address, **TIMES)
            await client.send_async({"slots": 10**9})
            with pytest.raises(LinkRefusedError, match="sent a dict, which no worker sends"):
                await client.recv_async()
            client.close()
            assert workers.num_slots == 0

    finish(run)


def test_a_worker_that_ends_on_request_gives_its_episodes_back_and_is_not_lost(renderer):
    async def run():
        engine = HeldEngine(renderer)
        async with linked(renderer, engine=engine, slots=2) as (workers, calls):
            async with new_runner(workers, concurrency=4) as runner:
                running = asyncio.ensure_future(groups_of(runner, tasks(4)))
                await engine.wait_for_in_flight(4)
                calls[0].cancel()
                await asyncio.wait([calls[0]])
                assert len(engine.in_flight) == 2, "the requests of the cancelled worker were cancelled"
                engine.release.set()
                assert len(await running) == 4
            metrics = runner.metrics()
            assert (metrics["workers_lost"], metrics["worker_jobs_moved"]) == (0, 2)
            assert outcomes(runner) == {"done": 4}

    finish(run)


def test_an_update_of_the_weights_holds_the_deadlines_of_linked_workers(renderer):
    async def run():
        engine = HeldEngine(renderer)
        updates, ended = [], asyncio.Event()

        class Watched(EpisodeWorker):
            def set_update(self, in_flight):
                super().set_update(in_flight)
                updates.append(in_flight)
                if updates == ["wait", None]:
                    ended.set()

        async with LinkWorkers(**TIMES) as workers:
            worker = Watched(Counting, engine, renderer)
            call = asyncio.ensure_future(run_link_worker(worker, workers.address, **TIMES))
            runner = Runner(None, engine, None, sampling=SamplingParams(max_tokens=8), workers=workers)
            async with runner:
                running = asyncio.ensure_future(groups_of(runner, tasks(2)))
                await engine.wait_for_in_flight(2)
                await runner.update_weights(None, "new", "wait")
                await ended.wait()
                engine.release.set()
                await running
        await call

    finish(run)


def test_a_worker_waits_for_the_next_orchestrator_after_one_that_failed(renderer):
    async def run():
        engine = HeldEngine(renderer)
        first = LinkWorkers(**TIMES)
        worker = EpisodeWorker(Counting, engine, renderer, slots=3)
        call = asyncio.ensure_future(run_link_worker(worker, first.address, wait_seconds=20, **TIMES))

        async def train():
            async with first, new_runner(first) as runner:
                running = asyncio.ensure_future(groups_of(runner, tasks(3)))
                await engine.wait_for_in_flight(3)
                running.cancel()
                raise RuntimeError("the trainer failed")

        with pytest.raises(RuntimeError, match="the trainer failed"):
            await train()
        engine.release.set()
        async with LinkWorkers(first.address, **TIMES) as second, new_runner(second) as runner:
            assert len(await groups_of(runner, tasks(3))) == 3
        assert not engine.in_flight
        await call
        await worker.close()

    finish(run)


def test_a_worker_without_an_orchestrator_ends_after_its_time(renderer):
    async def run():
        async with LinkWorkers(**TIMES) as workers:
            address = workers.address
        worker = EpisodeWorker(Counting, scripted(renderer), renderer)
        with pytest.raises(OrchestratorLostError) as caught:
            await run_link_worker(worker, address, wait_seconds=0.3, heartbeat=0.1, peer_timeout=0.3)
        assert caught.value.address == address
        assert caught.value.seconds >= 0.3
        assert "start it, or correct the address" in str(caught.value)
        assert_no_task_is_left()

    finish(run)


@pytest.mark.slow
@pytest.mark.parametrize("wait_seconds", [0, 1.2])
def test_a_worker_that_waits_for_less_than_the_link_does_ends_after_its_own_time(renderer, wait_seconds):
    async def run():
        async with LinkWorkers(**TIMES) as workers:
            address = workers.address
        worker = EpisodeWorker(Counting, scripted(renderer), renderer)
        with pytest.raises(OrchestratorLostError, match="did not answer within") as caught:
            await run_link_worker(worker, address, wait_seconds=wait_seconds, peer_timeout=100_000)
        assert caught.value.seconds >= wait_seconds
        assert_no_task_is_left()

    finish(run)


def test_workers_outside_of_their_block_name_the_cure(renderer):
    async def run():
        workers = LinkWorkers(**TIMES)
        with pytest.raises(RolloutsError, match="async with LinkWorkers"):
            new_runner(workers)
        await workers.close()

    finish(run)


@pytest.mark.slow
def test_keys_let_workers_in_and_keep_others_out(renderer, tmp_path):
    orchestrator, worker_file = write_key_files(tmp_path / "keys")
    _, other_worker = write_key_files(tmp_path / "other")

    async def run():
        async with LinkWorkers(keys=read_orchestrator_keys(orchestrator), **TIMES) as workers:
            options = {"heartbeat": 0.1, "peer_timeout": 0.5, "wait_seconds": 0.5}
            for keys in (None, read_worker_keys(other_worker)):
                worker = EpisodeWorker(Counting, scripted(renderer), renderer)
                with pytest.raises(OrchestratorLostError, match="keys of one set"):
                    await run_link_worker(worker, workers.address, keys=keys, **options)
            call = run_link_worker(worker, workers.address, keys=read_worker_keys(worker_file), **TIMES)
            running = asyncio.ensure_future(call)
            async with new_runner(workers) as runner:
                assert len(await groups_of(runner, tasks(2))) == 2
        await running

    finish(run)


def test_key_files_are_private_and_are_not_replaced(tmp_path):
    paths = write_key_files(tmp_path)
    for path in paths:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        secret = tomllib.loads(path.read_text())["secret"]
        assert secret not in repr(read_orchestrator_keys(paths[0]))
        assert secret not in repr(read_worker_keys(paths[1]))
    with pytest.raises(KeyFileError, match="it exists"):
        write_key_files(tmp_path)
    with pytest.raises(KeyFileError, match="has no workers; it is not the file of this side"):
        read_orchestrator_keys(paths[1])
    os.chmod(paths[1], 0o640)
    with pytest.raises(KeyFileError, match="other users may read it"):
        read_worker_keys(paths[1])
    os.chmod(paths[1], 0o600)
    paths[1].write_text("secret = 'short'\npublic = 'short'\norchestrator = 'short'\n")
    with pytest.raises(KeyFileError) as caught:
        read_worker_keys(paths[1])
    assert "40 characters" in str(caught.value)


def test_a_key_file_that_another_user_owns_is_refused_with_the_cure(tmp_path, monkeypatch):
    path, _ = write_key_files(tmp_path)
    if owner := os.geteuid():
        monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    else:
        os.chown(path, 54321, -1)
    with pytest.raises(KeyFileError, match=f"owns it, and can read and replace it; run `chown {os.geteuid()} "):
        read_orchestrator_keys(path)


@pytest.mark.parametrize("options", [{}, {"allow_remote": True}])
def test_an_address_of_other_machines_needs_keys_and_consent(options):
    with pytest.raises(LinkAddressError, match="keys"):
        LinkWorkers("tcp://0.0.0.0:*", **options)
