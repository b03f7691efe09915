"""Tiny random models of many architectures, and the processors of those that read images; made in code."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from family_tokenizers import family_tokenizer, media_token_ids
from transformers import PretrainedConfig, ProcessorMixin

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 2048,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
ROPE = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [2, 3, 3]}
_PINPOINTS = [[16, 32], [32, 16], [32, 32]]


def with_seed(build: Callable[[], Any], seed: int = 0) -> Any:
    """A model in float32 and evaluation mode whose weights are large enough for images to change the output."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build().float().eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.1)
    return model


# Text.


def _sliding(**more: Any) -> dict[str, Any]:
    return {**TEXT, "sliding_window": 8, "layer_types": ["sliding_attention", "full_attention"], **more}


_LLAMA4_TEXT = {**TEXT, "intermediate_size_mlp": 48, "num_local_experts": 2, "num_experts_per_tok": 1}


def text_config(name: str) -> PretrainedConfig:
    """A configuration with 300 tokens; what distinguishes the output layer or the attention is not the default."""
    build: Mapping[str, Callable[[], PretrainedConfig]] = {
        "qwen3": lambda: transformers.Qwen3Config(**TEXT, vocab_size=300),
        "llama": lambda: transformers.LlamaConfig(**TEXT, vocab_size=300, tie_word_embeddings=True),
        "gemma2": lambda: transformers.Gemma2Config(
            **_sliding(vocab_size=300, query_pre_attn_scalar=16, final_logit_softcapping=3.0)
        ),
        "gemma3_text": lambda: transformers.Gemma3TextConfig(**_sliding(vocab_size=300, query_pre_attn_scalar=16)),
        "glm4": lambda: transformers.Glm4Config(**TEXT, vocab_size=300),
        "gpt_oss": lambda: transformers.GptOssConfig(
            **_sliding(vocab_size=300, num_local_experts=4, num_experts_per_tok=2)
        ),
        "cohere": lambda: transformers.CohereConfig(**TEXT, vocab_size=300, logit_scale=0.25),
        "granite": lambda: transformers.GraniteConfig(**TEXT, vocab_size=300, logits_scaling=4.0),
        # Without an attribute pad_token_id.
        "codegen": lambda: transformers.CodeGenConfig(
            vocab_size=300, n_embd=32, n_layer=2, n_head=2, rotary_dim=8, n_positions=2048
        ),
        "bloom": lambda: transformers.BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=2),  # no positions
        "phi": lambda: transformers.PhiConfig(**TEXT, vocab_size=300),  # its output layer has a bias
        # Learned positions; token_type_ids are segments, whose embeddings are added to those of the tokens.
        "gpt2": lambda: transformers.GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=2048),
        # Its base model is itself: the language model inside Llama 4 has the output layer.
        "llama4_text": lambda: transformers.Llama4TextConfig(**_LLAMA4_TEXT, vocab_size=300),
        "mamba": lambda: transformers.MambaConfig(vocab_size=300, hidden_size=32, num_hidden_layers=2, state_size=4),
    }
    return build[name]()


TEXT_MODELS = (
    "qwen3",
    "llama",
    "gemma2",
    "gemma3_text",
    "glm4",
    "gpt_oss",
    "cohere",
    "granite",
    "phi",
    "gpt2",
    "bloom",
    "llama4_text",
    "mamba",
)


# Images and video: processor and configuration.


def _qwen_processor(processor_class: Any, video_class: Any) -> ProcessorMixin:
    text = family_tokenizer("qwen-vl")
    patches = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2}
    size = {"shortest_edge": 256, "longest_edge": 4096}
    image = transformers.Qwen2VLImageProcessor(size=size, **patches)
    video = video_class(size={"shortest_edge": 512, "longest_edge": 65536}, **patches)
    return processor_class(image, text, video, chat_template=text.chat_template)


def _qwen2_vl() -> tuple[ProcessorMixin, PretrainedConfig]:
    processor = _qwen_processor(transformers.Qwen2VLProcessor, transformers.Qwen2VLVideoProcessor)
    ids = processor.tokenizer.get_vocab()
    vision = {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 32, "mlp_ratio": 1, "patch_size": 8}
    text = {**TEXT, "vocab_size": 400, "rope_parameters": ROPE}
    named = media_token_ids("qwen-vl", ids)
    return processor, transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **named)


def _qwen2_5_vl() -> tuple[ProcessorMixin, PretrainedConfig]:
    processor = _qwen_processor(transformers.Qwen2_5_VLProcessor, transformers.Qwen2VLVideoProcessor)
    ids = processor.tokenizer.get_vocab()
    vision = {
        "depth": 2,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_heads": 2,
        "out_hidden_size": 32,
        "patch_size": 8,
        "window_size": 32,
        "fullatt_block_indexes": [1],
        "tokens_per_second": 2,
    }
    text = {**TEXT, "vocab_size": 400, "rope_parameters": ROPE}
    named = media_token_ids("qwen-vl", ids)
    return processor, transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **named)


_QWEN3_VISION = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 2,
    "patch_size": 8,
    "out_hidden_size": 32,
    "num_position_embeddings": 16,
}


def _qwen3_vl() -> tuple[ProcessorMixin, PretrainedConfig]:
    processor = _qwen_processor(transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor)
    ids = processor.tokenizer.get_vocab()
    text = {**TEXT, "vocab_size": 400, "rope_parameters": {**ROPE, "mrope_interleaved": True}}
    vision = {**_QWEN3_VISION, "deepstack_visual_indexes": [0]}
    named = media_token_ids("qwen-vl", ids)
    return processor, transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **named)


def _qwen3_vl_moe() -> tuple[ProcessorMixin, PretrainedConfig]:
    processor = _qwen_processor(transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor)
    ids = processor.tokenizer.get_vocab()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    text = {**TEXT, **experts, "vocab_size": 400, "rope_parameters": {**ROPE, "mrope_interleaved": True}}
    vision = {**_QWEN3_VISION, "deepstack_visual_indexes": [0]}
    named = media_token_ids("qwen-vl", ids)
    return processor, transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision, **named)


def _qwen3_5() -> tuple[ProcessorMixin, PretrainedConfig]:
    processor = _qwen_processor(transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor)
    ids = processor.tokenizer.get_vocab()
    linear = {
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "layer_types": ["linear_attention", "full_attention"],
    }
    rope = {**ROPE, "mrope_interleaved": True, "partial_rotary_factor": 1.0}
    text = {**TEXT, **linear, "vocab_size": 400, "rope_parameters": rope}
    named = media_token_ids("qwen-vl", ids)
    return processor, transformers.Qwen3_5Config(text_config=text, vision_config=_QWEN3_VISION, **named)


def _gemma3() -> tuple[ProcessorMixin, PretrainedConfig]:
    text = family_tokenizer("gemma3")
    image = transformers.Gemma3ImageProcessor(size={"height": 32, "width": 32}, do_pan_and_scan=None)
    processor = transformers.Gemma3Processor(image, text, image_seq_length=4, chat_template=text.chat_template)
    ids = text.get_vocab()
    config = transformers.Gemma3Config(
        text_config={**_sliding(), "vocab_size": 400, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0},
        vision_config={**VISION, "image_size": 32, "patch_size": 8},
        mm_tokens_per_image=4,
        **media_token_ids("gemma3", ids),
    )
    return processor, config


def _gemma4() -> tuple[ProcessorMixin, PretrainedConfig]:
    text = family_tokenizer("gemma4")
    processor = transformers.Gemma4Processor(
        transformers.Gemma4AudioFeatureExtractor(),
        transformers.Gemma4ImageProcessor(max_soft_tokens=70),
        text,
        transformers.Gemma4VideoProcessor(max_soft_tokens=70, num_frames=2),
        chat_template=text.chat_template,
    )
    ids = text.get_vocab()
    own = {
        "vocab_size": 400,
        "vocab_size_per_layer_input": 400,
        "hidden_size_per_layer_input": 8,
        "global_head_dim": 16,
        "use_bidirectional_attention": "vision",
        "final_logit_softcapping": 3.0,
    }
    vision = {**VISION, "head_dim": 16, "num_key_value_heads": 2}
    config = transformers.Gemma4Config(
        text_config={**_sliding(), **own},
        vision_config=vision,
        audio_config=None,
        **media_token_ids("gemma4", ids),
    )
    return processor, config


def _glm4v() -> tuple[ProcessorMixin, PretrainedConfig]:
    text = family_tokenizer("glm-4.5v")
    patches = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2}
    image = transformers.Glm4vImageProcessor(size={"shortest_edge": 512, "longest_edge": 8192}, **patches)
    video = transformers.Glm4vVideoProcessor(size={"shortest_edge": 512, "longest_edge": 16384}, **patches)
    processor = transformers.Glm4vProcessor(image, text, video, chat_template=text.chat_template)
    ids = text.get_vocab()
    config = transformers.Glm4vConfig(
        text_config={**TEXT, "vocab_size": 400, "rope_parameters": {**ROPE, "partial_rotary_factor": 1.0}},
        vision_config={
            "hidden_size": 32,
            "depth": 2,
            "num_heads": 2,
            "intermediate_size": 32,
            "out_hidden_size": 32,
            "patch_size": 8,
            "image_size": 64,
        },
        **media_token_ids("glm-4.5v", ids),
    )
    return processor, config


def _llava_next() -> tuple[ProcessorMixin, PretrainedConfig]:
    text = family_tokenizer("llava-next")
    image = transformers.LlavaNextImageProcessor(
        size={"shortest_edge": 16}, crop_size={"height": 16, "width": 16}, image_grid_pinpoints=_PINPOINTS
    )
    processor = transformers.LlavaNextProcessor(
        image,
        text,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=text.chat_template,
    )
    clip = {"model_type": "clip_vision_model", "image_size": 16, "patch_size": 8}
    config = transformers.LlavaNextConfig(
        text_config={**TEXT, "model_type": "llama", "vocab_size": 400},
        vision_config={**VISION, **clip},
        image_grid_pinpoints=_PINPOINTS,
        **media_token_ids("llava-next", text.get_vocab()),
    )
    return processor, config


def _internvl() -> tuple[ProcessorMixin, PretrainedConfig]:
    text = family_tokenizer("internvl3")
    size = {"height": 32, "width": 32}
    image = transformers.GotOcr2ImageProcessor(crop_to_patches=False, min_patches=1, max_patches=12, size=size)
    video = transformers.InternVLVideoProcessor(size=size, do_sample_frames=True, num_frames=4)
    processor = transformers.InternVLProcessor(image, text, video, image_seq_length=4, chat_template=text.chat_template)
    config = transformers.InternVLConfig(
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": 400},
        vision_config={**VISION, "image_size": [32, 32], "patch_size": [8, 8]},
        **media_token_ids("internvl3", text.get_vocab()),
        image_seq_length=4,
        downsample_ratio=0.5,
    )
    return processor, config


def _idefics3() -> tuple[ProcessorMixin, PretrainedConfig]:
    text = family_tokenizer("idefics3")
    image = transformers.Idefics3ImageProcessor(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    processor = transformers.Idefics3Processor(image, text, image_seq_len=4, chat_template=text.chat_template)
    config = transformers.Idefics3Config(
        text_config={**TEXT, "model_type": "llama", "vocab_size": 400},
        vision_config={**VISION, "image_size": 32, "patch_size": 8},
        scale_factor=2,
        **media_token_ids("idefics3", text.get_vocab()),
        pad_token_id=0,
    )
    return processor, config


def _smolvlm() -> tuple[ProcessorMixin, PretrainedConfig]:
    text = family_tokenizer("smolvlm")
    image = transformers.SmolVLMImageProcessor(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    video = transformers.SmolVLMVideoProcessor(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 32}, num_frames=8, fps=1
    )
    processor = transformers.SmolVLMProcessor(image, text, video, image_seq_len=4, chat_template=text.chat_template)
    config = transformers.SmolVLMConfig(
        text_config={**TEXT, "model_type": "llama", "vocab_size": 400},
        vision_config={**VISION, "image_size": 32, "patch_size": 8},
        scale_factor=2,
        **media_token_ids("smolvlm", text.get_vocab()),
        pad_token_id=0,
    )
    return processor, config


def _pixtral_processor() -> ProcessorMixin:
    text = family_tokenizer("pixtral")
    return transformers.PixtralProcessor(
        transformers.PixtralImageProcessor(size={"longest_edge": 64}, patch_size={"height": 8, "width": 8}),
        text,
        patch_size=8,
        chat_template=text.chat_template,
    )


_PIXTRAL_VISION = {**VISION, "model_type": "pixtral", "image_size": 64, "patch_size": 8, "head_dim": 16}


def _pixtral() -> tuple[ProcessorMixin, PretrainedConfig]:
    processor = _pixtral_processor()
    config = transformers.LlavaConfig(
        text_config={**TEXT, "model_type": "mistral", "vocab_size": 400},
        vision_config=_PIXTRAL_VISION,
        vision_feature_layer=-1,
        vision_feature_select_strategy="full",
        **media_token_ids("pixtral", processor.tokenizer.get_vocab()),
    )
    return processor, config


def _mistral3() -> tuple[ProcessorMixin, PretrainedConfig]:
    processor = _pixtral_processor()
    config = transformers.Mistral3Config(
        text_config={**TEXT, "model_type": "mistral", "vocab_size": 400},
        vision_config=_PIXTRAL_VISION,
        spatial_merge_size=1,
        **media_token_ids("pixtral", processor.tokenizer.get_vocab()),
    )
    return processor, config


def _llama4() -> tuple[ProcessorMixin, PretrainedConfig]:
    text = family_tokenizer("llama4")
    size = {"height": 56, "width": 56}
    image = transformers.Llama4ImageProcessor(size=size, max_patches=4)
    processor = transformers.Llama4Processor(image, text, patch_size=14, chat_template=text.chat_template)
    adapter = {"vision_output_dim": 32, "projector_input_dim": 32, "projector_output_dim": 32}
    # After the pixel shuffle a row holds four patches.
    vision = {**VISION, **adapter, "intermediate_size": 128, "image_size": 56, "patch_size": 14}
    config = transformers.Llama4Config(
        text_config={**_LLAMA4_TEXT, "vocab_size": 400},
        vision_config=vision,
        image_token_id=text.get_vocab()["<|patch|>"],
    )
    return processor, config


MEDIA_FAMILIES: Mapping[str, Callable[[], tuple[ProcessorMixin, PretrainedConfig]]] = {
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": _qwen3_vl_moe,
    "qwen3_5": _qwen3_5,
    "gemma3": _gemma3,
    "gemma4": _gemma4,
    "glm4v": _glm4v,
    "llava_next": _llava_next,
    "internvl": _internvl,
    "idefics3": _idefics3,
    "smolvlm": _smolvlm,
    "pixtral": _pixtral,
    "mistral3": _mistral3,
}
#: Whose own forward fails in some releases of transformers.
FAILING_FAMILIES: Mapping[str, Callable[[], tuple[ProcessorMixin, PretrainedConfig]]] = {"llama4": _llama4}
VIDEO_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "gemma4", "glm4v", "internvl")


def save_family(name: str, directory: Path) -> Path:
    """Write processor and float32 model of a family."""
    families = {**MEDIA_FAMILIES, **FAILING_FAMILIES}
    return save(*families[name](), transformers.AutoModelForImageTextToText.from_config, directory)


def save(processor: ProcessorMixin, config: PretrainedConfig, build: Callable[[Any], Any], directory: Path) -> Path:
    """Write a processor, and the float32 model that `build` makes of `config`."""
    processor.save_pretrained(directory)
    with_seed(lambda: build(config)).save_pretrained(directory)
    return directory
