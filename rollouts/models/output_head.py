"""The output layer of a model as numbers, checked against the model: softcap(scale * (hidden @ weight.T + bias)).

With them, log-probabilities are computed on chosen positions and in chunks; the full logits never exist.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch

from rollouts.errors import UnsupportedModelError
from rollouts.models.architecture import Architecture

# Attributes of text configurations that multiply or divide the logits.
_MULTIPLIERS = ("logit_scale", "lm_head_multiplier")
_DIVISORS = ("logits_scaling",)
# The largest difference from the model's own logits, relative to the largest logit.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
_LOW_PRECISION_TOLERANCE = 4e-2

_verified: WeakKeyDictionary[torch.nn.Module, tuple[float | None, float]] = WeakKeyDictionary()


@dataclass(frozen=True, slots=True, eq=False)
class OutputHead:
    """`weight` (V, H) and `bias` (V,) or None are the model's parameters; `softcap` c is c * tanh(logits / c)."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    softcap: float | None
    scale: float

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states (..., H) of the last layer -> logits (..., V) of the same type."""
        logits = self.scale * torch.nn.functional.linear(hidden, self.weight, self.bias)
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def output_head(architecture: Architecture) -> OutputHead:
    """The output head of a model; at first use its logits are compared with those of the model's forward.

    Raises `UnsupportedModelError` for an output layer that is no plain linear layer, and where the logits differ.
    """
    model = architecture.model
    layer = model.get_output_embeddings()
    if not isinstance(layer, torch.nn.Linear) or list(layer.children()):
        raise UnsupportedModelError(
            architecture.model_type,
            f"its output layer is {type(layer).__name__}, not a torch.nn.Linear without parts; its log-probabilities "
            "cannot be computed in chunks. Merge adapters of the output layer into its weight",
        )
    if model not in _verified:
        _verified[model] = _matching(architecture, layer)
    softcap, scale = _verified[model]
    return OutputHead(layer.weight, layer.bias, softcap, scale)


def _configured(architecture: Architecture) -> tuple[float | None, float]:
    """Softcap and scale that the configuration names."""
    config = architecture.text_config
    softcap = getattr(config, "final_logit_softcapping", None)
    scale = 1.0
    for name in _MULTIPLIERS:
        scale *= getattr(config, name, None) or 1.0
    for name in _DIVISORS:
        scale /= getattr(config, name, None) or 1.0
    return (None if softcap is None else float(softcap)), float(scale)


def _matching(architecture: Architecture, layer: torch.nn.Linear) -> tuple[float | None, float]:
    """Softcap and scale whose logits are those of the model's forward.

    A class may ignore what its configuration names: Gemma 3 with images applies no `final_logit_softcapping`.
    """
    hidden, logits = _probe(architecture)
    own = logits.float()
    softcap, scale = _configured(architecture)
    candidates = dict.fromkeys([(softcap, scale), (None, scale), (softcap, 1.0), (None, 1.0)])
    differences = {}
    with torch.no_grad():
        for candidate in candidates:
            computed = OutputHead(layer.weight, layer.bias, *candidate).logits(hidden).float()
            differences[candidate] = float((own - computed).abs().max() / own.abs().max().clamp(min=1e-6))
    best = min(differences, key=differences.__getitem__)  # the first of equals: as configured
    if not differences[best] <= _TOLERANCE.get(hidden.dtype, _LOW_PRECISION_TOLERANCE):
        raise UnsupportedModelError(
            architecture.model_type,
            f"the logits of {type(architecture.model).__name__} differ from those computed of its hidden states by "
            f"{differences[best]:.1e} of the largest. Tried: weight and bias of get_output_embeddings(), with and "
            f"without softcap {softcap} (final_logit_softcapping) and scale {scale} "
            f"({', '.join(_MULTIPLIERS + _DIVISORS)}). Its output layer does something else, so that token_logprobs "
            "could not be exact",
        )
    return best


def _probe(architecture: Architecture) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits of four text tokens, from one forward pass of the model."""
    model, thread = architecture.model, threading.get_ident()
    captured: list[torch.Tensor] = []

    def capture(module: Any, args: Any, output: Any) -> None:
        if threading.get_ident() == thread:  # other threads may run the model meanwhile
            captured.append(output[0])

    hook = architecture.base.register_forward_hook(capture)
    try:
        with torch.no_grad():
            logits = model(**_probe_inputs(architecture)).logits
    finally:
        hook.remove()
    if len(captured) != 1 or captured[0].shape[:-1] != logits.shape[:-1]:
        raise UnsupportedModelError(
            architecture.model_type,
            f"the forward of {type(model).__name__} does not call its base model {type(architecture.base).__name__} "
            "once for all tokens (tried: a probe of four tokens), so the hidden states of its output layer are not "
            "known",
        )
    return captured[0], logits


def _probe_inputs(architecture: Architecture) -> Mapping[str, Any]:
    usual = range(len(architecture.placeholder_ids) + 4)
    chosen = [token for token in usual if token not in architecture.placeholder_ids][:4]
    ids = torch.tensor([chosen], device=architecture.model.device)
    zeros = dict.fromkeys(architecture.token_types(architecture.model), torch.zeros_like(ids))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False, "return_dict": True, **zeros}
