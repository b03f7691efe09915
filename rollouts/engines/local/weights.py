"""New weights of a local engine: tensors by the names of the model or of a checkpoint, or a directory."""

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from rollouts.engines.weight_deltas import WeightDelta, deltas_after
from rollouts.errors import WeightUpdateError
from rollouts.models.loading import without_progress_bars


def matched_weights(model: torch.nn.Module, weights: Mapping[str, Any]) -> list[tuple[torch.Tensor, Any]]:
    """(tensor of the model, given weight) for every parameter, and for the buffers that are given.

    Names are those of `state_dict()`. Parameters that are tied to each other are one tensor: one of their
    names is enough, and values given under several names must be equal. Raises `WeightUpdateError` where a
    name is unknown, a parameter is missing, a shape or type does not fit, or a value of a parameter is not
    finite.
    """
    # Without `keep_vars` each name would get a new tensor, and tied ones would not be recognised.
    own = model.state_dict(keep_vars=True)
    if unknown := sorted(weights.keys() - own.keys()):
        raise _error(
            f"{len(unknown)} names are not in the model, among them {unknown[0]!r}; use the names of its state_dict()"
        )
    names: dict[int, list[str]] = {}  # by tensor; tied parameters are one object
    for name, tensor in own.items():
        names.setdefault(id(tensor), []).append(name)
    matched: list[tuple[torch.Tensor, Any]] = []
    missing: list[str] = []
    for tied in names.values():
        target = own[tied[0]]
        given = [name for name in tied if name in weights]
        if not given:
            missing += [tied[0]] if isinstance(target, torch.nn.Parameter) else []
            continue
        for name in given:
            _check_type(name, value := weights[name])
            if tuple(value.shape) != tuple(target.shape):
                raise _error(f"{name} has shape {tuple(value.shape)}, the model wants {tuple(target.shape)}")
            if isinstance(target, torch.nn.Parameter):
                _check_finite(name, as_tensor(value), target.dtype)
        for name in given[1:]:
            one, other = as_tensor(weights[given[0]]), as_tensor(weights[name])
            if one.dtype != other.dtype or not torch.equal(one, other.to(one.device)):
                raise _error(f"{given[0]} and {name} are one tensor in the model and differ in the given weights")
        matched.append((target, weights[given[0]]))
    if missing:
        raise _error(
            f"{len(missing)} parameters are missing, among them {missing[0]!r}; pass all parameters of state_dict()"
        )
    return matched


def checkpoint_weights(
    model: torch.nn.Module, checkpoint: Mapping[str, Any] | str | Path
) -> Mapping[str, torch.Tensor]:
    """The weights of a checkpoint by the names of the model's `state_dict()`; tied ones under all of their names.

    `checkpoint` is a directory with safetensors files, or has the tensors by their names in such files.
    Raises `WeightUpdateError` where the directory cannot be read, or tensors of the model are missing or
    there are others.
    """
    source: dict[str, Any]
    if isinstance(checkpoint, Mapping):
        for name, value in checkpoint.items():
            _check_type(name, value)
        tensors = {name: as_tensor(value) for name, value in checkpoint.items()}
        source = {"pretrained_model_name_or_path": None, "config": model.config, "state_dict": tensors}
        place = "the mapping of weights"
    elif not Path(checkpoint).is_dir():  # transformers would take the path for the name of a repository
        raise _error(f"there is no directory {checkpoint}")
    else:
        source = {"pretrained_model_name_or_path": checkpoint, "local_files_only": True, "use_safetensors": True}
        place = str(checkpoint)
    model_class: Any = type(model)
    try:
        with without_progress_bars():
            loaded, report = model_class.from_pretrained(**source, dtype=torch.float32, output_loading_info=True)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise _error(f"{place} holds no checkpoint that {model_class.__name__} can load ({error})") from error
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys"):
        if report[kind]:
            names = sorted(map(str, report[kind]))
            raise _error(f"{place} has {len(names)} {kind.replace('_', ' ')}, among them {names[0]:.80}")
    weights: Mapping[str, torch.Tensor] = loaded.state_dict()
    return weights


def apply_deltas(model: Any, directory: str | Path, version: str) -> None:
    """Write the values of weight deltas into a model with the weights of `version`.

    Raises `WeightUpdateError`, changing nothing, where none of them changes these weights, or one those of
    another model.
    """
    own = model.state_dict()
    head = getattr(model.get_output_embeddings(), "weight", None)
    # Tied, it has several names.
    of_head = {name for name, each in model.named_parameters(remove_duplicate=False) if each is head}
    changes: dict[str, list[WeightDelta]] = {}
    for delta in deltas_after(Path(directory), version):
        if of_head and of_head.isdisjoint(delta.names):
            reason = f"the base of {delta.directory} ties {min(of_head)} to its embeddings, the model does not"
            raise _error(f"{reason}; pass a whole checkpoint")
        for name, shape in delta.shapes.items():
            target = own.get(name)
            if target is None or tuple(target.shape) != shape or not target.is_contiguous():
                found = "none such" if target is None else f"{tuple(target.shape)}, strides {target.stride()}"
                reason = f"{delta.directory} changes {name} {shape}, the model has {found}"
                raise _error(f"{reason}; pass a whole checkpoint")
            _check_finite(name, delta.tensors[name], target.dtype)
            changes.setdefault(name, []).append(delta)

    def change(names: Sequence[str]) -> None:
        for name in names:
            for delta in changes[name]:
                delta.change(name, own[name])

    # The values are far from each other in memory, which one thread waits for.
    names, threads = list(changes), os.cpu_count() or 1
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(change, (names[first::threads] for first in range(threads))))


def as_tensor(value: Any) -> torch.Tensor:
    """A copy of an array: those from the wire are read-only, which torch cannot represent."""
    return value if isinstance(value, torch.Tensor) else torch.tensor(value)


def _check_type(name: str, value: Any) -> None:
    is_array = isinstance(value, np.ndarray)
    if not isinstance(value, torch.Tensor) and not (is_array and value.dtype.kind in "fiu"):
        described = f"an array of {value.dtype}" if is_array else f"a {type(value).__name__}"
        raise _error(f"{name} is {described}, not a tensor or an array that torch can convert; pass a tensor")


def _check_finite(name: str, value: torch.Tensor, dtype: torch.dtype) -> None:
    """In the model's dtype, of which float16 has no number above 65,504."""
    value = value.to(dtype)
    # The sum is quick to compute, and finite only if all values are; a large one may overflow.
    is_finite = bool(value.sum(dtype=torch.float32).isfinite())
    if wrong := 0 if is_finite else value.numel() - int(value.isfinite().sum()):
        raise _error(
            f"{name} has {wrong} values that are NaN or infinite; go back to weights from before the training failed"
        )


def _error(reason: str) -> WeightUpdateError:
    return WeightUpdateError(f"{reason}; nothing was changed")
