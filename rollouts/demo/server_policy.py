"""The policy of the demonstration on a vLLM server. Weights are sent as checkpoints in the file system."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from rollouts.engines.protocol import InFlight
from rollouts.engines.vllm import VLLMEngine, write_tied_head


class ServerPolicy(VLLMEngine):
    """An engine with replaceable weights, on a server that reads the same file system.

    The weights of the last two updates lie beside `model_directory`. The files that the server has loaded are never
    overwritten: the server loads them again if the new weights cannot be loaded.
    """

    def __init__(self, base_url: str, api_key: str | None, model_directory: Path) -> None:
        super().__init__(base_url, api_key=api_key)
        directory = model_directory.parent / "served-weights"
        self._loaded, self._spare = directory / "a", directory / "b"

    async def update_weights(
        self, weights: Mapping[str, np.ndarray] | str | os.PathLike[str], version: str, *, in_flight: InFlight = "abort"
    ) -> None:
        """Make the server load float32 weights by parameter name, which are written first, or a directory."""
        if not isinstance(weights, Mapping):
            await super().update_weights(weights, version, in_flight=in_flight)
            return
        self._spare.mkdir(parents=True, exist_ok=True)
        arrays = {name: np.ascontiguousarray(weight) for name, weight in weights.items()}
        save_file(arrays, self._spare / "model.safetensors", metadata={"format": "pt"})
        (self._spare / "lm_head.safetensors").unlink(missing_ok=True)  # left by the previous update
        write_tied_head(self._spare)
        await super().update_weights(self._spare.resolve(), version, in_flight=in_flight)
        self._loaded, self._spare = self._spare, self._loaded


def serve_command(model_directory: Path) -> str:
    """Return a shell command that starts a server for the demonstration."""
    return (
        f"VLLM_SERVER_DEV_MODE=1 vllm serve {shlex.quote(str(model_directory))} --host 127.0.0.1 --dtype float32 "
        "--max-model-len 4096 --enforce-eager --enable-scale-out"
    )
