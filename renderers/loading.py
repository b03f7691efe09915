"""From a model directory, or the name of a Hugging Face repository, to a renderer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from renderers.errors import InvalidFileError, MissingFileError, ModelNotFoundError
from renderers.formats.format import Format
from renderers.formats.probing import detect_format
from renderers.media.policy import MediaPolicy
from renderers.media.store import MediaStore
from renderers.template.chat_template import ChatTemplate
from renderers.template_renderer import TemplateRenderer
from renderers.tokens.tokenizer import TemplateTokenizer
from renderers.vision.qwen_vl import QwenVLConfig, QwenVLProcessor

# Only these are ever fetched: no weights, no code.
_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "chat_template.json",
    "preprocessor_config.json",
)
_IMAGE_PLACEHOLDER = "<|image_pad|>"


def load_renderer(
    name_or_dir: str | Path,
    *,
    chat_template: str | Path | None = None,
    revision: str | None = None,
    format: Format | None = None,
    media_policy: MediaPolicy | None = None,
    media_store: MediaStore | None = None,
) -> TemplateRenderer:
    """Build the renderer of a model.

    `name_or_dir` is a directory or a repository name (fetched at `revision`, text files only); `chat_template`, a path
    or the template's text, wins over the directory's; `format` wins over what probing finds. Raises a `LoadError` that
    names the file or token at fault.
    """
    directory = _resolve(name_or_dir, revision)
    model = str(name_or_dir)
    tokenizer_path = directory / "tokenizer.json"
    if not tokenizer_path.is_file():
        raise MissingFileError(
            model, "tokenizer.json", "a renderer needs the fast tokenizer; export it or copy it there"
        )
    tokenizer = TemplateTokenizer.from_file(tokenizer_path, model=model)
    settings = _read_json(directory / "tokenizer_config.json")
    special_tokens = _special_tokens(settings)
    template = ChatTemplate(
        _template_source(directory, settings, chat_template, model), model=model, special_tokens=special_tokens
    )
    if format is None:
        format = detect_format(template, tokenizer, eos_token=special_tokens.get("eos_token"))

    processor = None
    preprocessor_path = directory / "preprocessor_config.json"
    if preprocessor_path.is_file():
        config = QwenVLConfig.from_dict(_read_json(preprocessor_path), path=str(preprocessor_path))
        store = MediaStore() if media_store is None else media_store
        processor = QwenVLProcessor(config, policy=media_policy or MediaPolicy(), store=store)
    return TemplateRenderer(
        template,
        tokenizer,
        format,
        image_processor=processor,
        image_token=None if processor is None else _IMAGE_PLACEHOLDER,
    )


def _resolve(name_or_dir: str | Path, revision: str | None) -> Path:
    directory = Path(name_or_dir)
    if directory.is_dir():
        return directory
    name = str(name_or_dir)
    if isinstance(name_or_dir, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelNotFoundError(name, "there is no such directory")
    # Imported here: most processes load a local directory, and the hub client takes 0.3 s to import.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_FILES)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFoundError(name, f"no such directory, and the hub answers: {reason}") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError) as error:
        raise InvalidFileError(str(path), f"not readable as JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidFileError(str(path), "holds no JSON object")
    return content


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """The variables that a template may print: bos_token, eos_token... as text."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            found[key] = text
    return found


def _template_source(directory: Path, settings: dict[str, Any], chosen: str | Path | None, model: str) -> str:
    if chosen is not None:
        return _chosen_source(chosen)
    jinja_file = directory / "chat_template.jinja"
    if jinja_file.is_file():
        return jinja_file.read_text(encoding="utf-8")
    for found in (_read_json(directory / "chat_template.json").get("chat_template"), settings.get("chat_template")):
        if isinstance(found, str):
            return found
        if isinstance(found, list):  # several named templates: [{"name": "default", "template": ...}, ...]
            named = {entry["name"]: entry["template"] for entry in found}
            if "default" in named:
                return str(named["default"])
    raise MissingFileError(
        model, "chat_template.jinja", "put the model's chat template there, or pass chat_template= as text or a path"
    )


def _chosen_source(chosen: str | Path) -> str:
    # A template is code with braces or line breaks; a path has neither.
    if isinstance(chosen, str) and ("{" in chosen or "\n" in chosen):
        return chosen
    path = Path(chosen)
    if not path.is_file():
        raise MissingFileError(str(path.parent), path.name, "chat_template= is neither template text nor a file")
    return path.read_text(encoding="utf-8")
