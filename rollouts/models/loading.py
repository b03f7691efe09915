"""Loads a checkpoint directory as the class that transformers has for it, without progress bars."""

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_MULTIMODAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForMultimodalLM,
    AutoModelForSeq2SeqLM,
)
from transformers.utils import logging

from rollouts.errors import ArgumentError

# The setting belongs to the process. Two threads that both restored it could leave it off.
_PROGRESS_BARS: Final = threading.Lock()


def load_model(
    directory: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    attn_implementation: str | Mapping[str, str] | None = None,
) -> Any:
    """The model of a checkpoint directory: a text model, or one that sees or hears; of an Omni model, its thinker.

    `attn_implementation` as transformers has it; None: its usual one for the model. Raises `ArgumentError`
    where there is no checkpoint.
    """
    if not Path(directory).is_dir():  # transformers would take the path for the name of a repository
        rule = "pass a checkpoint directory with config.json and model.safetensors; there is no such directory"
        raise ArgumentError("directory", str(directory), rule)
    with _naming_directory(directory, OSError, ValueError):
        config = AutoConfig.from_pretrained(directory, local_files_only=True)
    config = getattr(config, "thinker_config", config)
    # A ValueError would be of `attn_implementation`.
    with _naming_directory(directory, OSError), without_progress_bars():
        return _auto_class(config).from_pretrained(
            directory, config=config, dtype=dtype, attn_implementation=attn_implementation, local_files_only=True
        )


def _auto_class(config: Any) -> Any:
    if type(config) in MODEL_FOR_MULTIMODAL_LM_MAPPING:
        return AutoModelForMultimodalLM
    hears = getattr(config, "audio_config", None) is not None
    if hears and type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:  # Audio Flamingo 3: transformers has it only here
        return AutoModelForSeq2SeqLM
    return AutoModelForCausalLM


@contextmanager
def _naming_directory(directory: str | Path, *refusals: type[Exception]) -> Iterator[None]:
    """Raise `ArgumentError` for `directory` in place of what transformers raises for its files."""
    try:
        yield
    except refusals as error:
        rule = f"pass a checkpoint directory with config.json and model.safetensors (transformers: {error})"
        raise ArgumentError("directory", str(directory), rule) from error


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Turn the progress bars of transformers off while the block runs, and restore the setting of the program after it.

        with without_progress_bars():
            model = AutoModelForCausalLM.from_pretrained(directory)

    One block runs at a time; blocks of other threads wait.
    """
    with _PROGRESS_BARS:
        if not logging.is_progress_bar_enabled():
            yield
            return
        hub_is_quiet = are_progress_bars_disabled()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.enable_progress_bar()
            if hub_is_quiet:
                disable_progress_bars()
