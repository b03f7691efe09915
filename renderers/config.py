"""How a renderer is to behave, where the model's own files leave a choice."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from renderers.bridging.refusals import HistoryPolicy, ThinkingRetention
from renderers.errors import ConfigError
from renderers.messages import ROLES
from renderers.parsing.format import Format
from renderers.tokens.encoding import BodyPolicy
from renderers.vision.processor import ImageBackend

ContentConversion = Literal["auto", "as_given"]
"""Whether messages are shown to the template in a form of content that it reads, or as they are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RendererConfig:
    """Options of `load_renderer` and `create_renderer`; every default is what the model's files say.

    chat_template: the template's text or a path, or the name of one of the model's own templates (`rag`); wins over
        the one that the model would take.
    format: a `Format` or the name of a family (`renderers.formats.names()`); wins over what probing finds.
    chat_template_kwargs: variables for the template, e.g. `{"enable_thinking": False}`.
    content_form: `auto` shows each message to the template in a form of content that the template reads for its role,
        as inference servers do: a string as a list with one text part where only parts are read, text parts as one
        string, joined by line breaks, where only strings are read. `as_given` leaves every message as it is, as
        `apply_chat_template` does.
    thinking_retention: when a bridge may keep reasoning that a full render would drop: `template` (never: such a turn
        is rendered anew), `tool_cycle` (until a user speaks again), `all`.
    history: what a bridge does where a full render would print earlier messages differently than when they were
        sampled (Mistral's templates move a system message into the last user turn): `template` refuses, so that such
        a turn is rendered anew; `as_sampled` goes on from the tokens that the policy saw and prints only what the
        template prints behind them. `bridge_stats.overridden` counts those. Reasoning has its own option.
    body_policies: role -> `text`, `parse` or `error`, for control tokens spelled in content.
    image_backend: which of transformers' two image processors the pixels of Qwen-VL equal: `torchvision` or `pillow`;
        None follows preprocessor_config.json.
    cache_bytes: how much memory each of the two caches (encoded text, laid out conversations) may hold.

    A dataclass and not a pydantic model, which alone would take a third of the time of `import renderers`.
    """

    chat_template: str | Path | None = None
    format: Format | str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    content_form: ContentConversion = "auto"
    thinking_retention: ThinkingRetention = "template"
    history: HistoryPolicy = "template"
    body_policies: Mapping[str, BodyPolicy] = field(default_factory=dict)
    image_backend: ImageBackend | None = None
    cache_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        _check_choice("content_form", self.content_form, get_args(ContentConversion))
        _check_choice("thinking_retention", self.thinking_retention, get_args(ThinkingRetention))
        _check_choice("history", self.history, get_args(HistoryPolicy))
        if not isinstance(self.chat_template_kwargs, Mapping):
            raise ConfigError("chat_template_kwargs", self.chat_template_kwargs, ("a dict of variable to value",))
        if not isinstance(self.body_policies, Mapping):
            raise ConfigError("body_policies", self.body_policies, ("a dict of role to policy",))
        for role, policy in self.body_policies.items():
            if role not in ROLES:
                raise ConfigError("body_policies", role, ROLES)
            _check_choice(f"body_policies[{role!r}]", policy, get_args(BodyPolicy))
        if self.image_backend is not None:
            _check_choice("image_backend", self.image_backend, get_args(ImageBackend))
        if isinstance(self.cache_bytes, bool) or not isinstance(self.cache_bytes, int) or self.cache_bytes < 0:
            raise ConfigError("cache_bytes", self.cache_bytes, ("a number of bytes, 0 for no cache",))


def _check_choice(option: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(option, value, allowed)
