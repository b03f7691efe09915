"""A folder in the layout of Hugging Face's cache that holds models by repository name, so that tests load them offline.

Templates and tokenizers are real ones, from packages of the index (tests/renderers/corpus.py has most of them). Of four
families only the template is real: their control tokens are added to Qwen 3's words. Models whose template no package
holds (Inkling, Kimi K2.5) are not here, and what needs them fails with either package.
"""

# ruff: noqa: RUF001 (control tokens are spelled as in their vocabularies)

from __future__ import annotations

import hashlib
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import corpus
import transformers
import vision_models
import vocabularies
from sources import CACHE, fetch
from tokenizers import Tokenizer

_VERSION = "1"
#: Where the tests' processes find the models (HF_HOME) and the harmony encoding (TIKTOKEN_ENCODINGS_BASE).
HOME = CACHE / "hub"
ENCODINGS = CACHE / "encodings"

# Repositories whose tests name a commit.
_COMMITS = {"moonshotai/Kimi-K2-Instruct": "fd1984e2b7a3350dbf7305fe73a4ede25c14de50"}
_COMMIT = "0" * 40

_LAGUNA = ["〈|EOS|〉", "<assistant>", "</assistant>", "<think>", "</think>", "<tool_call>", "</tool_call>"]
_KIMI = [
    "[BOS]",
    "[EOS]",
    "<|im_user|>",
    "<|im_assistant|>",
    "<|im_system|>",
    "<|im_middle|>",
    "<|im_end|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
    "<think>",
    "</think>",
]
_HY3 = [
    "<｜hy_begin_of_sentence:opensource｜>",
    "<｜hy_eos:opensource｜>",
    "<｜hy_pad:opensource｜>",
    "<｜hy_User:opensource｜>",
    "<｜hy_Assistant:opensource｜>",
    "<｜reasoning_mode:opensource｜>",
    *(
        f"<{slash}{name}:opensource>"
        for name in (
            "think",
            "tool_calls",
            "tool_call",
            "arg_key",
            "arg_value",
            "tool_responses",
            "tool_response",
        )
        for slash in ("", "/")
    ),
    "<tool_sep:opensource>",
]
_LLAMA_3 = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|finetune_right_pad_id|>",
    "<|reserved_special_token_2|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eom_id|>",
    "<|eot_id|>",
    "<|python_tag|>",
    *(f"<|reserved_special_token_{index}|>" for index in range(3, 248)),
]
_GPT_OSS = {
    199998: "<|startoftext|>",
    199999: "<|endoftext|>",
    200002: "<|return|>",
    200003: "<|constrain|>",
    200005: "<|channel|>",
    200006: "<|start|>",
    200007: "<|end|>",
    200008: "<|message|>",
    200012: "<|call|>",
    200018: "<|endofprompt|>",
}


@dataclass(frozen=True)
class Model:
    """What a repository of the hub holds.

    template: `GROUP/NAME`; groups `trl` and `own` are the corpus's, `llama.cpp` is the folder of that program. None:
        the model has none.
    base: fills a folder with all that is not the template.
    model_type: what transformers calls its architecture.
    """

    template: str | None
    base: Callable[[Path], None]
    model_type: str


def build() -> None:
    """Make the hub and the encodings, if this version of them is not there. About a minute."""
    stamp = HOME / "stamp"
    wanted = hashlib.sha256(f"{_VERSION} {Path(__file__).read_text(encoding='utf-8')}".encode()).hexdigest()
    if stamp.is_file() and stamp.read_text() == wanted:
        return
    HOME.parent.mkdir(parents=True, exist_ok=True)
    ENCODINGS.mkdir(exist_ok=True)
    vocabularies.write_ranks(fetch("quicktok") / "data" / "o200k.vocab", ENCODINGS / "o200k_base.tiktoken")
    with tempfile.TemporaryDirectory(dir=HOME.parent) as scratch:
        made = Path(scratch) / "hub"
        bases: dict[Callable[[Path], None], Path] = {}
        for repository, model in models():
            commit = _COMMITS.get(repository, _COMMIT)
            folder = made / "hub" / f"models--{repository.replace('/', '--')}"
            snapshot = folder / "snapshots" / commit
            if model.base in bases:
                shutil.copytree(bases[model.base], snapshot, copy_function=_link)
            else:
                snapshot.mkdir(parents=True)
                model.base(snapshot)
                bases[model.base] = snapshot
            _forget_template(snapshot)
            if model.template is not None:
                (snapshot / "chat_template.jinja").write_text(_template(model.template), encoding="utf-8")
            (snapshot / "config.json").unlink(missing_ok=True)
            (snapshot / "config.json").write_text(json.dumps({"model_type": model.model_type}), encoding="utf-8")
            (folder / "refs").mkdir()
            (folder / "refs" / "main").write_text(commit)
        (made / "stamp").write_text(wanted)
        if HOME.is_dir():
            HOME.rename(Path(scratch) / "old")
        made.rename(HOME)


def _forget_template(snapshot: Path) -> None:
    # The files may be shared with another repository: they are replaced, never written to.
    (snapshot / "chat_template.jinja").unlink(missing_ok=True)
    settings = json.loads((snapshot / "tokenizer_config.json").read_text(encoding="utf-8"))
    if settings.pop("chat_template", None) is not None:
        (snapshot / "tokenizer_config.json").unlink()
        (snapshot / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _link(source: str, target: str) -> None:
    Path(target).hardlink_to(source)


def models() -> Iterator[tuple[str, Model]]:
    """Every repository of the hub with what it holds."""
    for size in ("0.6B", "1.7B", "4B", "8B", "14B", "32B", "30B-A3B", "235B-A22B"):
        yield f"Qwen/Qwen3-{size}", Model("trl/qwen3", _QWEN_3, "qwen3")
    for size in ("4B-Instruct-2507", "30B-A3B-Instruct-2507"):
        yield f"Qwen/Qwen3-{size}", Model("trl/qwen3_instruct_2507", _QWEN_3, "qwen3")
    for size in ("0.6B", "1.7B"):
        yield f"PrimeIntellect/Qwen3-{size}", Model("llama.cpp/Qwen3-Coder", _QWEN_3, "qwen3")
    yield "Qwen/Qwen2.5-0.5B-Instruct", Model("trl/qwen2_5", _corpus("qwen-2.5"), "qwen2")
    for size in ("0.8B", "2B"):
        yield f"Qwen/Qwen3.5-{size}", Model("trl/qwen3_5_nothink", _QWEN_3_5, "qwen3_5")
    for size in ("4B", "9B", "35B-A3B", "122B-A10B", "397B-A17B"):
        yield f"Qwen/Qwen3.5-{size}", Model("trl/qwen3_5_think", _QWEN_3_5, "qwen3_5")
    yield "Qwen/Qwen3.6-35B-A3B", Model("trl/qwen3_6", _QWEN_3_5, "qwen3_5")
    for name in ("Qwen3.8-27B", "Qwen3.8-Flash-Next"):
        yield f"Qwen/{name}", Model("trl/qwen3_8", _QWEN_3_5, "qwen3_5")
    for size in ("4B", "8B", "30B-A3B"):
        yield f"Qwen/Qwen3-VL-{size}-Instruct", Model("trl/qwen3_vl", _QWEN_3_VL, "qwen3_vl")
    for size in ("E2B", "E4B", "26B-A4B", "31B"):
        small = size.startswith("E")
        yield (
            f"google/gemma-4-{size}-it",
            Model("trl/gemma4" if small else "llama.cpp/google-gemma-4-31B-it", _gemma_4, "gemma4"),
        )
    yield "zai-org/GLM-5", Model("own/glm-5", _GLM_4_7, "glm_moe_dsa")
    yield "zai-org/GLM-5.1", Model("own/glm-5.1", _GLM_4_7, "glm_moe_dsa")
    for name in ("GLM-5.3", "GLM-5.3-BF16"):
        yield f"zai-org/{name}", Model("own/glm-5.2", _GLM_4_7, "glm_moe_dsa")
    yield "zai-org/GLM-4.7-Flash", Model("own/glm-4.7-flash", _GLM_4_7, "glm4_moe_lite")
    for owner in ("THUDM", "zai-org"):
        yield f"{owner}/GLM-4.5-Air", Model("trl/glm4moe", _corpus("glm-4.5v"), "glm4_moe")
    for name in ("MiniMax-M2", "MiniMax-M2.5"):
        yield f"MiniMaxAI/{name}", Model("own/minimax", _corpus("minimax"), "minimax_m2")
    yield "moonshotai/Kimi-K2-Instruct", Model("llama.cpp/Kimi-K2-Instruct", _kimi_k2, "deepseek_v3")
    for name in ("DeepSeek-V3", "DeepSeek-V3-Base"):
        yield f"deepseek-ai/{name}", Model("trl/deepseekv3", _corpus("deepseek-v3"), "deepseek_v3")
    for name in ("DeepSeek-R1", "DeepSeek-R1-0528"):
        yield f"deepseek-ai/{name}", Model("own/deepseek-r1", _corpus("deepseek-r1"), "deepseek_v3")
    yield "deepseek-ai/DeepSeek-V4-Flash-0731", Model(None, _corpus("deepseek-v4"), "deepseek_v4")
    for name, template in (
        ("3-Nano-30B-A3B", "nemotron_3_nano"),
        ("3-Super-120B-A12B", "nemotron_3_super"),
        ("3-Ultra-550B-A55B", "nemotron_3_ultra"),
        ("3.5-Lightning-30B-A3B", "nemotron_3_5_lightning"),
    ):
        yield f"nvidia/NVIDIA-Nemotron-{name}-BF16", Model(f"trl/{template}", _QWEN_3, "nemotron_h")
    yield "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8", Model("trl/nemotron_3_ultra", _QWEN_3, "nemotron_h")
    for name in ("XS.2", "XS-2.1", "S-2.1"):
        yield f"poolside/Laguna-{name}", Model(f"llama.cpp/poolside-Laguna-{name}", _laguna, "laguna")
    for owner in ("meta-llama", "unsloth"):
        for size in ("1B", "3B"):
            template = "llama.cpp/meta-llama-Llama-3.2-3B-Instruct"
            yield f"{owner}/Llama-3.2-{size}-Instruct", Model(template, _llama_3, "llama")
    for size in ("20b", "120b"):
        yield f"openai/gpt-oss-{size}", Model("llama.cpp/openai-gpt-oss-120b", _gpt_oss, "gpt_oss")
    for name in ("Hy3", "Hy3-FP8"):
        yield f"tencent/{name}", Model("llama.cpp/tencent-Hy3", _hy3, "hy_v3")


def _template(name: str) -> str:
    group, _, stem = name.partition("/")
    if group == "llama.cpp":
        folder = fetch("llama.cpp") / "vendor" / "llama.cpp" / "models" / "templates"
        return (folder / f"{stem}.jinja").read_text(encoding="utf-8")
    return corpus.every_template()[name]


def _corpus(name: str) -> Callable[[Path], None]:
    def fill(target: Path) -> None:
        shutil.copytree(corpus.whole_model_dir(name), target, dirs_exist_ok=True)

    return fill


def _vision(name: str) -> Callable[[Path], None]:
    def fill(target: Path) -> None:
        shutil.copytree(vision_models.vision_model_dir(name), target, dirs_exist_ok=True)

    return fill


_QWEN_3, _QWEN_3_5, _QWEN_3_VL = _corpus("qwen-3"), _vision("qwen3.5"), _vision("qwen3-vl")
_GLM_4_7 = _corpus("glm-4.7-flash")


def _qwen_words(target: Path, controls: list[str], **named: str) -> None:
    """Qwen 3's words, and the control tokens of another family in place of its own."""
    written = json.loads((corpus.whole_model_dir("qwen-3") / "tokenizer.json").read_text(encoding="utf-8"))
    first = len(written["model"]["vocab"])
    plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    written["added_tokens"] = [
        {"id": first + index, "content": control, **plain, "special": re.match(r"<\||〈|\[|<｜", control) is not None}
        for index, control in enumerate(controls)
    ]
    (target / "tokenizer.json").write_text(json.dumps(written, ensure_ascii=False), encoding="utf-8")
    _write_settings(target, named)


def _save(target: Path, made: Tokenizer, **named: str) -> None:
    made.save(str(target / "tokenizer.json"))
    _write_settings(target, named)


def _write_settings(target: Path, named: dict[str, str]) -> None:
    settings: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": 131072,
        **named,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=2), encoding="utf-8")


def _kimi_k2(target: Path) -> None:
    _qwen_words(target, _KIMI, bos_token="[BOS]", eos_token="[EOS]")


def _laguna(target: Path) -> None:
    _qwen_words(target, _LAGUNA, bos_token="〈|EOS|〉", eos_token="〈|EOS|〉")


def _hy3(target: Path) -> None:
    _qwen_words(target, _HY3, bos_token=_HY3[0], eos_token=_HY3[1], pad_token=_HY3[2])


def _gemma_4(target: Path) -> None:
    vocabulary = fetch("llama.cpp") / "vendor" / "llama.cpp" / "models" / "ggml-vocab-gemma-4.gguf"
    named = {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"}
    media = {
        "boi_token": "<|image>",
        "eoi_token": "<image|>",
        "image_token": "<|image|>",
        "boa_token": "<|audio>",
        "eoa_token": "<audio|>",
        "audio_token": "<|audio|>",
    }
    text = transformers.PreTrainedTokenizerFast(
        tokenizer_object=vocabularies.gemma(vocabulary), extra_special_tokens=media, **named
    )
    transformers.Gemma4Processor(
        transformers.Gemma4AudioFeatureExtractor(),
        transformers.Gemma4ImageProcessor(),
        text,
        transformers.Gemma4VideoProcessor(),
        chat_template="",
    ).save_pretrained(target)


def _llama_3(target: Path) -> None:
    made = vocabularies.from_ranks(fetch("quicktok") / "data" / "llama3.vocab", vocabularies.LLAMA_3_PATTERN, _LLAMA_3)
    _save(target, made, bos_token="<|begin_of_text|>", eos_token="<|eot_id|>")


def _gpt_oss(target: Path) -> None:
    controls = [_GPT_OSS.get(index, f"<|reserved_{index}|>") for index in range(199998, 201088)]
    vocabulary = fetch("quicktok") / "data" / "o200k.vocab"
    made = vocabularies.from_ranks(vocabulary, vocabularies.O200K_PATTERN, controls)
    _save(target, made, bos_token="<|startoftext|>", eos_token="<|return|>", pad_token="<|endoftext|>")
