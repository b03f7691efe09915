"""Environments of the real gymnasium: the model sees exactly what they render, and acts as they define."""

import asyncio
import re
import threading
import time

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from played import play

from renderers.errors import MissingExtraError
from renderers.installation import install_command
from renderers.media.decoding import array_to_raw
from renderers.media.item import MediaSource
from rollouts.environments import GymnasiumEnvironment
from rollouts.episodes.errors import EpisodeError
from rollouts.errors import ArgumentError, RolloutsError

DIRECTIONS = ["left", "down", "right", "up"]
#: The way to the gift on the lake of 4 by 4 fields without slipping, and how it is answered.
WAY = ["down", "1", "I go right.", "RIGHT", "down (1)", "2"]
WAY_ACTIONS = [1, 1, 2, 2, 1, 2]


def frozen_lake(**options):
    return gymnasium.make("FrozenLake-v1", render_mode="rgb_array", is_slippery=False, **options)


def cart_pole(**options):
    return gymnasium.make("CartPole-v1", render_mode="rgb_array", **options)


def frames_of(make, seed, actions):
    """What the environment itself renders, without any of our code."""
    env = make()
    env.reset(seed=seed)
    frames = [env.render()]
    for action in actions:
        *_, terminated, truncated, _ = env.step(action)
        if terminated or truncated:
            break
        frames.append(env.render())
    env.close()
    return frames


def digests(frames):
    return [MediaSource.of(array_to_raw(np.ascontiguousarray(frame))).digest for frame in frames]


def seen(trajectory):
    return [reference.source.digest for reference in trajectory.all_media()]


def texts(trajectory):
    """The texts of the messages that the model received."""
    contents = [message["content"] for message in trajectory.to_messages(trajectory.leaves()[-1])[::2]]
    return [
        content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        for content in contents
    ]


def test_an_episode_that_the_environment_truncates_is_truncated_and_says_so(renderer):
    environment = GymnasiumEnvironment(lambda: cart_pole(max_episode_steps=2))
    trajectory, _ = play(environment, ["0", "1"], renderer)
    assert (trajectory.done, trajectory.truncated, trajectory.error) == (False, True, "")
    assert trajectory.truncation_reason == "environment: the limit of steps of the environment"
    assert [(turn.info["terminated"], turn.info["truncated"]) for turn in trajectory.turns] == [
        (False, False),
        (False, True),
    ]


async def test_no_two_environments_draw_at_the_same_time():
    drawing, most = [], []

    class Drawn(Counted):
        def render(self):
            drawing.append(self)
            time.sleep(0.002)  # gives the other threads time to draw as well, if nothing prevents it
            most.append(len(drawing))
            drawing.remove(self)
            return super().render()

    environments = [GymnasiumEnvironment(Drawn) for _ in range(8)]
    await asyncio.gather(*(environment.reset(0) for environment in environments))
    await asyncio.gather(*(environment.close() for environment in environments))
    assert most == [1] * 8


class Counted(gymnasium.Env):
    """Counts steps; draws the count into one array that it uses again for every frame."""

    metadata = {"render_modes": ["rgb_array"]}  # noqa: RUF012  the form that gymnasium prescribes
    observation_space = spaces.Discrete(100)
    action_space = spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, render_mode="rgb_array", frame=(32, 32, 3), dtype=np.uint8, calls=None):
        self.render_mode, self.calls = render_mode, [] if calls is None else calls
        self.buffer = np.zeros(frame, dtype)

    def _called(self, name):
        self.calls.append((name, threading.current_thread().name))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self._called("reset")
        self.count = 0
        return 0, {}

    def step(self, action):
        self._called("step")
        self.count += 1
        info = {"action": action, "text": "a", "number": np.float32(0.5), "flag": np.True_, "object": object()}
        return self.count, 0.25, self.count == 3, False, info

    def render(self):
        self.buffer[:] = self.count
        return self.buffer

    def close(self):
        self._called("close")


def test_a_frame_that_is_drawn_into_the_same_array_does_not_change_earlier_ones(renderer):
    trajectory, _ = play(GymnasiumEnvironment(Counted), ["0, 0", "1 -1", "[0.5, 0.25]"], renderer)
    assert seen(trajectory) == digests([np.full((32, 32, 3), count, np.uint8) for count in range(3)])
    assert [turn.info["action"].tolist() for turn in trajectory.turns] == [[0, 0], [1, -1], [0.5, 0.25]]


def test_an_environment_is_used_on_one_thread_and_closed_once(renderer):
    calls = []
    play(GymnasiumEnvironment(lambda: Counted(calls=calls)), ["0, 0"] * 3, renderer)
    assert [name for name, _ in calls] == ["reset", "step", "step", "step", "close"]
    (thread,) = {thread for _, thread in calls}
    assert thread != threading.current_thread().name


async def test_an_environment_is_closed_after_a_long_step_though_close_was_cancelled():
    calls, stepping, may_return, closed = [], threading.Event(), threading.Event(), threading.Event()

    class Slow(Counted):
        def step(self, action):
            stepping.set()
            assert may_return.wait(30)
            return super().step(action)

        def close(self):
            super().close()
            closed.set()

    environment = GymnasiumEnvironment(lambda: Slow(calls=calls))
    await environment.reset(0)
    step = asyncio.create_task(environment.step({"role": "assistant", "content": "0, 0"}))
    await asyncio.to_thread(stepping.wait, 30)
    step.cancel()
    with pytest.raises(TimeoutError):  # as `run_episode` does, which waits for two seconds
        await asyncio.wait_for(environment.close(), 0.01)
    may_return.set()
    assert closed.wait(30)
    assert [name for name, _ in calls] == ["reset", "step", "close"]


def test_an_invalid_action_is_answered_and_nothing_has_changed(renderer):
    environment = GymnasiumEnvironment(frozen_lake, action_names=DIRECTIONS, invalid_action_reward=-0.5)
    trajectory, _ = play(environment, ["jump", "left or right", *WAY], renderer, seed=3)
    assert [turn.reward for turn in trajectory.turns] == [-0.5, -0.5, 0, 0, 0, 0, 0, 1]
    assert trajectory.turns[0].info == {"invalid_action": "there is no action in the answer"}
    assert texts(trajectory)[1] == (
        "This is not a valid action: there is no action in the answer. Answer with one of these actions, by name or "
        "number: left (0), down (1), right (2), up (3)."
    )
    assert seen(trajectory) == digests(frames_of(frozen_lake, 3, WAY_ACTIONS))


def test_an_invalid_action_ends_the_episode_where_that_is_wanted(renderer):
    environment = GymnasiumEnvironment(cart_pole, on_invalid_action="end", invalid_action_reward=-1)
    trajectory, _ = play(environment, ["7"], renderer)
    assert (trajectory.reward, trajectory.done, trajectory.num_turns) == (-1.0, True, 1)
    assert trajectory.turns[0].info == {"invalid_action": "7 is not the number of an action"}


def test_a_function_parses_actions_and_its_reason_is_answered(renderer):
    def parse(text):
        if not text.startswith("go "):
            raise ValueError("an answer begins with go")
        return DIRECTIONS.index(text[3:]) if text[3:] in DIRECTIONS else 17

    environment = GymnasiumEnvironment(frozen_lake, parse_action=parse)
    trajectory, _ = play(environment, ["down", "go home", "go down"], renderer, max_turns=3)
    assert [turn.info.get("invalid_action") for turn in trajectory.turns] == [
        "an answer begins with go",
        "17 is not an action of Discrete(4)",
        None,
    ]


class Pairs(Counted):
    action_space = spaces.MultiDiscrete([2, 3])


def test_other_spaces_need_a_function_that_parses_actions(renderer):
    with pytest.raises(
        EpisodeError, match=r"MultiDiscrete\(\[2 3\]\) is neither Discrete nor Box; pass .*parse_action"
    ):
        play(GymnasiumEnvironment(Pairs), ["0 0"], renderer)


def test_observations_are_text_without_any_frame(renderer):
    environment = GymnasiumEnvironment(
        lambda: gymnasium.make("FrozenLake-v1", is_slippery=False),
        action_names=DIRECTIONS,
        observation="text",
    )
    trajectory, _ = play(environment, WAY, renderer)
    assert trajectory.reward == 1.0
    assert not list(trajectory.all_media())
    assert texts(trajectory)[0].endswith("up (3).\n\n0")
    assert texts(trajectory)[1:] == ["4", "8", "9", "10", "14"]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gymnasium.make("CartPole-v1"), 'render_mode=None; make it with render_mode="rgb_array"'),
        (
            lambda: gymnasium.make_vec("CartPole-v1", num_envs=2, vectorization_mode="sync"),
            r"make returned SyncVectorEnv\(.*; return one",
        ),
        (lambda: "CartPole-v1", "make returned 'CartPole-v1'; return one gymnasium.Env"),
        (lambda: Counted(frame=(32, 32)), r"returned uint8 \(32, 32\); a frame is uint8"),
        (lambda: Counted(dtype=np.float32), r"returned float32 \(32, 32, 3\); a frame is uint8"),
    ],
    ids=["no render mode", "vectorised", "not an environment", "grey frames", "float frames"],
)
def test_an_environment_that_cannot_be_shown_is_refused_with_the_reason(renderer, make, message):
    with pytest.raises(EpisodeError, match=message) as caught:
        play(GymnasiumEnvironment(make), ["0"], renderer)
    assert isinstance(caught.value.__cause__.__cause__, RolloutsError)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"action_names": "left"}, "action_names is 'left'"),
        ({"observation": "pixels"}, "observation is 'pixels'; pass one of image, text, image and text"),
        ({"on_invalid_action": "stop"}, "on_invalid_action is 'stop'; pass one of ask again, end"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_wrong_argument_is_refused_with_its_name(arguments, message):
    with pytest.raises(ArgumentError, match=message):
        GymnasiumEnvironment(**{"make": cart_pole, **arguments})


def test_a_missing_gymnasium_names_the_extra(renderer, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "gymnasium", None)
    with pytest.raises(EpisodeError, match=re.escape(install_command("gym"))) as caught:
        play(GymnasiumEnvironment(cart_pole), ["0"], renderer)
    assert isinstance(caught.value.__cause__.__cause__, MissingExtraError)
