"""The provenance of an episode: renderer, template, processors, engine and package versions."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any, Generic, Protocol, TypeVar

from renderers.media.item import Modality
from renderers.messages import part_kind
from rollouts.errors import as_unicode
from transport import wire_type


class Medium(Protocol):
    @property
    def modality(self) -> Modality: ...


M = TypeVar("M", bound=Medium)


class MediaOfParts(Generic[M]):
    """The media of a prompt in its order, taken for one image or video part after the other.

    A template may print the images of a message before its videos, so that a part has the next medium of its own type.
    """

    def __init__(self, media: Iterable[M]) -> None:
        self._left = list(media)

    def __len__(self) -> int:
        """The number of media that were not taken."""
        return len(self._left)

    def take(self, part: Mapping[str, Any]) -> M | None:
        """The medium of the next part; None where none is left."""
        kind = part_kind(part)
        index = next((index for index, medium in enumerate(self._left) if medium.modality == kind), 0)
        return self._left.pop(index) if self._left else None


_ALWAYS = ("mmrollouts", "tokenizers", "jinja2", "numpy", "pillow")
_IF_LOADED = ("torch", "transformers", "vllm")


@wire_type("rollouts.Provenance")
@dataclass(frozen=True, slots=True)
class Provenance:
    """`model` and `engine` are names; `template` is the sha256 of the chat template's source, empty where there is
    none; `processors` maps a modality to its processor's fingerprint, `packages` a distribution to its version.
    """

    model: str = ""
    engine: str = ""
    template: str = ""
    processors: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, renderer: Any, engine: Any) -> Provenance:
        """The provenance of episodes of a renderer, or of the renderer of a pool, and an engine."""
        renderer = getattr(renderer, "renderer", renderer)
        source = getattr(getattr(renderer, "template", None), "source", "")
        processors = getattr(renderer, "processors", None) or {}
        return cls(
            model=_text(getattr(getattr(renderer, "tokenizer", None), "model", "")),
            engine=type(engine).__name__,
            template=_digest(source) if source else "",
            processors={
                _text(modality): _text(getattr(processor, "fingerprint", ""))
                for modality, processor in processors.items()
            },
            packages=dict(_packages(tuple(name for name in _IF_LOADED if name in sys.modules))),
        )


def _text(value: object) -> str:
    """Text that can be stored. The name of a directory, for example, may not be Unicode."""
    return as_unicode(str.__str__(value) if isinstance(value, str) else str(value))


@functools.lru_cache(maxsize=64)
def _digest(source: str) -> str:
    return hashlib.sha256(source.encode()).hexdigest()


@functools.lru_cache(maxsize=8)
def _packages(loaded: tuple[str, ...]) -> Mapping[str, str]:
    found = {}
    for name in (*_ALWAYS, *loaded):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
