"""Many episodes at once: a result for every spec, whatever happens to the others."""

import asyncio

import numpy as np
import pytest
from misbehaviour import Talkative

from renderers import RendererPool
from rollouts import SamplingParams
from rollouts.episodes import calls as renderer_calls
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


def test_episodes_that_fail_together_all_keep_their_turns(renderer):
    class Together(Failing):
        seeds = frozenset(range(10))

    trajectories = play(renderer, Together, count=10)
    assert [t.num_turns for t in trajectories] == [2] * 10
    assert [f"seed {seed}" in t.error for seed, t in enumerate(trajectories)] == [True] * 10


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


def test_raising_names_every_failure_of_one_moment(renderer):
    waiting = []

    class Together(Failing):
        async def step(self, assistant):
            result = Talkative.step(self, assistant)
            if self.turns == 2 and self.seed in (1, 2):
                waiting.append(self)
                while len(waiting) < 2:  # noqa: ASYNC110
                    await asyncio.sleep(0)
                raise KeyError(f"seed {self.seed}")
            return result

    with pytest.raises(EpisodesError, match="1 more failed") as caught:
        play(renderer, Together, count=4, on_error="raise")
    assert sorted(e.trajectory.seed for e in caught.value.errors) == [1, 2]
    assert [t.num_turns for t in caught.value.trajectories][1:3] == [2, 2]


def test_nothing_is_raised_where_nothing_fails(renderer):
    assert [t.done for t in play(renderer, Talkative, count=5, on_error="raise")] == [True] * 5


def test_an_environment_that_cannot_be_made_is_a_failed_episode(renderer):
    made = []

    def make():
        made.append(None)
        if len(made) == 2:
            raise OSError("no more mazes")
        return Talkative()

    trajectories = play(renderer, make, count=4, concurrency=1)
    assert [t.num_turns for t in trajectories] == [3, 0, 3, 3]
    assert "make_environment raised OSError: no more mazes" in trajectories[1].error


@pytest.mark.parametrize(
    "bad",
    [
        {"concurrency": 0},
        {"concurrency": -1},
        {"concurrency": 1.5},
        {"concurrency": "8"},
        {"concurrency": None},
        {"concurrency": True},
        {"on_error": "ignore"},
        {"on_error": None},
        {"on_end": "print"},
        {"max_turns": 0},
        {"sampling": SamplingParams(n=2)},
        {"sampling": None},
        {"engine": "http://x"},
        {"renderer": "directory"},
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


def test_two_specs_with_one_id_are_an_error(renderer):
    with pytest.raises(ArgumentError, match=r"^episode_id is 'e1'; 2 specs have it: give each its own"):
        asyncio.run(run_episodes(Talkative, [*specs(3), EpisodeSpec(5, episode_id="e1")], **options(renderer)))


def test_an_async_on_end_is_refused_for_nobody_would_await_it(renderer):
    async def on_end(trajectory):
        raise AssertionError

    with pytest.raises(ArgumentError, match="not async"):
        play(renderer, count=1, on_end=on_end)


@pytest.mark.parametrize("bad", [None, 5, [5], ["e1"], [EpisodeSpec], {"e1": EpisodeSpec(1)}])
def test_specs_that_are_none_are_an_error(renderer, bad):
    with pytest.raises(ArgumentError, match="specs"):
        asyncio.run(run_episodes(Talkative, bad, **options(renderer)))


@pytest.mark.parametrize(
    "bad",
    [
        {"seed": "1"},
        {"seed": 1.0},
        {"seed": None},
        {"seed": True},
        {"sampling_seed": "1"},
        {"sampling_seed": 0.5},
        {"group_id": None},
        {"group_id": 5},
        {"group_id": "\ud800"},
        {"episode_id": 5},
        {"episode_id": "\ud800"},
    ],
)
def test_a_spec_of_other_types_is_refused_where_it_is_written(bad):
    with pytest.raises(ArgumentError, match=f"^{next(iter(bad))} is "):
        EpisodeSpec(**{"seed": 1, **bad})


def test_seeds_of_numpy_become_ints():
    spec = EpisodeSpec(np.int64(3), np.uint32(4))
    assert (spec.seed, type(spec.seed), type(spec.sampling_seed)) == (3, int, int)


def test_no_specs_are_no_trajectories(renderer):
    assert play(renderer, count=0) == []


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


# The renderer's threads.


def test_one_pool_is_made_for_a_run_and_closed(renderer, monkeypatch):
    made = []

    class Counting(RendererPool):
        def __init__(self, *args, **kwargs):
            super().__init__(*args, **kwargs)
            self.closed = False
            made.append(self)

        def close(self, **kwargs):
            self.closed = True
            super().close(**kwargs)

    monkeypatch.setattr(renderer_calls, "RendererPool", Counting)
    play(renderer, count=20)
    assert [pool.closed for pool in made] == [True]
    with pytest.raises(OSError, match="x"):
        play(renderer, count=2, on_end=raising(OSError("x")))
    assert [pool.closed for pool in made] == [True, True]


def raising(error):
    def fail(*_):
        raise error

    return fail


def test_a_pool_that_was_given_is_used_and_stays_open(renderer):
    with RendererPool(renderer) as pool:
        play(pool, count=3)
        assert play(pool, count=3)[0].done
        assert pool.render([{"role": "user", "content": "x"}]).token_ids


def test_a_closed_pool_is_a_failure_that_says_so(renderer):
    pool = RendererPool(renderer)
    pool.close()
    trajectories = play(pool, count=2)
    assert ["this RendererPool is closed" in t.error for t in trajectories] == [True, True]
