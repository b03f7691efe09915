"""The policy of the demonstration on a vLLM server. Weights are sent as checkpoints in the file system."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from rollouts.engines.protocol import GenerateRequest, GenerateResult
from rollouts.engines.vllm import VLLMEngine, write_tied_head


class ServerPolicy:
    """An `Engine` with replaceable weights, on a server that reads the same file system.

    `directory` holds the weights of the last two updates. The files that the server has loaded are never overwritten:
    the server loads them again if the new weights cannot be loaded.
    """

    def __init__(self, engine: VLLMEngine, directory: Path) -> None:
        self._engine = engine
        self._loaded, self._spare = directory / "a", directory / "b"

    @property
    def weight_version(self) -> str:
        return self._engine.weight_version

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        return await self._engine.generate(request)

    async def update_weights(self, weights: Mapping[str, np.ndarray], version: str) -> None:
        """Write float32 weights by parameter name, and make the server load them."""
        self._spare.mkdir(parents=True, exist_ok=True)
        arrays = {name: np.ascontiguousarray(weight) for name, weight in weights.items()}
        save_file(arrays, self._spare / "model.safetensors", metadata={"format": "pt"})
        (self._spare / "lm_head.safetensors").unlink(missing_ok=True)  # left by the previous update
        write_tied_head(self._spare)
        await self._engine.control.update_weights_from_directory(self._spare.resolve(), version)
        self._loaded, self._spare = self._spare, self._loaded

    async def close(self) -> None:
        await self._engine.close()


def server_policy(base_url: str, api_key: str | None = None) -> Callable[[Path], ServerPolicy]:
    """Return a function from the model directory to the policy on the server at `base_url`."""
    return lambda model_directory: ServerPolicy(
        VLLMEngine(base_url, api_key=api_key), model_directory.parent / "served-weights"
    )


def serve_command(model_directory: Path) -> str:
    """Return a shell command that starts a server for the demonstration."""
    return (
        f"VLLM_SERVER_DEV_MODE=1 vllm serve {shlex.quote(str(model_directory))} --host 127.0.0.1 --dtype float32 "
        "--max-model-len 4096 --enforce-eager --enable-scale-out"
    )
