"""The files of a model directory: its repository's name, its configuration and its tokenizer."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Final, NamedTuple

import tokenizers

from renderers.errors import LoadError, ModelNotFoundError, short_repr
from renderers.process.files import read_json, read_text
from renderers.tokens.added_tokens import TOKEN_ID_LIMIT, is_token_entry
from renderers.tokens.tokenizer import TemplateTokenizer

# The text files of a model that a renderer needs: where they are, what they say of tokens and templates.


# Only these files are fetched: no weights, no code.
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
    "generation_config.json",
    "preprocessor_config.json",
    "video_preprocessor_config.json",
    "processor_config.json",
    "config.json",
)
# Names of a model's templates; `tool_use` is for conversations with tools.
DEFAULT_TEMPLATE, TOOL_TEMPLATE = "default", "tool_use"


class ModelFiles(NamedTuple):
    """The text files of a model that a renderer needs, in a directory. `model` is the name for errors.

    `chat_template` is a text that was chosen in place of the directory's own templates; None where none was.
    """

    model: str
    directory: Path
    settings: Mapping[str, Any]
    chat_template: str | None = None

    @classmethod
    def of(cls, name_or_dir: str | Path, revision: str | None = None) -> ModelFiles:
        """Those of a directory, or of a repository, which are fetched. Raises a `LoadError` if a file is missing."""
        directory = _resolve(name_or_dir, revision)
        if not (directory / "tokenizer.json").is_file():
            cure = "export it or copy it there"
            if (directory / "tekken.json").is_file():
                cure = (
                    "its tekken.json is for mistral_common, which makes prompts by code of its own (Voxtral has no "
                    "other form): let the inference server render (docs/vllm.md)"
                )
            raise LoadError(f"{name_or_dir!s} holds no tokenizer.json: a renderer needs the fast tokenizer; {cure}")
        settings = {
            **read_json(directory / "special_tokens_map.json"),
            **read_json(directory / "tokenizer_config.json"),
        }
        return cls(str(name_or_dir), directory, settings)

    def copy_to(self, directory: Path) -> None:
        """Write the files into another directory, in place of those of the same names.

        A chosen template is written as `chat_template.jinja`, without the templates that it replaces.
        config.json, which belongs to the weights, is not written. Raises `OSError`.
        """
        shutil.copyfile(self.tokenizer_path, directory / self.tokenizer_path.name)  # an error where it is gone
        for path in sorted(path for pattern in _FILES for path in self.directory.glob(pattern)):
            name = path.relative_to(self.directory)
            if name == Path("config.json") or (self.chat_template is not None and "chat_template" in str(name)):
                continue
            (directory / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(path, directory / name)
        if self.chat_template is not None:
            settings = read_json(self.directory / "tokenizer_config.json")
            settings = {key: value for key, value in settings.items() if key != "chat_template"}
            text = json.dumps(settings, indent=2, ensure_ascii=False) + "\n"
            (directory / "tokenizer_config.json").write_text(text, encoding="utf-8")
            (directory / "chat_template.jinja").write_text(self.chat_template, encoding="utf-8", newline="")

    @property
    def tokenizer_path(self) -> Path:
        return self.directory / "tokenizer.json"

    @property
    def special_tokens(self) -> dict[str, str]:
        return special_tokens_of(self.settings)

    @property
    def default_template(self) -> str | None:
        return named_sources(self.directory, self.settings).get(DEFAULT_TEMPLATE)


def _resolve(name_or_dir: str | Path, revision: str | None) -> Path:
    directory = Path(name_or_dir)
    name = str(name_or_dir)
    try:
        if directory.is_dir():
            return directory
        is_file = directory.is_file()
    except OSError as error:  # invalid as a path, for example too long
        raise ModelNotFoundError(f"{name[:80]}...", str(error.strerror)) from error
    if is_file or isinstance(name_or_dir, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelNotFoundError(name, "there is no such directory")
    # Imported here, because the hub client takes 0.3 s to import and a local directory does not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_FILES)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFoundError(name, f"no such directory, and the hub responds: {reason}") from error


def special_tokens_of(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a template may print, as text: bos_token, eos_token..."""
    tokens: dict[str, str] = {}
    for key, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            tokens[key] = text
    return tokens


def added_tokens_decoder(settings: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """The tokens that tokenizer_config.json adds to those of tokenizer.json."""
    decoder = settings.get("added_tokens_decoder")
    if not isinstance(decoder, dict):
        return {}
    added: dict[int, Mapping[str, Any]] = {}
    for token_id, token in decoder.items():
        # Every id has at most ten digits; `int` refuses texts of thousands.
        is_id = token_id.isdecimal() and len(token_id) <= 10 and int(token_id) < TOKEN_ID_LIMIT
        if not is_id or not is_token_entry(token):
            raise LoadError(
                "tokenizer_config.json: added_tokens_decoder does not map an id to a token at "
                f"{short_repr(token_id)}: {short_repr(token)}"
            )
        added[int(token_id)] = token
    return added


def generation_stops(directory: Path, tokenizer: TemplateTokenizer) -> list[str]:
    """The tokens at which inference engines stop this model: `eos_token_id` of generation_config.json."""
    value = read_json(directory / "generation_config.json").get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    tokens = (tokenizer.control_token(token_id) for token_id in ids if isinstance(token_id, int))
    return [token for token in tokens if token is not None]


def named_sources(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a directory by name; a template file overrides an entry of a JSON file, as in transformers."""
    sources: dict[str, str] = {}
    for value in (settings.get("chat_template"), read_json(directory / "chat_template.json").get("chat_template")):
        if isinstance(value, str):
            sources[DEFAULT_TEMPLATE] = value
        elif isinstance(value, list):  # [{"name": "default", "template": ...}, {"name": "tool_use", ...}]
            sources |= dict(map(_named_template, value))
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = read_text(path)
    if (directory / "chat_template.jinja").is_file():
        sources[DEFAULT_TEMPLATE] = read_text(directory / "chat_template.jinja")
    return sources


def _named_template(entry: Any) -> tuple[str, str]:
    try:
        return str(entry["name"]), str(entry["template"])
    except (TypeError, KeyError) as error:
        raise LoadError(
            'tokenizer_config.json: an entry of chat_template is {"name": ..., "template": ...}, not '
            f"{short_repr(entry)}"
        ) from error


_MODELS_OF_FAMILY: Final = {
    "qwen3": (
        "Qwen/Qwen3-0.6B",
        "Qwen/Qwen3-1.7B",
        "Qwen/Qwen3-4B",
        "Qwen/Qwen3-4B-Instruct-2507",
        "Qwen/Qwen3-4B-Thinking-2507",
        "Qwen/Qwen3-8B",
        "Qwen/Qwen3-14B",
        "Qwen/Qwen3-32B",
        "Qwen/Qwen3-30B-A3B",
        "Qwen/Qwen3-30B-A3B-Instruct-2507",
        "Qwen/Qwen3-30B-A3B-Thinking-2507",
        "Qwen/Qwen3-235B-A22B",
    ),
    "prime-qwen3": ("PrimeIntellect/Qwen3-0.6B", "PrimeIntellect/Qwen3-1.7B"),
    "qwen3.5": (
        "Qwen/Qwen3.5-0.8B",
        "Qwen/Qwen3.5-2B",
        "Qwen/Qwen3.5-4B",
        "Qwen/Qwen3.5-9B",
        "Qwen/Qwen3.5-35B-A3B",
        "Qwen/Qwen3.5-122B-A10B",
        "Qwen/Qwen3.5-397B-A17B",
    ),
    "qwen3.6": ("Qwen/Qwen3.6-35B-A3B",),
    "qwen3.8": ("Qwen/Qwen3.8-27B", "Qwen/Qwen3.8-Flash-Next"),
    "qwen3-vl": ("Qwen/Qwen3-VL-4B-Instruct", "Qwen/Qwen3-VL-8B-Instruct", "Qwen/Qwen3-VL-30B-A3B-Instruct"),
    "gemma4": (
        "google/gemma-4-E2B-it",
        "google/gemma-4-E4B-it",
        "google/gemma-4-26B-A4B-it",
        "google/gemma-4-31B-it",
    ),
    "glm-5": ("zai-org/GLM-5", "zai-org/GLM-5-FP8", "zai-org/GLM-4.7-Flash"),
    "glm-5.1": ("zai-org/GLM-5.1",),
    "glm-5.3": ("zai-org/GLM-5.3", "zai-org/GLM-5.3-BF16"),
    "glm-4.5": ("THUDM/GLM-4.5-Air", "zai-org/GLM-4.5-Air"),
    "minimax-m2": ("MiniMaxAI/MiniMax-M2", "MiniMaxAI/MiniMax-M2.5"),
    "deepseek-v3": ("deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3-Base"),
    "deepseek-r1": ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-R1-0528"),
    "deepseek-v4": ("deepseek-ai/DeepSeek-V4-Flash-0731",),
    "kimi-k2": ("moonshotai/Kimi-K2-Instruct",),
    "kimi-k2.5": ("moonshotai/Kimi-K2.5", "moonshotai/Kimi-K2.6"),
    "nemotron-3": (
        "nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
        "nvidia/NVIDIA-Nemotron-3-Super-120B-A12B-BF16",
    ),
    "nemotron-3-ultra": (
        "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16",
        "nvidia/NVIDIA-Nemotron-3-Ultra-550B-A55B-FP8",
    ),
    "nemotron-3.5": (
        "nvidia/NVIDIA-Nemotron-3.5-Lightning-30B-A3B-BF16",
        "nvidia/NVIDIA-Nemotron-3.5-Super-EA-09112026",
    ),
    "llama-3": ("meta-llama/Llama-3.2-1B-Instruct", "meta-llama/Llama-3.2-3B-Instruct"),
    "laguna-xs.2": ("poolside/Laguna-XS.2",),
    "laguna-m.1": ("poolside/Laguna-M.1",),
    "laguna-xs-2.1": ("poolside/Laguna-XS-2.1",),
    "laguna-s-2.1": ("poolside/Laguna-S-2.1",),
    "gpt-oss": ("openai/gpt-oss-20b", "openai/gpt-oss-120b"),
    "inkling": ("thinkingmachines/Inkling", "thinkingmachines/Inkling-Small"),
    "hy3": ("tencent/Hy3", "tencent/Hy3-FP8"),
}

#: Repository name -> the `name` of its configuration. A model that is not listed is no less supported: its own template
#: decides, as with `DefaultRendererConfig`.
MODEL_RENDERER_MAP: Final = {model: family for family, models in _MODELS_OF_FAMILY.items() for model in models}


# A tokenizer of a model directory or repository, without transformers: text to ids, ids to text, special tokens.


class ModelTokenizer:
    """What programs use of a tokenizer of transformers; `create_renderer` takes it in place of one.

    `name_or_path` is the name that it was loaded by. `chat_template` is the text of the model's template,
    None if there is none; `special_tokens_map` maps `eos_token` and the like to their text. Tokens that a
    model does not have are None, and so are their ids.
    """

    def __init__(self, name_or_dir: str | Path, *, revision: str | None = None) -> None:
        self.files = ModelFiles.of(name_or_dir, revision)
        self.name_or_path = str(name_or_dir)
        self.backend_tokenizer = tokenizers.Tokenizer.from_file(str(self.files.tokenizer_path))
        self.special_tokens_map: dict[str, str] = self.files.special_tokens
        self.chat_template = self.files.default_template
        self._vocabulary_size = self.backend_tokenizer.get_vocab_size(with_added_tokens=True)

    def __len__(self) -> int:
        return self._vocabulary_size

    def __getattr__(self, name: str) -> Any:
        """`eos_token`, `pad_token_id` and the like."""
        if name.endswith("_token") and not name.startswith("_"):
            return self.special_tokens_map.get(name)
        if name.endswith("_token_id") and not name.startswith("_"):
            token = self.special_tokens_map.get(name.removesuffix("_id"))
            return None if token is None else self.backend_tokenizer.token_to_id(token)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; transformers' own tokenizers may have")

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The ids of a text. Control tokens spelled in it are encoded as control tokens, as transformers does."""
        ids: list[int] = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, return_offsets_mapping: bool = False
    ) -> dict[str, Any]:
        """`input_ids`, and `offset_mapping` if asked for: per token its (start, end) characters."""
        encoding = self.backend_tokenizer.encode(text, add_special_tokens=add_special_tokens)
        result: dict[str, Any] = {"input_ids": encoding.ids, "attention_mask": encoding.attention_mask}
        return {**result, "offset_mapping": encoding.offsets} if return_offsets_mapping else result

    def decode(self, token_ids: int | Iterable[int], skip_special_tokens: bool = False) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else list(token_ids)
        text: str = self.backend_tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """The id of a token, or the ids of several; that of the unknown token, or None, for one that is not there."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        token_id = self.backend_tokenizer.token_to_id(tokens)
        return self.unk_token_id if token_id is None else token_id

    def convert_ids_to_tokens(self, token_ids: int | Iterable[int]) -> Any:
        """The token of an id, or those of several; None for an id that is not there."""
        if isinstance(token_ids, int):
            return self.backend_tokenizer.id_to_token(token_ids)
        return [self.backend_tokenizer.id_to_token(token_id) for token_id in token_ids]

    def get_vocab(self) -> Mapping[str, int]:
        vocabulary: dict[str, int] = self.backend_tokenizer.get_vocab(with_added_tokens=True)
        return vocabulary


#: Repositories that need a request for access -> a repository with the same tokenizer and template that does not.
_OPEN_COPIES = {
    "meta-llama/Llama-3.2-1B-Instruct": "unsloth/Llama-3.2-1B-Instruct",
    "meta-llama/Llama-3.2-3B-Instruct": "unsloth/Llama-3.2-3B-Instruct",
}


def load_tokenizer(model_name_or_path: str) -> ModelTokenizer:
    """The tokenizer of a directory or a repository. Needs neither transformers nor code of the repository.

    Raises a `LoadError` that names the missing file. For a Llama 3.2 repository that cannot be read, the
    tokenizer comes from an open repository with the same files; `name_or_path` keeps the given name.
    """
    try:
        return ModelTokenizer(model_name_or_path)
    except ModelNotFoundError:
        if model_name_or_path not in _OPEN_COPIES:
            raise
        tokenizer = ModelTokenizer(_OPEN_COPIES[model_name_or_path])
        tokenizer.name_or_path = model_name_or_path
        return tokenizer
