"""Adapters for clients to download, whose tensors have Tinker's names."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rollouts.training.trainer import Trainer

_FILE: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
#: Begins the names of layers in files of Gemma 3, LLaVA and others, which build_hf_model takes as they are.
_OUTER: Final = "language_model.model."


def save_for_download(trainer: Trainer, model_id: str, directory: Path) -> None:
    """As `Trainer.save_for_sampler`, but an adapter has the names that programs of Tinker read.

    They say `model.layers` for `model.language_model.layers`, and `model.unembed_tokens` for the output layer, so that
    `tinker_cookbook.weights.build_hf_model` merges it into the base model; `build_lora_adapter` makes PEFT's names.
    """
    with trainer.lock:
        trainer.save_for_sampler(model_id, directory)
        if trainer.models()[model_id] is None:
            return
        names = {module: f"{name}." for name, module in trainer.model.named_modules()}
        output, decoder = (names[each()] for each in (trainer.model.get_output_embeddings, trainer.model.get_decoder))
    within = _OUTER if any(name.startswith(_OUTER) for name in _names_in_files(trainer.directory)) else "model."
    tensors = {}
    for name, value in load_file(directory / _FILE).items():
        own = name.removeprefix(_PREFIX)
        place, to = (output, f"{within}unembed_tokens.") if own.startswith(output) else (decoder, within)
        tensors[f"{_PREFIX}{to}{own.removeprefix(place)}"] = value
    save_file(tensors, directory / _FILE, metadata={"format": "pt"})


def _names_in_files(directory: Path) -> Iterator[str]:
    for path in directory.glob("*.safetensors"):
        file: Any = safe_open(path, "pt")
        yield from file.keys()
