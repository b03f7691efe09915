"""Metrics for Weights & Biases."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from rollouts.errors import MissingExtraError
from rollouts.observability.errors import SinkStartError
from rollouts.observability.metric_sinks import RUNNER, TRAINING


class WandbSink:
    """Logs metrics as a run of Weights & Biases. Needs the extra `wandb`.

    Keys are SECTION/NAME, for example `runner/turns_per_second` and `training/loss`, over `runner/step` and
    `training/step`. `directory` gets the folder `wandb` with the local files. `mode` "offline" sends nothing:
    `wandb sync` does that later; None is what WANDB_MODE says, else "online". The key is that of `wandb login` or
    WANDB_API_KEY. `config` are the values that the run is listed with. Neither the code, the repository nor the output
    of the program is recorded.

    Raises `MissingExtraError`, and `SinkStartError` if the run cannot be made.
    """

    def __init__(
        self,
        project: str,
        *,
        directory: str | os.PathLike[str],
        entity: str | None = None,
        name: str | None = None,
        mode: Literal["online", "offline"] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        try:
            import wandb
        except ImportError as error:
            raise MissingExtraError("metrics for Weights & Biases", "wandb", "wandb") from error
        settings = wandb.Settings(console="off", silent=True, save_code=False, disable_code=True, disable_git=True)
        Path(directory).mkdir(parents=True, exist_ok=True)  # wandb writes into /tmp where it is missing
        try:
            self._run = wandb.init(
                project=project,
                entity=entity,
                name=name,
                dir=os.fspath(directory),
                mode=mode,
                config=dict(config or {}),
                reinit="create_new",
                settings=settings,
            )
        except wandb.Error as error:
            cure = "run `wandb login`, or choose the mode offline"
            raise SinkStartError("Weights & Biases", str(error), cure) from error
        for section in (RUNNER, TRAINING):
            self._run.define_metric(f"{section}/*", step_metric=f"{section}/step")

    def write(self, section: str, step: int, values: Mapping[str, float]) -> None:
        named = {f"{section}/{name}": float(value) for name, value in values.items()}
        self._run.log({**named, f"{section}/step": step})

    def close(self) -> None:
        self._run.finish()
