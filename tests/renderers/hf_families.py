"""Processor directories of model families, made in code: published numbers, small tokenizers, published templates."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import corpus
import torch
import transformers
from family_tokenizers import family_tokenizer
from transformers import PreTrainedTokenizerBase, ProcessorMixin

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


def _real_tokenizer(name: str, template: str) -> PreTrainedTokenizerBase:
    loaded = transformers.AutoTokenizer.from_pretrained(corpus.model_dir(name))
    loaded.chat_template = template
    return loaded


def _gemma3() -> ProcessorMixin:
    text = family_tokenizer("gemma3")
    image = transformers.Gemma3ImageProcessor(size={"height": 896, "width": 896}, do_pan_and_scan=None)
    return transformers.Gemma3Processor(image, text, chat_template=text.chat_template)


def gemma4(name: str = "Gemma4") -> ProcessorMixin:
    """`name` begins the names of its classes."""
    text = family_tokenizer("gemma4")
    parts = ("AudioFeatureExtractor", "ImageProcessor", "VideoProcessor")
    sounds, images, videos = (getattr(transformers, f"{name}{part}")() for part in parts)
    processor: ProcessorMixin = getattr(transformers, f"{name}Processor")(
        sounds, images, text, videos, chat_template=text.chat_template
    )
    return processor


def _glm4v() -> ProcessorMixin:
    text = family_tokenizer("glm-4.5v")
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
    text = family_tokenizer("internvl3")
    size = {"height": 448, "width": 448}
    image = transformers.GotOcr2ImageProcessor(crop_to_patches=False, min_patches=1, max_patches=12, size=size)
    video = transformers.InternVLVideoProcessor(size=size, do_sample_frames=True, num_frames=4)
    return transformers.InternVLProcessor(image, text, video, image_seq_length=256, chat_template=text.chat_template)


def _llava_next() -> ProcessorMixin:
    text = family_tokenizer("llava-next")
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
    text = family_tokenizer("idefics3")
    return transformers.Idefics3Processor(
        transformers.Idefics3ImageProcessor(), text, image_seq_len=169, chat_template=text.chat_template
    )


def _smolvlm() -> ProcessorMixin:
    text = family_tokenizer("smolvlm")
    image = transformers.SmolVLMImageProcessor(size={"longest_edge": 2048}, max_image_size={"longest_edge": 512})
    video = transformers.SmolVLMVideoProcessor(
        size={"longest_edge": 512}, max_image_size={"longest_edge": 512}, num_frames=8, fps=1
    )
    return transformers.SmolVLMProcessor(image, text, video, image_seq_len=64, chat_template=text.chat_template)


def _pixtral() -> ProcessorMixin:
    text = family_tokenizer("pixtral")
    return transformers.PixtralProcessor(
        transformers.PixtralImageProcessor(), text, patch_size=16, chat_template=text.chat_template
    )


def _llama4() -> ProcessorMixin:
    text = family_tokenizer("llama4")
    return transformers.Llama4Processor(transformers.Llama4ImageProcessor(), text, chat_template=text.chat_template)


def _kimi() -> ProcessorMixin:
    text = family_tokenizer("kimi-k2.5")
    return transformers.Kimi_K25Processor(
        transformers.Kimi_K25ImageProcessor(),
        text,
        transformers.Kimi_K25VideoProcessor(),
        chat_template=text.chat_template,
    )


def _qwen2_vl() -> ProcessorMixin:
    text = family_tokenizer("qwen-vl")
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
    Family("gemma4", gemma4, _gemma4_model, "<|image|>", "<|video|>"),
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
