"""Checkpoints of a model with the files of its renderer."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from renderers import RendererPool, TemplateRenderer
from rollouts.errors import ArgumentError
from rollouts.files import replaced_path
from rollouts.models.loading import without_progress_bars

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_GENERATION = "generation_config.json"


def save_checkpoint(
    model: PreTrainedModel, renderer: TemplateRenderer | RendererPool, directory: str | os.PathLike[str]
) -> Path:
    """Write the weights of `model`, and the tokenizer, template and processor files of `renderer`; the directory.

        directory = save_checkpoint(model, renderer, "checkpoints/step-100")
        renderer = load_renderer(directory)
        engine = LocalEngine.from_pretrained(directory)  # or: vllm serve checkpoints/step-100

    The renderer that is loaded from the directory gives the same tokens and pixels as `renderer`, if the same options
    are passed: a `chat_template=` that `renderer` was loaded with is written, other options and `processors=` are not
    files. Weights have the dtype of `model`, and safetensors files their names of transformers.

    `directory` must be new or empty, and appears when it is complete: a process that is killed leaves no half of it.
    Raises `ArgumentError` for a model that is no `PreTrainedModel` (merge the adapters of PEFT first), a renderer that
    was not loaded from files, and a directory that has files; `OSError`.
    """
    from transformers import PreTrainedModel

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
        (unfinished / _GENERATION).unlink(missing_ok=True)
        files.copy_to(unfinished)
    return target
