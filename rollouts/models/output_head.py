"""The output layer as numbers, checked against the model: softcap(scale * (hidden @ weight.T + bias)).

With them, log-probabilities are computed on chosen positions and in chunks; the full logits never exist.
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
import transformers

from rollouts.errors import UnsupportedModelError
from rollouts.models.architecture import FORWARD_ERRORS, Architecture, same_random_numbers, token_type_argument
from rollouts.models.forward import hidden_states
from rollouts.models.placed_rows import TokenRow, placed_rows

# Attributes of text configurations that limit, multiply or divide the logits.
_SOFTCAPS = ("final_logit_softcapping", "logits_soft_cap")
_MULTIPLIERS = ("logit_scale", "lm_head_multiplier", "output_multiplier")
_DIVISORS = ("logits_scaling", "logits_mup_width_multiplier")
# The largest difference from the model's own logits, relative to the largest logit.
_TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-3}
_LOW_PRECISION_TOLERANCE = 4e-2

# Softcap, scale and the number of logits; Inkling's weight has more rows.
_verified: WeakKeyDictionary[torch.nn.Module, tuple[float | None, float, int]] = WeakKeyDictionary()


class LowRank(NamedTuple):
    """What a LoRA adapter adds to a weight (V, H): `scale` times `up` (V, r) times `down` (r, H)."""

    down: torch.Tensor
    up: torch.Tensor
    scale: float


@dataclass(frozen=True, slots=True, eq=False)
class OutputHead:
    """`weight` (V, H) and `bias` (V,) or None are the model's parameters; `softcap` c is c * tanh(logits / c).

    `low_rank` is added to the weight by an adapter; None where there is none.
    """

    weight: torch.Tensor
    bias: torch.Tensor | None
    softcap: float | None
    scale: float
    low_rank: LowRank | None = None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Hidden states (..., H) of the last layer -> logits (..., V) of the same type."""
        logits = torch.nn.functional.linear(hidden, self.weight, self.bias)
        if self.low_rank is not None:
            down, up, scale = self.low_rank
            # In the dtype of the adapter, as PEFT computes it.
            logits = logits + (scale * (hidden.to(down.dtype) @ down.T @ up.T)).to(logits.dtype)
        logits = self.scale * logits
        return logits if self.softcap is None else self.softcap * torch.tanh(logits / self.softcap)


def output_head(architecture: Architecture) -> OutputHead:
    """The output head of a model; at first use its logits are compared with those of the model's forward.

    Raises `UnsupportedModelError` for an output layer that is no plain linear layer, and where the logits differ.
    """
    model = architecture.model
    layer = architecture.output_layer
    low_rank = _low_rank(layer)
    if low_rank is not None or getattr(layer, "disable_adapters", False):
        layer = layer.base_layer
    if not isinstance(layer, torch.nn.Linear) or list(layer.children()):
        raise UnsupportedModelError(
            architecture.model_type,
            f"its output layer is {type(layer).__name__}, not a torch.nn.Linear without parts; its "
            "log-probabilities cannot be computed in chunks. Merge adapters of the output layer into its "
            "weight",
        )
    if model not in _verified:
        _verified[model] = _matching(architecture, OutputHead(layer.weight, layer.bias, None, 1.0, low_rank))
    softcap, scale, count = _verified[model]
    if count == len(layer.weight):
        return OutputHead(layer.weight, layer.bias, softcap, scale, low_rank)
    bias = None if layer.bias is None else layer.bias[:count]
    low_rank = None if low_rank is None else low_rank._replace(up=low_rank.up[:count])
    return OutputHead(layer.weight[:count], bias, softcap, scale, low_rank)


def _low_rank(layer: Any) -> LowRank | None:
    """The adapter in a module of PEFT that does LoRA and nothing else; None for any other module."""
    names: list[str] = list(getattr(layer, "active_adapters", ()))
    if len(names) != 1 or names[0] not in getattr(layer, "lora_A", ()):
        return None
    (name,) = names
    drops = layer.training and not isinstance(layer.lora_dropout[name], torch.nn.Identity)
    if layer.disable_adapters or layer.merged or name in layer.lora_variant or drops:
        return None
    down, up = layer.lora_A[name], layer.lora_B[name]
    return None if up.bias is not None else LowRank(down.weight, up.weight, layer.scaling[name])


def _configured(architecture: Architecture) -> tuple[float | None, float]:
    """Softcap and scale that the configuration names."""
    config = architecture.text_config
    softcap = next((cap for name in _SOFTCAPS if (cap := getattr(config, name, None)) is not None), None)
    scale = 1.0
    for name in _MULTIPLIERS:
        scale *= getattr(config, name, None) or 1.0
    for name in _DIVISORS:
        scale /= getattr(config, name, None) or 1.0
    return (None if softcap is None else float(softcap)), float(scale)


def _matching(architecture: Architecture, head: OutputHead) -> tuple[float | None, float, int]:
    """Softcap and scale whose logits are those of the model's forward, and the number of logits.

    A class may ignore what its configuration names: Gemma 3 with images applies no `final_logit_softcapping`.
    """
    hidden, logits = _probe(architecture)
    _check_inputs(architecture, hidden)
    softcap, scale = _configured(architecture)
    candidates = dict.fromkeys([(softcap, scale), (None, scale), (softcap, 1.0), (None, 1.0)])
    differences = dict.fromkeys(candidates, float("inf"))
    count = logits.shape[-1]
    with torch.no_grad():
        for candidate in candidates if hidden.shape[-1] == head.weight.shape[1] and count <= len(head.weight) else ():
            computed = replace(head, softcap=candidate[0], scale=candidate[1]).logits(hidden)
            differences[candidate] = relative_difference(logits, computed[..., :count])
    best = min(differences, key=differences.__getitem__)  # the first of equals: as configured
    # Not `>`, with which NaN would pass.
    if not differences[best] <= tolerance(hidden.dtype):
        raise UnsupportedModelError(
            architecture.model_type,
            f"the logits of {type(architecture.model).__name__} differ from those computed of its hidden "
            f"states by {differences[best]:.1e} of the largest. Tried: weight and bias of the output layer, "
            f"with and without softcap {softcap} ({', '.join(_SOFTCAPS)}) and scale {scale} "
            f"({', '.join(_MULTIPLIERS + _DIVISORS)}). Its output layer does something else, so that "
            "token_logprobs could not be exact",
        )
    return *best, count


def _probe(architecture: Architecture) -> tuple[torch.Tensor, torch.Tensor]:
    """Hidden states and logits of four text tokens, from one forward pass of the model."""
    model, thread = architecture.model, threading.get_ident()
    captured: list[torch.Tensor] = []

    def capture(module: Any, args: Any, output: Any = None) -> None:
        if threading.get_ident() == thread:  # other threads may run the model meanwhile
            captured.append((args if output is None else output)[0])

    if architecture.base is model.base_model:
        hook = architecture.base.register_forward_hook(capture)
    else:  # a copy, which the model does not call
        hook = architecture.output_layer.register_forward_pre_hook(capture)
    try:
        with torch.no_grad(), same_random_numbers(architecture):
            logits = model(**_probe_inputs(architecture)).logits
    except torch.OutOfMemoryError:
        raise
    except FORWARD_ERRORS as error:
        raise UnsupportedModelError(
            architecture.model_type,
            f"the forward of {type(model).__name__} in transformers {transformers.__version__} failed for "
            f"four text tokens with {type(error).__name__}: {error}. Tried: input_ids and attention_mask "
            "alone. Call it yourself in this way and correct the model, or install a release of "
            "transformers in which it works",
        ) from error
    finally:
        hook.remove()
    if len(captured) != 1 or captured[0].shape[:-1] != logits.shape[:-1]:
        raise UnsupportedModelError(
            architecture.model_type,
            f"the forward of {type(model).__name__} does not call its base model "
            f"{type(architecture.base).__name__} once for all tokens (tried: a probe of four tokens), so "
            "the hidden states of its output layer are not known",
        )
    return captured[0], logits


def _check_inputs(architecture: Architecture, plain: torch.Tensor) -> None:
    """Check that positions and token types, given explicitly, leave the hidden states (1, 4, H) of text as they are.

    And that those of a token do not depend on later tokens.
    """
    ids = probe_ids(architecture)
    hidden, changed = text_states(architecture, ids), text_states(architecture, [*ids[:-1], ids[0]])
    types = token_type_argument(architecture, architecture.base) or "no token types"
    check_equal_states(
        architecture,
        (plain, hidden),
        "for four text tokens with explicit positions",
        f"from those without (tried: position_ids from 0, {types}). Its positions or token types mean "
        "something else, so that token_logprobs could not be exact",
    )
    check_equal_states(
        architecture,
        (hidden[:, :-1], changed[:, :-1]),
        "depend on later tokens: with another last token those of the first three",
        "(tried: four text tokens). Probabilities of sampled tokens are not known from one forward pass. "
        "Load it as a causal decoder",
    )


def check_equal_states(
    architecture: Architecture, states: tuple[torch.Tensor, torch.Tensor], when: str, consequence: str
) -> None:
    """Raise `UnsupportedModelError` for hidden states that differ more than rounding explains."""
    difference = relative_difference(*states)
    # Not `>`, with which NaN would pass.
    if not difference <= tolerance(states[0].dtype):
        name = type(architecture.base).__name__
        differ = f"the hidden states of {name} {when} differ by {difference:.1e} of the largest"
        raise UnsupportedModelError(architecture.model_type, f"{differ} {consequence}")


def text_states(architecture: Architecture, ids: Sequence[int]) -> torch.Tensor:
    """Hidden states (1, n, H) of a text, of a model in training mode with the same dropout each time."""
    with torch.no_grad(), same_random_numbers(architecture):
        return hidden_states(architecture, placed_rows([TokenRow(np.array(ids))], pad_id=0))[0]


def relative_difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest difference, relative to the largest value of the first."""
    one, other = one.float(), other.float()
    return float((one - other).abs().max() / one.abs().max().clamp(min=1e-6))


def tolerance(dtype: torch.dtype) -> float:
    """The largest `relative_difference` of equal computations in another order."""
    return _TOLERANCE.get(dtype, _LOW_PRECISION_TOLERANCE)


def probe_ids(architecture: Architecture) -> list[int]:
    """Four text tokens."""
    usual = range(len(architecture.placeholder_ids) + 4)
    return [token for token in usual if token not in architecture.placeholder_ids][:4]


def _probe_inputs(architecture: Architecture) -> Mapping[str, Any]:
    ids = torch.tensor([probe_ids(architecture)], device=architecture.model.device)
    name = token_type_argument(architecture, architecture.model)
    zeros = {} if name is None else {name: torch.zeros_like(ids)}
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False, "return_dict": True, **zeros}
