"""Sounds as a server takes them: the tensors that vLLM's own processor makes, from those of transformers' processor.

vLLM names and cuts some tensors in its own way (the frames of a sound without its padding, and their number).
What a server makes is read off a sound that it has rendered, so that nothing is assumed of its model.
"""

import base64
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from renderers import MediaItem
from renderers.media.item import PackedArray, TensorField
from renderers.media.samples import wav_bytes
from renderers.vision.patches import float32_to_bfloat16
from rollouts.engines.vllm.feature_decoding import DecodedTensor
from rollouts.engines.vllm.tensors import FLOATS, KEPT_ON_CPU, ServerNumbers, ServerTensor, tensor_type

#: The rate of the probe, which is that of nearly all models.
_PROBE_RATE = 16_000


@functools.cache
def probe_sound_url() -> str:
    """A data URL of a second of noise: long enough for every model, and its tensors depend on every sample."""
    noise = np.random.default_rng(0).integers(-16_000, 16_000, _PROBE_RATE).astype(np.int16)
    return f"data:audio/wav;base64,{base64.b64encode(wav_bytes(noise, _PROBE_RATE)).decode()}"


class SoundField(NamedTuple):
    """One tensor of a server's sounds: how a batch is made of it, torch's name of its dtype, and its shape."""

    kind: Literal["flat", "batched", "shared"]
    dtype: str
    shape: tuple[int, ...]
    keep_on_cpu: bool
    dim: int


@dataclass(frozen=True, slots=True)
class SoundFormat:
    """The tensors that a server makes of a sound, by name, and how many tokens it gives to the frames of a sound.

    `tokens` is None where no known formula gives the number of tokens of the rendered sound. `window` is the
    tensor that has the same shape for all sounds, padded to the window of the model; None where there is
    none.
    """

    fields: Mapping[str, SoundField]
    tokens: Callable[[int], int] | None
    window: str | None = None


def sound_format(tensors: Mapping[str, DecodedTensor], num_tokens: int) -> SoundFormat:
    """The format of a server that has made these tensors, and so many tokens, of a second of sound."""
    fields = {name: _field(name, each) for name, each in tensors.items()}
    frames = frame_count({name: each.tensor for name, each in tensors.items()})
    tokens = None if frames is None else next((each for each in _FORMULAS if each(frames) == num_tokens), None)
    features, window = fields.get("input_features"), None
    # The window is of half a minute, the sound has a second.
    if features is not None and features.kind == "batched" and frames is not None and max(features.shape) > 2 * frames:
        window = "input_features"
    return SoundFormat(fields, tokens, window)


def _field(name: str, decoded: DecodedTensor) -> SoundField:
    tensor, kind = decoded.tensor, decoded.field.kind
    keep_on_cpu = kind == "batched" and name in KEPT_ON_CPU
    if isinstance(tensor, ServerTensor | ServerNumbers):
        keep_on_cpu = tensor.keep_on_cpu
    dim = tensor.dim if isinstance(tensor, ServerTensor) else 0
    return SoundField(kind, decoded.dtype, tensor_type(tensor).shape, keep_on_cpu, dim)


def in_server_layout(item: MediaItem, server: SoundFormat) -> MediaItem | None:
    """The item with the tensors that the server makes of a sound; None where they cannot be made of the item's."""
    if any(isinstance(tensor, ServerTensor) for tensor in item.tensors.values()):
        return item if item.tensors.keys() == server.fields.keys() else None  # made by a server
    tensors: dict[str, np.ndarray | PackedArray] = {}
    for name, wanted in server.fields.items():
        array = _made(name, item)
        if array is None or (array.dtype.kind == "f" and wanted.dtype not in FLOATS):
            return None
        if wanted.kind == "flat" and wanted.dim == 0 and array.ndim == len(wanted.shape) - 1:
            array = array[None]  # one row
        if array.ndim != len(wanted.shape):
            return None
        tensors[name] = _server_tensor(array, wanted)
    fields = {name: TensorField(each.kind) for name, each in server.fields.items()}
    return replace(item, tensors=tensors, fields=fields)


def sound_error(item: MediaItem, server: SoundFormat) -> str | None:
    """Where the features of a sound in the server's layout do not fit its mask, its tokens or the model: such
    a sound would end the server."""
    shapes = {name: tensor_type(tensor).shape for name, tensor in item.tensors.items()}
    frames = frame_count(item.tensors)
    for name, shape in shapes.items():
        own = server.fields[name]
        # One axis is time, of flat tensors that along which they are joined; the others are the same for
        # every sound, and so is time where all sounds are padded to one window.
        differing = [axis for axis, (mine, other) in enumerate(zip(shape, own.shape, strict=False)) if mine != other]
        in_time = differing == [own.dim] if own.kind == "flat" else len(differing) == 1 and name != server.window
        if len(shape) != len(own.shape) or (differing and not in_time):
            return f"{name} has the shape {shape}, the server's own of another sound {own.shape}"
        if name == "input_audio_features" and frames is not None and shape[1] != frames:
            return f"{name} has {shape[1]} frames, and its audio_feature_lengths or mask says {frames}"
        mask = next((shapes[each] for each in _MASKS if each in shapes), None)
        if name in ("input_features", "input_features_padded") and mask is not None and mask[-1] not in shape:
            return f"{name} has the shape {shape}, and its mask {mask}"
    if frames is not None and server.tokens is not None and (made := server.tokens(frames)) != item.num_tokens:
        return f"it has {item.num_tokens} tokens for {frames} frames, of which the model makes {made} features"
    return None


_MASKS = ("feature_attention_mask", "input_features_mask")


def frame_count(tensors: Mapping[str, np.ndarray | PackedArray]) -> int | None:
    """The number of frames without padding; None where no tensor says it."""
    for name in ("audio_feature_lengths", *_MASKS):
        if (tensor := tensors.get(name)) is not None:
            return int((tensor if isinstance(tensor, np.ndarray) else tensor.unpack()).sum())
    return None


def _made(name: str, item: MediaItem) -> np.ndarray | None:
    """A tensor of the server by its name, of those that transformers' processor has made; None where it needs others.

    Sources: `_postprocess_hf_mm_data` of qwen2_5_omni_thinker, qwen3_asr, gemma3n_mm, gemma4_mm,
    audioflamingo3 and granite_speech in vllm/model_executor/models of vLLM 0.32.
    """
    if name in item.tensors:
        return item[name]
    features = item.get("input_features")
    mask = next((item[each] for each in _MASKS if each in item), None)
    match name:
        case "input_audio_features" if features is not None and mask is not None and features.ndim == 2:
            return features[:, mask.reshape(-1).astype(bool)]
        case "audio_feature_lengths" if mask is not None:
            return np.array(int(mask.sum()), dtype=np.int64)
        case "feature_attention_mask":
            return mask
        case "input_features_padded":
            return features
        case "chunk_counts" if features is not None and features.ndim == 3:
            return np.array(len(features), dtype=np.int64)
        case "audio_embed_sizes":
            return np.array(item.num_tokens, dtype=np.int64)
    return None


def _server_tensor(array: np.ndarray, wanted: SoundField) -> ServerTensor:
    if wanted.dtype == "bfloat16":
        raw = float32_to_bfloat16(np.asarray(array, dtype=np.float32)).astype("<u2", copy=False)
    else:
        raw = np.asarray(array, dtype=np.dtype(wanted.dtype).newbyteorder("<"))
    data = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
    return ServerTensor(wanted.dtype, array.shape, data, wanted.keep_on_cpu, wanted.dim)


# How many tokens the towers make of so many frames: of Whisper with a pooling of two (Qwen2-Audio,
# Qwen2.5-Omni, Audio Flamingo 3), and of Qwen3-Omni and Qwen3-ASR, which cut a sound into chunks of a hundred
# frames.


def _pooled_tokens(frames: int) -> int:
    return ((frames - 1) // 2 + 1 - 2) // 2 + 1


def _chunked_tokens(frames: int) -> int:
    whole, rest = divmod(frames, 100)
    halved = (rest - 1) // 2 + 1
    return ((halved - 1) // 2 + 1 - 1) // 2 + 1 + whole * 13


_FORMULAS: tuple[Callable[[int], int], ...] = (_pooled_tokens, _chunked_tokens)
