"""The tokenizers of model families that read images: a few merges, the published control tokens and chat templates.

`hf_families`, `model_families` and `tests/real/make_family_checkpoint` build processors and models around them.
"""

from collections.abc import Callable, Mapping, Sequence

import corpus
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

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
_COHERE_TEMPLATE = """\
{{- bos_token }}{%- for message in messages %}\
{{- '<|START_OF_TURN_TOKEN|><|' + message['role'] + '|>' }}\
{%- for part in message['content'] %}{%- if part['type'] == 'image' %}{{- '<|IMG_PATCH|>' }}\
{%- else %}{{- part['text'] }}{%- endif %}{%- endfor %}{{- '<|END_OF_TURN_TOKEN|>' }}{%- endfor %}"""

#: The tokens that processors ask for by attribute.
GEMMA3_TOKENS = {
    "boi_token": "<start_of_image>",
    "eoi_token": "<end_of_image>",
    "image_token": "<image_soft_token>",
}
_GEMMA4_TOKENS = {
    "boi_token": "<|image>",
    "eoi_token": "<image|>",
    "image_token": "<|image|>",
    "boa_token": "<|audio>",
    "eoa_token": "<audio|>",
    "audio_token": "<|audio|>",
}
_INTERNVL_TOKENS = {
    "start_image_token": "<img>",
    "end_image_token": "</img>",
    "context_image_token": "<IMG_CONTEXT>",
    "video_token": "<video>",
}
_COHERE2_VISION_TOKENS = {
    "boi_token": "<|START_OF_IMG|>",
    "eoi_token": "<|END_OF_IMG|>",
    "image_token": "<|IMG_PATCH|>",
    "img_line_break_token": "<|IMG_LINE_BREAK|>",
}
_SMOLVLM_TOKENS = {
    "fake_image_token": "<fake_token_around_image>",
    "global_image_token": "<global-img>",
    "image_token": "<image>",
    "end_of_utterance_token": "<end_of_utterance>",
    "video_token": "<video>",
}
_TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7))
_IDEFICS3_CONTROLS = ("<|begin_of_text|>", "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
_GLM_TURNS = ("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|observation|>")
_GLM_EDGES = tuple(f"<|{edge}_of_{kind}|>" for edge in ("begin", "end") for kind in ("image", "video"))
_KIMI_CONTROLS = (
    *("<|im_system|>", "<|im_user|>", "<|im_assistant|>", "<|im_middle|>", "<|im_end|>"),
    *("<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>", "<|kimi_k25_video_placeholder|>"),
)
_LLAMA4_CONTROLS = (
    *("<|header_start|>", "<|header_end|>", "<|eot|>", "<|image|>", "<|image_start|>", "<|image_end|>"),
    *("<|patch|>", "<|tile_x_separator|>", "<|tile_y_separator|>"),
)
_COHERE_TURNS = (
    *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>"),
    *("<|user|>", "<|assistant|>", "<|system|>"),
)
_QWEN_MEDIA = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")


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


def family_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a family of `_FAMILIES`."""
    return _FAMILIES[family]()


_FAMILIES: Mapping[str, Callable[[], PreTrainedTokenizerFast]] = {
    "gemma3": lambda: tokenizer(
        ["<start_of_turn>", "<end_of_turn>"], corpus.templates()["trl/gemma3"], **GEMMA3_TOKENS
    ),
    "gemma4": lambda: tokenizer(
        ["<|turn>", "<turn|>", "<|video|>"], corpus.templates()["trl/gemma4"], **_GEMMA4_TOKENS
    ),
    "glm-4.5v": lambda: tokenizer(
        [*_GLM_TURNS, *_GLM_EDGES, "<|image|>", "<|video|>"], corpus.templates()["own/glm-4.5v"]
    ),
    "internvl3": lambda: tokenizer(["<|im_start|>", "<|im_end|>"], _INTERNVL_TEMPLATE, **_INTERNVL_TOKENS),
    "llava-next": lambda: tokenizer([], corpus.templates()["trl/llava_next"], image_token="<image>"),
    "idefics3": lambda: tokenizer([*_IDEFICS3_CONTROLS, *_TILES], corpus.templates()["trl/idefics3"]),
    "smolvlm": lambda: tokenizer(["<|im_start|>", *_TILES], corpus.templates()["trl/smolvlm"], **_SMOLVLM_TOKENS),
    "pixtral": lambda: tokenizer(["[INST]", "[/INST]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"], _PIXTRAL_TEMPLATE),
    "llama4": lambda: tokenizer(_LLAMA4_CONTROLS, _LLAMA4_TEMPLATE),
    "kimi-k2.5": lambda: tokenizer(_KIMI_CONTROLS, _KIMI_TEMPLATE),
    "llava-onevision": lambda: tokenizer(
        ["<|im_start|>", "<|im_end|>", "<image>", "<video>"], _INTERNVL_TEMPLATE.replace("<IMG_CONTEXT>", "<image>")
    ),
    "cohere2-vision": lambda: tokenizer(_COHERE_TURNS, _COHERE_TEMPLATE, **_COHERE2_VISION_TOKENS),
    "qwen-vl": lambda: tokenizer(["<|im_start|>", "<|im_end|>", *_QWEN_MEDIA], corpus.templates()["trl/qwen2_5_vl"]),
}


def media_token_ids(family: str, ids: Mapping[str, int]) -> dict[str, int]:
    """The arguments of a family's configuration that name its media tokens, given the ids of its tokenizer."""
    return {name: ids[token] for name, token in _MEDIA_TOKENS[family].items()}


_MEDIA_TOKENS: Mapping[str, Mapping[str, str]] = {
    "gemma3": {
        "image_token_index": "<image_soft_token>",
        "boi_token_index": "<start_of_image>",
        "eoi_token_index": "<end_of_image>",
    },
    "gemma4": {
        "image_token_id": "<|image|>",
        "video_token_id": "<|video|>",
        "audio_token_id": "<|audio|>",
        "boi_token_id": "<|image>",
        "eoi_token_id": "<image|>",
    },
    "glm-4.5v": {
        "image_token_id": "<|image|>",
        "video_token_id": "<|video|>",
        "image_start_token_id": "<|begin_of_image|>",
        "image_end_token_id": "<|end_of_image|>",
        "video_start_token_id": "<|begin_of_video|>",
        "video_end_token_id": "<|end_of_video|>",
    },
    "internvl3": {"image_token_id": "<IMG_CONTEXT>"},
    "llava-next": {"image_token_index": "<image>"},
    "idefics3": {"image_token_id": "<image>"},
    "smolvlm": {"image_token_id": "<image>"},
    "pixtral": {"image_token_index": "[IMG]"},
    "llava-onevision": {"image_token_index": "<image>", "video_token_index": "<video>"},
    "cohere2-vision": {"image_token_id": "<|IMG_PATCH|>"},
    "qwen-vl": {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    },
}
