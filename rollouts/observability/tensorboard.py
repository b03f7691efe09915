"""Metrics for TensorBoard."""

from __future__ import annotations

import os
from collections.abc import Mapping

from rollouts.errors import MissingExtraError


class TensorBoardSink:
    """Writes metrics as scalars into an event file of TensorBoard. Needs the extra `tensorboard`.

    Tags are SECTION/NAME, for example `runner/turns_per_second` and `training/loss`; `tensorboard --logdir DIRECTORY`
    shows them. Each process that writes into a directory has a file of its own there. Raises `MissingExtraError`.
    """

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        try:
            # tensorboardX and not tensorboard: it only writes the files, and installs neither a server nor gRPC.
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise MissingExtraError("metrics for TensorBoard", "tensorboard", "tensorboardX") from error
        self._writer = SummaryWriter(logdir=os.fspath(directory))

    def write(self, section: str, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(f"{section}/{name}", float(value), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()
