"""The experts of a sampler in the place of those that a model chooses in its forward pass, differentiable.

"Rollout routing replay" (Ma et al. 2025, arXiv:2510.11370): the router's scores at the sampler's experts.
"""

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.overrides import TorchFunctionMode

from rollouts.errors import ArgumentError, UnsupportedModelError
from rollouts.models.architecture import Architecture
from rollouts.models.output_head import check_equal_states, probe_ids, relative_difference, text_states

# transformers' name for what it records of the modules that choose experts.
_RECORDED = "router_logits"
_TOPK, _MASKED_FILL = (torch.topk, torch.Tensor.topk), (torch.masked_fill, torch.Tensor.masked_fill)

#: The experts (tokens, k) that take the place of those that a router has chosen, of its scores.
_Replace = Callable[[torch.Tensor], torch.Tensor]

#: The number of experts a token of models that `check_replay` has found to compute with given ones.
_verified: WeakKeyDictionary[torch.nn.Module, int] = WeakKeyDictionary()


def num_experts(architecture: Architecture) -> int:
    """The number of experts of a layer; 0 for a model that routes to none."""
    # Names in configurations for the number of experts, and for how many of them a token takes.
    numbers = [
        getattr(architecture.text_config, name, None)
        for name in ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
    ]
    return max([number for number in numbers if isinstance(number, int) and number > 1], default=0)


@contextmanager
def replayed_experts(architecture: Architecture, experts: np.ndarray | None) -> Iterator[None]:
    """Inside, a forward pass over rows (B, T) takes `experts` in place of those that its routers choose.

    `experts` are integers (B, T, layers, experts a token), -1 where the model's own remain; None: everywhere.
    The layers are those with routers, or all of the model. The weights of the experts are what the model
    computes for these experts from its router's scores, with their gradients; also where layers are computed
    again in the backward pass (gradient checkpointing, not the reentrant one).

    Raises `ArgumentError` for experts of another number of layers or beyond those of the model, and
    `UnsupportedModelError` as `check_replay` does.
    """
    if experts is None:
        yield
        return
    taken, routers, count = check_replay(architecture), _routers(architecture), num_experts(architecture)
    if len(wrong := experts[(experts < -1) | (experts >= count)]):
        raise ArgumentError("an expert", int(wrong[0]), f"pass those of this model, from 0 to {count - 1}")
    if experts.shape[3] != taken:
        raise ArgumentError("the number of experts a token", experts.shape[3], f"pass {taken} for this model")
    layers = _layers_of(architecture, [name for name, _ in routers], experts.shape[2])
    of_tokens = torch.from_numpy(experts.reshape(-1, *experts.shape[2:]).astype(np.int64))
    of_tokens = of_tokens.to(architecture.model.device)
    given = [partial(_given, of_tokens[:, layer]) for layer in layers]

    def contexts() -> tuple[Any, Any]:
        return nullcontext(), _replaced(architecture, given)

    with ExitStack() as replaced:
        for module in architecture.base.modules():
            if (checkpoint := getattr(module, "_gradient_checkpointing_func", None)) is not None:
                again = partial(checkpoint, context_fn=contexts)
                replaced.enter_context(_attribute(module, "_gradient_checkpointing_func", again))
        replaced.enter_context(_replaced(architecture, given))
        yield


def check_replay(architecture: Architecture) -> int:
    """The number of experts a token of a model in which `replayed_experts` computes with given experts.

    At first use the model runs on four text tokens. With its own experts in another order it has to compute
    the same, up to rounding, and with others something else. Its routers must be modules that transformers
    names, and choose by one `topk` over all experts. Raises `UnsupportedModelError`.
    """
    if architecture.model in _verified:
        return _verified[architecture.model]
    numbers: list[int] = []
    count, routers = num_experts(architecture), _routers(architecture)

    def states(replace: _Replace) -> torch.Tensor:
        with _replaced(architecture, [replace] * len(routers)):
            return text_states(architecture, probe_ids(architecture))

    def own_choice(chosen: torch.Tensor) -> torch.Tensor:
        numbers.append(chosen.shape[-1])
        return chosen

    own, turned = states(own_choice), states(lambda chosen: chosen.flip(-1))
    consequence = "so that given experts would not be weighted as it weights its own"
    check_equal_states(architecture, (own, turned), "with its experts in another order", consequence)
    others = states(lambda chosen: (chosen + 1) % count)
    if not relative_difference(own, others) > relative_difference(own, turned):
        reason = "the experts that its routers return do not change its hidden states"
        raise UnsupportedModelError(architecture.model_type, reason)
    return _verified.setdefault(architecture.model, numbers[0])


@contextmanager
def _replaced(architecture: Architecture, replace: Sequence[_Replace]) -> Iterator[None]:
    """Inside, the routers choose what the function of each makes of its own choice."""
    with ExitStack() as replaced:
        for (_, router), function in zip(_routers(architecture), replace, strict=True):
            forward = _replacing(architecture, router.forward, function)
            replaced.enter_context(_attribute(router, "forward", forward))
        yield


def _given(given: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Given experts (tokens, k) in place of the chosen ones, but for those that are -1."""
    if len(given) != len(chosen):  # Ernie 4.5 VL has other routers for the tokens of images
        rule = f"its router chooses for {len(chosen)}, not for all of a pass, and cannot take given experts"
        raise ArgumentError("the number of tokens of a layer", len(given), rule)
    given = given.to(chosen.device)
    return torch.where((given >= 0).all(dim=-1, keepdim=True), given, chosen)


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


def _replacing(architecture: Architecture, forward: Any, replace: _Replace) -> Any:
    """`forward` of a router with other experts in place of its own."""
    count = num_experts(architecture)

    def replacing(*args: Any, **kwargs: Any) -> Any:
        with _ReplacedTopK(replace, count) as replaced:
            result = forward(*args, **kwargs)
        if replaced.calls != 1:
            reason = f"its routers call topk over all {count} experts {replaced.calls} times instead of once"
            raise UnsupportedModelError(architecture.model_type, reason)
        return result

    return replacing


class _ReplacedTopK(TorchFunctionMode):
    """Inside, `topk` over the experts of all tokens returns other experts and their values."""

    def __init__(self, replace: _Replace, count: int) -> None:
        super().__init__()
        self.calls = 0
        self._replace, self._count = replace, count
        self._masked: Any = (None, None)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _MASKED_FILL:
            self._masked = (result, args[0])
        if func not in _TOPK:
            return result
        values, chosen = args[0] if args else kwargs["input"], result.indices
        if values.shape[-1] != self._count or _is_one_group(values):
            return result  # of groups of experts
        self.calls += 1
        replaced = self._replace(chosen.reshape(-1, chosen.shape[-1])).reshape(chosen.shape)
        # DeepSeek V2 weights experts by scores that are 0 outside of the groups that it chose.
        masked, scores = self._masked
        values = scores if values is masked else values
        return torch.return_types.topk((values.gather(-1, replaced), replaced))


def _is_one_group(scores: torch.Tensor) -> bool:
    """Whether these are the scores of a single group of experts, (tokens, 1, experts)."""
    return scores.ndim == 3 and scores.shape[0] > 1 and scores.shape[1] == 1
