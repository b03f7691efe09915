"""The experts that a model chooses in a forward pass: recorded, and replaced by given ones."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from rollouts.errors import ArgumentError, UnsupportedModelError
from rollouts.models.architecture import Architecture

# transformers' name for what it records of the modules that choose experts.
_RECORDED = "router_logits"
_TOPK = (torch.topk, torch.Tensor.topk)


@dataclass(slots=True)
class RoutingComparison:
    """`choices`: how often a layer chose the experts of a token; `different`: how often it chose others."""

    choices: int = 0
    different: int = 0


def num_experts(architecture: Architecture) -> int:
    """The number of experts of a layer; 0 for a model that routes to none."""
    # Names in configurations for the number of experts, and for how many of them a token takes.
    numbers = [
        getattr(architecture.text_config, name, None)
        for name in ("num_experts", "num_local_experts", "n_routed_experts")
    ]
    return max([number for number in numbers if isinstance(number, int) and number > 1], default=0)


@contextmanager
def replayed_experts(architecture: Architecture, experts: np.ndarray) -> Iterator[RoutingComparison]:
    """Inside, a forward pass over one row of n tokens takes `experts` in place of those that its routers choose.

    `experts` are integers (n - 1, layers, experts a token) for all tokens but the last, which keeps its own:
    the layers are those with routers, or all of the model. The weights of the experts are the model's own.
    The comparison has how many choices differed, the order of a token's experts left out.

    Raises `ArgumentError` for experts of another number of layers or beyond those of the model, and
    `UnsupportedModelError` for a model whose routers transformers does not name, or which do not choose by
    one `topk` over all experts.
    """
    routers = _routers(architecture)
    count = num_experts(architecture)
    if experts.size and not 0 <= int(experts.min()) <= int(experts.max()) < count:
        numbers = f"from {experts.min()} to {experts.max()}"
        raise ArgumentError("experts", numbers, f"pass those of this model, from 0 to {count - 1}")
    layers = _layers_of(architecture, [name for name, _ in routers], experts.shape[1])
    comparison = RoutingComparison()
    with ExitStack() as replaced:
        for (_, router), layer in zip(routers, layers, strict=True):
            forward = _replaying(architecture.model_type, router.forward, experts[:, layer], count, comparison)
            replaced.enter_context(_attribute(router, "forward", forward))
        yield comparison


def _routers(architecture: Architecture) -> list[tuple[str, Any]]:
    """The modules that choose experts, by name, in the order of layers."""
    classes: list[type] = []
    layer_names: list[str] = []
    for module in architecture.base.modules():
        recorded = (getattr(module, "_can_record_outputs", None) or {}).get(_RECORDED)
        for recorder in recorded if isinstance(recorded, list) else [recorded]:
            if (target := getattr(recorder, "target_class", recorder)) is not None:
                classes.append(target)
                layer_names.append(getattr(recorder, "layer_name", None) or "")
    found = [
        (name, module)
        for name, module in architecture.base.named_modules()
        if isinstance(module, tuple(classes))
        and any(isinstance(module, each) and part in name for each, part in zip(classes, layer_names, strict=True))
    ]
    if not found:
        reason = "transformers does not name the modules that choose its experts"
        raise UnsupportedModelError(architecture.model_type, f"{reason} (tried: _can_record_outputs[{_RECORDED!r}])")
    return found


def _layers_of(architecture: Architecture, names: Sequence[str], recorded: int) -> list[int]:
    """For each router the index of its layer among the `recorded` ones."""
    if recorded == len(names):
        return list(range(recorded))
    numbers = [re.search(r"\blayers\.(\d+)\.", name) for name in names]
    if recorded == architecture.text_config.num_hidden_layers and all(numbers):
        return [int(number[1]) for number in numbers if number]
    rule = f"pass those of the {len(names)} layers of this model that have routers, or those of all its layers"
    raise ArgumentError("the number of layers of experts", recorded, rule)


@contextmanager
def _attribute(module: Any, name: str, value: object) -> Iterator[None]:
    """Inside, an attribute of a module has another value."""
    before = vars(module).get(name)
    setattr(module, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(module, name)  # that of its class is found again
        else:
            setattr(module, name, before)


def _replaying(
    model_type: str, forward: Callable[..., Any], experts: np.ndarray, count: int, comparison: RoutingComparison
) -> Callable[..., Any]:
    """`forward` of a router with the experts int (n - 1, k) of one layer in place of its own."""

    def replaying(*args: Any, **kwargs: Any) -> Any:
        with _ReplacedTopK(experts, count, comparison) as replaced:
            result = forward(*args, **kwargs)
        if replaced.calls != 1:
            topk = f"topk for {experts.shape[1]} of all {count} experts"
            reason = f"its routers call {topk} {replaced.calls} times instead of once"
            raise UnsupportedModelError(model_type, reason)
        return result

    return replaying


class _ReplacedTopK(TorchFunctionMode):
    """Inside, `topk` over the experts of all tokens returns the given experts and their values."""

    def __init__(self, experts: np.ndarray, count: int, comparison: RoutingComparison) -> None:
        super().__init__()
        self.calls = 0
        self._experts, self._count, self._comparison = experts, count, comparison

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func not in _TOPK:
            return result
        values, chosen = args[0] if args else kwargs["input"], result.indices
        if values.shape[-1] != self._count or chosen.shape[-1] != self._experts.shape[1] or _is_one_group(values):
            return result  # of groups of experts
        self.calls += 1
        own = chosen.reshape(-1, chosen.shape[-1])
        if len(own) != len(self._experts) + 1:
            rule = f"pass one row for each of the {len(own)} tokens but the last"
            raise ArgumentError("the number of rows of experts", len(self._experts), rule)
        given = torch.from_numpy(self._experts.astype(np.int64)).to(own.device)
        self._comparison.choices += len(given)
        self._comparison.different += int((given.sort().values != own[:-1].sort().values).any(dim=-1).sum())
        replaced = torch.cat([given, own[-1:]]).reshape(chosen.shape)
        return torch.return_types.topk((values.gather(-1, replaced), replaced))


def _is_one_group(scores: torch.Tensor) -> bool:
    """Whether these are the scores of a single group of experts, (tokens, 1, experts)."""
    return scores.ndim == 3 and scores.shape[0] > 1 and scores.shape[1] == 1
