"""Processor directories of model families that hear, made in code: published numbers, small tokenizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import transformers
from family_tokenizers import tokenizer
from transformers import ProcessorMixin

_CHATML = """\
{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' }}\
{%- if message['content'] is string %}{{- message['content'] }}{%- else %}\
{%- for part in message['content'] %}{%- if part['type'] == 'audio' %}{{- 'AUDIO' }}\
{%- elif part['type'] == 'image' %}{{- 'IMAGE' }}{%- elif part['type'] == 'video' %}{{- 'VIDEO' }}\
{%- else %}{{- part['text'] }}{%- endif %}{%- endfor %}{%- endif %}{{- '<|im_end|>\\n' }}{%- endfor %}\
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
_CHATML_TOKENS = ("<|im_start|>", "<|im_end|>")


def chatml(*, audio: str, image: str = "", video: str = "") -> str:
    """A ChatML template that prints these texts for parts with media."""
    return _CHATML.replace("AUDIO", audio).replace("IMAGE", image).replace("VIDEO", video)


def _qwen2_audio() -> ProcessorMixin:
    template = chatml(audio="<|audio_bos|><|AUDIO|><|audio_eos|>\\n")
    text = tokenizer([*_CHATML_TOKENS, "<|audio_bos|>", "<|AUDIO|>", "<|audio_eos|>"], template)
    extractor = transformers.WhisperFeatureExtractor(feature_size=128)
    return transformers.Qwen2AudioProcessor(extractor, text, chat_template=template)


def _qwen2_5_omni() -> ProcessorMixin:
    named = {
        "image_token": "<|IMAGE|>",
        "video_token": "<|VIDEO|>",
        "audio_token": "<|AUDIO|>",
        "vision_bos_token": "<|vision_bos|>",
        "vision_eos_token": "<|vision_eos|>",
        "audio_bos_token": "<|audio_bos|>",
        "audio_eos_token": "<|audio_eos|>",
    }
    template = chatml(
        audio="<|audio_bos|><|AUDIO|><|audio_eos|>",
        image="<|vision_bos|><|IMAGE|><|vision_eos|>",
        video="<|vision_bos|><|VIDEO|><|vision_eos|>",
    )
    text = tokenizer(_CHATML_TOKENS, template, **named)
    return transformers.Qwen2_5OmniProcessor(
        transformers.Qwen2VLImageProcessor(),
        transformers.Qwen2VLVideoProcessor(),
        transformers.WhisperFeatureExtractor(feature_size=128),
        text,
        chat_template=template,
    )


def _gemma3n() -> ProcessorMixin:
    named = {
        "audio_token": "<audio_soft_token>",
        "boa_token": "<start_of_audio>",
        "eoa_token": "<end_of_audio>",
        "image_token": "<image_soft_token>",
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
    }
    template = chatml(audio="<audio_soft_token>", image="<image_soft_token>")
    text = tokenizer(_CHATML_TOKENS, template, **named)
    return transformers.Gemma3nProcessor(
        transformers.Gemma3nAudioFeatureExtractor(),
        transformers.SiglipImageProcessor(size={"height": 256, "width": 256}),
        text,
        chat_template=template,
    )


FAMILIES: Mapping[str, Callable[[], ProcessorMixin]] = {
    "qwen2_audio": _qwen2_audio,
    "qwen2_5_omni": _qwen2_5_omni,
    "gemma3n": _gemma3n,
}


def save(family: str, directory: Path) -> Path:
    """Write the processor of a family into a directory."""
    FAMILIES[family]().save_pretrained(directory)
    return directory
