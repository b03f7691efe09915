"""The random numbers of a model that runs on a probe."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from rollouts.models.architecture import Architecture


@contextlib.contextmanager
def same_random_numbers(architecture: Architecture) -> Iterator[None]:
    """A context in which dropout of a model in training mode is the same each time.

    The caller's random numbers go on afterwards as if the model had not run. Only the generators of the CPU and of the
    model's GPUs are seeded: `torch.manual_seed` would also seed those of GPUs whose state is not restored.
    """
    devices = {tensor.device for tensor in architecture.model.parameters()} | {architecture.model.device}
    gpus = sorted((device for device in devices if device.type == "cuda"), key=str)
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(0)
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(0)
        yield
