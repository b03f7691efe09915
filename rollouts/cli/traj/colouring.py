"""What the tokens of an episode are coloured by, if the episode does not have what `--by` asks for."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from rollouts.cli.traj.token_colours import By
from rollouts.trajectory.tree import Trajectory
from rollouts.view.token_columns import mismatch
from rollouts.view.trainer_logprobs import TrainerLogprobs


class Colouring(NamedTuple):
    """`by` is what the tokens are coloured by; `note` says why it is not what was asked for, empty if it is."""

    by: By
    note: str


def trainer_logprobs_beside(file: Path, trajectory: Trajectory, problems: list[str]) -> Mapping[int, np.ndarray]:
    """The trainer's log-probabilities by node, from the `mismatch.mmr` of the directory of `file`; none without it."""
    from rollouts.report.run_files import RunFiles
    from rollouts.report.viewer_page import compared_tokens

    directory = RunFiles(file.parent, problems)
    for _ in directory.mismatches():  # names in `problems` what cannot be read
        pass
    compared = compared_tokens(directory, {trajectory.episode_id})
    return {} if compared is None else TrainerLogprobs(compared).of(trajectory)


def colouring_of(
    by: By, trajectory: Trajectory, trainer_logprobs: Mapping[int, np.ndarray], *, has_model: bool
) -> Colouring:
    """`by` where a token of the episode has what it shows; else a colouring that the episode has, and a line."""
    sampled = any(node.sampled.any() for node in trajectory.nodes)
    if by is By.MISMATCH and not any(
        len(mismatch(node, trainer_logprobs.get(index))) for index, node in enumerate(trajectory.nodes)
    ):
        reason = (
            "--by mismatch needs the trainer's log-probabilities, and this episode has none: a TrainingLog writes them "
            "into mismatch.mmr beside the file (docs/report.md), or they are the extra trainer_logprobs of its nodes"
        )
        return _instead(By.LOGPROB if sampled else By.OWNER, reason)
    if by in (By.LOGPROB, By.SAMPLED) and not sampled:
        return _instead(By.OWNER, f"--by {by.value} shows sampled tokens, and this episode has none")
    if by is By.OWNER and not has_model and not any(len(node.messages) == 1 for node in trajectory.nodes) and sampled:
        reason = "the owners of prompt tokens are not known: they need the model, so pass --model DIR"
        return _instead(By.SAMPLED, reason)
    return Colouring(by, "")


def _instead(by: By, reason: str) -> Colouring:
    return Colouring(by, f"{reason}; the tokens are coloured by {by.value}")
