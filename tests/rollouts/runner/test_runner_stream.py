"""Groups of episodes for tasks: all of them, whatever happens to one, within the bounds that were given."""

import asyncio
import itertools

import pytest
from misbehaviour import PanicError
from runner_world import make_runner, run_groups, tasks

from renderers import RendererPool
from rollouts.rewards import GroupReward
from rollouts.runner import GroupFailedError, Task, TaskSourceError
from rollouts.testing import ScriptedEngine


@pytest.mark.slow
def test_a_function_that_skips_one_group_after_the_other_is_warned_of_once(renderer, caplog):
    def skip(group):
        return "too easy" if int(group.task.task_id[1:]) < 150 else False

    groups, _ = run_groups(renderer, tasks(152), skip_group=skip, concurrency=4)
    assert sorted(groups) == ["t150", "t151"]
    (message,) = [record.getMessage() for record in caplog.records]
    assert "skip_group has skipped the last 100 groups, the latest for 'too easy'" in message


def test_the_episodes_of_a_task_share_the_seed_of_the_environment_and_no_seed_of_a_sample(renderer):
    engine = ScriptedEngine(lambda request: "yes", renderer=renderer)
    groups, _ = run_groups(renderer, [Task("own", seed=7), Task("derived")], engine=engine, group_size=4)
    assert {episode.seed for episode in groups["own"].episodes} == {7}
    assert len({episode.seed for episode in groups["derived"].episodes} - {7}) == 1
    assert {turn.info["seed"] for episode in groups["own"].episodes for turn in episode.turns} == {7}
    sampling_seeds = [request.sampling.seed for request in engine.requests]
    assert len(set(sampling_seeds)) == len(sampling_seeds) == 16


async def test_an_infinite_source_is_taken_from_only_as_far_as_there_is_capacity(renderer):
    taken = []

    def endless():
        for index in itertools.count():
            taken.append(index)
            yield Task(str(index))

    # Of one episode each: another group begins where only a part of a group is left, so that larger ones vary.
    async with make_runner(renderer, group_size=1, concurrency=2) as runner:
        stream = runner.stream(endless())
        for wanted in range(1, 20):
            await anext(stream)
            for _ in range(200):  # the groups that may run ahead of a slow consumer have time to
                await asyncio.sleep(0)
            # Four that run or are finished, and one that begins.
            assert len(taken) <= wanted + 5
        await stream.aclose()


async def test_no_more_groups_wait_for_their_rewards_than_may_run(renderer):
    taken, scoring = [], []
    more_than_run, may_score = asyncio.Event(), asyncio.Event()

    def endless():
        for index in itertools.count():
            taken.append(index)
            yield Task(str(index))

    async def reward(episodes):
        scoring.append(episodes[0].group_id)
        if len(scoring) == 3:
            more_than_run.set()
        await may_score.wait()
        return [0.0] * len(episodes)

    options = {"group_size": 1, "concurrency": 2, "group_rewards": [GroupReward("slow", 1.0, reward)]}
    async with make_runner(renderer, **options) as runner:
        stream = runner.stream(endless())
        first = asyncio.ensure_future(anext(stream))
        await asyncio.wait_for(more_than_run.wait(), 30)  # episodes of others run while rewards are computed
        for _ in range(500):  # further groups would have time to begin
            await asyncio.sleep(0)
        assert len(scoring) <= 4
        assert len(taken) <= 5  # and one that waits for its start
        may_score.set()
        await first
        await stream.aclose()


async def test_skipped_groups_are_counted_under_their_reason_and_replaced_by_others(renderer):
    def skip(group):
        number = group.task.data
        return "solved" if number % 3 == 0 else number % 3 == 1

    source = (Task(str(index), index) for index in itertools.count())
    async with make_runner(renderer, skip_group=skip, tasks=source) as runner:
        groups = await runner.collect(3)
        assert [group.task.data for group in groups] == [2, 5, 8]
        metrics = runner.metrics()
    assert metrics["groups_skipped/solved"] == 3
    assert metrics["groups_skipped/skipped"] == 3
    assert metrics["groups_delivered"] == 3


@pytest.mark.parametrize(
    ("skip_group", "text"),
    [
        (lambda group: 1 / 0, "ZeroDivisionError"),
        (lambda group: group.rewards > 0, r"returned array\(\[ True,  True\]\); return True, False, None or a reason"),
    ],
    ids=["raises", "array"],
)
def test_a_predicate_of_skipping_that_gives_no_verdict_is_an_error_and_loses_no_group(renderer, skip_group, text):
    with pytest.raises(GroupFailedError, match=f"task t0: skip_group failed .*{text}") as caught:
        run_groups(renderer, tasks(1), group_size=2, skip_group=skip_group)
    assert [episode.done for episode in caught.value.episodes] == [True, True]


async def asynchronously(source):
    for task in source:
        await asyncio.sleep(0)
        yield task


def failing(source, error):
    yield from source
    raise error


@pytest.mark.parametrize("wrap", [iter, asynchronously], ids=["iterable", "async iterable"])
@pytest.mark.parametrize(
    ("source", "position", "text"),
    [
        (lambda: failing(tasks(3), OSError("the disk is gone")), 3, "the source raised OSError: the disk is gone"),
        (lambda: failing(tasks(1), asyncio.CancelledError()), 1, "the source raised CancelledError"),
        (lambda: failing(tasks(1), PanicError("stop")), 1, "the source raised PanicError: stop"),
        (lambda: [*tasks(2), Task("t0")], 2, "the id 't0' was used before"),
        (lambda: [*tasks(2), {"task_id": "t2"}], 2, "it is a dict"),
    ],
    ids=["raises", "cancellation", "base exception", "repeats an id", "yields another type"],
)
async def test_a_failing_source_is_an_error_after_the_groups_before_it(renderer, wrap, source, position, text):
    async with make_runner(renderer, group_size=2) as runner:
        stream = runner.stream(wrap(source()))
        delivered = [(await anext(stream)).task.task_id for _ in range(position)]
        with pytest.raises(TaskSourceError, match=text) as caught:
            await anext(stream)
        assert sorted(delivered) == [f"t{index}" for index in range(position)]
        assert caught.value.position == position


@pytest.mark.parametrize("kind", ["iterable", "async iterable", "async iterable that waits"])
async def test_a_generator_of_tasks_is_closed_when_the_runner_ends(renderer, kind):
    closed = []

    def generator():
        try:
            yield from (Task(str(number)) for number in itertools.count())
        finally:
            closed.append(kind)

    async def async_generator():
        try:
            yield Task("0")
            while True:
                if kind.endswith("waits"):
                    await asyncio.Event().wait()
                yield Task(str(next(numbers)))
        finally:
            closed.append(kind)

    numbers = itertools.count(1)

    source = generator() if kind == "iterable" else async_generator()
    async with make_runner(renderer, concurrency=1) as runner:
        await anext(runner.stream(source))
    assert closed == [kind]


def test_group_rewards_are_added_to_those_of_the_episodes(renderer):
    place = GroupReward("place", 10.0, lambda episodes: [1.0, 0.5, 0.0])
    group = run_groups(renderer, tasks(1), group_size=3, group_rewards=[place])[0]["t0"]
    assert group.environment_rewards.tolist() == [2.0, 2.0, 2.0]
    assert group.rewards.tolist() == [12.0, 7.0, 2.0]
    assert group.reward_parts["place"].tolist() == [1.0, 0.5, 0.0]


@pytest.mark.parametrize("threads", [1, 3])
async def test_a_pool_of_renderers_that_was_given_is_used_and_stays_open(renderer, threads):
    async with RendererPool(renderer, threads=threads) as pool:
        for _ in range(2):
            async with make_runner(pool, engine=ScriptedEngine(lambda _: "yes", renderer=renderer)) as runner:
                assert len([group async for group in runner.stream(tasks(3))]) == 3
        assert await pool.render_async([{"role": "user", "content": "?"}])
