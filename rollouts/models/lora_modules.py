"""LoRA adapters over one model: PEFT makes their modules, which are in the model only while a block runs.

At all other times the model has its own modules. Its parameters then have the names of its checkpoint, and
any number of adapters share one copy of its weights.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from renderers.errors import MissingExtraError
from rollouts.errors import ArgumentError, UnsupportedModelError
from rollouts.models.architecture import EXTEND, Architecture
from rollouts.values import Bounded, number_field, whole_field

#: The largest value of vLLM's --max-lora-rank.
MAX_RANK = 512
#: PEFT's name of the only adapter in the modules that it makes here.
ADAPTER = "default"

#: Parts of the names of modules of attention, and of their classes.
_ATTENTION = ("attn", "attention")
#: Classes with a recurrent state: their fast kernels read the weights of their layers, and would pass an adapter by.
_STATE_SPACE = "Mixer"
#: Names of modules that choose experts.
_ROUTERS = frozenset({"gate", "router", "shared_expert_gate"})


@dataclass(frozen=True, slots=True)
class LoraOptions(Bounded):
    """A LoRA adapter (Hu et al. 2021, arXiv:2106.09685) on linear layers of the language model.

    `rank` of its matrices; their product is multiplied by `alpha` / `rank`. `seed` of the random initial
    values; None: another one each time. `train_attn`, `train_mlp` and `train_unembed` name the layers: those
    of attention, those of the MLPs, and the output layer. Raises `ArgumentError`.
    """

    rank: int = whole_field(32, most=MAX_RANK)
    alpha: float = number_field(32.0, above=0)
    seed: int | None = whole_field(None, least=0, most=2**63 - 1)
    train_mlp: bool = True
    train_attn: bool = True
    train_unembed: bool = True

    def __post_init__(self) -> None:
        Bounded.__post_init__(self)
        if not (self.train_mlp or self.train_attn or self.train_unembed):
            raise ArgumentError("train_mlp, train_attn and train_unembed", False, "set at least one of them")


class Replacement(NamedTuple):
    """The module `name` of `parent`: the model's own, and that of the adapter."""

    parent: torch.nn.Module
    name: str
    own: torch.nn.Module
    adapted: torch.nn.Module


@contextmanager
def inserted(replacements: Sequence[Replacement]) -> Iterator[None]:
    """The model has the modules of an adapter inside the block, and its own after it."""
    try:
        for each in replacements:
            setattr(each.parent, each.name, each.adapted)
        yield
    finally:
        for each in replacements:
            setattr(each.parent, each.name, each.own)


def replacements_by(modules: Mapping[str, torch.nn.Module], adapted: Mapping[str, Any]) -> tuple[Replacement, ...]:
    """What puts the modules `adapted` into the place of those of the model, `modules`, of the same names."""
    return tuple(
        Replacement(modules[name.rpartition(".")[0]], name.rpartition(".")[2], modules[name], module)
        for name, module in adapted.items()
    )


def lora_modules(modules: Mapping[str, torch.nn.Module], names: Sequence[str], **fields: Any) -> dict[str, Any]:
    """The modules of PEFT, by name, for the linear layers `names` of a model with `modules`; in evaluation mode.

    `fields` are those of `peft.LoraConfig`. The model itself is not changed. Raises what PEFT raises, and
    `MissingExtraError` without it.
    """
    peft = peft_package()
    # PEFT replaces modules of what it is given. The model may run meanwhile, so this is a tree of the same modules.
    tree = torch.nn.Module()
    for name in names:
        *parents, attribute = name.split(".")
        node = tree
        for parent in parents:
            if parent not in node._modules:
                node.add_module(parent, torch.nn.Module())
            node = node.get_submodule(parent)
        node.add_module(attribute, modules[name])
    requires_grad = [(parameter, parameter.requires_grad) for parameter in tree.parameters()]
    try:
        peft.inject_adapter_in_model(peft.LoraConfig(**fields, target_modules=sorted(names)), tree, ADAPTER)
    finally:
        for parameter, value in requires_grad:  # PEFT has frozen them
            parameter.requires_grad_(value)
    return {name: tree.get_submodule(name).eval() for name in names}


def peft_package() -> Any:
    """The package `peft`. Raises `MissingExtraError`."""
    try:
        import peft
    except ImportError as error:
        raise MissingExtraError("a LoRA adapter", "lora", "peft") from error
    return peft


def has_lora_modules(modules: Mapping[str, torch.nn.Module]) -> bool:
    """Whether PEFT has put adapters into a model."""
    peft_package()
    from peft.tuners.tuners_utils import BaseTunerLayer

    return any(isinstance(module, BaseTunerLayer) for module in modules.values())


def linear_layers(architecture: Architecture, lora: LoraOptions) -> list[str]:
    """The names of the layers that `lora` names: linear layers of the language model.

    Towers and their projectors, routers of experts and state-space layers have none. Raises
    `UnsupportedModelError` where a kind that is asked for has no linear layer: experts can be one parameter
    without modules.
    """
    model = architecture.model
    modules = dict(model.named_modules())
    decoder = {id(module) for module in model.get_decoder().modules()}
    if (towers := getattr(model.get_decoder(), EXTEND, None)) is not None:  # Phi-4 has its towers in its decoder
        decoder -= {id(module) for module in towers.modules()}
    found: dict[str, list[str]] = {"train_attn": [], "train_mlp": [], "train_unembed": []}
    for name, module in modules.items():
        if not isinstance(module, torch.nn.Linear):
            continue
        if module is model.get_output_embeddings():
            found["train_unembed"].append(name)
        elif id(module) in decoder and not _ROUTERS & {*name.split(".")}:
            owner = type(modules[name.rpartition(".")[0]]).__name__
            if not owner.endswith(_STATE_SPACE):
                mixes = any(word in f"{name}.{owner}".lower() for word in _ATTENTION)
                found["train_attn" if mixes else "train_mlp"].append(name)
    wanted = [option for option in found if getattr(lora, option)]
    for option in wanted:
        if not found[option]:
            raise UnsupportedModelError(
                architecture.model_type,
                f"{option} names no torch.nn.Linear of it that LoRA can change (experts are often one "
                f"parameter, and state-space layers read their weights directly); pass {option}=False",
            )
    return [name for option in wanted for name in found[option]]
