"""The model that a server serves, and its adapters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from renderers import MediaItem, RendererError, TemplateRenderer
from renderers.media.item import TensorField
from renderers.messages import Modality
from renderers.model_files import ModelFiles
from renderers.process.files import read_json
from rollouts.engines.lora import base_labels
from rollouts.engines.protocol import Completion
from rollouts.engines.vllm.features import PixelDtype, raw_pixels
from rollouts.serve.errors import RequestError


class ServedAdapters:
    """The adapters that an engine has loaded. An engine without the method `adapters` has none."""

    def __init__(self, engine: Any) -> None:
        self._engine = engine
        self._list = getattr(engine, "adapters", None)
        self._base_versions: dict[str, str] = {}  # by adapter: the label of the weights below it when it was first seen

    async def has(self, name: str) -> bool:
        """Whether the engine has the adapter. Raises `EngineError`.

        The engine is asked about a name that it did not have before: adapters are loaded while it serves. One that was
        unloaded since is an error of the engine when it samples.
        """
        return name in self._base_versions or name in await self.names()

    async def names(self) -> list[str]:
        """The adapters that the engine has now. Raises `EngineError`."""
        loaded = {} if self._list is None else await self._list()
        base_version = str(getattr(getattr(self._engine, "engine", self._engine), "weight_version", "default"))
        self._base_versions = {name: self._base_versions.get(name, base_version) for name in loaded}
        return sorted(self._base_versions)

    def base_labels(self, completions: Iterable[Completion], name: str) -> list[Completion]:
        """The completions of an adapter, labelled with the versions of the weights below it, as those of a vLLM."""
        return base_labels(completions, name, self._base_versions.get(name, "default"))


# What a server tells of its model: names, limits, stop tokens, and the tensors that it takes for an image and a sound.


#: The vLLM whose routes, bodies and errors this server has; clients choose their wire format by it.
WIRE_VERSION = "0.32.0"


@dataclass(frozen=True, slots=True)
class MediaFormat:
    """The tensors that the server takes for an image or a sound, read off one that the renderer has processed.

    `pixel_dtype` is torch's name of the dtype of pixels in requests; `token_id` stands for one row of features.
    `fields` has the names of the tensors and how they are batched. `example` is the processed medium, for which
    `example_features` tokens stand.
    """

    pixel_dtype: PixelDtype
    token_id: int
    fields: Mapping[str, TensorField]
    example: MediaItem = field(repr=False)
    example_features: int


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model behind the routes.

    `name` is what requests call it; `directory` holds its files. `max_model_len` bounds a prompt and its completion
    together, `vocab_size` the token ids (None: not known). `eos_id` ends a completion without being named as its
    stop, `more_stop_ids` end it as stop tokens of the request do; both unless the request ignores them. `media` has
    the modalities that the model takes, of images and sounds. `dtype` is torch's name of the dtype of the weights, None
    if not known.
    """

    name: str
    directory: Path
    max_model_len: int
    vocab_size: int | None
    eos_id: int | None
    more_stop_ids: tuple[int, ...]
    media: Mapping[Modality, MediaFormat]
    dtype: str | None


def served_model(
    directory: Path,
    renderer: TemplateRenderer,
    *,
    name: str | None = None,
    max_model_len: int,
    vocab_size: int | None = None,
    dtype: str | None = None,
) -> ServedModel:
    """The model of a directory; its name is that of the directory unless given.

    Raises a `LoadError` for a directory without the files of a tokenizer.
    """
    files = ModelFiles.of(directory)
    eos_token = files.special_tokens.get("eos_token")
    eos_id = None if eos_token is None else renderer.tokenizer.control_id(eos_token)
    configured = read_json(directory / "generation_config.json").get("eos_token_id")
    stop_ids = configured if isinstance(configured, list) else [configured]
    return ServedModel(
        name=name or directory.resolve().name,
        directory=directory.absolute(),
        max_model_len=max_model_len,
        vocab_size=vocab_size,
        eos_id=eos_id,
        more_stop_ids=tuple(each for each in stop_ids if isinstance(each, int) and each != eos_id),
        media=media_formats(renderer),
        dtype=dtype,
    )


def media_formats(renderer: TemplateRenderer) -> dict[Modality, MediaFormat]:
    """The tensors of an image and of a sound as the renderer's processors make them; empty where it takes neither.

    A model whose sounds cannot be processed still takes images; requests with sounds then say why.
    """
    # Small, and enough for all known models: sides that are multiples of their patches, a second of sound.
    parts: dict[Modality, dict[str, Any]] = {
        "image": {"type": "image", "image": np.zeros((64, 64, 3), dtype=np.uint8)},
        "audio": {"type": "audio", "audio": np.zeros(16_000, dtype=np.int16), "sampling_rate": 16_000},
    }
    formats = {}
    for modality in parts.keys() & renderer.processors.keys():
        try:
            formats[modality] = _format(renderer, parts[modality])
        except RendererError:
            if modality == "image":
                raise
    return formats


def _format(renderer: TemplateRenderer, part: Mapping[str, Any]) -> MediaFormat:
    try:
        rendered = renderer.render([{"role": "user", "content": [part]}])
    except RendererError:  # a template that refuses a message without text
        rendered = renderer.render([{"role": "user", "content": [part, {"type": "text", "text": "a"}]}])
    assert rendered.multi_modal_data is not None  # of a medium
    ((item, placeholder),) = rendered.multi_modal_data.items_with_ranges()
    return MediaFormat(
        pixel_dtype="uint8" if _is_uint8(item) else "float32",
        token_id=rendered.token_ids[placeholder.runs[0][0]],
        fields=item.fields,
        example=item,
        example_features=placeholder.num_embeds,
    )


def _is_uint8(item: MediaItem) -> bool:
    """Whether the pixels are uint8 and the scale of the item makes floats of them."""
    return item.scale is not None and any(raw_pixels(item, name) is not None for name in item.tensors)


def unknown_model(name: str, model: ServedModel) -> RequestError:
    """The error (404) for another model than the one that is served and its adapters."""
    message = f"The model `{name[:200]}` does not exist. Valid aliases: {model.name}."
    return RequestError(404, message, "model")


def check_tokens(token_ids: Sequence[int], vocab_size: int | None) -> None:
    """Raise `RequestError` (400) for a token id that the model does not have."""
    if vocab_size is not None and (largest := max(token_ids)) >= vocab_size:
        raise RequestError(400, f"Token id {largest} is out of vocabulary", param="token_ids")


def check_length(token_ids: Sequence[int], max_model_len: int) -> None:
    """Raise `RequestError` (400) for a prompt that leaves no room for a token."""
    count = len(token_ids)
    if count > max_model_len:
        relation = f"is longer than the maximum model length of {max_model_len}"
    elif count == max_model_len:
        relation = (
            "plus the number of requested output tokens (at least 1) is longer than the maximum model length of "
            f"{max_model_len}"
        )
    else:
        return
    raise RequestError(400, f"The decoder prompt (length {count}) {relation}. Shorten the prompt.")
