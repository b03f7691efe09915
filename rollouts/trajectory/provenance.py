"""The provenance of an episode: renderer, template, processors, engine and package versions."""

from __future__ import annotations

import functools
import hashlib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from rollouts.errors import as_unicode
from transport import wire_type


@wire_type("rollouts.Provenance")
@dataclass(frozen=True, slots=True)
class Provenance:
    """`model` and `engine` are names; `template` is the sha256 of the chat template's source, empty where
    there is none; `processors` maps a modality to its processor's fingerprint, `packages` a distribution to
    its version. `teacher_versions` are those of the weights that gave the scores in the nodes
    (`with_scores`), several where they changed between the leaves.
    """

    model: str = ""
    engine: str = ""
    template: str = ""
    processors: Mapping[str, str] = field(default_factory=dict)
    packages: Mapping[str, str] = field(default_factory=dict)
    teacher_versions: Sequence[str] = ()

    @classmethod
    def of(cls, renderer: Any, engine: Any) -> Provenance:
        """The provenance of episodes of a renderer, or of the renderer of a pool, and an engine."""
        renderer = getattr(renderer, "renderer", renderer)
        source = getattr(getattr(renderer, "template", None), "source", "")
        processors = getattr(renderer, "processors", None) or {}
        return cls(
            model=_text(getattr(getattr(renderer, "tokenizer", engine), "model", "")),
            engine=type(engine).__name__,
            template=_digest(source) if source else "",
            processors={
                _text(modality): _text(getattr(processor, "fingerprint", ""))
                for modality, processor in processors.items()
            },
            packages=dict(_packages(tuple(name for name in ("torch", "transformers", "vllm") if name in sys.modules))),
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
    for name in (*("mmrollouts", "tokenizers", "jinja2", "numpy", "pillow"), *loaded):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
