"""`score_episode` of a runner: what it returns is in groups and journal, and what it raises fails the episode."""

from dataclasses import replace

import pytest
from runner_world import Counting, make_runner, run_groups, tasks

from rollouts.errors import ArgumentError, ServerError
from rollouts.runner import Journal, RetryPolicy

NO_DELAY = RetryPolicy(max_attempts=3, first_delay=0.0)


async def scored(episode):
    return replace(episode, metrics={**episode.metrics, "scored": 1.0})


class Failing:
    """A teacher that fails for its first calls, and then scores. `calls` are the ids of the episodes."""

    def __init__(self, error, times):
        self.error, self.times, self.calls = error, times, []

    async def __call__(self, episode):
        self.calls.append(episode.episode_id)
        if len(self.calls) <= self.times:
            raise self.error
        return await scored(episode)


def run_scored(renderer, teacher, **options):
    """The group of one task, and how often its environment was made."""
    made = []

    def make(task):
        made.append(task)
        return Counting(task)

    groups, _ = run_groups(renderer, tasks(1), make, score_episode=teacher, retry=NO_DELAY, **options)
    return groups["t0"], len(made)


def test_a_score_that_fails_as_an_engine_does_is_tried_again_and_its_episode_is_not_run_again(renderer, caplog):
    teacher = Failing(ServerError("r", "teacher", status=500, body="try again"), 2)
    group, environments = run_scored(renderer, teacher)
    assert teacher.calls == ["t0/0.0"] * 3
    assert (environments, group.attempts) == (1, (1,))
    assert group.episodes[0].metrics["scored"] == 1.0
    warnings = [record.message for record in caplog.records if "could not be scored" in record.message]
    assert len(warnings) == 1
    assert "episode t0/0.0 could not be scored, which is tried again" in warnings[0]


@pytest.mark.parametrize(
    ("error", "calls", "text"),
    [
        (ServerError("r", "it is dead", status=500, body=""), 3, "score_episode failed 3 times: ServerError: "),
        (ArgumentError("engine", "teacher", "it has another vocabulary"), 1, "score_episode failed: ArgumentError: "),
    ],
)
def test_an_episode_that_cannot_be_scored_is_a_failed_one_with_its_turns(renderer, error, calls, text):
    teacher = Failing(error, 100)
    group, environments = run_scored(renderer, teacher)
    (episode,) = group.episodes
    assert (len(teacher.calls), environments, group.attempts) == (calls, 1, (1,))
    assert episode.error.startswith(f"ScoringError: {text}")
    assert str(error) in episode.error
    assert not episode.done
    assert episode.num_turns == 2


def test_a_failed_episode_is_not_scored(renderer):
    class Broken(Counting):
        def step(self, assistant):
            raise ValueError("broken")

    seen = []

    async def note(episode):
        seen.append(episode)
        return episode

    groups, _ = run_groups(renderer, tasks(1), Broken, score_episode=note)
    assert "broken" in groups["t0"].episodes[0].error
    assert not seen


@pytest.mark.parametrize("wrong", [None, "episode"])
def test_another_value_than_the_episode_fails_it(renderer, wrong):
    async def other(episode):
        return wrong

    groups, _ = run_groups(renderer, tasks(1), score_episode=other)
    assert "return the episode with its scores" in groups["t0"].episodes[0].error


async def test_scores_are_in_the_journal_and_not_computed_again(renderer, tmp_path):
    calls = []

    async def counted(episode):
        calls.append(episode.episode_id)
        return await scored(episode)

    async def runs():
        for _ in range(2):
            journal = Journal.open(tmp_path / "journal")
            async with make_runner(renderer, journal=journal, score_episode=counted) as runner:
                # A group that is not asked for a second time does not count as delivered.
                group = await anext(runner.stream(tasks(1)))
                yield group

    first, second = [group async for group in runs()]
    assert [len(calls), *(group.episodes[0].metrics["scored"] for group in (first, second))] == [1, 1.0, 1.0]
