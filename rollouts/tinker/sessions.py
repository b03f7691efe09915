"""What a client of the Tinker API has begun: sessions, their models and sampling sessions, and their metadata."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from rollouts.errors import as_unicode
from rollouts.models.lora_modules import LoraOptions
from rollouts.serve.errors import RequestError
from rollouts.tinker.turns import Turns

#: The largest size of all metadata of a session, model or checkpoint: listings read and send them.
METADATA_CHARACTERS: Final = 2**16

Json = dict[str, object]


@dataclass(slots=True, eq=False)
class Session:
    """What a client has begun: its models by id; whether there ever was one; and its sampling sessions."""

    session_id: str
    user_metadata: Mapping[str, str] | None = None
    display_name: str | None = None
    last_seen: float = field(default_factory=time.monotonic)
    models: dict[str, Model] = field(default_factory=dict)
    has_begun: bool = False
    samplers: dict[str, SamplingSession] = field(default_factory=dict)

    def add_sampling(self, number: int, base_model: str, uri: str | None, path: Path | None) -> str:
        """Add a sampling session, and return its id."""
        sampling_session_id = f"{self.session_id}:sample:{number}"
        self.samplers[sampling_session_id] = SamplingSession(self, base_model, uri, path)
        return sampling_session_id


@dataclass(slots=True, eq=False)
class Model:
    """A model of the trainer. `steps` counts its optimiser steps, `session` began it."""

    model_id: str
    session: Session
    base_model: str
    lora: LoraOptions | None
    turns: Turns = field(default_factory=Turns)
    steps: int = 0


@dataclass(frozen=True, slots=True, eq=False)
class SamplingSession:
    """Samples from the weights of a directory, with the URI `model_path`; from the base model where there are none."""

    session: Session
    base_model: str
    model_path: str | None
    weights: Path | None


def metadata_texts(metadata: Mapping[str, Any] | None) -> dict[str, str]:
    """Metadata of a client as texts that can be written and sent. Raises `RequestError` (400) for too many of them."""
    texts = {as_unicode(key): as_unicode(str(value)) for key, value in (metadata or {}).items()}
    if (size := sum(len(key) + len(value) for key, value in texts.items())) > METADATA_CHARACTERS:
        raise RequestError(400, f"the metadata has {size} characters; send at most {METADATA_CHARACTERS}")
    return texts
