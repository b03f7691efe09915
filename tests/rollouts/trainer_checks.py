"""What a `Trainer` computes, by a plain loop over the models of transformers and PEFT, and its gradients read back."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import peft
import torch
from safetensors.torch import load_file

from rollouts.models.loading import load_model
from rollouts.training import TrainingBatch, TrainingSample, model_inputs
from rollouts.training.trainer import AdamParams, Datum, LoraOptions, Trainer, datum_from_sample

#: With these numbers the first step of AdamW subtracts the gradient itself: lr * g / (|g| + eps) is g.
PLAIN_STEP = AdamParams(learning_rate=1e10, eps=1e10)
SMALL = LoraOptions(rank=4, alpha=8, seed=1, train_unembed=False)


def random_weights(sample: TrainingSample, seed: int) -> Datum:
    """A datum for cross-entropy with a random weight, negative ones too, on every trained token."""
    datum = datum_from_sample(sample, "cross_entropy")
    weights = np.random.default_rng(seed).normal(size=len(datum)).astype(np.float32)
    return Datum(
        datum.token_ids, datum.target_ids, {"weights": np.where(sample.loss_mask[1:], weights, 0)}, datum.media
    )


def plain_logprobs(model: Any, sample: TrainingSample) -> torch.Tensor:
    """log p of every token of a sample but the first, (n - 1,), from all logits of the model's own forward."""
    batch = TrainingBatch.from_samples([sample], pad_id=0)
    logits = model(**model_inputs(batch, model), use_cache=False).logits[0, :-1].float()
    ids = torch.from_numpy(sample.token_ids[1:].astype(np.int64))
    return torch.log_softmax(logits, -1).gather(1, ids[:, None])[:, 0]


def plain_gradients(model: Any, samples: Sequence[TrainingSample], data: Sequence[Datum]) -> dict[str, np.ndarray]:
    """The gradients of -sum(w log p), one row at a time, by the names of the parameters that have one."""
    for sample, datum in zip(samples, data, strict=True):
        (-(torch.from_numpy(datum.inputs["weights"]) * plain_logprobs(model, sample)).sum()).backward()
    return {name: parameter.grad.numpy() for name, parameter in model.named_parameters() if parameter.grad is not None}


def exported(trainer: Trainer, model_id: str, directory: Path) -> dict[str, np.ndarray]:
    """The parameters of a model, by the names of the files that `save_for_sampler` writes."""
    trainer.save_for_sampler(model_id, directory)
    return {name: value.numpy() for path in directory.glob("*.safetensors") for name, value in load_file(path).items()}


def gradients(trainer: Trainer, model_id: str, directory: Path) -> dict[str, np.ndarray]:
    """The accumulated gradients of a model that has had no step: what `PLAIN_STEP` subtracts from its parameters."""
    before = exported(trainer, model_id, directory / "before")
    trainer.optim_step(model_id, PLAIN_STEP)
    after = exported(trainer, model_id, directory / "after")
    return {name: before[name] - after[name] for name in before}


def peft_model(base: Path, adapter: Path) -> Any:
    """The model of PEFT for an exported adapter, whose parameters have the names of the export in `plain_names`."""
    return peft.PeftModel.from_pretrained(load_model(base), adapter, is_trainable=True).eval()


def plain_names(named: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Names of parameters of a `PeftModel` as files have them."""
    return {name.replace(".default.", "."): value for name, value in named.items()}


def with_nonzero_adapter(trainer: Trainer, model_id: str, data: Sequence[Datum], lora: LoraOptions = SMALL) -> None:
    """Create a model and change it: the product of a new adapter's matrices is 0, which hides half of its gradients."""
    trainer.create_model(model_id, lora=lora)
    trainer.forward_backward(model_id, data, "cross_entropy")
    trainer.optim_step(model_id, AdamParams(learning_rate=0.05))
