"""Building a renderer from a model directory, a Hugging Face repository or a loaded tokenizer."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from types import NoneType
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakValueDictionary

from renderers.errors import ConfigError, LoadError, MissingFileError, short_repr
from renderers.file_reading import read_text
from renderers.formats import by_name
from renderers.formats.detection import detect_format
from renderers.media.item import Modality
from renderers.media.policy import MediaPolicy
from renderers.media.store import MediaStore
from renderers.model_files import (
    DEFAULT_TEMPLATE,
    TOOL_TEMPLATE,
    ModelFiles,
    added_tokens_decoder,
    generation_stops,
    named_sources,
    special_tokens_of,
)
from renderers.options import RendererOptions
from renderers.parsing.format import Format
from renderers.template.argument_forms import ArgumentConvertingTemplate
from renderers.template.chat_template import ChatTemplate, Template, TemplateWithTools
from renderers.template.content_forms import ConvertingTemplate
from renderers.template_renderer import TemplateRenderer
from renderers.tokens.tokenizer import TemplateTokenizer
from renderers.vision.media_loader import MediaLoader
from renderers.vision.media_markers import printed_markers
from renderers.vision.processor_loading import load_media

if TYPE_CHECKING:
    from renderers.configs import BaseRendererConfig


def load_renderer(
    name_or_dir: str | Path,
    *,
    chat_template: str | Path | None = None,
    revision: str | None = None,
    format: Format | str | None = None,
    media_policy: MediaPolicy | None = None,
    media_store: MediaStore | None = None,
    config: RendererOptions | BaseRendererConfig | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    now: Callable[[], datetime] = datetime.now,
) -> TemplateRenderer:
    """Build the renderer of a model.

    `name_or_dir` is a directory or a repository name (fetched at `revision`, text files only). `chat_template` is a
    path, the template's text or the name of one of the directory's templates, used in place of the default template.
    `format` is a `Format` or the name of a family, used in place of the one that probing finds. `config` holds options,
    or is the typed configuration of a family (`renderers.configs`); `chat_template_kwargs` are template variables.
    These arguments override `config`. `now` is the clock of templates that print the date. Raises a `LoadError` that
    names the file or token.
    """
    return _load(
        ModelFiles.of(name_or_dir, revision),
        _Settings.of(str(name_or_dir), config, chat_template_kwargs).overridden(chat_template, format),
        media_policy=media_policy,
        media_store=media_store,
        now=now,
    )


def _load(
    files: ModelFiles,
    settings: _Settings,
    *,
    media_policy: MediaPolicy | None,
    media_store: MediaStore | None,
    now: Callable[[], datetime],
) -> TemplateRenderer:
    options = settings.options
    tokenizer = _shared_tokenizer(
        (files.directory, _changed_at(files.tokenizer_path), options.cache_bytes),
        lambda: TemplateTokenizer.from_file(
            files.tokenizer_path,
            model=files.model,
            more_added_tokens=added_tokens_decoder(files.settings),
            cache_bytes=options.cache_bytes,
        ),
    )
    sources = _chosen_sources(files.model, named_sources(files.directory, files.settings), options.chat_template)
    # Imported here, as is the code that reads images: together a fifth of the time of `import renderers`.
    from renderers.formats.prompts.selection import prompt_for

    template: Template | None = None
    if not sources:
        template = prompt_for(files.settings, tokenizer, variables=options.chat_template_kwargs)
    special_tokens = files.special_tokens
    return _build(
        _converting(template, options)
        if template is not None
        else _template(sources, tokenizer, options, {**special_tokens, **options.chat_template_kwargs}, now),
        tokenizer,
        settings,
        eos_token=special_tokens.get("eos_token"),
        more_stops=generation_stops(files.directory, tokenizer),
        media=load_media(
            files.directory, tokenizer=tokenizer, policy=media_policy, store=media_store, backend=options.image_backend
        ),
    )


def create_renderer(
    tokenizer: Any,
    config: RendererOptions | BaseRendererConfig | None = None,
    *,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    media_policy: MediaPolicy | None = None,
    media_store: MediaStore | None = None,
    now: Callable[[], datetime] = datetime.now,
) -> Any:
    """Build a renderer from a tokenizer that is already loaded, with its chat template.

    `tokenizer` is a fast tokenizer of transformers, or a `ModelTokenizer` of `load_tokenizer`. `config` holds options,
    or is the typed configuration of a family (`renderers.configs`); `chat_template_kwargs` are template variables, and
    with a typed configuration only those that the family has. The result is a `TemplateRenderer`, unless a
    `CustomRendererConfig` names another class.

    For a multimodal model, `tokenizer.name_or_path` must be a directory with its preprocessor_config.json; else the
    renderer reads text only and raises `UnsupportedModalityError` for an image. Raises a `LoadError` for a tokenizer
    without a `tokenizers` backend or without a template, `ConfigError` for the configuration of another family than the
    template's, `ValueError` for a template variable that the family does not have.
    """
    model = str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)
    settings = _Settings.of(model, config, chat_template_kwargs)
    if settings.custom_class is not None:
        return settings.custom_class(tokenizer, settings.config)
    files = getattr(tokenizer, "files", None)
    if isinstance(files, ModelFiles):
        return _load(files, settings, media_policy=media_policy, media_store=media_store, now=now)
    options = settings.options
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise LoadError(
            f"{type(tokenizer).__name__} has no `tokenizers` backend; pass a fast tokenizer (use_fast=True), or a "
            "directory with tokenizer.json to load_renderer"
        )
    template = getattr(tokenizer, "chat_template", None)
    named = template if isinstance(template, Mapping) else {} if template is None else {DEFAULT_TEMPLATE: template}
    sources = _chosen_sources(model, dict(named), options.chat_template)
    definition = backend.to_str()
    own = _shared_tokenizer(
        (model, blake2b(definition.encode(), digest_size=16).digest(), options.cache_bytes),
        lambda: TemplateTokenizer(json.loads(definition), model=model, cache_bytes=options.cache_bytes),
    )
    special_tokens = special_tokens_of(tokenizer.special_tokens_map)
    directory = Path(model)
    return _build(
        _template(sources, own, options, {**special_tokens, **options.chat_template_kwargs}, now),
        own,
        settings,
        eos_token=special_tokens.get("eos_token"),
        more_stops=generation_stops(directory, own),
        media=load_media(
            directory, tokenizer=own, policy=media_policy, store=media_store, backend=options.image_backend
        )
        if directory.is_dir()
        else None,
    )


class _Settings(NamedTuple):
    """The options of a renderer, and the resolved typed configuration that they were made of, if there is one.

    `custom_class` is the class of another package that a `CustomRendererConfig` names; it builds itself.
    """

    options: RendererOptions
    config: BaseRendererConfig | None = None
    custom_class: Callable[..., Any] | None = None

    @classmethod
    def of(
        cls, model: str, config: RendererOptions | BaseRendererConfig | None, variables: Mapping[str, Any] | None
    ) -> _Settings:
        if not isinstance(variables, Mapping | None):
            raise ConfigError("chat_template_kwargs", variables, ("a dict of variable to value", "None"))
        if config is None or isinstance(config, RendererOptions):
            options = config or RendererOptions()
            if variables:
                options = replace(options, chat_template_kwargs={**options.chat_template_kwargs, **variables})
            return cls(options)
        # Imported here: pydantic would take a third of the time of `import renderers`.
        from renderers.configs import BaseRendererConfig, CustomRendererConfig, custom_renderer_class
        from renderers.family_options import options_of, resolve_config

        if not isinstance(config, BaseRendererConfig):
            raise ConfigError("config", config, ("RendererOptions", "a configuration of renderers.configs", "None"))
        resolved = resolve_config(model, config, variables)
        if isinstance(resolved, CustomRendererConfig):
            renderer_class = custom_renderer_class(resolved.import_path)
            return cls(RendererOptions(), resolved.renderer_config(), renderer_class)
        return cls(options_of(resolved), resolved)

    def overridden(self, chat_template: str | Path | None, format: Format | str | None) -> _Settings:
        """These settings with the arguments of `load_renderer` that are not None."""
        options = self.options
        if chat_template is not None:
            options = replace(options, chat_template=chat_template)
        if format is not None:
            options = replace(options, format=format)
        return self._replace(options=options)


# Reading a tokenizer takes seconds and tens of megabytes; renderers with different options share one. A renderer that
# is deleted deletes its tokenizer.
_TOKENIZERS: WeakValueDictionary[tuple[Any, ...], TemplateTokenizer] = WeakValueDictionary()
_TOKENIZERS_LOCK = threading.Lock()


def _changed_at(path: Path) -> int | None:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # reading the file raises the error that names it
        return None


def _shared_tokenizer(key: tuple[Any, ...], build: Callable[[], TemplateTokenizer]) -> TemplateTokenizer:
    with _TOKENIZERS_LOCK:
        tokenizer = _TOKENIZERS.get(key)
        if tokenizer is None:
            tokenizer = _TOKENIZERS[key] = build()
        return tokenizer


def _build(
    template: Template,
    tokenizer: TemplateTokenizer,
    settings: _Settings,
    *,
    eos_token: str | None,
    more_stops: Sequence[str],
    media: MediaLoader | None,
) -> TemplateRenderer:
    options = settings.options
    format = options.format
    if not isinstance(format, (Format, str, NoneType)):
        raise ConfigError("format", format, ("a Format", "the name of a family"))
    if isinstance(format, str):
        format = by_name(format)
    if format is None:
        format = detect_format(template, tokenizer, eos_token=eos_token)
        added = [token for token in more_stops if token not in format.stop_tokens]
        format = replace(format, stop_tokens=(*format.stop_tokens, *added))
    markers: Mapping[Modality, str] = {}
    if settings.config is not None:
        from renderers.family_options import check_family, with_parsing_rules

        check_family(settings.config, format.name, tokenizer.model)
        format = with_parsing_rules(format, settings.config)
        markers = printed_markers(template, tokenizer)
    return TemplateRenderer(
        template,
        tokenizer,
        format,
        media=media,
        unprocessed_markers=markers,
        body_policies=options.body_policies,
        thinking_retention=options.thinking_retention,
        history=options.history,
        cache_bytes=options.cache_bytes,
        config=settings.config or options,
    )


def _template(
    sources: Mapping[str, str],
    tokenizer: TemplateTokenizer,
    options: RendererOptions,
    variables: Mapping[str, Any],
    now: Callable[[], datetime],
) -> Template:
    """The model's template; a `TemplateWithTools` if it has another one for conversations with tools.

    As in `get_chat_template` of transformers: `tool_use` if tools are given, else `default`.
    """
    from renderers.formats.prompts.kimi_k25 import TypeScriptToolTemplate, reads_typescript

    def compiled(source: str) -> Template:
        template = ChatTemplate(source, model=tokenizer.model, variables=variables, now=now)
        return _converting(TypeScriptToolTemplate(template) if reads_typescript(source) else template, options)

    default = next(iter(sources.values())) if len(sources) == 1 else sources.get(DEFAULT_TEMPLATE)
    if default is None and TOOL_TEMPLATE not in sources:
        found = f" (it has templates named {', '.join(sorted(sources))})" if sources else ""
        raise MissingFileError(
            tokenizer.model,
            "chat_template.jinja",
            f"put the model's chat template there, or pass chat_template= as text, a path or a name{found}",
        )
    if TOOL_TEMPLATE in sources and len(sources) > 1:
        without_tools = None if default is None else compiled(default)
        return TemplateWithTools(without_tools, compiled(sources[TOOL_TEMPLATE]), model=tokenizer.model)
    assert default is not None
    return compiled(default)


def _converting(template: Template, options: RendererOptions) -> Template:
    if options.tool_arguments == "auto":
        template = ArgumentConvertingTemplate(template)
    return template if options.content_form == "as_given" else ConvertingTemplate(template)


def _chosen_sources(model: str, named: dict[str, str], chosen: str | Path | None) -> dict[str, str]:
    """The model's own templates by name, or only the chosen one, given by its name, a path or its text."""
    if chosen is None:
        return named
    is_name = isinstance(chosen, str) or (isinstance(chosen, Path) and not _is_file(chosen))
    if is_name and str(chosen) in named:
        return {DEFAULT_TEMPLATE: named[str(chosen)]}
    return {DEFAULT_TEMPLATE: _chosen_source(model, named, chosen)}


def _chosen_source(model: str, names: Collection[str], chosen: str | Path) -> str:
    if not isinstance(chosen, (str, Path)):
        raise ConfigError("chat_template", chosen, ("text", "a path", "the name of one of the model's templates"))
    # A template is code with braces or line breaks; a path has neither.
    if isinstance(chosen, str) and ("{" in chosen or "\n" in chosen):
        return chosen
    path = Path(chosen)
    if not _is_file(path):
        raise MissingFileError(
            model,
            str(chosen)[:255],
            "chat_template= is template text, the path of a file, or the name of one of the model's own templates, "
            f"which are {', '.join(map(short_repr, sorted(names))) or 'none'}",
        )
    return read_text(path)


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # invalid as a path, for example too long
        return False
