"""Making environments of Gymnasium, drawing their frames and closing them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np

from renderers.fork_reset import ProcessLock
from rollouts.environments.gymnasium.errors import GymnasiumError
from rollouts.error_texts import short_repr
from rollouts.errors import MissingExtraError

# pygame, with which many environments draw, keeps the points of a polygon in one buffer of the process: two threads
# that draw get wrong frames and no error. And `close` calls `pygame.quit`, which ends what other environments use.
_DRAWING: Final = ProcessLock()


def make_env(make: Callable[[], Any], *, needs_frames: bool) -> Any:
    """The environment that `make` returns. Raises `GymnasiumError` for one that a model cannot play."""
    try:
        import gymnasium
    except ImportError as error:
        raise MissingExtraError("GymnasiumEnvironment", "gym", "gymnasium") from error
    env = make()
    if isinstance(env, gymnasium.vector.VectorEnv):
        env.close()
        raise GymnasiumError(
            type(env).__name__, "is a vectorised environment; an episode plays a single one: use gymnasium.make"
        )
    if not isinstance(env, gymnasium.Env):
        raise GymnasiumError(f"make returned {short_repr(env)}, which", "is not a gymnasium.Env")
    if needs_frames and env.render_mode != "rgb_array":
        close_env(env)
        cure = 'make it with render_mode="rgb_array", or pass observation="text"'
        raise GymnasiumError(str(env), f"has render_mode={env.render_mode!r}; {cure}")
    return env


def render_frame(env: Any) -> np.ndarray:
    """The current frame, uint8 (height, width, 3). Raises `GymnasiumError` for anything else."""
    with _DRAWING:
        frame = env.render()
        if isinstance(frame, np.ndarray) and frame.dtype == np.uint8 and frame.ndim == 3 and frame.shape[2] == 3:
            return np.array(frame)  # a copy: an environment may draw the next frame into the same array
    returned = f"{frame.dtype} {frame.shape}" if isinstance(frame, np.ndarray) else type(frame).__name__
    raise GymnasiumError(f"{env}.render", f"returned {returned}; a frame is uint8 (height, width, 3)")


def close_env(env: Any) -> None:
    """Close an environment."""
    with _DRAWING:
        env.close()
