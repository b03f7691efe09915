"""Tiny random models of architectures that hear, with the processors of `audio_families`."""

from collections.abc import Callable, Mapping
from typing import Any
from unittest import mock

import audio_families
import pytest
import torch
import transformers
from model_families import MEDIA_FAMILIES, ROPE, TEXT, with_seed
from transformers import PretrainedConfig, ProcessorMixin
from transformers.models.gemma3n import modeling_gemma3n

_VOCABULARY = 400


def _ids(processor: ProcessorMixin, **tokens: str) -> dict[str, int]:
    """By name in a configuration, the id of each token."""
    known = processor.tokenizer.get_vocab()
    return {name: known[token] for name, token in tokens.items()}


_WHISPER = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 32}
_ENCODER = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}


def _qwen2_audio(processor: Any) -> PretrainedConfig:
    return transformers.Qwen2AudioConfig(
        audio_config={"model_type": "qwen2_audio_encoder", "num_mel_bins": 128, **_WHISPER},
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
    vision = {"depth": 2, "num_heads": 2, "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]}
    return transformers.Qwen2_5OmniThinkerConfig(
        audio_config={"num_mel_bins": 128, "output_dim": 32, "n_window": 100, **_WHISPER},
        vision_config={"hidden_size": 32, "intermediate_size": 32, "out_hidden_size": 32, **vision},
        text_config={**TEXT, "vocab_size": _VOCABULARY, "rope_parameters": ROPE},
        position_id_per_seconds=25,
        **_ids(processor, **_OMNI_TOKENS),
    )


def _qwen3_omni(processor: Any) -> PretrainedConfig:
    tokens = {f"{kind}_token_id": f"<|{kind}_pad|>" for kind in ("image", "video", "audio")}
    tokens |= {f"{kind}_start_token_id": f"<|{kind}_start|>" for kind in ("vision", "audio")}
    vision = {"depth": 2, "num_heads": 2, "patch_size": 16, "out_hidden_size": 32, "num_position_embeddings": 16}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return transformers.Qwen3OmniMoeThinkerConfig(
        audio_config={**_WHISPER, "output_dim": 32, "downsample_hidden_size": 8},
        vision_config={"hidden_size": 32, "intermediate_size": 32, "deepstack_visual_indexes": [0], **vision},
        text_config={**TEXT, **experts, "vocab_size": _VOCABULARY, "rope_parameters": ROPE},
        position_id_per_seconds=13,
        **_ids(processor, **tokens),
    )


_QWEN3 = {**TEXT, "model_type": "qwen3", "vocab_size": _VOCABULARY}
_LLAMA = {**TEXT, "model_type": "llama", "vocab_size": _VOCABULARY}


def _qwen3_asr(processor: Any) -> PretrainedConfig:
    return transformers.Qwen3ASRConfig(
        audio_config={"model_type": "qwen3_asr_encoder", **_WHISPER, "output_dim": 32, "downsample_hidden_size": 8},
        text_config=_QWEN3,
        **_ids(processor, audio_token_id="<|audio_pad|>"),
    )


def _audio_flamingo3(processor: Any) -> PretrainedConfig:
    return transformers.AudioFlamingo3Config(
        audio_config={"model_type": "audioflamingo3_encoder", **_ENCODER},
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": _VOCABULARY},
        **_ids(processor, audio_token_id="<sound>"),
    )


def _music_flamingo(processor: Any) -> PretrainedConfig:
    tokens = {"audio_token_id": "<sound>", "audio_bos_token_id": "<|sound_bos|>", "audio_eos_token_id": "<|sound_eos|>"}
    return transformers.MusicFlamingoConfig(
        audio_config={"model_type": "audioflamingo3_encoder", **_ENCODER},
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": _VOCABULARY},
        **_ids(processor, **tokens),
    )


def _glm_asr(processor: Any) -> PretrainedConfig:
    return transformers.GlmAsrConfig(
        audio_config={"model_type": "glmasr_encoder", **_ENCODER, "intermediate_size": 128},
        text_config=_LLAMA,
        **_ids(processor, audio_token_id="<|pad|>"),
    )


def voxtral() -> Any:
    """Its processor makes prompts by mistral_common, so that no renderer makes its items."""
    config = transformers.VoxtralConfig(
        audio_config={"model_type": "voxtral_encoder", **_ENCODER, "intermediate_size": 128},
        text_config=_LLAMA,
        audio_token_id=24,
    )
    return with_seed(lambda: transformers.VoxtralForConditionalGeneration(config))


def granite_speech() -> Any:
    """Its feature extractor wants torchaudio, so that no renderer makes its items here."""
    encoder = {"num_layers": 2, "hidden_dim": 32, "num_heads": 2, "output_dim": 8, "context_size": 50, "dropout": 0.0}
    qformer = {"num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "encoder_hidden_size": 32}
    config = transformers.GraniteSpeechConfig(
        encoder_config=encoder,
        projector_config={"model_type": "blip_2_qformer", "hidden_size": 32, **qformer},
        text_config={**TEXT, "model_type": "granite", "vocab_size": _VOCABULARY},
        has_lora_adapter=False,
        audio_token_index=24,
    )
    return with_seed(lambda: transformers.GraniteSpeechForConditionalGeneration(config))


def _phi4_multimodal(processor: Any) -> PretrainedConfig:
    audio = {"num_blocks": 2, "ext_pw_out_channel": 32, "depthwise_separable_out_channel": 32, "nemo_conv_channels": 8}
    tower = {"hidden_size": 32, "intermediate_size": 32, "num_attention_heads": 2}
    return transformers.Phi4MultimodalConfig(
        **{**TEXT, "head_dim": 16},
        vocab_size=_VOCABULARY,
        audio_config={**tower, **audio, **_ids(processor, audio_token_id="<|audio|>")},
        vision_config={**tower, "num_hidden_layers": 2, **_ids(processor, image_token_id="<|image|>")},
        original_max_position_embeddings=2048,
    )


def _gemma3n(processor: Any) -> PretrainedConfig:
    # The vocabularies of pictures and sounds follow that of text.
    known = processor.tokenizer.get_vocab()
    vocabularies = {"vocab_offset": 384, "vocab_size": 8}, {"vocab_offset": 392, "vocab_size": 8}
    audio = {"conf_num_hidden_layers": 2, "conf_num_attention_heads": 2, "sscp_conv_channel_size": [8, 4]}
    text = {"laurel_rank": 8, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 0, "altup_num_inputs": 2}
    return transformers.Gemma3nConfig(
        text_config={
            **TEXT,
            **text,
            "vocab_size": _VOCABULARY,
            "vocab_size_per_layer_input": 384,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
        vision_config={**vocabularies[0], "hidden_size": 32},
        audio_config={**vocabularies[1], "hidden_size": 32, **audio},
        image_token_id=known["<image_soft_token>"],
        audio_token_id=known["<audio_soft_token>"],
    )


def _gemma4(processor: Any) -> PretrainedConfig:
    _, config = MEDIA_FAMILIES["gemma4"]()
    audio = {"num_hidden_layers": 1, "num_attention_heads": 2, "subsampling_conv_channels": [128, 4]}
    config.audio_config = transformers.Gemma4AudioConfig(hidden_size=32, output_proj_dims=32, **audio)
    for name, token in _ids(processor, audio_token_id=processor.audio_token).items():
        setattr(config, name, token)
    return config


class Gemma3nWithoutVision(transformers.Gemma3nForConditionalGeneration):
    """Its vision tower would be one of timm, which these tests do without."""

    def __init__(self, config: PretrainedConfig) -> None:
        make = modeling_gemma3n.AutoModel.from_config

        def unless_of_timm(part: PretrainedConfig, **options: Any) -> Any:
            return torch.nn.Identity() if part.model_type == "gemma3n_vision" else make(part, **options)

        with mock.patch.object(modeling_gemma3n.AutoModel, "from_config", unless_of_timm):
            super().__init__(config)


#: Family of `audio_families` -> class of the model, and its configuration from the processor.
AUDIO_MODELS: Mapping[str, tuple[Any, Callable[[Any], PretrainedConfig]]] = {
    "qwen2_audio": (transformers.Qwen2AudioForConditionalGeneration, _qwen2_audio),
    "qwen2_5_omni": (transformers.Qwen2_5OmniThinkerForConditionalGeneration, _qwen2_5_omni),
    "qwen3_omni": (transformers.Qwen3OmniMoeThinkerForConditionalGeneration, _qwen3_omni),
    "qwen3_asr": (transformers.Qwen3ASRForConditionalGeneration, _qwen3_asr),
    "audio_flamingo3": (transformers.AudioFlamingo3ForConditionalGeneration, _audio_flamingo3),
    "music_flamingo": (transformers.MusicFlamingoForConditionalGeneration, _music_flamingo),
    "glm_asr": (transformers.GlmAsrForConditionalGeneration, _glm_asr),
    "phi4_multimodal": (transformers.Phi4MultimodalForCausalLM, _phi4_multimodal),
    "gemma3n": (Gemma3nWithoutVision, _gemma3n),
    "hearing_gemma4": (transformers.Gemma4ForConditionalGeneration, _gemma4),
}
_QUICK = ("qwen2_audio", "qwen2_5_omni", "gemma3n")
#: All of them as parameters of tests; a plain run takes three.
EACH = [name if name in _QUICK else pytest.param(name, marks=pytest.mark.slow) for name in AUDIO_MODELS]
#: Those that see too.
SEEING = ("qwen2_5_omni", "qwen3_omni", "phi4_multimodal")
#: Those whose own forward lets the padding of a batch change the features of a shorter sound.
PADDING_CHANGES = ("qwen3_omni", "qwen3_asr", "phi4_multimodal")
#: Those whose processors take one sound a text.
ONE_SOUND = ("qwen3_asr", "audio_flamingo3", "music_flamingo", "glm_asr")


def audio_family(name: str) -> tuple[ProcessorMixin, PretrainedConfig]:
    processor: Any = audio_families.FAMILIES[name.removeprefix("hearing_")]()
    return processor, AUDIO_MODELS[name][1](processor)
