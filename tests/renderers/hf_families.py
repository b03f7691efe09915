"""Processor directories of model families, made in code: published numbers, small tokenizers, published templates."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import corpus
import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast, ProcessorMixin

# Merged as in real tokenizers, so that white space at the edge of an expansion joins what stands beside it.
_MERGES = [("Ċ", "Ċ"), ("ĊĊ", "Ċ"), ("Ġ", "Ġ"), ("Ċ", "Ġ"), ("Ġ", "a"), ("0", "0"), ("0", ":")]
# From its published template; trl has none for Llama 4.
_LLAMA4_TEMPLATE = """\
{{- bos_token }}{%- for message in messages %}{{- '<|header_start|>' + message['role'] + '<|header_end|>\\n\\n' }}\
{%- for part in message['content'] %}{%- if part['type'] == 'image' %}{{- '<|image|>' }}\
{%- else %}{{- part['text'] }}{%- endif %}{%- endfor %}{{- '<|eot|>' }}{%- endfor %}"""
_KIMI_TEMPLATE = """\
{%- for message in messages %}{{- '<|im_' + message['role'] + '|>' + message['role'] + '<|im_middle|>' }}\
{%- for part in message['content'] %}{%- if part['type'] == 'image' %}\
{{- '<|media_begin|>image<|media_content|><|media_pad|><|media_end|>\\n' }}\
{%- elif part['type'] == 'video' %}{{- '<|kimi_k25_video_placeholder|>' }}\
{%- else %}{{- part['text'] }}{%- endif %}{%- endfor %}{{- '<|im_end|>' }}{%- endfor %}"""
_INTERNVL_TEMPLATE = """\
{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' }}\
{%- for part in message['content'] %}{%- if part['type'] == 'image' %}{{- '<IMG_CONTEXT>\\n' }}\
{%- elif part['type'] == 'video' %}{{- '<video>\\n' }}\
{%- else %}{{- part['text'] }}{%- endif %}{%- endfor %}{{- '<|im_end|>\\n' }}{%- endfor %}"""
_PIXTRAL_TEMPLATE = """\
{{- bos_token }}{%- for message in messages %}{{- '[INST]' }}\
{%- for part in message['content'] %}{%- if part['type'] == 'image' %}{{- '[IMG]' }}\
{%- else %}{{- part['text'] }}{%- endif %}{%- endfor %}{{- '[/INST]' }}{%- endfor %}"""

_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]


@dataclass(frozen=True)
class Family:
    """A processor to build, and what its published model says: which token stands for a row of features."""

    name: str
    build: Callable[[], ProcessorMixin]
    tower: Callable[[], torch.nn.Module]  # the model, tiny, but with the published patches and merging
    embed: str
    video_embed: str | None = None
    needs: str | None = None  # a package that the processor itself asks for

    @property
    def runs_here(self) -> bool:
        return self.needs is None or importlib.util.find_spec(self.needs) is not None

    def save(self, directory: Path) -> Path:
        self.build().save_pretrained(directory)
        return directory


def tokenizer(controls: Sequence[str], template: str, **named: str) -> PreTrainedTokenizerFast:
    """Bytes, a few merges and control tokens; `named` are those that the processor asks for by attribute."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, *("".join(pair) for pair in _MERGES)]
    backend = Tokenizer(models.BPE(vocab={word: index for index, word in enumerate(words)}, merges=_MERGES))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokens = dict.fromkeys(["<pad>", "<bos>", "<eos>", *controls, *named.values()])
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in tokens])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        extra_special_tokens=named,
        chat_template=template,
        model_max_length=100_000,
    )


def _real_tokenizer(name: str, template: str) -> PreTrainedTokenizerBase:
    loaded = transformers.AutoTokenizer.from_pretrained(corpus.model_dir(name))
    loaded.chat_template = template
    return loaded


def _gemma3() -> ProcessorMixin:
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    text = tokenizer(["<start_of_turn>", "<end_of_turn>"], corpus.templates()["trl/gemma3"], **named)
    image = transformers.Gemma3ImageProcessor(size={"height": 896, "width": 896}, do_pan_and_scan=None)
    return transformers.Gemma3Processor(image, text, chat_template=text.chat_template)


def _gemma4() -> ProcessorMixin:
    named = {
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
        "audio_token": "<|audio|>",
    }
    text = tokenizer(["<|turn>", "<turn|>", "<|video|>"], corpus.templates()["trl/gemma4"], **named)
    return transformers.Gemma4Processor(
        transformers.Gemma4AudioFeatureExtractor(),
        transformers.Gemma4ImageProcessor(),
        text,
        transformers.Gemma4VideoProcessor(),
        chat_template=text.chat_template,
    )


def _glm4v() -> ProcessorMixin:
    media = [f"<|{edge}_of_{kind}|>" for edge in ("begin", "end") for kind in ("image", "video")]
    turns = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
    text = tokenizer([*turns, *media, "<|image|>", "<|video|>"], corpus.templates()["own/glm-4.5v"])
    image = transformers.Glm4vImageProcessor(size={"shortest_edge": 12544, "longest_edge": 9633792})
    return transformers.Glm4vProcessor(
        image, text, transformers.Glm4vVideoProcessor(), chat_template=text.chat_template
    )


def _glm46v() -> ProcessorMixin:
    text = _real_tokenizer("glm-4.5v", corpus.templates()["own/glm-4.6v"])
    image = transformers.Glm46VImageProcessor(size={"shortest_edge": 12544, "longest_edge": 9633792})
    return transformers.Glm46VProcessor(
        image, text, transformers.Glm46VVideoProcessor(), chat_template=text.chat_template
    )


def _internvl3() -> ProcessorMixin:
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    text = tokenizer(["<|im_start|>", "<|im_end|>"], _INTERNVL_TEMPLATE, **named)
    size = {"height": 448, "width": 448}
    image = transformers.GotOcr2ImageProcessor(crop_to_patches=False, min_patches=1, max_patches=12, size=size)
    video = transformers.InternVLVideoProcessor(size=size, do_sample_frames=True, num_frames=4)
    return transformers.InternVLProcessor(image, text, video, image_seq_length=256, chat_template=text.chat_template)


def _llava_next() -> ProcessorMixin:
    text = tokenizer([], corpus.templates()["trl/llava_next"], image_token="<image>")
    image = transformers.LlavaNextImageProcessor(
        size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}, image_grid_pinpoints=_PINPOINTS
    )
    return transformers.LlavaNextProcessor(
        image,
        text,
        patch_size=14,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=text.chat_template,
    )


def _idefics3() -> ProcessorMixin:
    text = tokenizer(
        ["<|begin_of_text|>", "<fake_token_around_image>", "<image>", "<end_of_utterance>"],
        corpus.templates()["trl/idefics3"],
    )
    return transformers.Idefics3Processor(
        transformers.Idefics3ImageProcessor(), text, image_seq_len=169, chat_template=text.chat_template
    )


def _smolvlm() -> ProcessorMixin:
    cells = [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]
    named = {
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "image_token": "<image>",
        "end_of_utterance_token": "<end_of_utterance>",
        "video_token": "<video>",
    }
    text = tokenizer(["<|im_start|>", *cells], corpus.templates()["trl/smolvlm"], **named)
    image = transformers.SmolVLMImageProcessor(size={"longest_edge": 2048}, max_image_size={"longest_edge": 512})
    video = transformers.SmolVLMVideoProcessor(
        size={"longest_edge": 512}, max_image_size={"longest_edge": 512}, num_frames=8, fps=1
    )
    return transformers.SmolVLMProcessor(image, text, video, image_seq_len=64, chat_template=text.chat_template)


def _pixtral() -> ProcessorMixin:
    text = tokenizer(["[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"], _PIXTRAL_TEMPLATE)
    return transformers.PixtralProcessor(
        transformers.PixtralImageProcessor(), text, patch_size=16, chat_template=text.chat_template
    )


def _llama4() -> ProcessorMixin:
    controls = ["<|header_start|>", "<|header_end|>", "<|eot|>", "<|image|>", "<|image_start|>", "<|image_end|>"]
    separators = ["<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>"]
    text = tokenizer([*controls, *separators], _LLAMA4_TEMPLATE)
    return transformers.Llama4Processor(transformers.Llama4ImageProcessor(), text, chat_template=text.chat_template)


def _kimi() -> ProcessorMixin:
    turns = ["<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"]
    media = ["<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>", "<|kimi_k25_video_placeholder|>"]
    text = tokenizer([*turns, *media], _KIMI_TEMPLATE)
    return transformers.Kimi_K25Processor(
        transformers.Kimi_K25ImageProcessor(),
        text,
        transformers.Kimi_K25VideoProcessor(),
        chat_template=text.chat_template,
    )


def _qwen2_vl() -> ProcessorMixin:
    media = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    text = tokenizer(["<|im_start|>", "<|im_end|>", *media], corpus.templates()["trl/qwen2_5_vl"])
    video = transformers.Qwen2VLVideoProcessor(cap_pixels_per_frame=True)
    return transformers.Qwen2VLProcessor(
        transformers.Qwen2VLImageProcessor(), text, video, chat_template=text.chat_template
    )


_TEXT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 400,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_VISION: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
}
_GLM_VISION = {"hidden_size": 16, "depth": 1, "num_heads": 1, "intermediate_size": 16, "out_hidden_size": 16}


def _gemma3_model() -> torch.nn.Module:
    vision = {**_VISION, "image_size": 896, "patch_size": 14}
    config = transformers.Gemma3Config(text_config=_TEXT, vision_config=vision, mm_tokens_per_image=256)
    return transformers.Gemma3Model(config)


def _gemma4_model() -> torch.nn.Module:
    text = {**_TEXT, "layer_types": ["full_attention"], "vocab_size_per_layer_input": 400}
    vision = {**_VISION, "head_dim": 16, "num_key_value_heads": 1}
    config = transformers.Gemma4Config(text_config=text, vision_config=vision, audio_config=None)
    return transformers.Gemma4Model(config)


def _glm4v_model() -> torch.nn.Module:
    return transformers.Glm4vModel(transformers.Glm4vConfig(text_config=_TEXT, vision_config=_GLM_VISION))


def _glm46v_model() -> torch.nn.Module:
    text = {**_TEXT, "model_type": "glm4v_text"}
    vision = {**_GLM_VISION, "model_type": "glm4v_vision"}
    return transformers.Glm46VModel(transformers.Glm46VConfig(text_config=text, vision_config=vision))


def _internvl3_model() -> torch.nn.Module:
    text = {**_TEXT, "model_type": "qwen2"}
    vision = {**_VISION, "image_size": [448, 448], "patch_size": [14, 14]}
    return transformers.InternVLModel(transformers.InternVLConfig(text_config=text, vision_config=vision))


def _llava_next_model() -> torch.nn.Module:
    text = {**_TEXT, "model_type": "llama"}
    clip = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14, "num_hidden_layers": 2}
    config = transformers.LlavaNextConfig(
        text_config=text, vision_config={**_VISION, **clip}, image_grid_pinpoints=_PINPOINTS
    )
    return transformers.LlavaNextModel(config)


def _idefics3_model() -> torch.nn.Module:
    text = {**_TEXT, "model_type": "llama"}
    vision = {**_VISION, "image_size": 364, "patch_size": 14}
    config = transformers.Idefics3Config(text_config=text, vision_config=vision, scale_factor=2, pad_token_id=0)
    return transformers.Idefics3Model(config)


def _smolvlm_model() -> torch.nn.Module:
    text = {**_TEXT, "model_type": "llama"}
    vision = {**_VISION, "image_size": 512, "patch_size": 16}
    config = transformers.SmolVLMConfig(text_config=text, vision_config=vision, scale_factor=4, pad_token_id=0)
    return transformers.SmolVLMModel(config)


def _pixtral_model() -> torch.nn.Module:
    text = {**_TEXT, "model_type": "mistral"}
    vision = {**_VISION, "model_type": "pixtral", "image_size": 1024, "patch_size": 16, "head_dim": 16}
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, vision_feature_layer=-1, vision_feature_select_strategy="full"
    )
    return transformers.LlavaModel(config)


def _llama4_model() -> torch.nn.Module:
    text = {**_TEXT, "intermediate_size_mlp": 16, "num_local_experts": 1}
    adapter = {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16}
    # After the pixel shuffle a row holds four patches.
    vision = {**_VISION, **adapter, "intermediate_size": 64, "image_size": 336, "patch_size": 14}
    config = transformers.Llama4Config(text_config=text, vision_config=vision)
    return transformers.Llama4ForConditionalGeneration(config)


def _kimi_model() -> torch.nn.Module:
    latent = {"kv_lora_rank": 16, "q_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1}
    text = {**_TEXT, **latent, **experts, "model_type": "deepseek_v3", "moe_intermediate_size": 16}
    config = transformers.Kimi_K25Config(text_config=text, vision_config=_VISION, projection_hidden_size=16)
    return transformers.Kimi_K25Model(config)


def _qwen2_vl_model() -> torch.nn.Module:
    vision = {"depth": 1, "embed_dim": 16, "num_heads": 1, "hidden_size": 16, "mlp_ratio": 1}
    return transformers.Qwen2VLModel(transformers.Qwen2VLConfig(text_config=_TEXT, vision_config=vision))


FAMILIES = [
    Family("gemma3", _gemma3, _gemma3_model, "<image_soft_token>"),
    Family("gemma4", _gemma4, _gemma4_model, "<|image|>", "<|video|>"),
    Family("glm-4.5v", _glm4v, _glm4v_model, "<|image|>", "<|image|>"),
    Family("glm-4.6v", _glm46v, _glm46v_model, "<|image|>", "<|image|>"),
    Family("internvl3", _internvl3, _internvl3_model, "<IMG_CONTEXT>", "<IMG_CONTEXT>"),
    Family("llava-next", _llava_next, _llava_next_model, "<image>"),
    Family("idefics3", _idefics3, _idefics3_model, "<image>"),
    Family("smolvlm", _smolvlm, _smolvlm_model, "<image>", "<image>", needs="num2words"),
    Family("pixtral", _pixtral, _pixtral_model, "[IMG]"),
    Family("llama4", _llama4, _llama4_model, "<|patch|>"),
    Family("kimi-k2.5", _kimi, _kimi_model, "<|media_pad|>", "<|kimi_k25_video_placeholder|>"),
    Family("qwen2-vl", _qwen2_vl, _qwen2_vl_model, "<|image_pad|>", "<|video_pad|>"),
]
