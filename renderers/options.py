"""Options of a renderer."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, get_args

from renderers.bridging.refusals import HistoryPolicy, ThinkingRetention
from renderers.errors import ConfigError
from renderers.messages import ROLES
from renderers.parsing.format import Format
from renderers.tokens.encoding import BodyPolicy


@dataclass(frozen=True, slots=True, kw_only=True)
class RendererOptions:
    """Options of `load_renderer` and `create_renderer`; by default the model's files decide.

    chat_template: the template's text or a path, or the name of one of the model's own templates (`rag`);
        used in place of the model's default template.
    format: a `Format` or the name of a family (`renderers.formats.names()`); used in place of the one that
        probing finds.
    chat_template_kwargs: variables for the template, e.g. `{"enable_thinking": False}`. As in
        `apply_chat_template`, `{"use_audio_in_video": True}`, which newer transformers call
        `load_audio_from_video`, is an option of the processor: an omni model then gets videos together with
        the sound inside of them.
    thinking_retention: when a bridge may keep reasoning that a full render would drop: `template` (never: the
        bridge is refused), `tool_cycle` (until the next user or developer message), `all`.
    history: what a bridge does where a full render would print earlier messages differently than when they
        were sampled (Mistral's templates move a system message into the last user turn): `template` refuses,
        so that the caller renders the whole conversation; `as_sampled` extends the tokens that the policy saw
        and sampled. `bridge_stats.overridden` counts the latter. Reasoning has its own option.
    body_policies: role -> `text`, `parse` or `error`: what a control token written in content becomes.
    cache_bytes: memory limit of each of the two caches (encoded text; layouts of prompts and of what bridges
        add).

    A dataclass and not a pydantic model, because importing pydantic would take a third of the time of
    `import renderers`.
    """

    chat_template: str | Path | None = None
    format: Format | str | None = None
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    thinking_retention: ThinkingRetention = "template"
    history: HistoryPolicy = "template"
    body_policies: Mapping[str, BodyPolicy] = field(default_factory=dict)
    cache_bytes: int = 64 * 2**20

    def __post_init__(self) -> None:
        _check_choice("thinking_retention", self.thinking_retention, get_args(ThinkingRetention))
        _check_choice("history", self.history, get_args(HistoryPolicy))
        if not isinstance(self.chat_template_kwargs, Mapping):
            raise ConfigError("chat_template_kwargs", self.chat_template_kwargs, ("a dict of variable to value",))
        for name in _SOUND_OF_VIDEO:
            if not isinstance(self.chat_template_kwargs.get(name, False), bool):
                raise ConfigError(f"chat_template_kwargs[{name!r}]", self.chat_template_kwargs[name], ("True", "False"))
        for role, policy in self.body_policies.items():
            _check_choice("body_policies", role, ROLES)
            _check_choice(f"body_policies[{role!r}]", policy, get_args(BodyPolicy))

    @property
    def sound_of_videos(self) -> str | None:
        """The name by which `chat_template_kwargs` ask for the sound of videos; None where they do not."""
        return next((name for name in _SOUND_OF_VIDEO if self.chat_template_kwargs.get(name)), None)


# The two names of an option of the processors of omni models. Templates have no such variable.
_SOUND_OF_VIDEO: Final = ("use_audio_in_video", "load_audio_from_video")


def _check_choice(option: str, value: object, allowed: tuple[str, ...]) -> None:
    if not isinstance(value, str) or value not in allowed:
        raise ConfigError(option, value, allowed)
