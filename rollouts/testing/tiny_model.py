"""Complete checkpoint directories of under a million parameters: random weights, real formats."""

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from renderers.errors import MissingExtraError

_CONTROL_TOKENS = [
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|object_ref_start|>",
    "<|object_ref_end|>",
    "<|box_start|>",
    "<|box_end|>",
    "<|quad_start|>",
    "<|quad_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
]
# Of `tiny_qwen2_audio`: the longest sound in seconds, and the bands of its features.
_MAX_SOUND_SECONDS = 2
_MELS = 40
_MARKER_TOKENS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]

CHAT_TEMPLATE = """\
{%- macro show(content) -%}
{%- if content is string -%}
{{- content -}}
{%- elif content -%}
{%- for part in content -%}
{%- if part.type in ('image', 'image_url') -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' -}}
{%- elif part.type in ('video', 'video_url') -%}
{{- '<|vision_start|><|video_pad|><|vision_end|>' -}}
{%- else -%}
{{- part.text -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
{{- '<|im_start|>system\\n' -}}
{%- if messages and messages[0].role == 'system' -%}
{{- show(messages[0].content) + '\\n\\n' -}}
{%- endif -%}
{{- 'You may call these functions:\\n<tools>\\n' -}}
{%- for tool in tools -%}
{{- (tool | tojson) + '\\n' -}}
{%- endfor -%}
{{- '</tools>\\nA call is {"name": ..., "arguments": {...}} between <tool_call> and </tool_call>.<|im_end|>\\n' -}}
{%- elif messages and messages[0].role == 'system' -%}
{{- '<|im_start|>system\\n' + show(messages[0].content) + '<|im_end|>\\n' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'user' or (message.role == 'system' and not loop.first) -%}
{{- '<|im_start|>' + message.role + '\\n' + show(message.content) + '<|im_end|>\\n' -}}
{%- elif message.role == 'assistant' -%}
{{- '<|im_start|>assistant\\n' -}}
{%- if message.reasoning_content -%}
{{- '<think>\\n' + message.reasoning_content + '\\n</think>\\n\\n' -}}
{%- endif -%}
{{- show(message.content) -}}
{%- for call in message.tool_calls or [] -%}
{{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- call.function.arguments if call.function.arguments is string else call.function.arguments | tojson -}}
{{- '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|im_end|>\\n' -}}
{%- elif message.role == 'tool' -%}
{%- if loop.first or loop.previtem.role != 'tool' -%}
{{- '<|im_start|>user' -}}
{%- endif -%}
{{- '\\n<tool_response>\\n' + show(message.content) + '\\n</tool_response>' -}}
{%- if loop.last or loop.nextitem.role != 'tool' -%}
{{- '<|im_end|>\\n' -}}
{%- endif -%}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' -}}
{%- endif -%}
"""


def tiny_qwen3_vl(directory: str | Path, seed: int = 0, *, weights: bool = True) -> Path:
    """Write a `Qwen3VLForConditionalGeneration` checkpoint that transformers' Auto classes load; return its directory.

    About 0.35 M float32 parameters, random from `seed`; a byte-level tokenizer (256 bytes, then the Qwen control
    tokens); a ChatML template with images and tools; a processor configuration with 8-pixel patches, so that a 32x32
    image is 16 patches and 4 tokens. Needs the `torch` extra; `weights=False` leaves out the model, which a renderer
    does not read, and needs nothing. Raises `MissingExtraError` before anything is written.
    """
    if weights and not (find_spec("torch") and find_spec("transformers")):
        raise MissingExtraError("tiny_qwen3_vl with weights", "torch", "torch")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    token_ids = _write_tokenizer(directory, _CONTROL_TOKENS)
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE, encoding="utf-8")
    _write_processor(directory)
    if weights:
        _write_model(directory, token_ids, seed)
    return directory


def tiny_qwen2_audio(directory: str | Path, seed: int = 0) -> Path:
    """Write a `Qwen2AudioForConditionalGeneration` checkpoint; return its directory.

    About 0.3 M float32 parameters, random from `seed`; the tokenizer and the template of `tiny_qwen3_vl`, with sounds
    in place of images; log-mel features of at most 2 seconds at 16 kHz, 25 tokens a second. Needs the `torch` extra;
    raises `MissingExtraError` before anything is written.
    """
    if not (find_spec("torch") and find_spec("transformers")):
        raise MissingExtraError("tiny_qwen2_audio", "torch", "torch")
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    token_ids = _write_tokenizer(directory, [*_CONTROL_TOKENS, "<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"])
    template = CHAT_TEMPLATE
    for given, audio in (
        ("('image', 'image_url')", "('audio', 'audio_url', 'input_audio')"),
        ("<|vision_start|><|image_pad|><|vision_end|>", "<|audio_bos|><|AUDIO|><|audio_eos|>"),
    ):
        template = template.replace(given, audio)
    (directory / "chat_template.jinja").write_text(template, encoding="utf-8")
    features = {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": _MELS, "sampling_rate": 16_000}
    window = {"chunk_length": _MAX_SOUND_SECONDS, "hop_length": 160, "n_fft": 400, "padding_side": "right"}
    _write_json(directory / "preprocessor_config.json", {**features, **window, "padding_value": 0.0})
    _write_json(directory / "processor_config.json", {"processor_class": "Qwen2AudioProcessor"})
    _write_audio_model(directory, token_ids, seed)
    return directory


def _write_tokenizer(directory: Path, control_tokens: Sequence[str]) -> dict[str, int]:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control_tokens])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in _MARKER_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "additional_special_tokens": control_tokens[1:],
            "clean_up_tokenization_spaces": False,
            "model_max_length": 4096,
        },
    )
    return tokenizer.get_vocab(with_added_tokens=True)


def _write_processor(directory: Path) -> None:
    geometry: dict[str, Any] = {
        "patch_size": 8,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "rescale_factor": 1 / 255,
        "resample": 3,
    }
    image = {"image_processor_type": "Qwen2VLImageProcessor", "size": {"shortest_edge": 1024, "longest_edge": 65536}}
    video = {"video_processor_type": "Qwen3VLVideoProcessor", "size": {"shortest_edge": 1024, "longest_edge": 1048576}}
    _write_json(directory / "preprocessor_config.json", {**image, **geometry})
    _write_json(directory / "video_preprocessor_config.json", {**video, **geometry})
    _write_json(directory / "processor_config.json", {"processor_class": "Qwen3VLProcessor"})


def _write_model(directory: Path, token_ids: dict[str, int], seed: int) -> None:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    rope = {"mrope_interleaved": True, "mrope_section": [6, 5, 5]}  # sums to head_dim / 2
    config = Qwen3VLConfig(
        text_config=_text_config(token_ids, **rope),
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 2,
            "patch_size": 8,
            "temporal_patch_size": 2,
            "spatial_merge_size": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 16,
            "initializer_range": 0.05,
            "deepstack_visual_indexes": [0],
            "hidden_act": "gelu_pytorch_tanh",
        },
        image_token_id=token_ids["<|image_pad|>"],
        video_token_id=token_ids["<|video_pad|>"],
        vision_start_token_id=token_ids["<|vision_start|>"],
        vision_end_token_id=token_ids["<|vision_end|>"],
        tie_word_embeddings=True,
        architectures=["Qwen3VLForConditionalGeneration"],
    )
    _save(Qwen3VLForConditionalGeneration, config, directory, token_ids, seed)


def _write_audio_model(directory: Path, token_ids: dict[str, int], seed: int) -> None:
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration

    config = Qwen2AudioConfig(
        text_config={"model_type": "qwen2", **_text_config(token_ids)},
        audio_config={
            "num_mel_bins": _MELS,
            "d_model": 64,
            "encoder_layers": 2,
            "encoder_attention_heads": 2,
            "encoder_ffn_dim": 128,
            "max_source_positions": 50 * _MAX_SOUND_SECONDS,
            "initializer_range": 0.05,
        },
        audio_token_index=token_ids["<|AUDIO|>"],
        architectures=["Qwen2AudioForConditionalGeneration"],
    )
    _save(Qwen2AudioForConditionalGeneration, config, directory, token_ids, seed)


def _text_config(token_ids: dict[str, int], **rope: Any) -> dict[str, Any]:
    return {
        "vocab_size": 288,  # 256 bytes and up to 23 tokens, rounded up
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
        "initializer_range": 0.05,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": True,
        "eos_token_id": token_ids["<|im_end|>"],
        "pad_token_id": token_ids["<|endoftext|>"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0, **rope},
    }


def _save(model_class: Any, config: Any, directory: Path, token_ids: dict[str, int], seed: int) -> None:
    import torch

    from rollouts.models.loading import without_progress_bars

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
    pad = token_ids["<|endoftext|>"]
    model.generation_config.eos_token_id = [token_ids["<|im_end|>"], pad]
    model.generation_config.pad_token_id = pad
    with without_progress_bars():
        model.save_pretrained(directory)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
