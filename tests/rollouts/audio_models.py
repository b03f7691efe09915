"""Tiny random models of architectures that hear, with the processors of `audio_families`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import audio_families
import transformers
from model_families import ROPE, TEXT
from transformers import PretrainedConfig, ProcessorMixin

_VOCABULARY = 400


def _ids(processor: ProcessorMixin, **tokens: str) -> dict[str, int]:
    """By name in a configuration, the id of each token."""
    known = processor.tokenizer.get_vocab()
    return {name: known[token] for name, token in tokens.items()}


def _qwen2_audio(processor: Any) -> PretrainedConfig:
    audio = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
    return transformers.Qwen2AudioConfig(
        audio_config={"model_type": "qwen2_audio_encoder", "num_mel_bins": 128, **audio},
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": _VOCABULARY},
        **_ids(processor, audio_token_index="<|AUDIO|>"),
    )


_OMNI_TOKENS = {
    "image_token_id": "<|IMAGE|>",
    "video_token_id": "<|VIDEO|>",
    "audio_token_id": "<|AUDIO|>",
    "vision_start_token_id": "<|vision_bos|>",
    "vision_end_token_id": "<|vision_eos|>",
    "audio_start_token_id": "<|audio_bos|>",
    "audio_end_token_id": "<|audio_eos|>",
}


def _qwen2_5_omni(processor: Any) -> PretrainedConfig:
    audio = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
    vision = {"depth": 2, "num_heads": 2, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
    return transformers.Qwen2_5OmniThinkerConfig(
        audio_config={"num_mel_bins": 128, "output_dim": 32, "n_window": 100, **audio},
        vision_config={"hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 32, **vision},
        text_config={**TEXT, "vocab_size": _VOCABULARY, "rope_parameters": ROPE},
        position_id_per_seconds=25,
        **_ids(processor, **_OMNI_TOKENS),
    )


#: Family of `audio_families` -> class of the model, and its configuration from the processor.
AUDIO_MODELS: Mapping[str, tuple[str, Callable[[Any], PretrainedConfig]]] = {
    "qwen2_audio": ("Qwen2AudioForConditionalGeneration", _qwen2_audio),
    "qwen2_5_omni": ("Qwen2_5OmniThinkerForConditionalGeneration", _qwen2_5_omni),
}
#: Those that see too.
SEEING = ("qwen2_5_omni",)


def audio_family(name: str) -> tuple[ProcessorMixin, PretrainedConfig]:
    processor = audio_families.FAMILIES[name]()
    return processor, AUDIO_MODELS[name][1](processor)
