"""Environments of Gymnasium, whose rendered frames the model sees. Needs the extra `gym` when an episode begins."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, NamedTuple

import numpy as np

from renderers import Message
from renderers.errors import MissingExtraError
from renderers.process.fork_reset import ProcessLock
from renderers.process.threads import DaemonThreads
from rollouts.calls import result_of
from rollouts.environments.gymnasium.actions import describe_actions, in_dtype_of, kind_of, parse_action
from rollouts.episodes.environment import StepResult
from rollouts.errors import ArgumentError, RolloutsError, short_repr
from rollouts.values import check_choice

# pygame, with which many environments draw, keeps the points of a polygon in one buffer of the process: two
# threads that draw get wrong frames and no error. And `close` calls `pygame.quit`, which ends what other
# environments use.
_DRAWING: Final = ProcessLock()


def make_env(make: Callable[[], Any], *, needs_frames: bool) -> Any:
    """The environment that `make` returns. Raises `RolloutsError` for one that a model cannot play."""
    try:
        import gymnasium
    except ImportError as error:
        raise MissingExtraError("GymnasiumEnvironment", "gym", "gymnasium") from error
    env = make()
    if not isinstance(env, gymnasium.Env):
        raise RolloutsError(f"make returned {short_repr(env)}; return one gymnasium.Env, as gymnasium.make does")
    if needs_frames and env.render_mode != "rgb_array":
        with _DRAWING:
            env.close()
        cure = 'make it with render_mode="rgb_array", or pass observation="text"'
        raise RolloutsError(f"{env!s} has render_mode={env.render_mode!r}; {cure}")
    return env


def render_frame(env: Any) -> np.ndarray:
    """The current frame, uint8 (height, width, 3). Raises `RolloutsError` for anything else."""
    with _DRAWING:
        frame = env.render()
        if isinstance(frame, np.ndarray) and frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3:
            return np.array(frame)  # a copy: an environment may draw the next frame into the same array
    returned = f"{frame.dtype} {frame.shape}" if isinstance(frame, np.ndarray) else type(frame).__name__
    raise RolloutsError(f"{env}.render returned {returned}; a frame is uint8 (height, width, 3)")


#: What the model gets of each state.
Observation = Literal["image", "text", "image and text"]
#: What follows an answer without a valid action.
OnInvalidAction = Literal["ask again", "end"]


class _State(NamedTuple):
    """What a reset or a step returned, and what the model sees of it; nothing of the last state of an episode."""

    frame: np.ndarray | None
    text: str
    reward: Any
    terminated: bool
    truncated: bool
    info: dict[str, Any]


class GymnasiumEnvironment:
    """Plays an environment of Gymnasium; the model sees its frames as images.

        GymnasiumEnvironment(
            lambda: gymnasium.make("FrozenLake-v1", render_mode="rgb_array"),
            instructions="Walk over the ice to the gift.",
            action_names=["left", "down", "right", "up"],
        )

    `make` returns a new environment; it is called once for each episode. The first message has the
    `instructions`, the description of the actions (of `Discrete` and `Box` spaces) and the first frame; every
    later message has the next frame. The reward of a turn is that of the step; the episode is done when the
    environment has terminated, and `truncated` when the environment is. The info of a turn has `action`,
    `terminated`, `truncated`, and the numbers and texts of the environment's own info; `invalid_action` has
    the reason where an answer had no action.

    - `observation`: "image" (frames), "text" (`str` of the observation; no frame is rendered), or "image and
      text". A wrapper of Gymnasium (`TransformObservation`) makes other texts.
    - `parse_action(text)` returns the action in a completion and raises `ValueError` with a reason for the
      model; it is needed for spaces other than `Discrete` and `Box`; an array need not have the dtype of the
      space. By default an answer has one number or one of `action_names`, or the numbers of a `Box`.
    - `on_invalid_action`: "ask again" (the model gets the reason and another turn, in which nothing has
      changed) or "end" (the episode is done). The reward of such a turn is `invalid_action_reward`.

    The environment's methods run on a thread of their own, always the same one: an OpenGL context belongs to
    one thread. Frames are drawn one at a time in a process, because pygame draws wrong ones on several
    threads. The environment is closed at the end of the episode. The same seed, a non-negative integer, gives
    the same episode.

    Raises `ArgumentError`. An episode fails with `RolloutsError` for a vectorised environment and for a
    render mode without frames, and with `MissingExtraError` without gymnasium.
    """

    def __init__(
        self,
        make: Callable[[], Any],
        *,
        instructions: str = "",
        action_names: Sequence[str] = (),
        parse_action: Callable[[str], Any] | None = None,
        observation: Observation = "image",
        on_invalid_action: OnInvalidAction = "ask again",
        invalid_action_reward: float = 0.0,
    ) -> None:
        if isinstance(action_names, str) or not all(isinstance(name, str) and name for name in action_names):
            raise ArgumentError("action_names", action_names, "pass a list of names")
        check_choice("observation", observation, Observation)
        check_choice("on_invalid_action", on_invalid_action, OnInvalidAction)
        self._make = make
        self._instructions = instructions
        self._action_names = tuple(action_names)
        self._parse_action = parse_action
        self._observation = observation
        self._on_invalid_action = on_invalid_action
        self._invalid_action_reward = invalid_action_reward
        self._env: Any = None
        self._thread: DaemonThreads | None = None

    async def reset(self, seed: int) -> list[Message]:
        """Make the environment, reset it with `seed`, and return the first message."""
        await self.close()
        self._thread = DaemonThreads(1, "gymnasium")
        state = await self._run(self._first_state, seed)
        return [self._message(state, " ".join(filter(None, (self._instructions, self._described_actions()))))]

    async def step(self, assistant: Message) -> StepResult:
        """Take the action of a completion. Raises `RolloutsError` without a `reset` before."""
        if self._env is None:
            raise RolloutsError("the environment is closed; call reset before step")
        try:
            action = self._action(assistant.get("content"))
        except ValueError as error:
            return self._invalid(str(error))
        state = await self._run(lambda taken: self._state(*self._env.step(taken)), action)
        info = {
            **state.info,
            "action": _storable_action(action),
            "terminated": state.terminated,
            "truncated": state.truncated,
        }
        done = state.terminated or state.truncated
        reason = "the limit of steps of the environment" if state.truncated and not state.terminated else ""
        return StepResult([] if done else [self._message(state, "")], state.reward, done, info, reason)

    async def close(self) -> None:
        """Close the environment; a step that still runs ends first, and if this call is cancelled, it is closed then.

        A closed environment can be reset.
        """
        thread, self._thread = self._thread, None
        if thread is None:
            return
        try:
            closing = thread.submit(self._close)
            # Its result is awaited through another call: a wait that is cancelled cancels what it waits for,
            # so that an environment with a long step would never be closed.
            await asyncio.wrap_future(thread.submit(closing.result))
        finally:
            thread.shutdown(wait=False)

    # On the environment's thread.

    def _first_state(self, seed: int) -> _State:
        self._env = make_env(self._make, needs_frames=self._observation != "text")
        observation, info = self._env.reset(seed=seed)
        return self._state(observation, 0.0, False, False, info)

    def _state(self, observation: Any, reward: Any, terminated: bool, truncated: bool, info: Any) -> _State:
        is_shown = not (terminated or truncated)
        text = str(observation) if is_shown and self._observation != "image" else ""
        frame = render_frame(self._env) if is_shown and self._observation != "text" else None
        return _State(frame, text, reward, bool(terminated), bool(truncated), _storable_info(info))

    def _close(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            with _DRAWING:
                env.close()

    # On the event loop.

    async def _run(self, method: Callable[[Any], _State], argument: Any) -> _State:
        assert self._thread is not None
        # Not `run`, which would let `close` begin on another thread while a cancelled step still runs.
        return await asyncio.wrap_future(self._thread.submit(result_of, method, argument))

    def _described_actions(self) -> str:
        """The actions for the model; "" where `parse_action` reads those of a space that has no description."""
        space, names = self._env.action_space, self._action_names
        return "" if self._parse_action and not names and kind_of(space) is None else describe_actions(space, names)

    def _message(self, state: _State, text: str) -> Message:
        text = "\n\n".join(filter(None, (text, state.text)))
        if state.frame is None:
            return {"role": "user", "content": text}
        image: Any = {"type": "image", "image": state.frame}
        return {"role": "user", "content": [{"type": "text", "text": text}, image] if text else [image]}

    def _action(self, content: Any) -> Any:
        """The action of a completion. Raises `ValueError` with the reason why there is none."""
        space = self._env.action_space
        text = content if isinstance(content, str) else ""
        if self._parse_action is None:
            return parse_action(text, space, self._action_names)
        action = in_dtype_of(space, self._parse_action(text))
        if not space.contains(action):
            raise ValueError(f"{short_repr(action)} is not an action of {space}")
        return action

    def _invalid(self, reason: str) -> StepResult:
        done = self._on_invalid_action == "end"
        text = " ".join(filter(None, (f"This is not a valid action: {reason}.", self._described_actions())))
        messages: list[Message] = [] if done else [{"role": "user", "content": text}]
        return StepResult(messages, self._invalid_action_reward, done, {"invalid_action": reason})


def _storable_info(info: Any) -> dict[str, Any]:
    """The numbers and texts of the environment's info."""
    items = info.items() if isinstance(info, dict) else ()
    return {
        str(key): value.item() if isinstance(value, np.generic) else value
        for key, value in items
        if isinstance(value, str | bool | int | float | np.bool_ | np.integer | np.floating)
    }


def _storable_action(action: Any) -> Any:
    if isinstance(action, np.generic):
        return action.item()
    return action if isinstance(action, str | int | float | list | tuple | dict | np.ndarray) else short_repr(action)
