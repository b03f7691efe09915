"""The renderer of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from renderers import MediaPolicy, TemplateRenderer, load_renderer
from rollouts.run_config.config_file import ConfigFile
from rollouts.run_config.sections import MediaSection

#: Variables of a chat template that the renderer passes itself.
_OWN_VARIABLES: Final = ("messages", "tools", "add_generation_prompt")


def make_renderer(file: ConfigFile, *, offline: bool) -> TemplateRenderer:
    """Load the renderer of a configuration.

    `renderer.model` is a directory if there is one of that name, else a repository of Hugging Face. `offline`: its
    files must be in the local cache, and no connection is opened. Raises `RunConfigError`.
    """
    section = file.config.renderer
    for name in section.chat_template_kwargs:
        if name in _OWN_VARIABLES:
            reason = "the renderer passes this variable to the chat template itself; remove the key"
            raise file.error(("renderer", "chat_template_kwargs", name), reason)
    template: Path | None = None
    if section.chat_template is not None:
        template = file.resolve(section.chat_template)
        if not template.is_file():
            raise file.error(("renderer", "chat_template"), f"there is no file {template}; write its path")
    with file.naming("renderer", "media"):
        policy = _media_policy(file, section.media)
    model = _model(file, section.model, section.revision, offline=offline)
    with file.naming("renderer", "model"):
        return load_renderer(
            model,
            revision=None if isinstance(model, Path) else section.revision,
            chat_template=template,
            chat_template_kwargs=section.chat_template_kwargs,
            media_policy=policy,
        )


def _media_policy(file: ConfigFile, section: MediaSection) -> MediaPolicy:
    return MediaPolicy(
        allowed_schemes=frozenset(section.allowed_schemes),
        allowed_hosts=tuple(section.allowed_hosts),
        allowed_networks=tuple(section.allowed_networks),
        allowed_directories=tuple(file.resolve(directory) for directory in section.allowed_directories),
    )


def _model(file: ConfigFile, name: str, revision: str | None, *, offline: bool) -> str | Path:
    """The directory or the name of the repository."""
    directory = file.resolve(name)
    key = ("renderer", "model")
    if directory.is_dir():
        if revision is not None:
            reason = f"{directory} is a directory, which has no revisions; remove the key"
            raise file.error(("renderer", "revision"), reason)
        return directory
    if name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise file.error(key, f"there is no directory {directory}; write a model directory or the name of a repository")
    return _cached_repository(file, name, revision) if offline else name


def _cached_repository(file: ConfigFile, name: str, revision: str | None) -> Path:
    # Imported here: the client takes 0.3 s to import, and a local directory does not need it.
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(name, revision=revision, local_files_only=True))
    except (HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = (
            f"there is no directory {file.resolve(name)}, and the repository {name!r} is not in the local cache, from "
            "which --dry-run reads it without a connection; correct the name, or download the repository first"
        )
        raise file.error(("renderer", "model"), reason) from error
