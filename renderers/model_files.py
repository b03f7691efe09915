"""The text files of a model that a renderer needs: where they are, what they say of tokens and templates."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from renderers.errors import LoadError, short_repr
from renderers.process.files import read_json, read_text
from renderers.tokens.added_tokens import TOKEN_ID_LIMIT, is_token_entry
from renderers.tokens.tokenizer import TemplateTokenizer

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
        """Those of a directory, or fetched from a repository. Raises a `LoadError` if a file is missing."""
        directory = _resolve(name_or_dir, revision)
        if not (directory / "tokenizer.json").is_file():
            cure = "export it or copy it there"
            if (directory / "tekken.json").is_file():
                cure = (
                    "its tekken.json is for mistral_common, which makes prompts by code of its own (Voxtral "
                    "has no other form): let the inference server render (docs/vllm.md)"
                )
            elif adapter := read_json(directory / "adapter_config.json"):
                base = adapter.get("base_model_name_or_path", "which it does not name")
                cure = f"it is an adapter: pass the directory of its base model, {base}"
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
        raise _no_model(f"{name[:80]}...", str(error.strerror)) from error
    if is_file or isinstance(name_or_dir, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise _no_model(name, "there is no such directory")
    # Imported here, because the hub client takes 0.3 s to import and a local directory does not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_FILES)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise _no_model(name, f"no such directory, and the hub responds: {reason}") from error


def _no_model(name: str, reason: str) -> LoadError:
    return LoadError(
        f"no model at {name!r}: {reason}. Pass a directory with tokenizer.json and chat_template.jinja, or the name of "
        "a repository that this machine can reach or has in its cache."
    )


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
    """The templates of a directory by name; as in transformers, a template file overrides a JSON file."""
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
