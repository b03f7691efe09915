"""The LoRA adapters of a model in this process: read from directories, and put into the model for a batch.

An update of the weights changes the same tensors, so that it concerns every adapter.
"""

import itertools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from rollouts.engines.lora import adapter_exists_error
from rollouts.engines.protocol import check_adapter_name
from rollouts.errors import UnknownAdapterError, WeightUpdateError
from rollouts.models.lora_modules import (
    ADAPTER,
    MAX_RANK,
    Replacement,
    has_lora_modules,
    lora_modules,
    replacements_by,
)

_CONFIG = "adapter_config.json"
_WEIGHTS = "adapter_model.safetensors"
_PARTS = (".lora_A.weight", ".lora_B.weight")
#: Fields of the configuration that are passed on to PEFT.
_READ = frozenset({"r", "lora_alpha", "rank_pattern", "alpha_pattern", "use_rslora", "fan_in_fan_out"})
#: Fields that change nothing about a trained adapter: the names of its tensors say which modules it has.
_WITHOUT_EFFECT = frozenset(
    {
        *("auto_mapping", "base_model_name_or_path", "inference_mode", "peft_type", "peft_version", "revision"),
        *("exclude_modules", "layers_pattern", "layers_to_transform", "target_modules", "task_type"),
        *("ensure_weight_tying", "lora_dropout", "megatron_core", "qalora_group_size", "runtime_config"),
    }
)


@dataclass(frozen=True, eq=False, slots=True)
class LocalAdapter:
    """An adapter that is loaded. `base_version`: the label of the weights of the model when it was; no other one has
    its `number`."""

    name: str
    directory: str
    base_version: str
    replacements: tuple[Replacement, ...]
    number: int = field(default_factory=itertools.count().__next__)


class LocalAdapters:
    """The adapters of one model. A request keeps the `LocalAdapter` that it began with, also after `remove`."""

    def __init__(self, model: Any) -> None:
        self._own: dict[str, torch.nn.Module] = dict(model.named_modules())
        self._loaded: dict[str, LocalAdapter] = {}

    def directories(self) -> dict[str, str]:
        """The directory of each adapter, by its name."""
        return {name: each.directory for name, each in self._loaded.items()}

    def find(self, request_id: str, name: str | None) -> LocalAdapter | None:
        """The adapter of a request; None for a request without any. Raises `UnknownAdapterError`."""
        if name is None:
            return None
        if (adapter := self._loaded.get(name)) is None:
            raise UnknownAdapterError(request_id, name, self._loaded)
        return adapter

    def load(self, name: str, directory: str | Path, base_version: str) -> None:
        """Load the adapter of a directory; on any thread, also while a batch runs.

        Raises `ArgumentError` for a name that is none, `MissingExtraError` without PEFT; `WeightUpdateError`,
        changing nothing, for a name that is in use and for a directory without an adapter of this model.
        """
        check_adapter_name(name)
        if name in self._loaded:
            raise adapter_exists_error("there is", name, self._loaded[name].directory)
        path = Path(directory).absolute()
        replacements = replacements_by(self._own, _modules_of_adapter(self._own, path))
        adapter = LocalAdapter(name, str(path), base_version, replacements)
        if self._loaded.setdefault(name, adapter) is not adapter:
            raise _error(path, f"another adapter was loaded as {name!r} meanwhile")

    def remove(self, name: str) -> None:
        """Forget an adapter. Raises `UnknownAdapterError`."""
        if self._loaded.pop(name, None) is None:
            raise UnknownAdapterError("unload_adapter", name, self._loaded)


def _modules_of_adapter(modules: Mapping[str, torch.nn.Module], directory: Path) -> dict[str, Any]:
    """The modules that PEFT makes for an adapter, by the names of those of the model that they stand for."""
    if has_lora_modules(modules):
        raise _error(directory, "the model of this engine has adapters of PEFT in it; merge them (merge_and_unload)")
    fields = _checked_config(directory)
    weights = _checked_weights(modules, directory)
    try:
        made = lora_modules(modules, list(weights), **fields, init_lora_weights=False)
        for name, parts in weights.items():
            _fill(directory, name, made[name], parts)
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise _error(directory, f"PEFT cannot use it ({error})") from error
    return made


def _fill(directory: Path, name: str, module: Any, parts: Mapping[str, torch.Tensor]) -> None:
    """Copy the tensors of an adapter into a module of PEFT. Raises `WeightUpdateError` for other shapes."""
    for part, value in parts.items():
        weight = getattr(module, part)[ADAPTER].weight
        if weight.shape != value.shape:
            rule = f"{name}.{part}.weight has shape {tuple(value.shape)}; model and r want {tuple(weight.shape)}"
            raise _error(directory, rule)
        with torch.no_grad():
            weight.copy_(value)
    if not isfinite(module.scaling[ADAPTER]):
        raise _error(directory, f"lora_alpha scales {name} by {module.scaling[ADAPTER]}, which is no finite number")


def _checked_config(directory: Path) -> dict[str, Any]:
    """The fields for PEFT. Raises `WeightUpdateError` for an adapter that is more than LoRA of rank `MAX_RANK`."""
    path = directory / _CONFIG
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise _error(directory, f"{_CONFIG} cannot be read ({error})") from error
    if not isinstance(config, dict) or config.get("peft_type") != "LORA":
        raise _error(directory, f"{_CONFIG} is of no LoRA adapter (peft_type LORA)")
    initial = config.pop("init_lora_weights", None)
    others = {name: value for name, value in config.items() if name not in _READ | _WITHOUT_EFFECT}
    # Values of `init_lora_weights` that leave the weights of the model as they are; others change them.
    if initial not in (None, True, False, "gaussian", "orthogonal"):
        others["init_lora_weights"] = initial
    if others.get("bias") == "none":
        del others["bias"]
    if extra := sorted(name for name, value in others.items() if value not in (None, False, {}, [])):
        reason = f"{extra[0]} is {str(others[extra[0]])[:100]!r}, and LoRA of linear layers alone is supported"
        raise _error(directory, f"{reason}; merge the adapter into the weights, and use update_weights")
    fields = {name: config[name] for name in _READ & config.keys() if config[name] is not None}
    patterns = fields.get("rank_pattern", {})
    if not isinstance(patterns, dict) or not isinstance(fields.get("alpha_pattern", {}), dict):
        raise _error(directory, "rank_pattern and alpha_pattern must be objects")
    ranks = [fields.get("r", 8), *patterns.values()]  # PEFT's own default
    if wrong := [rank for rank in ranks if type(rank) is not int or not 1 <= rank <= MAX_RANK]:
        raise _error(directory, f"rank {str(wrong[0])[:100]} is not an integer from 1 to {MAX_RANK}")
    return fields


def _checked_weights(modules: Mapping[str, torch.nn.Module], directory: Path) -> dict[str, dict[str, torch.Tensor]]:
    """By module of the model, its `lora_A` and `lora_B`. Raises `WeightUpdateError`."""
    path = directory / _WEIGHTS
    if not path.is_file():  # a named pipe would never be read to its end
        raise _error(directory, f"it lacks {_WEIGHTS}, as `save_pretrained` of peft writes it")
    limit = 2**20 + sum(parameter.nbytes for parameter in modules[""].parameters())
    if path.stat().st_size > limit:
        raise _error(directory, f"{_WEIGHTS} is larger than the model")
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise _error(directory, f"{_WEIGHTS} is no complete safetensors file ({error})") from error
    weights: dict[str, dict[str, torch.Tensor]] = {}
    for name, value in tensors.items():
        suffix = next((part for part in _PARTS if name.endswith(part)), None)
        module_name = name.removeprefix("base_model.model.").removesuffix(suffix or "")
        module = modules.get(module_name)
        if suffix is None or not isinstance(module, torch.nn.Linear):
            raise _error(directory, f"{name[:200]} is no lora_A or lora_B of a linear layer of this model")
        if not value.isfinite().all():
            raise _error(directory, f"{name[:200]} has values that are NaN or infinite")
        weights.setdefault(module_name, {})[suffix.split(".")[1]] = value
    if incomplete := sorted(name for name, parts in weights.items() if len(parts) != len(_PARTS)):
        raise _error(directory, f"{incomplete[0]} has only one of lora_A and lora_B")
    if not weights:
        raise _error(directory, f"{_WEIGHTS} has no tensors")
    return weights


def _error(directory: Path, reason: str) -> WeightUpdateError:
    return WeightUpdateError(f"the adapter of {directory} was not loaded: {reason}. Nothing was changed")
