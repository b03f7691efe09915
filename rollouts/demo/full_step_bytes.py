"""Size of the same episodes in the common form in which each step holds its whole history."""

from __future__ import annotations

from collections.abc import Sequence

import msgpack
import numpy as np

from renderers.vision.processor import MediaProcessor
from rollouts.trajectory.tree import Trajectory


def full_step_bytes(trajectories: Sequence[Trajectory], processor: MediaProcessor) -> int:
    """Return the bytes of all steps: whole prompt and completion as msgpack lists, log-probabilities as floats, and
    float32 pixels of all images up to the step."""
    total = 0
    for trajectory in trajectories:
        for turn in trajectory.turns:
            completion = trajectory.nodes[turn.node]
            ids = trajectory.token_ids(turn.node)
            total += len(msgpack.packb([ids.tolist(), completion.logprobs.tolist()]))
            for reference in trajectory.media(turn.node):
                item = processor.process(reference.source)
                total += item["pixel_values"].size * np.dtype(np.float32).itemsize + item["image_grid_thw"].nbytes
    return total
