"""Adapters for clients to download, whose tensors have Tinker's names."""

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from safetensors import safe_open
from safetensors.torch import load_file, save_file

from rollouts.training.trainer import Trainer

log = logging.getLogger("rollouts.tinker")
_FILE: Final = "adapter_model.safetensors"
_PREFIX: Final = "base_model.model."
#: Begins the names of layers in files of Gemma 3, LLaVA and others, which build_hf_model takes as they are.
_OUTER: Final = "language_model.model."

_TIED: Final = (
    "%s has a change of the output layer, and the embeddings of the model are tied: build_hf_model would add it to the "
    "input embeddings, too, which were not trained so. Train with train_unembed=False what is to be merged"
)


def save_for_download(trainer: Trainer, model_id: str, directory: Path) -> None:
    """Write a model by `Trainer.save_for_sampler`; tensors of an adapter get the names that Tinker's programs read.

    They say `model.layers` for `model.language_model.layers`, and `model.unembed_tokens` for the output
    layer, so that `tinker_cookbook.weights.build_hf_model` merges it into the base model;
    `build_lora_adapter` makes PEFT's names.
    """
    with trainer.lock:
        trainer.save_for_sampler(model_id, directory)
        if trainer.models()[model_id] is None:
            return
        names = {module: f"{name}." for name, module in trainer.model.named_modules()}
        head, decoder = trainer.model.get_output_embeddings(), names[trainer.model.get_decoder()]
        output, is_tied = names[head], head.weight is trainer.model.get_input_embeddings().weight
    within = _OUTER if any(name.startswith(_OUTER) for name in _names_in_files(trainer.directory)) else "model."
    tensors: dict[str, Any] = {}
    for name, value in load_file(directory / _FILE).items():
        own = name.removeprefix(_PREFIX)
        place, to = (output, f"{within}unembed_tokens.") if own.startswith(output) else (decoder, within)
        tensors[f"{_PREFIX}{to}{own.removeprefix(place)}"] = value
    if is_tied and any("unembed_tokens" in name for name in tensors):
        log.warning(_TIED, directory)
    save_file(tensors, directory / _FILE, metadata={"format": "pt"})


def _names_in_files(directory: Path) -> Iterator[str]:
    for path in directory.glob("*.safetensors"):
        file: Any = safe_open(path, "pt")
        yield from file.keys()
