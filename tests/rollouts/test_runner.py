"""Many episodes at once: a result for every spec, whatever happens to the others."""

import asyncio

import pytest
from misbehaviour import Talkative

from rollouts import SamplingParams
from rollouts.episodes.episode import EpisodeSpec, run_episodes
from rollouts.episodes.errors import EnvironmentFailedError, EpisodeError, EpisodesError
from rollouts.errors import ArgumentError
from rollouts.testing import ScriptedEngine
from rollouts.trajectory.packed_episodes import pack_episodes
from transport import decode, encode


class Failing(Talkative):
    """Fails in its second step where the seed says so."""

    seeds = frozenset({37})

    def reset(self, seed):
        self.seed = seed
        return super().reset(seed)

    def step(self, assistant):
        result = super().step(assistant)
        if self.seed in self.seeds and self.turns == 2:
            raise KeyError(f"seed {self.seed}")
        return result


def specs(count):
    return [EpisodeSpec(seed, episode_id=f"e{seed}", group_id=f"g{seed // 4}") for seed in range(count)]


def options(renderer, **more):
    engine = ScriptedEngine(lambda request: "x", renderer=renderer)
    return {"engine": engine, "renderer": renderer, "sampling": SamplingParams(), "max_turns": 4, **more}


def play(renderer, make=Failing, count=100, **more):
    return asyncio.run(run_episodes(make, specs(count), **options(renderer, **more)))


def test_one_failing_episode_leaves_the_other_99_alone(renderer):
    trajectories = play(renderer)
    assert [t.episode_id for t in trajectories] == [f"e{seed}" for seed in range(100)]
    assert [t.seed for t in trajectories if t.error] == [37]
    assert [t.num_turns for t in trajectories] == [2 if seed == 37 else 3 for seed in range(100)]
    assert "KeyError: 'seed 37'" in trajectories[37].error
    assert all(t.done != bool(t.error) for t in trajectories)
    assert decode(encode(pack_episodes(trajectories, pixels="source"))).episodes[37].error == trajectories[37].error


def test_raising_stops_the_others_and_holds_every_trajectory(renderer):
    with pytest.raises(EpisodesError, match="seed 37") as caught:
        play(renderer, on_error="raise", concurrency=10)
    error = caught.value
    assert [e.trajectory.seed for e in error.errors] == [37]
    assert isinstance(error.__cause__, EpisodeError)
    assert isinstance(error.__cause__.__cause__, EnvironmentFailedError)
    assert [t.seed for t in error.trajectories] == list(range(100))
    assert all(t.finished for t in error.trajectories)
    assert error.trajectories[37].num_turns == 2
    # All before it had begun, and at most nine others ran when it failed.
    assert sum(not t.done for t in error.trajectories[:37]) <= 9
    unplayed = error.trajectories[60:]
    assert all(t.error.startswith("did not begin") and not t.turns for t in unplayed)


@pytest.mark.parametrize(
    "bad",
    [
        {"concurrency": 0},
        {"on_error": "ignore"},
        {"on_end": "print"},
        {"on_end": asyncio.sleep},
        {"make_environment": Talkative()},
    ],
)
def test_an_argument_that_cannot_be_is_an_error_before_anything_is_played(renderer, bad):
    arguments = options(renderer)
    name = next(iter(bad))
    with pytest.raises(ArgumentError, match=f"^{name}"):
        asyncio.run(
            asyncio.wait_for(run_episodes(specs=specs(3), **{"make_environment": Talkative, **arguments, **bad}), 60)
        )
    assert arguments["engine"].requests == []


def test_a_function_of_a_task_is_refused(renderer):
    with pytest.raises(ArgumentError, match=r"^make_environment is .*\(\), but takes \(task\): .* `Runner` is"):
        play(renderer, lambda task: Talkative())


def test_two_specs_with_one_id_are_an_error(renderer):
    with pytest.raises(ArgumentError, match=r"^episode_id is 'e1'; 2 specs have it: give each its own"):
        asyncio.run(run_episodes(Talkative, [*specs(3), EpisodeSpec(5, episode_id="e1")], **options(renderer)))


def test_on_end_has_each_trajectory_as_soon_as_it_is_finished(renderer):
    ended = []
    trajectories = play(renderer, count=40, concurrency=3, on_end=ended.append)
    assert sorted(map(id, ended)) == sorted(map(id, trajectories))
    assert all(t.finished for t in ended)
    # Three at a time, which may overtake each other: only those before an episode and two more can have begun.
    assert all(trajectory.seed <= index + 2 for index, trajectory in enumerate(ended))


def test_what_on_end_raises_stops_the_run(renderer):
    def full(trajectory):
        raise OSError("disk full")

    engine = ScriptedEngine(lambda request: "x", renderer=renderer)
    with pytest.raises(OSError, match="disk full"):
        play(renderer, Talkative, count=100, concurrency=2, engine=engine, on_end=full)
    assert len(engine.requests) < 20
