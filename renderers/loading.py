"""Building a renderer from a model directory, a Hugging Face repository or a loaded tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from types import NoneType
from typing import Any

from renderers.errors import ConfigError, InvalidFileError, LoadError, MissingFileError, ModelNotFoundError, short_repr
from renderers.file_reading import read_json, read_text
from renderers.formats import by_name
from renderers.formats.detection import detect_format
from renderers.media.policy import MediaPolicy
from renderers.media.store import MediaStore
from renderers.options import RendererOptions
from renderers.parsing.format import Format
from renderers.template.chat_template import ChatTemplate, Template, TemplateWithTools
from renderers.template.content_forms import ConvertingTemplate
from renderers.template_renderer import TemplateRenderer
from renderers.tokens.added_tokens import TOKEN_ID_LIMIT, is_token_entry
from renderers.tokens.tokenizer import TemplateTokenizer
from renderers.vision.media_loader import MediaLoader
from renderers.vision.processor_loading import load_media

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
_DEFAULT, _TOOL_USE = "default", "tool_use"


def load_renderer(
    name_or_dir: str | Path,
    *,
    chat_template: str | Path | None = None,
    revision: str | None = None,
    format: Format | str | None = None,
    media_policy: MediaPolicy | None = None,
    media_store: MediaStore | None = None,
    config: RendererOptions | None = None,
    now: Callable[[], datetime] = datetime.now,
) -> TemplateRenderer:
    """Build the renderer of a model.

    `name_or_dir` is a directory or a repository name (fetched at `revision`, text files only). `chat_template` is a
    path, the template's text or the name of one of the directory's templates, used in place of the default template.
    `format` is a `Format` or the name of a family, used in place of the one that probing finds. Both override `config`.
    `now` is the clock of templates that print the date. Raises a `LoadError` that names the file or token.
    """
    config = _checked_config(config)
    directory = _resolve(name_or_dir, revision)
    model = str(name_or_dir)
    tokenizer_path = directory / "tokenizer.json"
    if not tokenizer_path.is_file():
        raise MissingFileError(
            model, "tokenizer.json", "a renderer needs the fast tokenizer; export it or copy it there"
        )
    settings = {
        **read_json(directory / "special_tokens_map.json"),
        **read_json(directory / "tokenizer_config.json"),
    }
    tokenizer = TemplateTokenizer.from_file(
        tokenizer_path, model=model, more_added_tokens=_added_tokens_decoder(settings), cache_bytes=config.cache_bytes
    )
    chosen = chat_template if chat_template is not None else config.chat_template
    sources = _chosen_sources(_named_sources(directory, settings), chosen)
    # Imported here, as is the code that reads images: together a fifth of the time of `import renderers`.
    from renderers.formats.prompts import prompt_for

    template: Template | None = None
    if not sources:
        template = prompt_for(settings, tokenizer, variables=config.chat_template_kwargs)
    special_tokens = _special_tokens(settings)
    return _build(
        _converting(template, config)
        if template is not None
        else _template(sources, tokenizer, config, {**special_tokens, **config.chat_template_kwargs}, now),
        tokenizer,
        config if format is None else replace(config, format=format),
        eos_token=special_tokens.get("eos_token"),
        more_stops=_generation_stops(directory, tokenizer),
        media=load_media(
            directory, tokenizer=tokenizer, policy=media_policy, store=media_store, backend=config.image_backend
        ),
    )


def create_renderer(
    tokenizer: Any,
    config: RendererOptions | None = None,
    *,
    media_policy: MediaPolicy | None = None,
    media_store: MediaStore | None = None,
    now: Callable[[], datetime] = datetime.now,
) -> TemplateRenderer:
    """Build a renderer from a fast tokenizer of transformers that is already loaded, with its chat template.

    For a multimodal model, `tokenizer.name_or_path` must be a directory with its preprocessor_config.json; else the
    renderer reads text only and raises `UnsupportedModalityError` for an image. Raises a `LoadError` for a tokenizer
    without a `tokenizers` backend or without a template.
    """
    config = _checked_config(config)
    model = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise LoadError(
            f"{type(tokenizer).__name__} has no `tokenizers` backend; pass a fast tokenizer (use_fast=True), or a "
            "directory with tokenizer.json to load_renderer"
        )
    template = getattr(tokenizer, "chat_template", None)
    named = dict(template) if isinstance(template, Mapping) else {} if template is None else {_DEFAULT: template}
    sources = _chosen_sources(named, config.chat_template)
    own = TemplateTokenizer(json.loads(backend.to_str()), model=model, cache_bytes=config.cache_bytes)
    special_tokens = _special_tokens(tokenizer.special_tokens_map)
    directory = Path(model)
    return _build(
        _template(sources, own, config, {**special_tokens, **config.chat_template_kwargs}, now),
        own,
        config,
        eos_token=special_tokens.get("eos_token"),
        more_stops=_generation_stops(directory, own),
        media=load_media(directory, tokenizer=own, policy=media_policy, store=media_store, backend=config.image_backend)
        if directory.is_dir()
        else None,
    )


def _checked_config(config: RendererOptions | None) -> RendererOptions:
    if not isinstance(config, (RendererOptions, NoneType)):
        raise ConfigError("config", config, ("a RendererOptions",))
    return config or RendererOptions()


def _build(
    template: Template,
    tokenizer: TemplateTokenizer,
    config: RendererOptions,
    *,
    eos_token: str | None,
    more_stops: Sequence[str],
    media: MediaLoader | None,
) -> TemplateRenderer:
    format = config.format
    if not isinstance(format, (Format, str, NoneType)):
        raise ConfigError("format", format, ("a Format", "the name of a family"))
    if isinstance(format, str):
        format = by_name(format)
    if format is None:
        format = detect_format(template, tokenizer, eos_token=eos_token)
        added = [token for token in more_stops if token not in format.stop_tokens]
        format = replace(format, stop_tokens=(*format.stop_tokens, *added))
    return TemplateRenderer(
        template,
        tokenizer,
        format,
        media=media,
        body_policies=config.body_policies,
        thinking_retention=config.thinking_retention,
        history=config.history,
        cache_bytes=config.cache_bytes,
    )


def _template(
    sources: Mapping[str, str],
    tokenizer: TemplateTokenizer,
    config: RendererOptions,
    variables: Mapping[str, Any],
    now: Callable[[], datetime],
) -> Template:
    """The model's template; a `TemplateWithTools` if it has another one for conversations with tools.

    As in `get_chat_template` of transformers: `tool_use` if tools are given, else `default`.
    """
    from renderers.formats.prompts import TypeScriptToolTemplate, reads_typescript

    def compiled(source: str) -> Template:
        template = ChatTemplate(source, model=tokenizer.model, variables=variables, now=now)
        return _converting(TypeScriptToolTemplate(template) if reads_typescript(source) else template, config)

    default = next(iter(sources.values())) if len(sources) == 1 else sources.get(_DEFAULT)
    if default is None and _TOOL_USE not in sources:
        found = f" (it has templates named {', '.join(sorted(sources))})" if sources else ""
        raise MissingFileError(
            tokenizer.model,
            "chat_template.jinja",
            f"put the model's chat template there, or pass chat_template= as text, a path or a name{found}",
        )
    if _TOOL_USE in sources and len(sources) > 1:
        without_tools = None if default is None else compiled(default)
        return TemplateWithTools(without_tools, compiled(sources[_TOOL_USE]), model=tokenizer.model)
    assert default is not None
    return compiled(default)


def _converting(template: Template, config: RendererOptions) -> Template:
    return template if config.content_form == "as_given" else ConvertingTemplate(template)


def _resolve(name_or_dir: str | Path, revision: str | None) -> Path:
    if not isinstance(name_or_dir, (str, Path)):
        raise ConfigError("name_or_dir", name_or_dir, ("a directory", "the name of a repository"))
    directory = Path(name_or_dir)
    name = str(name_or_dir)
    try:
        if directory.is_dir():
            return directory
    except OSError as error:  # invalid as a path, for example too long
        raise ModelNotFoundError(f"{name[:80]}...", str(error.strerror)) from error
    if isinstance(name_or_dir, Path) or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelNotFoundError(name, "there is no such directory")
    # Imported here, because the hub client takes 0.3 s to import and a local directory does not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(_FILES)))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ModelNotFoundError(name, f"no such directory, and the hub responds: {reason}") from error


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that a template may print, as text: bos_token, eos_token..."""
    tokens: dict[str, str] = {}
    for key, value in settings.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            tokens[key] = text
    return tokens


def _added_tokens_decoder(settings: Mapping[str, Any]) -> dict[int, Mapping[str, Any]]:
    """The tokens that tokenizer_config.json adds to those of tokenizer.json."""
    decoder = settings.get("added_tokens_decoder")
    if not isinstance(decoder, dict):
        return {}
    added: dict[int, Mapping[str, Any]] = {}
    for token_id, token in decoder.items():
        # Every id has at most ten digits; `int` refuses texts of thousands.
        is_id = token_id.isdecimal() and len(token_id) <= 10 and int(token_id) < TOKEN_ID_LIMIT
        if not is_id or not is_token_entry(token):
            raise InvalidFileError(
                "tokenizer_config.json",
                f"added_tokens_decoder does not map an id to a token at {short_repr(token_id)}: {short_repr(token)}",
            )
        added[int(token_id)] = token
    return added


def _generation_stops(directory: Path, tokenizer: TemplateTokenizer) -> list[str]:
    """The tokens at which inference engines stop this model: `eos_token_id` of generation_config.json."""
    value = read_json(directory / "generation_config.json").get("eos_token_id")
    ids = value if isinstance(value, list) else [value]
    tokens = (tokenizer.control_token(token_id) for token_id in ids if isinstance(token_id, int))
    return [token for token in tokens if token is not None]


def _named_sources(directory: Path, settings: Mapping[str, Any]) -> dict[str, str]:
    """The templates of a directory by name; a template file overrides an entry of a JSON file, as in transformers."""
    sources: dict[str, str] = {}
    for value in (settings.get("chat_template"), read_json(directory / "chat_template.json").get("chat_template")):
        if isinstance(value, str):
            sources[_DEFAULT] = value
        elif isinstance(value, list):  # [{"name": "default", "template": ...}, {"name": "tool_use", ...}]
            sources |= dict(map(_named_template, value))
    for path in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        sources[path.stem] = read_text(path)
    if (directory / "chat_template.jinja").is_file():
        sources[_DEFAULT] = read_text(directory / "chat_template.jinja")
    return sources


def _named_template(entry: Any) -> tuple[str, str]:
    try:
        return str(entry["name"]), str(entry["template"])
    except (TypeError, KeyError) as error:
        raise InvalidFileError(
            "tokenizer_config.json",
            f'an entry of chat_template is {{"name": ..., "template": ...}}, not {short_repr(entry)}',
        ) from error


def _chosen_sources(named: dict[str, str], chosen: str | Path | None) -> dict[str, str]:
    """The model's own templates by name, or only the chosen one, given by its name, a path or its text."""
    if chosen is None:
        return named
    if isinstance(chosen, str) and chosen in named:
        return {_DEFAULT: named[chosen]}
    return {_DEFAULT: _chosen_source(chosen)}


def _chosen_source(chosen: str | Path) -> str:
    if not isinstance(chosen, (str, Path)):
        raise ConfigError("chat_template", chosen, ("text", "a path", "the name of one of the model's templates"))
    # A template is code with braces or line breaks; a path has neither.
    if isinstance(chosen, str) and ("{" in chosen or "\n" in chosen):
        return chosen
    path = Path(chosen)
    try:
        is_file = path.is_file()
    except OSError:  # invalid as a path, for example too long
        is_file = False
    if not is_file:
        raise MissingFileError(
            str(path.parent)[:80],
            path.name[:80],
            "chat_template= is neither template text nor a file nor the name of one of the model's templates",
        )
    return read_text(path)
