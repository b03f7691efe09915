"""Building a renderer from a model directory, a Hugging Face repository or a loaded tokenizer."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from datetime import datetime
from hashlib import blake2b
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, NamedTuple, get_args
from weakref import WeakValueDictionary

from renderers.errors import ConfigError, LoadError
from renderers.formats import by_name
from renderers.formats.detection import detect_format
from renderers.media.policy import MediaPolicy
from renderers.media.store import MediaStore
from renderers.messages import Modality
from renderers.model_families import check_family, with_parsing_rules
from renderers.model_files import (
    DEFAULT_TEMPLATE,
    ModelFiles,
    added_tokens_decoder,
    generation_stops,
    named_sources,
    special_tokens_of,
)
from renderers.model_template import chosen_sources, compiled_template, converting
from renderers.options import RendererOptions
from renderers.parsing.format import Format
from renderers.process.fork_reset import ProcessLock
from renderers.template.chat_template import Template
from renderers.template_renderer import TemplateRenderer
from renderers.tokens.tokenizer import TemplateTokenizer
from renderers.vision.media_loader import MediaLoader
from renderers.vision.media_markers import printed_markers
from renderers.vision.processor import MediaProcessor, check_processors
from renderers.vision.processor_loading import load_media

if TYPE_CHECKING:
    from renderers.configs import BaseRendererConfig


class Settings(NamedTuple):
    """The options of a renderer; the family that they stand for, None for options that the caller has given.

    `config` is the resolved typed configuration that the options were made of, if there is one.
    `custom_class` is the class of another package that a `CustomRendererConfig` names; it builds itself.
    """

    options: RendererOptions
    family: str | None = None
    config: BaseRendererConfig | None = None
    custom_class: Callable[..., Any] | None = None

    @classmethod
    def of(
        cls, model: str, config: RendererOptions | BaseRendererConfig | None, variables: Mapping[str, Any] | None
    ) -> Settings:
        """The settings that a configuration means for a model; None is `RendererOptions()`."""
        if config is None or isinstance(config, RendererOptions):
            options = config or RendererOptions()
            if variables:
                options = replace(options, chat_template_kwargs={**options.chat_template_kwargs, **variables})
            return cls(options)
        # Imported here: pydantic would take a third of the time of `import renderers`.
        from renderers.configs import (
            BaseRendererConfig,
            CustomRendererConfig,
            custom_renderer_config,
            load_custom_renderer,
        )
        from renderers.family_options import options_of, resolve_config

        if not isinstance(config, BaseRendererConfig):
            raise ConfigError("config", config, ("RendererOptions", "a configuration of renderers.configs", "None"))
        resolved = resolve_config(model, config, variables)
        if isinstance(resolved, CustomRendererConfig):
            own_config = custom_renderer_config(resolved)
            return cls(RendererOptions(), None, own_config, load_custom_renderer(resolved.import_path))
        return cls(options_of(resolved), resolved.name, resolved)


def load_renderer(
    name_or_dir: str | Path,
    *,
    chat_template: str | Path | None = None,
    revision: str | None = None,
    format: Format | str | None = None,
    media_policy: MediaPolicy | None = None,
    media_store: MediaStore | None = None,
    processors: Mapping[Modality, MediaProcessor] | None = None,
    config: RendererOptions | BaseRendererConfig | None = None,
    chat_template_kwargs: Mapping[str, Any] | None = None,
    now: Callable[[], datetime] = datetime.now,
) -> TemplateRenderer:
    """Build the renderer of a model.

    `name_or_dir` is a directory or a repository name (fetched at `revision`, text files only).
    `chat_template` is a path, the template's text or the name of one of the directory's templates, used in
    place of the default template. `format` is a `Format` or the name of a family, used in place of the one
    that probing finds. `config` holds options, or is the typed configuration of a family
    (`renderers.configs`); `chat_template_kwargs` are template variables. These arguments override `config`.
    `now` is the clock of templates that print the date.

    `processors` are used in place of all those that the directory describes; other media are then refused.
    Each has a policy and a store of its own, so `media_policy` and `media_store` must be None with them.

    Raises a `LoadError` that names the file or token, and `ConfigError` for options with other values.
    """
    settings = Settings.of(str(name_or_dir), config, chat_template_kwargs)
    overriding: dict[str, Any] = {"chat_template": chat_template, "format": format}
    given = {name: value for name, value in overriding.items() if value is not None}
    arguments = _arguments_of_files(
        ModelFiles.of(name_or_dir, revision),
        settings._replace(options=replace(settings.options, **given)),
        now=now,
        media_policy=media_policy,
        media_store=media_store,
        processors=processors,
    )
    return TemplateRenderer(**arguments)


def _arguments_of_files(files: ModelFiles, settings: Settings, **others: Any) -> dict[str, Any]:
    return _arguments(
        _tokenizer_of_files(files, settings.options.cache_bytes),
        named_sources(files.directory, files.settings),
        files.special_tokens,
        files.directory,
        settings,
        files=files,
        **others,
    )


def load_tokenizer(directory: Path) -> TemplateTokenizer:
    """The tokenizer of a model directory, shared by those who load it. Raises `LoadError`."""
    return _tokenizer_of_files(ModelFiles.of(directory), RendererOptions().cache_bytes)


def load_media_reader(
    directory: Path, *, media_policy: MediaPolicy | None = None, media_store: MediaStore | None = None
) -> tuple[TemplateTokenizer, MediaLoader]:
    """The tokenizer and the media processors of a model directory, which needs no chat template.

    Raises a `LoadError` as `load_renderer` does.
    """
    tokenizer = load_tokenizer(directory)
    return tokenizer, load_media(directory, tokenizer=tokenizer, policy=media_policy, store=media_store)


def arguments_of_tokenizer(tokenizer: Any, settings: Settings, **others: Any) -> dict[str, Any]:
    """The arguments of the `TemplateRenderer` of a loaded tokenizer with its template; see `create_renderer`.

    `others` are `now`, `media_policy`, `media_store` and `processor`, a processor of transformers, which is used in
    place of the one that the files of the tokenizer's directory describe.
    """
    files = getattr(tokenizer, "files", None)
    if isinstance(files, ModelFiles):
        return _arguments_of_files(files, settings, **others)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise LoadError(
            f"{type(tokenizer).__name__} has no `tokenizers` backend; pass a fast tokenizer "
            "(use_fast=True), or a directory with tokenizer.json to load_renderer"
        )
    model, cache_bytes = model_of_tokenizer(tokenizer), settings.options.cache_bytes
    template = getattr(tokenizer, "chat_template", None)
    named = template if isinstance(template, Mapping) else {} if template is None else {DEFAULT_TEMPLATE: template}
    definition = backend.to_str()
    own = _shared_tokenizer(
        (model, blake2b(definition.encode(), digest_size=16).digest(), cache_bytes),
        lambda: TemplateTokenizer(json.loads(definition), model=model, cache_bytes=cache_bytes),
    )
    special_tokens = special_tokens_of(tokenizer.special_tokens_map)
    return _arguments(own, dict(named), special_tokens, Path(model), settings, **others)


def model_of_tokenizer(tokenizer: Any) -> str:
    """The name or directory that a tokenizer was loaded from; the name of its class if it does not say."""
    return str(getattr(tokenizer, "name_or_path", "") or type(tokenizer).__name__)


def _media(
    directory: Path,
    processor: Any,
    tokenizer: TemplateTokenizer,
    options: RendererOptions,
    policy: MediaPolicy | None,
    store: MediaStore | None,
) -> MediaLoader | None:
    """The processors of a directory, or one as `processor` would be saved; None if there is neither."""
    with TemporaryDirectory() if processor is not None else nullcontext(directory) as source:
        if processor is not None:
            processor.save_pretrained(source)
        elif not directory.is_dir():
            return None
        return load_media(
            Path(source),
            tokenizer=tokenizer,
            policy=policy,
            store=store,
            sound_of_videos=options.sound_of_videos,
        )


def _given_media(
    processors: Mapping[Modality, MediaProcessor],
    tokenizer: TemplateTokenizer,
    options: RendererOptions,
    policy: MediaPolicy | None,
    store: MediaStore | None,
) -> MediaLoader:
    """The processors that the caller has made, which have policies and stores."""
    check_processors(processors)
    if options.sound_of_videos is not None and not getattr(processors.get("video"), "reads_sound", False):
        rule = "without it: processors= decide what is made of a video; pass those of a renderer with this option"
        raise ConfigError("chat_template_kwargs", options.sound_of_videos, (rule,))
    for name, value in (("media_policy", policy), ("media_store", store)):
        if value is not None:
            raise ConfigError(name, value, ("None with processors=, each of which has its own",))
    reason = "processors= has none for it; pass one"
    missing = {modality: reason for modality in get_args(Modality) if modality not in processors}
    return MediaLoader(dict(processors), model=tokenizer.model, missing=missing)


# Reading a tokenizer takes seconds and tens of megabytes; renderers with different options share one. A
# renderer that is deleted deletes its tokenizer.
_TOKENIZERS: WeakValueDictionary[tuple[Any, ...], TemplateTokenizer] = WeakValueDictionary()
_TOKENIZERS_LOCK = ProcessLock()


def _tokenizer_of_files(files: ModelFiles, cache_bytes: int) -> TemplateTokenizer:
    return _shared_tokenizer(
        (files.directory, _changed_at(files.tokenizer_path), cache_bytes),
        lambda: TemplateTokenizer.from_file(
            files.tokenizer_path,
            model=files.model,
            more_added_tokens=added_tokens_decoder(files.settings),
            cache_bytes=cache_bytes,
        ),
    )


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


def _arguments(
    tokenizer: TemplateTokenizer,
    named: dict[str, str],
    special_tokens: Mapping[str, str],
    directory: Path,
    settings: Settings,
    *,
    files: ModelFiles | None = None,
    processor: Any = None,
    processors: Mapping[Modality, MediaProcessor] | None = None,
    media_policy: MediaPolicy | None = None,
    media_store: MediaStore | None = None,
    now: Callable[[], datetime] = datetime.now,
) -> dict[str, Any]:
    """The arguments of `TemplateRenderer`; `named` are the templates of the model, by name."""
    options = settings.options
    sources = chosen_sources(tokenizer.model, named, options.chat_template)
    template: Template | None = None
    if files is not None and not sources:
        # Imported here, as is the code that reads images: together a fifth of the time of `import renderers`.
        from renderers.formats.deepseek_prompts import prompt_for

        template = prompt_for(files.settings, tokenizer, variables=options.chat_template_kwargs)
    if template is None:
        variables = {**special_tokens, **options.chat_template_kwargs}
        template = compiled_template(sources, tokenizer, variables, now)
    else:
        template = converting(template)
    if files is not None and options.chat_template is not None:
        files = files._replace(chat_template=sources[DEFAULT_TEMPLATE])
    format = by_name(options.format) if isinstance(options.format, str) else options.format
    if format is None:
        format = detect_format(template, tokenizer, eos_token=special_tokens.get("eos_token"))
        added = [token for token in generation_stops(directory, tokenizer) if token not in format.stop_tokens]
        format = replace(format, stop_tokens=(*format.stop_tokens, *added))
    markers: Mapping[Modality, str] = {}
    if settings.family is not None:
        check_family(settings.family, format.name, tokenizer.model)
        format = with_parsing_rules(format, settings.family)
        markers = printed_markers(template, tokenizer)
    return {
        "template": template,
        "tokenizer": tokenizer,
        "format": format,
        "media": _media(directory, processor, tokenizer, options, media_policy, media_store)
        if processors is None
        else _given_media(processors, tokenizer, options, media_policy, media_store),
        "unprocessed_markers": markers,
        "body_policies": options.body_policies,
        "thinking_retention": options.thinking_retention,
        "history": options.history,
        "cache_bytes": options.cache_bytes,
        "config": options if settings.family is None else settings.config,
        "files": files,
    }
