"""LoRA adapters for a tiny checkpoint, in the format of peft, and the checkpoint with an adapter merged into it."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

_PREFIX = "base_model.model."
#: So large that the adapter changes what is sampled.
_STANDARD_DEVIATION = 0.5


def make_adapter(
    directory: Path, base: Path, *, seed: int, rank: int = 4, modules: Sequence[str] = ("q_proj", "v_proj", "down_proj")
) -> Path:
    """Write a random adapter for the language layers of the checkpoint `base`; returns the directory."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, weight in _weights(base).items():
        if "language_model" in name and name.endswith(tuple(f"{module}.weight" for module in modules)):
            module = _PREFIX + name.removesuffix(".weight")
            tensors[f"{module}.lora_A.weight"] = _random(generator, rank, weight.shape[1])
            tensors[f"{module}.lora_B.weight"] = _random(generator, weight.shape[0], rank)
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": list(modules), "bias": "none"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def merged_checkpoint(directory: Path, base: Path, adapter: Path) -> Path:
    """Write the checkpoint `base` with an adapter added to its weights; returns the directory."""
    shutil.copytree(base, directory)
    config = json.loads((adapter / "adapter_config.json").read_text())
    added = load_file(adapter / "adapter_model.safetensors")
    for path in directory.glob("*.safetensors"):
        weights = load_file(path)
        for name, weight in weights.items():
            module = _PREFIX + name.removesuffix(".weight")
            if f"{module}.lora_A.weight" in added:
                change = added[f"{module}.lora_B.weight"] @ added[f"{module}.lora_A.weight"]
                weights[name] = weight + change * config["lora_alpha"] / config["r"]
        save_file(weights, path, metadata={"format": "pt"})
    return directory


def _weights(base: Path) -> dict[str, torch.Tensor]:
    return {name: weight for path in base.glob("*.safetensors") for name, weight in load_file(path).items()}


def _random(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator) * _STANDARD_DEVIATION
