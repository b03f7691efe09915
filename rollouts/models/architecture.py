"""What a forward pass needs to know about a model, read from its classes and its configuration."""

import contextlib
import functools
import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from rollouts.errors import UnsupportedModelError

# Names in configurations for the ids that stand for rows of features.
_PLACEHOLDER_IDS = (
    "image_token_id",
    "image_token_index",
    "video_token_id",
    "video_token_index",
    "audio_token_id",
    "audio_token_index",
    "media_placeholder_token_id",
)
#: Methods that search the ids for placeholders when features are written into the embeddings.
SEARCHES = ("get_placeholder_mask", "inputs_merger")
# Those of one model each, which `sounds_by_range` replaces.
#: The module with which Phi-4-multimodal writes the features of images and sounds into the embeddings.
EXTEND = "embed_tokens_extend"
#: Qwen2-Audio searches for placeholders in its forward, and calls this method where none has a neighbour.
MERGE = "_merge_input_ids_with_audio_features"

# Model types whose `token_type_ids` are `mm_token_type_ids`. Elsewhere the name means something else: the
# prefix that PaliGemma attends in both directions, or an embedding that is added, as in BERT and GPT-2.
_IMAGE_TOKEN_TYPES = frozenset({"gemma3", "gemma3n"})
#: Errors that the code of a model raises for inputs that it cannot take.
FORWARD_ERRORS = (AttributeError, IndexError, KeyError, NotImplementedError, RuntimeError, TypeError, ValueError)


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model, and what its classes tell.

    `base` gives hidden states: the base model, or where that is the model itself, a copy without the output
    layer. `placeholder_ids` are the token ids that stand for features; `mrope`: positions have three axes
    (`get_rope_index` computes them); `search`: the name of the attribute of `base` that looks for
    placeholders by id, None where there is none.
    """

    model: Any
    model_type: str
    base: Any
    placeholder_ids: frozenset[int]
    mrope: bool
    search: str | None

    @property
    def output_layer(self) -> Any:
        """The layer that makes logits of hidden states. Adapters that come and go replace it."""
        return _output_layer(self.model)

    @property
    def text_config(self) -> Any:
        return self.model.config.get_text_config()

    @property
    def attention(self) -> str:
        """The implementation of attention that the text model has now."""
        return str(getattr(self.text_config, "_attn_implementation", None))

    @property
    def floor_scale(self) -> int | None:
        """The column of a row from which on Llama 4 scales its scores; None for other models."""
        scale = getattr(self.text_config, "floor_scale", None)
        return None if scale is None else int(scale)

    @property
    def longrope_length(self) -> int | None:
        """The tokens up to which LongRoPE (Phi-3, MiniCPM3) takes its short factors; None for other models.

        transformers takes the long ones for all rows of a pass in which one is longer.
        """
        rope = getattr(self.text_config, "rope_parameters", None) or {}
        kinds = [rope, *(each for each in rope.values() if isinstance(each, dict))]  # one for each type of layer
        if not any(kind.get("rope_type") == "longrope" for kind in kinds):
            return None
        own = rope.get("original_max_position_embeddings")
        return own or getattr(self.text_config, "original_max_position_embeddings", None)

    @property
    def max_length(self) -> int | None:
        """The largest number of tokens of a row; None: the configuration names none."""
        lengths = (getattr(self.text_config, "max_position_embeddings", None), self.longrope_length)
        return min((length for length in lengths if length is not None), default=None)

    @property
    def neutral_id(self) -> int:
        """The smallest token id that is no placeholder."""
        return next(token for token in range(len(self.placeholder_ids) + 1) if token not in self.placeholder_ids)


def architecture(model: Any) -> Architecture:
    """Raises `UnsupportedModelError` for an object that is no model of transformers with an output layer."""
    model = _without_adapters(model)
    config = getattr(model, "config", None)
    model_type = str(getattr(config, "model_type", type(model).__name__))
    base: Any = getattr(model, "base_model", None)
    if not _is_model_of_transformers(model):
        wraps = _is_model_of_transformers(_without_adapters(getattr(model, "module", None)))
        raise UnsupportedModelError(
            model_type,
            "it is no model of transformers (tried: config, base_model). "
            + ("It wraps one: pass model.module" if wraps else "Pass one that an Auto class loads"),
        )
    if hasattr(model, "thinker"):  # and a talker
        raise UnsupportedModelError(
            model_type, "it is an Omni model with its talker, and what samples text is its thinker: pass model.thinker"
        )
    if getattr(config, "is_encoder_decoder", False) and "decoder_input_ids" in forward_parameters(model):
        raise UnsupportedModelError(
            model_type,
            f"{type(model).__name__} has an encoder and a decoder, and a row here is one sequence of "
            "tokens. Load a model that continues its prompt",
        )
    output_layer = _output_layer(model)
    if output_layer is None:
        raise UnsupportedModelError(
            model_type,
            f"{type(model).__name__} has no output layer for tokens (tried: get_output_embeddings() of the "
            "model and of its parts). Load a class for causal or conditional generation",
        )
    if base is model:
        base = _without_output_layer(model, output_layer)
    mrope = hasattr(base, "get_rope_index")
    if (
        mrope
        and not {"mm_token_type_ids", "use_audio_in_video"} & inspect.signature(base.get_rope_index).parameters.keys()
    ):
        raise UnsupportedModelError(
            model_type,
            f"{type(base).__name__}.get_rope_index of this transformers finds images by token id and takes "
            "no mm_token_type_ids. Upgrade transformers",
        )
    return Architecture(
        model=model,
        model_type=model_type,
        base=base,
        placeholder_ids=placeholder_ids(config),
        mrope=mrope,
        search=next((name for name in (*SEARCHES, EXTEND, MERGE) if hasattr(base, name)), None),
    )


def _output_layer(model: Any) -> Any:
    """The layer that makes the logits; if the model does not tell, that of the only part that has one. None: none."""
    if (layer := model.get_output_embeddings()) is not None:
        return layer
    parts = [part for part in model.children() if hasattr(part, "get_output_embeddings")]
    layers = [layer for part in parts if (layer := part.get_output_embeddings()) is not None]
    return layers[0] if len(layers) == 1 else None


def _without_output_layer(model: Any, output_layer: Any) -> Any:
    """A copy of a model whose forward gives the hidden states of the last layer in the place of logits.

    Llama 4 with images needs it: the language model in it has its own output layer. All modules are those of
    the model, but for the ones around the output layer, which are copied.
    """
    *around, last = next(name for name, each in model.named_modules() if each is output_layer).split(".")
    part = copied = _with_own_modules(model)
    for name in around:
        part._modules[name] = inner = _with_own_modules(part._modules[name])
        part = inner
    part._modules[last] = torch.nn.Identity()
    return copied


def _with_own_modules(module: Any) -> Any:
    copied = shallow_copy(module)
    vars(copied)["_modules"] = {**module._modules}
    return copied


def shallow_copy(module: Any) -> Any:
    """Another module with the attributes of `module`: its parameters, submodules and hooks are the same objects."""
    copied = object.__new__(type(module))  # `copy` calls the class of a module that FSDP divides
    vars(copied).update(vars(module))
    return copied


def _without_adapters(model: Any) -> Any:
    """The model that one of PEFT wraps, with its adapters in its modules. Any other as it is."""
    unwrap = getattr(model, "get_base_model", None)
    return model if unwrap is None else unwrap()


def _is_model_of_transformers(model: Any) -> bool:
    return (
        isinstance(model, torch.nn.Module)
        and hasattr(getattr(model, "config", None), "get_text_config")
        and getattr(model, "base_model", None) is not None
    )


def placeholder_ids(config: Any) -> frozenset[int]:
    """The token ids that stand for features of images, videos or sound; empty for a text model."""
    parts = (config, getattr(config, "vision_config", None), getattr(config, "audio_config", None))  # the last: Phi-4
    values = (getattr(part, name, None) for part in parts for name in _PLACEHOLDER_IDS)
    return frozenset(value for value in values if isinstance(value, int) and not isinstance(value, bool))


def forward_parameters(module: Any) -> frozenset[str]:
    """The keyword arguments that `module.forward` names."""
    return parameters_of(module.forward)


def cache_argument(function: Any) -> str:
    """The name under which `function` of transformers takes its key-value cache; releases have one or the other."""
    return "cache" if "cache" in parameters_of(function) else "past_key_values"


def parameters_of(function: Any) -> frozenset[str]:
    """The names of the parameters of a function or a bound method."""
    return _parameters(getattr(function, "__func__", function))


@functools.lru_cache(maxsize=256)  # sampling asks for each token
def _parameters(function: Any) -> frozenset[str]:
    """The names of the parameters of a function; not of a bound method, whose model would be kept."""
    return frozenset(inspect.signature(function).parameters)


def token_type_argument(architecture: Architecture, module: Any, *, with_media: bool = False) -> str | None:
    """The argument of `module.forward` that takes 1 on tokens of images, 2 of videos, 3 of sounds, 0 on text.

    None if there is none. Raises `UnsupportedModelError` `with_media` for `token_type_ids` of another meaning.
    """
    takes = forward_parameters(module)
    if "mm_token_type_ids" in takes:
        return "mm_token_type_ids"
    if "token_type_ids" not in takes or not architecture.placeholder_ids:
        return None
    if architecture.model_type in _IMAGE_TOKEN_TYPES:
        return "token_type_ids"
    if with_media:
        raise UnsupportedModelError(
            architecture.model_type,
            f"{type(module).__name__}.forward takes token_type_ids, whose meaning is not known here (known: "
            f"{', '.join(sorted(_IMAGE_TOKEN_TYPES))}), so rows with images cannot be computed. Rows of "
            "text can",
        )
    return None


@contextlib.contextmanager
def same_random_numbers(architecture: Architecture) -> Iterator[None]:
    """A context in which dropout of a model in training mode is the same each time.

    The caller's random numbers go on afterwards as if the model had not run. Only the generators of the CPU
    and of the model's GPUs are seeded: `torch.manual_seed` would also seed those of GPUs whose state is not
    restored.
    """
    devices = {tensor.device for tensor in architecture.model.parameters()} | {architecture.model.device}
    gpus = sorted((device for device in devices if device.type == "cuda"), key=str)
    with torch.random.fork_rng(devices=gpus):
        torch.default_generator.manual_seed(0)
        for gpu in gpus:
            with torch.cuda.device(gpu):
                torch.cuda.manual_seed(0)
        yield


def attends_by_types(architecture: Architecture) -> bool:
    """Whether images may be attended in both directions, so that one changes another one that touches it.

    Raises `UnsupportedModelError` as `token_type_argument` does.
    """
    # With M-RoPE the token types only matter for positions, which are given.
    types = token_type_argument(architecture, architecture.base, with_media=True)
    return not architecture.mrope and types is not None
