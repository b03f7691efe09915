"""Tiny random models of many architectures, and the processors of those that read images; made in code."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import corpus
import torch
import transformers
from hf_families import _INTERNVL_TEMPLATE, _PIXTRAL_TEMPLATE, tokenizer
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
        "bloom": lambda: transformers.BloomConfig(vocab_size=300, hidden_size=32, n_layer=2, n_head=2),  # no positions
        "phi": lambda: transformers.PhiConfig(**TEXT, vocab_size=300),  # its output layer has a bias
        # Learned positions; token_type_ids are segments, whose embeddings are added to those of the tokens.
        "gpt2": lambda: transformers.GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=2, n_positions=2048),
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
    "mamba",
)


# Images and video: processor and configuration.


def _qwen_tokenizer() -> Any:
    media = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    return tokenizer(["<|im_start|>", "<|im_end|>", *media], corpus.templates()["trl/qwen2_5_vl"])


def _qwen_processor(processor_class: Any, video_class: Any) -> ProcessorMixin:
    text = _qwen_tokenizer()
    patches = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2}
    size = {"shortest_edge": 256, "longest_edge": 4096}
    image = transformers.Qwen2VLImageProcessor(size=size, **patches)
    video = video_class(size={"shortest_edge": 512, "longest_edge": 65536}, **patches)
    return processor_class(image, text, video, chat_template=text.chat_template)


def _qwen_ids(ids: Mapping[str, int]) -> dict[str, int]:
    named = {f"vision_{edge}_token_id": ids[f"<|vision_{edge}|>"] for edge in ("start", "end")}
    return {"image_token_id": ids["<|image_pad|>"], "video_token_id": ids["<|video_pad|>"], **named}


def _qwen2_vl() -> tuple[ProcessorMixin, PretrainedConfig]:
    processor = _qwen_processor(transformers.Qwen2VLProcessor, transformers.Qwen2VLVideoProcessor)
    ids = processor.tokenizer.get_vocab()
    vision = {"depth": 2, "embed_dim": 32, "num_heads": 2, "hidden_size": 32, "mlp_ratio": 1, "patch_size": 8}
    text = {**TEXT, "vocab_size": 400, "rope_parameters": ROPE}
    return processor, transformers.Qwen2VLConfig(text_config=text, vision_config=vision, **_qwen_ids(ids))


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
    return processor, transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **_qwen_ids(ids))


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
    return processor, transformers.Qwen3VLConfig(text_config=text, vision_config=vision, **_qwen_ids(ids))


def _qwen3_vl_moe() -> tuple[ProcessorMixin, PretrainedConfig]:
    processor = _qwen_processor(transformers.Qwen3VLProcessor, transformers.Qwen3VLVideoProcessor)
    ids = processor.tokenizer.get_vocab()
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    text = {**TEXT, **experts, "vocab_size": 400, "rope_parameters": {**ROPE, "mrope_interleaved": True}}
    vision = {**_QWEN3_VISION, "deepstack_visual_indexes": [0]}
    return processor, transformers.Qwen3VLMoeConfig(text_config=text, vision_config=vision, **_qwen_ids(ids))


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
    return processor, transformers.Qwen3_5Config(text_config=text, vision_config=_QWEN3_VISION, **_qwen_ids(ids))


def _gemma3() -> tuple[ProcessorMixin, PretrainedConfig]:
    named = {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"}
    text = tokenizer(["<start_of_turn>", "<end_of_turn>"], corpus.templates()["trl/gemma3"], **named)
    image = transformers.Gemma3ImageProcessor(size={"height": 32, "width": 32}, do_pan_and_scan=None)
    processor = transformers.Gemma3Processor(image, text, image_seq_length=4, chat_template=text.chat_template)
    ids = text.get_vocab()
    config = transformers.Gemma3Config(
        text_config={**_sliding(), "vocab_size": 400, "query_pre_attn_scalar": 16, "final_logit_softcapping": 3.0},
        vision_config={**VISION, "image_size": 32, "patch_size": 8},
        mm_tokens_per_image=4,
        image_token_index=ids["<image_soft_token>"],
        boi_token_index=ids["<start_of_image>"],
        eoi_token_index=ids["<end_of_image>"],
    )
    return processor, config


def _gemma4() -> tuple[ProcessorMixin, PretrainedConfig]:
    named = {
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
        "audio_token": "<|audio|>",
    }
    text = tokenizer(["<|turn>", "<turn|>", "<|video|>"], corpus.templates()["trl/gemma4"], **named)
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
        image_token_id=ids["<|image|>"],
        video_token_id=ids["<|video|>"],
        audio_token_id=ids["<|audio|>"],
        boi_token_id=ids["<|image>"],
        eoi_token_id=ids["<image|>"],
    )
    return processor, config


def _glm4v() -> tuple[ProcessorMixin, PretrainedConfig]:
    media = [f"<|{edge}_of_{kind}|>" for edge in ("begin", "end") for kind in ("image", "video")]
    turns = ["[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>"]
    text = tokenizer([*turns, *media, "<|image|>", "<|video|>"], corpus.templates()["own/glm-4.5v"])
    patches = {"patch_size": 8, "temporal_patch_size": 2, "merge_size": 2}
    image = transformers.Glm4vImageProcessor(size={"shortest_edge": 512, "longest_edge": 8192}, **patches)
    video = transformers.Glm4vVideoProcessor(size={"shortest_edge": 512, "longest_edge": 16384}, **patches)
    processor = transformers.Glm4vProcessor(image, text, video, chat_template=text.chat_template)
    ids = text.get_vocab()
    edges = {
        f"{kind}_{where}_token_id": ids[f"<|{edge}_of_{kind}|>"]
        for kind in ("image", "video")
        for where, edge in (("start", "begin"), ("end", "end"))
    }
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
        image_token_id=ids["<|image|>"],
        video_token_id=ids["<|video|>"],
        **edges,
    )
    return processor, config


def _llava_next() -> tuple[ProcessorMixin, PretrainedConfig]:
    text = tokenizer([], corpus.templates()["trl/llava_next"], image_token="<image>")
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
        image_token_index=text.get_vocab()["<image>"],
    )
    return processor, config


def _internvl() -> tuple[ProcessorMixin, PretrainedConfig]:
    named = {
        "start_image_token": "<img>",
        "end_image_token": "</img>",
        "context_image_token": "<IMG_CONTEXT>",
        "video_token": "<video>",
    }
    text = tokenizer(["<|im_start|>", "<|im_end|>"], _INTERNVL_TEMPLATE, **named)
    size = {"height": 32, "width": 32}
    image = transformers.GotOcr2ImageProcessor(crop_to_patches=False, min_patches=1, max_patches=12, size=size)
    video = transformers.InternVLVideoProcessor(size=size, do_sample_frames=True, num_frames=4)
    processor = transformers.InternVLProcessor(image, text, video, image_seq_length=4, chat_template=text.chat_template)
    config = transformers.InternVLConfig(
        text_config={**TEXT, "model_type": "qwen2", "vocab_size": 400},
        vision_config={**VISION, "image_size": [32, 32], "patch_size": [8, 8]},
        image_token_id=text.get_vocab()["<IMG_CONTEXT>"],
        image_seq_length=4,
        downsample_ratio=0.5,
    )
    return processor, config


def _tiles() -> list[str]:
    return [f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)]


def _idefics3() -> tuple[ProcessorMixin, PretrainedConfig]:
    controls = ["<|begin_of_text|>", "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
    text = tokenizer([*controls, *_tiles()], corpus.templates()["trl/idefics3"])
    image = transformers.Idefics3ImageProcessor(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    processor = transformers.Idefics3Processor(image, text, image_seq_len=4, chat_template=text.chat_template)
    config = transformers.Idefics3Config(
        text_config={**TEXT, "model_type": "llama", "vocab_size": 400},
        vision_config={**VISION, "image_size": 32, "patch_size": 8},
        scale_factor=2,
        image_token_id=text.get_vocab()["<image>"],
        pad_token_id=0,
    )
    return processor, config


def _smolvlm() -> tuple[ProcessorMixin, PretrainedConfig]:
    named = {
        "fake_image_token": "<fake_token_around_image>",
        "global_image_token": "<global-img>",
        "image_token": "<image>",
        "end_of_utterance_token": "<end_of_utterance>",
        "video_token": "<video>",
    }
    text = tokenizer(["<|im_start|>", *_tiles()], corpus.templates()["trl/smolvlm"], **named)
    image = transformers.SmolVLMImageProcessor(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    video = transformers.SmolVLMVideoProcessor(
        size={"longest_edge": 32}, max_image_size={"longest_edge": 32}, num_frames=8, fps=1
    )
    processor = transformers.SmolVLMProcessor(image, text, video, image_seq_len=4, chat_template=text.chat_template)
    config = transformers.SmolVLMConfig(
        text_config={**TEXT, "model_type": "llama", "vocab_size": 400},
        vision_config={**VISION, "image_size": 32, "patch_size": 8},
        scale_factor=2,
        image_token_id=text.get_vocab()["<image>"],
        pad_token_id=0,
    )
    return processor, config


def _pixtral_processor() -> ProcessorMixin:
    text = tokenizer(["[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"], _PIXTRAL_TEMPLATE)
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
        image_token_index=processor.tokenizer.get_vocab()["[IMG]"],
    )
    return processor, config


def _mistral3() -> tuple[ProcessorMixin, PretrainedConfig]:
    processor = _pixtral_processor()
    config = transformers.Mistral3Config(
        text_config={**TEXT, "model_type": "mistral", "vocab_size": 400},
        vision_config=_PIXTRAL_VISION,
        spatial_merge_size=1,
        image_token_index=processor.tokenizer.get_vocab()["[IMG]"],
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
VIDEO_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "gemma4", "glm4v", "internvl")


def save_family(name: str, directory: Path) -> Path:
    """Write processor and float32 model of a family."""
    processor, config = MEDIA_FAMILIES[name]()
    processor.save_pretrained(directory)
    with_seed(lambda: transformers.AutoModelForImageTextToText.from_config(config)).save_pretrained(directory)
    return directory
