"""Loads a checkpoint directory as the class that transformers has for it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import (
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
)

from rollouts.errors import ArgumentError
from rollouts.models.progress_bars import without_progress_bars


def load_model(
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | Mapping[str, str] | None = None,
) -> Any:
    """The model of a checkpoint directory: a text model, or one that reads images.

    `attn_implementation` as transformers has it; None: its usual one for the model. Raises `ArgumentError` where
    there is no checkpoint.
    """
    if not Path(directory).is_dir():  # transformers would take the path for the name of a repository
        rule = "pass a checkpoint directory with config.json and model.safetensors; there is no such directory"
        raise ArgumentError("directory", str(directory), rule)
    with _naming_directory(directory, OSError, ValueError):
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    reads_images = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    auto_class = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
    # A ValueError would be of `attn_implementation`.
    with _naming_directory(directory, OSError), without_progress_bars():
        return auto_class.from_pretrained(
            directory, dtype=dtype, attn_implementation=attn_implementation, local_files_only=True
        )


@contextmanager
def _naming_directory(directory: str | Path, *refusals: type[Exception]) -> Iterator[None]:
    """Raise `ArgumentError` for `directory` in place of what transformers raises for its files."""
    try:
        yield
    except refusals as error:
        rule = f"pass a checkpoint directory with config.json and model.safetensors (transformers: {error})"
        raise ArgumentError("directory", str(directory), rule) from error
