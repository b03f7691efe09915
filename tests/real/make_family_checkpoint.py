"""Tiny checkpoints of other families that vLLM serves: the processors of `hf_families` and small random models.

PYTHONPATH=tests/renderers python tests/real/make_family_checkpoint.py gemma3 DIRECTORY
"""

import argparse
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import audio_families
import corpus
import torch
import transformers
from family_tokenizers import GEMMA3_TOKENS, family_tokenizer, media_token_ids, tokenizer
from hf_families import FAMILIES
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

_TEXT: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,  # one that vLLM's attention for CPUs supports
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_SMALL_VISION: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
_PINPOINTS = [[28, 28], [28, 56], [56, 28], [56, 56]]
_QWEN_GENERATION = "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
_GEMMA_CONTROLS = ("<pad>", "<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>")


def make_family_checkpoint(family: str, directory: Path, seed: int = 0) -> Path:
    """Write a float32 checkpoint of a family with its processor and tokenizer; returns the directory."""
    build_processor, build_model = _FAMILIES[family]
    processor = build_processor()
    processor.save_pretrained(directory)
    ids = getattr(processor, "tokenizer", processor).get_vocab()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build_model(-(-(max(ids.values()) + 1) // 64) * 64, ids).float()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() > 1:  # the initial weights are so small that images hardly change the output
                    parameter.normal_(0, 0.08)
    model.generation_config.eos_token_id = 2
    model.save_pretrained(directory)
    if family in ("gemma3", "llava-onevision", "cohere2-vision"):
        _name_as_published(directory / "model.safetensors")
    return directory


def _gemma3_processor() -> transformers.ProcessorMixin:
    """With a tokenizer like Gemma's own: characters, bytes for the others, and tokens of several line breaks."""
    lines = ["\n" * count for count in range(1, 5)]
    characters = ["\u2581", *map(chr, range(33, 127))]
    words = ["<pad>", "<bos>", "<eos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *lines, *characters]
    merges = [("\n", "\n"), ("\n\n", "\n\n"), ("\n\n", "\n")]
    vocabulary = {word: index for index, word in enumerate(words)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, byte_fallback=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    backend.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    controls = [*_GEMMA_CONTROLS, *GEMMA3_TOKENS.values()]
    backend.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in controls])
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        extra_special_tokens=GEMMA3_TOKENS,
        chat_template=corpus.templates()["trl/gemma3"],
    )
    image = transformers.Gemma3ImageProcessor(size={"height": 896, "width": 896}, do_pan_and_scan=None)
    return transformers.Gemma3Processor(image, tokenizer, chat_template=tokenizer.chat_template)


def _gemma3_model(vocabulary: int, ids: Mapping[str, int]) -> transformers.PreTrainedModel:
    vision = {**_SMALL_VISION, "image_size": 896, "patch_size": 14}
    text = {**_TEXT, "vocab_size": vocabulary, "sliding_window": 512, "query_pre_attn_scalar": 32}
    config = transformers.Gemma3Config(
        text_config=text,
        vision_config=vision,
        mm_tokens_per_image=256,
        **media_token_ids("gemma3", ids),
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _name_as_published(path: Path) -> None:
    """The names that vLLM looks for; transformers 5 saves the vision tower under shorter ones and reads both."""
    tensors = load_file(path)
    prefix, published = "vision_tower.", "vision_tower.vision_model."
    renamed = {
        name if published in name else name.replace(prefix, published): tensor for name, tensor in tensors.items()
    }
    save_file(renamed, path, metadata={"format": "pt"})


def _glm_processor() -> transformers.ProcessorMixin:
    return next(family for family in FAMILIES if family.name == "glm-4.5v").build()


def _glm_model(vocabulary: int, ids: Mapping[str, int]) -> transformers.PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6], "partial_rotary_factor": 1.0}
    vision = {"hidden_size": 64, "depth": 2, "num_heads": 2, "intermediate_size": 128, "out_hidden_size": 64}
    config = transformers.Glm4vConfig(
        text_config={**_TEXT, "vocab_size": vocabulary, "model_type": "glm4v_text", "rope_parameters": rope},
        vision_config=vision,
        **media_token_ids("glm-4.5v", ids),
    )
    return transformers.Glm4vForConditionalGeneration(config)


def _internvl_processor() -> transformers.ProcessorMixin:
    """Images of 32 x 32 pixels and 4 tokens, between two tokens of their own."""
    text = family_tokenizer("internvl3")
    text.chat_template += _QWEN_GENERATION
    size = {"height": 32, "width": 32}
    image = transformers.GotOcr2ImageProcessor(crop_to_patches=False, min_patches=1, max_patches=12, size=size)
    video = transformers.InternVLVideoProcessor(size=size, do_sample_frames=True, num_frames=4)
    return transformers.InternVLProcessor(image, text, video, image_seq_length=4, chat_template=text.chat_template)


def _internvl_model(vocabulary: int, ids: Mapping[str, int]) -> transformers.PreTrainedModel:
    config = transformers.InternVLConfig(
        text_config={**_TEXT, "vocab_size": vocabulary, "model_type": "qwen2"},
        vision_config={**_SMALL_VISION, "image_size": [32, 32], "patch_size": [8, 8]},
        **media_token_ids("internvl3", ids),
        image_seq_length=4,
        downsample_ratio=0.5,
    )
    return transformers.InternVLForConditionalGeneration(config)


def _llava_onevision_processor() -> transformers.ProcessorMixin:
    """Images of up to 2 x 2 tiles of 28 x 28 pixels, and one of the whole; 4 tokens each and one for each line."""
    text = family_tokenizer("llava-onevision")
    text.chat_template += _QWEN_GENERATION
    side = {"height": 28, "width": 28}
    image = transformers.LlavaOnevisionImageProcessor(size=side, image_grid_pinpoints=_PINPOINTS)
    return transformers.LlavaOnevisionProcessor(
        image,
        text,
        transformers.LlavaOnevisionVideoProcessor(size=side),
        num_image_tokens=4,
        vision_feature_select_strategy="full",
        chat_template=text.chat_template,
    )


def _llava_onevision_model(vocabulary: int, ids: Mapping[str, int]) -> transformers.PreTrainedModel:
    config = transformers.LlavaOnevisionConfig(
        text_config={**_TEXT, "vocab_size": vocabulary, "model_type": "qwen2"},
        vision_config={
            **_SMALL_VISION,
            "model_type": "siglip_vision_model",
            "image_size": 28,
            "patch_size": 14,
            "vision_use_head": False,
        },
        image_grid_pinpoints=_PINPOINTS,
        **media_token_ids("llava-onevision", ids),
    )
    return transformers.LlavaOnevisionForConditionalGeneration(config)


def _cohere2_vision_processor() -> transformers.ProcessorMixin:
    """Images in up to 4 tiles of 32 x 32 pixels, and one of the whole; 4 tokens each and one for the end of a tile."""
    text = family_tokenizer("cohere2-vision")
    text.chat_template += "{%- if add_generation_prompt %}{{- '<|START_OF_TURN_TOKEN|><|assistant|>' }}{%- endif %}"
    # `patch_size` is here the square root of the tokens of a tile.
    image = transformers.Cohere2VisionImageProcessor(
        size={"height": 32, "width": 32}, patch_size=2, crop_to_patches=True, min_patches=1, max_patches=4
    )
    return transformers.Cohere2VisionProcessor(image, text, chat_template=text.chat_template)


def _cohere2_vision_model(vocabulary: int, ids: Mapping[str, int]) -> transformers.PreTrainedModel:
    config = transformers.Cohere2VisionConfig(
        # transformers' class never reads `logit_scale`, which vLLM multiplies logits by.
        text_config={**_TEXT, "vocab_size": vocabulary, "model_type": "cohere2", "logit_scale": 0.25},
        vision_config={
            **_SMALL_VISION,
            "model_type": "siglip_vision_model",
            "image_size": 32,
            "patch_size": 8,
            "vision_use_head": False,
        },
        downsample_factor=2,
        alignment_intermediate_size=128,
        **media_token_ids("cohere2-vision", ids),
    )
    return transformers.Cohere2VisionForConditionalGeneration(config)


def _idefics3_processor() -> transformers.ProcessorMixin:
    """Images in tiles of 32 x 32 pixels and 4 tokens, with a name before each tile."""
    text = family_tokenizer("idefics3")
    image = transformers.Idefics3ImageProcessor(size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    return transformers.Idefics3Processor(image, text, image_seq_len=4, chat_template=text.chat_template)


def _idefics3_model(vocabulary: int, ids: Mapping[str, int]) -> transformers.PreTrainedModel:
    config = transformers.Idefics3Config(
        text_config={**_TEXT, "vocab_size": vocabulary, "model_type": "llama"},
        vision_config={**_SMALL_VISION, "image_size": 32, "patch_size": 8},
        scale_factor=2,
        **media_token_ids("idefics3", ids),
        pad_token_id=0,
    )
    return transformers.Idefics3ForConditionalGeneration(config)


def _qwen2_5_vl_processor() -> transformers.ProcessorMixin:
    text = family_tokenizer("qwen-vl")
    image = transformers.Qwen2VLImageProcessor(size={"shortest_edge": 3136, "longest_edge": 200_704})
    video = transformers.Qwen2VLVideoProcessor(size={"shortest_edge": 3136, "longest_edge": 200_704})
    return transformers.Qwen2_5_VLProcessor(image, text, video, chat_template=text.chat_template)


def _qwen2_5_vl_model(vocabulary: int, ids: Mapping[str, int]) -> transformers.PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
    vision = {"hidden_size": 64, "depth": 2, "num_heads": 2, "intermediate_size": 128, "out_hidden_size": 64}
    config = transformers.Qwen2_5_VLConfig(
        text_config={**_TEXT, "vocab_size": vocabulary, "rope_parameters": rope},
        vision_config={**vision, "fullatt_block_indexes": [1]},
        **media_token_ids("qwen-vl", ids),
    )
    return transformers.Qwen2_5_VLForConditionalGeneration(config)


_AUDIO_TOWER: dict[str, Any] = {
    "d_model": 64,
    "encoder_layers": 2,
    "encoder_attention_heads": 2,
    "encoder_ffn_dim": 128,
    "num_mel_bins": 128,
}


def _qwen2_audio_model(vocabulary: int, ids: Mapping[str, int]) -> transformers.PreTrainedModel:
    config = transformers.Qwen2AudioConfig(
        audio_config={**_AUDIO_TOWER, "model_type": "qwen2_audio_encoder"},
        text_config={**_TEXT, "vocab_size": vocabulary, "model_type": "qwen2"},
        audio_token_index=ids["<|AUDIO|>"],
    )
    return transformers.Qwen2AudioForConditionalGeneration(config)


def _qwen2_5_omni_model(vocabulary: int, ids: Mapping[str, int]) -> transformers.PreTrainedModel:
    """The thinker, without the parts that speak."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6]}
    vision = {"hidden_size": 64, "depth": 2, "num_heads": 2, "intermediate_size": 128, "out_hidden_size": 64}
    thinker = {
        "audio_config": {**_AUDIO_TOWER, "output_dim": 64},
        "vision_config": {**vision, "fullatt_block_indexes": [1]},
        # vLLM ties the layers by the configuration of the text alone.
        "text_config": {**_TEXT, "vocab_size": vocabulary, "rope_parameters": rope, "tie_word_embeddings": False},
        **{f"{kind}_token_index": ids[f"<|{kind.upper()}|>"] for kind in ("audio", "image", "video")},
        "audio_start_token_id": ids["<|audio_bos|>"],
        "audio_end_token_id": ids["<|audio_eos|>"],
        "vision_start_token_id": ids["<|vision_bos|>"],
        "vision_end_token_id": ids["<|vision_eos|>"],
        "pad_token_id": 0,
    }
    config = transformers.Qwen2_5OmniConfig(thinker_config=thinker, enable_audio_output=False)
    return transformers.Qwen2_5OmniForConditionalGeneration(config)


_ONLY_VLLM_READS = {"image_size": 768, "apply_vit_abs_pos_embed": True}  # of the vision tower in published files


def _qwen3_omni_model(vocabulary: int, ids: Mapping[str, int]) -> transformers.PreTrainedModel:
    """The thinker, without the parts that speak."""
    rope = {"rope_type": "default", "rope_theta": 10_000.0, "mrope_section": [4, 6, 6], "mrope_interleaved": True}
    vision = {"hidden_size": 64, "depth": 2, "num_heads": 2, "intermediate_size": 128, "out_hidden_size": 64}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    thinker = {
        "audio_config": {**_AUDIO_TOWER, "output_dim": 64, "downsample_hidden_size": 16},
        "vision_config": {**vision, "deepstack_visual_indexes": [0], **_ONLY_VLLM_READS},
        "text_config": {
            **_TEXT,
            **experts,
            "vocab_size": vocabulary,
            "rope_parameters": rope,
            "tie_word_embeddings": False,
        },
        **{f"{kind}_token_id": ids[f"<|{kind}_pad|>"] for kind in ("audio", "image", "video")},
        **{
            f"{kind}_{edge}_token_id": ids[f"<|{kind}_{edge}|>"]
            for kind in ("audio", "vision")
            for edge in ("start", "end")
        },
    }
    config = transformers.Qwen3OmniMoeConfig(thinker_config=thinker, enable_audio_output=False)
    return transformers.Qwen3OmniMoeForConditionalGeneration(config)


def _qwen3_asr_model(vocabulary: int, ids: Mapping[str, int]) -> transformers.PreTrainedModel:
    config = transformers.Qwen3ASRConfig(
        audio_config={
            "model_type": "qwen3_asr_encoder",
            **_AUDIO_TOWER,
            "output_dim": 64,
            "downsample_hidden_size": 16,
        },
        text_config={**_TEXT, "vocab_size": vocabulary, "model_type": "qwen3"},
        audio_token_id=ids["<|audio_pad|>"],
    )
    return transformers.Qwen3ASRForConditionalGeneration(config)


def _audio_flamingo3_model(vocabulary: int, ids: Mapping[str, int]) -> transformers.PreTrainedModel:
    config = transformers.AudioFlamingo3Config(
        audio_config={"model_type": "audioflamingo3_encoder", **_SMALL_VISION},
        text_config={**_TEXT, "vocab_size": vocabulary, "model_type": "qwen2"},
        audio_token_id=ids["<sound>"],
    )
    return transformers.AudioFlamingo3ForConditionalGeneration(config)


def _glm_asr_model(vocabulary: int, ids: Mapping[str, int]) -> transformers.PreTrainedModel:
    config = transformers.GlmAsrConfig(
        audio_config={"model_type": "glmasr_encoder", **_SMALL_VISION, "intermediate_size": 256},
        text_config={**_TEXT, "vocab_size": vocabulary, "model_type": "llama"},
        audio_token_id=ids["<|pad|>"],
    )
    return transformers.GlmAsrForConditionalGeneration(config)


def _qwen3_tokenizer() -> transformers.PreTrainedTokenizerBase:
    return tokenizer(["<|im_start|>", "<|im_end|>"], corpus.templates()["trl/qwen2_5"])


def _qwen3_model(vocabulary: int, ids: Mapping[str, int]) -> transformers.PreTrainedModel:
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**_TEXT, vocab_size=vocabulary))


def _olmoe_model(vocabulary: int, ids: Mapping[str, int]) -> transformers.PreTrainedModel:
    own = {"num_experts": 16, "num_experts_per_tok": 4, "num_key_value_heads": 2}
    config = transformers.OlmoeConfig(**{**_TEXT, **own}, vocab_size=vocabulary)
    return transformers.OlmoeForCausalLM(config)


_FAMILIES: Mapping[str, tuple[Callable[[], Any], Callable[[int, Mapping[str, int]], Any]]] = {
    "gemma3": (_gemma3_processor, _gemma3_model),
    "glm-4.5v": (_glm_processor, _glm_model),
    "internvl3": (_internvl_processor, _internvl_model),
    "idefics3": (_idefics3_processor, _idefics3_model),
    "llava-onevision": (_llava_onevision_processor, _llava_onevision_model),
    "cohere2-vision": (_cohere2_vision_processor, _cohere2_vision_model),
    "qwen2.5-vl": (_qwen2_5_vl_processor, _qwen2_5_vl_model),
    "qwen2-audio": (audio_families.FAMILIES["qwen2_audio"], _qwen2_audio_model),
    "qwen2.5-omni": (audio_families.FAMILIES["qwen2_5_omni"], _qwen2_5_omni_model),
    "qwen3-omni": (audio_families.FAMILIES["qwen3_omni"], _qwen3_omni_model),
    "qwen3-asr": (audio_families.FAMILIES["qwen3_asr"], _qwen3_asr_model),
    "audio-flamingo3": (audio_families.FAMILIES["audio_flamingo3"], _audio_flamingo3_model),
    "glm-asr": (audio_families.FAMILIES["glm_asr"], _glm_asr_model),
    "qwen3": (_qwen3_tokenizer, _qwen3_model),  # a text model
    "olmoe": (_qwen3_tokenizer, _olmoe_model),  # a text model
}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("family", choices=tuple(_FAMILIES))
    parser.add_argument("directory", type=Path)
    arguments = parser.parse_args()
    print(make_family_checkpoint(arguments.family, arguments.directory))
