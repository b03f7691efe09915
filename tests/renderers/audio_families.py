"""Processor directories of model families that hear, made in code: published numbers, small tokenizers."""

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import corpus
import pytest
import transformers
from family_tokenizers import GEMMA3_TOKENS, tokenizer
from hf_families import gemma4
from transformers import AutoProcessor, ProcessorMixin

from renderers import TemplateRenderer, load_renderer

Family = tuple[TemplateRenderer, Any]

_CHATML = """\
{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' }}\
{%- if message['content'] is string %}{{- message['content'] }}{%- else %}\
{%- for part in message['content'] %}{%- if part['type'] == 'audio' %}{{- 'AUDIO' }}\
{%- elif part['type'] == 'image' %}{{- 'IMAGE' }}{%- elif part['type'] == 'video' %}{{- 'VIDEO' }}\
{%- else %}{{- part['text'] }}{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
_whisper = partial(transformers.WhisperFeatureExtractor, feature_size=128)
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")


def chatml(*, audio: str, image: str = "", video: str = "") -> str:
    """A ChatML template that prints these texts for parts with media."""
    return _CHATML.replace("AUDIO", audio).replace("IMAGE", image).replace("VIDEO", video)


def _qwen2_audio() -> ProcessorMixin:
    text = tokenizer([*_CHATML_TOKENS, "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"], "")
    # Its own template, which counts the sounds: "Audio 1: ".
    processor = transformers.Qwen2AudioProcessor(_whisper(), text)
    text.chat_template = processor.chat_template = processor.default_chat_template
    return processor


_OMNI_TOKENS = {
    "image_token": "<|IMAGE|>",
    "video_token": "<|VIDEO|>",
    "audio_token": "<|AUDIO|>",
    "vision_bos_token": "<|vision_bos|>",
    "vision_eos_token": "<|vision_eos|>",
    "audio_bos_token": "<|audio_bos|>",
    "audio_eos_token": "<|audio_eos|>",
}


def _qwen2_5_omni() -> ProcessorMixin:
    template = corpus.templates()["own/qwen2.5-omni-3b"]
    return transformers.Qwen2_5OmniProcessor(
        transformers.Qwen2VLImageProcessor(),
        transformers.Qwen2VLVideoProcessor(),
        _whisper(),
        tokenizer(_CHATML_TOKENS, template, **_OMNI_TOKENS),
        chat_template=template,
    )


def _qwen3_omni() -> ProcessorMixin:
    named = {
        **{f"{kind}_token": f"<|{kind}_pad|>" for kind in ("image", "video", "audio")},
        **{f"{kind}_bos_token": f"<|{kind}_start|>" for kind in ("vision", "audio")},
        **{f"{kind}_eos_token": f"<|{kind}_end|>" for kind in ("vision", "audio")},
    }
    template = chatml(
        audio="<|audio_start|><|audio_pad|><|audio_end|>",
        image="<|vision_start|><|image_pad|><|vision_end|>",
        video="<|vision_start|><|video_pad|><|vision_end|>",
    )
    return transformers.Qwen3OmniMoeProcessor(
        transformers.Qwen2VLImageProcessor(patch_size=16),
        transformers.Qwen2VLVideoProcessor(patch_size=16),
        _whisper(),
        tokenizer(_CHATML_TOKENS, template, **named),
        chat_template=template,
    )


def _gemma3n() -> ProcessorMixin:
    named = {
        **GEMMA3_TOKENS,
        "audio_token": "<audio_soft_token>",
        "boa_token": "<start_of_audio>",
        "eoa_token": "<end_of_audio>",
    }
    template = chatml(audio="<audio_soft_token>", image="<image_soft_token>")
    return transformers.Gemma3nProcessor(
        transformers.Gemma3nAudioFeatureExtractor(),
        transformers.SiglipImageProcessor(size={"height": 256, "width": 256}),
        tokenizer(_CHATML_TOKENS, template, **named),
        chat_template=template,
    )


def _phi4_multimodal() -> ProcessorMixin:
    template = chatml(audio="<|audio|>", image="<|image|>")
    text = tokenizer(_CHATML_TOKENS, template, audio_token="<|audio|>", image_token="<|image|>")
    return transformers.Phi4MultimodalProcessor(
        transformers.Phi4MultimodalImageProcessor(),
        transformers.Phi4MultimodalFeatureExtractor(),
        text,
        chat_template=template,
    )


def _qwen3_asr() -> ProcessorMixin:
    named = {
        "audio_token": "<|audio_pad|>",
        "audio_bos_token": "<|audio_start|>",
        "audio_eos_token": "<|audio_end|>",
    }
    template = chatml(audio="<|audio_start|><|audio_pad|><|audio_end|>")
    text = tokenizer(_CHATML_TOKENS, template, **named)
    return transformers.Qwen3ASRProcessor(transformers.Qwen3ASRFeatureExtractor(), text, chat_template=template)


def _nemotron_h_omni() -> ProcessorMixin:
    controls = ["<image>", "<video>", "<so_embedding>", "<so_start>", "<so_end>", "<img>", "</img>"]
    template = chatml(audio="<so_embedding>", image="<image>", video="<video>")
    return transformers.NemotronH_Omni_Reasoning_V3Processor(
        transformers.NemotronH_Omni_Reasoning_V3ImageProcessor(),
        transformers.NemotronH_Omni_Reasoning_V3VideoProcessor(),
        tokenizer([*_CHATML_TOKENS, *controls], template),
        transformers.ParakeetFeatureExtractor(feature_size=128),
        chat_template=template,
    )


def _voxtral() -> ProcessorMixin:
    template = chatml(audio="[AUDIO]")
    text = tokenizer([*_CHATML_TOKENS, "[AUDIO]"], template)
    return transformers.VoxtralProcessor(_whisper(), text)


def _inkling() -> ProcessorMixin:
    controls = ["<|unused_200054|>", "<|unused_200053|>", "<|content_image|>", "<|content_audio_input|>"]
    template = chatml(audio="<|content_audio_input|><|unused_200053|>", image="<|content_image|><|unused_200054|>")
    return transformers.InklingProcessor(
        transformers.InklingFeatureExtractor(),
        transformers.InklingImageProcessor(),
        tokenizer([*_CHATML_TOKENS, *controls], template),
        chat_template=template,
    )


def _only_hears(name: str, audio: str, *tokens: str, extractor: str = "") -> Callable[[], ProcessorMixin]:
    """A family whose template prints `audio` for a sound. Its extractor is that of Whisper unless one is named."""

    def build() -> ProcessorMixin:
        template = chatml(audio=audio)
        text = tokenizer([*_CHATML_TOKENS, *re.findall("<[^>]+>", audio), *tokens], template)
        own = getattr(transformers, f"{extractor}FeatureExtractor") if extractor else _whisper
        processor: ProcessorMixin = getattr(transformers, f"{name}Processor")(own(), text, chat_template=template)
        return processor

    return build


FAMILIES: Mapping[str, Callable[[], ProcessorMixin]] = {
    "qwen2_audio": _qwen2_audio,
    "qwen2_5_omni": _qwen2_5_omni,
    "qwen3_omni": _qwen3_omni,
    "gemma3n": _gemma3n,
    "gemma4": gemma4,
    "gemma4_unified": partial(gemma4, "Gemma4Unified"),
    "phi4_multimodal": _phi4_multimodal,
    "qwen3_asr": _qwen3_asr,
    "audio_flamingo3": _only_hears("AudioFlamingo3", "<sound>"),
    "music_flamingo": _only_hears("MusicFlamingo", "<sound>", "<|sound_bos|>", "<|sound_eos|>"),
    "glm_asr": _only_hears("GlmAsr", "<|begin_of_audio|><|pad|><|end_of_audio|>"),
    "nemotron_h_omni": _nemotron_h_omni,
    "voxtral": _voxtral,
    "inkling": _inkling,
    "moss": _only_hears(
        "MossTranscribeDiarize",
        "<|audio_start|><|audio_pad|><|audio_end|>",
        extractor="MossTranscribeDiarize",
    ),
    "vibevoice_asr": _only_hears(
        "VibeVoiceAsr",
        "<|object_ref_start|><|box_start|><|object_ref_end|>",
        extractor="VibeVoiceAcousticTokenizer",
    ),
}


def save(family: str, directory: Path) -> Path:
    """Write the processor of a family into a directory."""
    FAMILIES[family]().save_pretrained(directory)
    return directory


def loaded(directories: pytest.TempPathFactory, family: str, **options: Any) -> Family:
    """A renderer of the directory of a family, and the processor that transformers loads from there."""
    directory = save(family, directories.mktemp(family))
    return load_renderer(directory, **options), AutoProcessor.from_pretrained(directory)
