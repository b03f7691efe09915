"""The loop of our own for what a supervised recipe has trained on: its conversations, our renderer and our trainer."""

from __future__ import annotations

import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from tinker import types

from renderers import TemplateRenderer, build_training_sample, load_renderer
from rollouts.training import sample_from_rendered
from rollouts.training.trainer import AdamParams, Datum, LoraOptions, Trainer, datum_from_sample

#: Of the recipe `vlm_classifier`.
QUESTION = "What is the name of the subject in this photo?"


def own_losses(model: Path, steps: Path, count: int | None = None) -> Iterator[float]:
    """The mean negative log-likelihood of each of the first steps that `tinker_recorded_recipe.py` has kept.

    Of its datums, the files of the images and the text of question and answer are taken, and rendered again.
    """
    renderer = load_renderer(model)
    trainer = Trainer.from_pretrained(model, device="cpu")
    trainer.create_model("own", lora=LoraOptions(seed=0))
    for sent, adam in _recorded(steps, count):
        data = [_rendered(renderer, datum) for datum in sent]
        result = trainer.forward_backward("own", data, "cross_entropy")
        trainer.optim_step("own", AdamParams(**adam))
        weights = np.concatenate([datum.inputs["weights"] for datum in data])
        yield float(-np.concatenate(result.logprobs) @ weights / weights.sum())


def _recorded(path: Path, count: int | None) -> Iterator[tuple[list[types.Datum], dict[str, Any]]]:
    with path.open("rb") as file:
        while file.peek() and count != 0:
            yield pickle.load(file)
            count = None if count is None else count - 1


def _rendered(renderer: TemplateRenderer, sent: types.Datum) -> Datum:
    """The datum of the conversation: its tokens must be those that were sent, and a line break that ends the turn."""
    targets, weights = (sent.loss_fn_inputs[name].to_numpy() for name in ("target_tokens", "weights"))
    (image,) = (chunk.data for chunk in sent.model_input.chunks if isinstance(chunk, types.ImageChunk))
    question = [{"type": "image", "image": image}, {"type": "text", "text": QUESTION}]
    answer = renderer.parse_response(targets[weights > 0].tolist()).to_message()
    sample = sample_from_rendered(build_training_sample(renderer, [{"role": "user", "content": question}, answer]))
    datum = datum_from_sample(sample, "cross_entropy")
    is_text = targets != 0  # the recipe has 0 for the placeholders of an image
    np.testing.assert_array_equal(datum.target_ids[:-1][is_text], targets[is_text])
    np.testing.assert_array_equal(datum.inputs["weights"][:-1], weights)
    return datum
