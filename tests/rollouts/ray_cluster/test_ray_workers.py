"""The runner with workers on a real Ray cluster of two nodes, of which actors and nodes are killed."""

import asyncio
import os
import signal
from collections import Counter
from functools import partial

import pytest
from ray_world import (
    Deadly,
    Looking,
    make_engine_except_in_one_process,
    make_renderer,
    runner_of,
    tasks,
    workers_of,
)

from rollouts import Group, Runner
from rollouts.errors import RolloutsError
from rollouts.ray import RayWorkers


def run(coroutine):
    return asyncio.run(asyncio.wait_for(coroutine, 100))


async def groups_of(runner: Runner, source) -> list[Group]:
    return [group async for group in runner.stream(source)]


async def wait_until(condition) -> None:
    while not condition():  # noqa: ASYNC110  the state of other processes
        await asyncio.sleep(0.02)


async def wait_for_both(workers: RayWorkers) -> None:
    """Both workers have started, on different nodes, and all their slots are used."""
    await wait_until(lambda: len(workers.places) == 2)
    assert len({node for node, _ in workers.places.values()}) == 2
    await wait_until(lambda: workers.metrics()["worker_slots_used"] == workers.num_slots)


@pytest.mark.contract
def test_each_task_has_all_its_episodes_with_their_images(cluster, tiny_model_dir):
    async def main():
        async with workers_of(tiny_model_dir) as workers, runner_of(workers, group_size=3) as runner:
            return await groups_of(runner, tasks(4)), runner.metrics()

    groups, metrics = run(main())
    assert sorted(group.task.task_id for group in groups) == ["t0", "t1", "t2", "t3"]
    for group in groups:
        assert len({episode.episode_id for episode in group.episodes}) == 3
        for episode in group.episodes:
            assert episode.done, episode.error
            assert next(reference.source.digest for reference in episode.all_media()) == group.task.data["image"].digest
            assert len(list(episode.all_media())) == 2
            for reference in episode.all_media():
                reference.source.verify()
    assert metrics["turns"] == 4 * 3 * 2


@pytest.mark.parametrize("victim", ["actor", "node"])
def test_a_killed_actor_or_node_loses_and_doubles_no_episode(cluster, tiny_model_dir, tmp_path, victim):
    gate = tmp_path / "gate"

    async def main():
        async with workers_of(tiny_model_dir) as workers, runner_of(workers, group_size=4) as runner:
            groups = asyncio.ensure_future(groups_of(runner, tasks(5, gate=str(gate))))
            await wait_for_both(workers)
            node, pid = workers.places["ray-0"]
            if victim == "actor":
                os.kill(pid, signal.SIGKILL)
            else:
                cluster.kill_node(node)
            await wait_until(lambda: workers.metrics()["workers_lost"] == 1)
            gate.touch()
            delivered = await groups
            await wait_until(lambda: len(workers.places) == 2)  # Ray has started the actor again
            assert (node, pid) not in workers.places.values()
            return delivered, workers.metrics()

    groups, metrics = run(main())
    ids = Counter(episode.episode_id for group in groups for episode in group.episodes)
    assert ids == Counter(f"t{task}/{index}.0" for task in range(5) for index in range(4))
    assert all(episode.done for group in groups for episode in group.episodes)
    assert metrics["worker_jobs_moved"] == 4 + 1  # one of them had to wait in the worker


@pytest.mark.contract
def test_an_episode_that_kills_its_workers_is_given_up(cluster, tiny_model_dir):
    async def main():
        options = {"num_workers": 1, "episodes_per_worker": 1, "max_losses": 2}
        async with workers_of(tiny_model_dir, Deadly, **options) as workers, runner_of(workers) as runner:
            return await groups_of(runner, tasks(1))

    [group] = run(main())
    assert "lost 2 workers" in group.episodes[0].error


def broken() -> None:
    raise FileNotFoundError("no model here")


def test_workers_whose_engine_cannot_be_made_are_an_error_with_the_reason(cluster, make_renderer):
    async def main():
        async with RayWorkers(Looking, broken, make_renderer, num_workers=1):
            pass

    with pytest.raises(RolloutsError, match="FileNotFoundError: no model here"):
        run(main())


def test_a_worker_that_cannot_be_started_leaves_the_run_to_the_others(cluster, tiny_model_dir, tmp_path, caplog):
    make_engine = partial(
        make_engine_except_in_one_process, str(tiny_model_dir), str(tmp_path / "first"), str(tmp_path / "gate")
    )
    make_renderer_of_model = partial(make_renderer, str(tiny_model_dir))

    async def main():
        workers = RayWorkers(Looking, make_engine, make_renderer_of_model, num_workers=2, episodes_per_worker=2)
        starting = asyncio.ensure_future(workers.start())
        await wait_until(lambda: "no model on this node; " in caplog.text)  # it was given up, before any other started
        (tmp_path / "gate").touch()
        await starting
        async with runner_of(workers) as runner:
            groups = await groups_of(runner, tasks(3))
        await workers.close()
        return groups

    groups = run(main())
    assert [episode.error for group in groups for episode in group.episodes] == [""] * 3
