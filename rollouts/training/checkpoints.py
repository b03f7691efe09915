"""Checkpoints of a model with the files of its renderer, and those of a `Trainer`."""

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from transformers import PreTrainedModel

from renderers import RendererPool, TemplateRenderer
from rollouts.errors import ArgumentError
from rollouts.files import replaced_path
from rollouts.models.loading import without_progress_bars
from rollouts.models.lora_modules import LoraOptions


def save_checkpoint(
    model: PreTrainedModel, renderer: TemplateRenderer | RendererPool, directory: str | os.PathLike[str]
) -> Path:
    """Write the weights of `model`, and the tokenizer, template and processor files of `renderer`; the directory.

        directory = save_checkpoint(model, renderer, "checkpoints/step-100")
        renderer = load_renderer(directory)
        engine = LocalEngine.from_pretrained(directory)  # or: vllm serve checkpoints/step-100

    The renderer that is loaded from the directory gives the same tokens and pixels as `renderer`, if the same
    options are passed: a `chat_template=` that `renderer` was loaded with is written, other options and
    `processors=` are not files. Weights have the dtype of `model`, and safetensors files their names of
    transformers.

    `directory` must be new or empty, and appears when it is complete: a process that is killed leaves no half
    of it. Raises `ArgumentError` for a model that is no `PreTrainedModel` (merge the adapters of PEFT first),
    a renderer that was not loaded from files, and a directory that has files; `OSError`.
    """
    target = Path(directory)
    if not isinstance(model, PreTrainedModel):
        rule = (
            "pass the PreTrainedModel itself: of a PeftModel the result of merge_and_unload(), of a wrapper its module"
        )
        raise ArgumentError("model", model, rule)
    if any(name.endswith(".base_layer.weight") for name, _ in model.named_parameters()):
        rule = "it has adapters of PEFT inside, whose names nothing loads; pass the result of merge_and_unload()"
        raise ArgumentError("model", type(model).__name__, rule)
    files = getattr(renderer.renderer if isinstance(renderer, RendererPool) else renderer, "files", None)
    if files is None:
        raise ArgumentError("renderer", renderer, "pass one of load_renderer(directory), which knows its files")
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ArgumentError("directory", str(target), "it exists and is not empty; name a new one")
    target.parent.mkdir(parents=True, exist_ok=True)
    with replaced_path(target) as unfinished:
        with without_progress_bars():
            model.save_pretrained(unfinished)
        # It has stop tokens, which the renderer reads, too: those of the renderer's files, or none.
        (unfinished / "generation_config.json").unlink(missing_ok=True)
        files.copy_to(unfinished)
    return target


_FILE = "checkpoint.safetensors"

_FORMAT = 2

#: What AdamW keeps for a parameter: the number of its steps, and the averages of its gradient and of its
#: square.
ADAM_STATE = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The parameters by name, and the state of AdamW: state name -> name of a parameter that has been changed
    by a step -> value; empty where it was not read."""

    parameters: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, Mapping[str, torch.Tensor]]


def write_checkpoint(
    directory: str | os.PathLike[str], checkpoint: Checkpoint, lora: LoraOptions | None, model_type: str
) -> None:
    """Write the file into `directory`, which is made where it is missing, in place of one that is there."""
    Path(directory).mkdir(parents=True, exist_ok=True)
    about = {
        "format": _FORMAT,
        "model_type": model_type,
        "lora": None if lora is None else asdict(lora),
    }
    tensors = {f"parameters.{name}": value for name, value in checkpoint.parameters.items()}
    for state, by_name in checkpoint.optimizer.items():
        tensors |= {f"{state}.{name}": value for name, value in by_name.items()}
    with replaced_path(Path(directory, _FILE)) as unfinished:
        save_file(
            {name: value.detach().contiguous() for name, value in tensors.items()},
            unfinished,
            metadata={"trainer": json.dumps(about)},
        )


def read_checkpoint(
    directory: str | os.PathLike[str],
    lora: LoraOptions | None,
    model_type: str,
    parameters: Mapping[str, torch.Tensor],
    *,
    with_optimizer: bool,
) -> Checkpoint:
    """The checkpoint, on the CPU. Raises `ArgumentError` for other parameters, model or options."""
    with _opened(directory) as file:
        about = _about(directory, file)
        if about["model_type"] != model_type:
            _refuse(directory, f"it is of model type {about['model_type']!r}, and this model is {model_type!r}")
        own = None if lora is None else {**asdict(lora), "seed": None}
        if (about["lora"] and {**about["lora"], "seed": None}) != own:
            _refuse(directory, f"it was saved with lora={about['lora']}, and this model has {lora}")
        names: dict[str, dict[str, torch.Tensor]] = {kind: {} for kind in ("parameters", *ADAM_STATE)}
        for key in file.keys():  # noqa: SIM118 - not a mapping
            kind, _, name = key.partition(".")
            if kind not in names or name not in parameters:
                _refuse(directory, f"it has {key!r:.200}, which this model has not")
            if kind == "parameters" or with_optimizer:
                names[kind][name] = file.get_tensor(key)
    if missing := sorted(parameters.keys() - names["parameters"].keys()):
        _refuse(directory, f"it lacks {missing[0]!r}")
    for kind, tensors in names.items():
        for name, value in tensors.items():
            parameter = parameters[name]
            if kind != "step" and (value.shape, value.dtype) != (parameter.shape, parameter.dtype):
                expected = f"{parameter.dtype} {tuple(parameter.shape)}"
                found = f"{kind} of {name!r} is {value.dtype} {tuple(value.shape)}"
                _refuse(directory, f"{found}; this model has {expected}")
    saved = names.pop("parameters")
    if any(tensors.keys() != names["step"].keys() for tensors in names.values()):
        _refuse(directory, "its state of the optimizer lacks tensors")
    return Checkpoint(saved, names)


def _opened(directory: str | os.PathLike[str]) -> Any:
    path = Path(directory, _FILE)
    if not path.is_file():
        _refuse(directory, f"there is no file {_FILE} in it; pass a directory that Trainer.save has written")
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise ArgumentError("directory", os.fspath(directory), f"{_FILE} cannot be read ({error})") from error


def _about(directory: str | os.PathLike[str], file: Any) -> dict[str, Any]:
    about: dict[str, Any] = {}
    with suppress(KeyError, TypeError, ValueError, AttributeError):
        about = {"format": None, **json.loads((file.metadata() or {})["trainer"])}
    if about.get("format") != _FORMAT or not {"model_type", "lora"} <= about.keys():
        _refuse(directory, f"{_FILE} is none of Trainer.save of this version")
    return about


def _refuse(directory: str | os.PathLike[str], reason: str) -> None:
    raise ArgumentError("directory", os.fspath(directory), f"{reason}. Nothing was changed")
