"""Every exception of `renderers`, under one root.

The text of each has the wrong value, its place (message, part, token) and the cure.
"""

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Self

from renderers.installation import install_command

# Characters of a value in an error: a role may be a megabyte, too.
_LONGEST_VALUE = 80


def short_repr(value: object) -> str:
    """The `repr` of any value for an error message, cut to 80 characters.

    `repr` fails for an integer of more than 4,300 digits and for nesting deeper than Python recurses; the type's name
    stands in its place then.
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"<{type(value).__name__} that cannot be written>"
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}..."


def type_name(value: object) -> str:
    """The name of a value's type for an error message: str, list or dict for one of a template's run."""
    return next((base.__name__ for base in (str, list, dict) if isinstance(value, base)), type(value).__name__)


class Copyable:
    """A root of errors that pickle and copy make of `args` and the fields, not by their constructors."""

    args: tuple[Any, ...]

    def __reduce__(self) -> tuple[object, ...]:
        return type(self).__new__, (type(self),), (self.args, self.__dict__)

    def __setstate__(self, state: Any) -> None:
        self.args, fields = state
        self.__dict__.update(fields)
        if "__notes__" in fields:  # a copy has a list of its own
            self.__notes__ = list(fields["__notes__"])


class RendererError(Copyable, Exception):
    """Root of every error that `renderers` raises on purpose.

    Its text can be printed, logged and stored, whatever it quotes: half a surrogate pair is escaped.

    Cure: what the text says; where one class has errors of one cure, its docstring has it.
    """

    def __str__(self) -> str:
        return super().__str__().encode("utf-8", "backslashreplace").decode("utf-8")


class ConfigError(RendererError, ValueError):
    """An option of a renderer has an invalid value.

    Cure: pass one of the allowed values, which the text lists.
    """

    def __init__(self, option: str, value: object, allowed: Iterable[str]) -> None:
        self.allowed = tuple(allowed)
        super().__init__(f"{option} is {short_repr(value)}; it can be {', '.join(self.allowed)}")


class LoadError(RendererError):
    """A renderer could not be built from the files of the directory or repository.

    Cure: complete the model's directory with the files of its repository; the text says what is missing or wrong.
    """


class MissingExtraError(LoadError, ImportError):
    """A feature needs packages that are not installed. `extra` is the extra of mmrollouts that installs them.

    Cure: run the `pip install` command in the text.
    """

    def __init__(self, feature: str, extra: str, missing: str) -> None:
        self.extra = extra
        super().__init__(f"{feature} needs {missing}, not installed here: {install_command(extra)}")


def missing_token(token: str, model: str, needed_by: str) -> LoadError:
    return LoadError(
        f"the tokenizer of {model} has no token {token!r}, which {needed_by} needs: it would be encoded as "
        "plain text. Add it to added_tokens in tokenizer.json, or load the tokenizer that belongs to this template."
    )


class MessageError(RendererError, ValueError):
    """A conversation is malformed. `message_index` and `part_index` name the place.

    Cure: correct the message at the place that the text names.
    """

    def __init__(self, reason: str, *, message_index: int | None = None, part_index: int | None = None) -> None:
        self.reason = reason
        self.message_index = message_index
        self.part_index = part_index
        place = "" if message_index is None else f"message {message_index}"
        if part_index is not None:
            place += f", part {part_index}"
        super().__init__(f"{place}: {reason}" if place else reason)


_AS_HISTORY = "use build_training_sample, which trains on history as the template prints it"


def unreachable_turn(message_index: int, reason: str, *, cure: str = _AS_HISTORY) -> MessageError:
    """The error of a turn that the model could not have sampled as printed, or that is printed in part."""
    return MessageError(
        f"it is not what the model would have sampled there: {reason}. Exclude it (message_loss_mask: False for "
        f"message {message_index}), or {cure}.",
        message_index=message_index,
    )


class TemplateError(RendererError, ValueError):
    """The chat template refused the conversation or failed on it.

    `template_message` is the template's own message; `message_index` is the message that it was printing (None: before
    the first). A prompt function raises it without `model`, which `PythonTemplate` adds.

    Cure: change the conversation as the template's message says; many templates require alternating roles or a first
    user message.
    """

    def __init__(
        self, template_message: str, *, cure: str, model: str = "the model", message_index: int | None = None
    ) -> None:
        self.template_message = template_message
        self.cure = cure
        self.model = model
        self.message_index = message_index
        place = "" if message_index is None else f" at message {message_index}"
        super().__init__(f"the chat template of {model} says{place}: {template_message.removesuffix('.')}. {cure}")


class TemplateLimitError(TemplateError):
    """The chat template was stopped because it would run without end or print more than memory holds.

    Cure: load the template that the model was published with, and pass deeply nested values as text.
    """

    def __init__(self, reason: str, *, model: str, message_index: int | None = None) -> None:
        super().__init__(
            f"stopped, because {reason}",
            model=model,
            cure="No conversation of ordinary shape does this with the template that the model was published with: "
            "load that one, and pass as text what is nested deeply.",
            message_index=message_index,
        )


class WorkLimitError(RendererError):
    """One run of a template exceeded its work limit; `ChatTemplate` turns this into a `TemplateLimitError`.

    Cure: none here: callers of a renderer receive the `TemplateLimitError` that is made of it.
    """


class MediaError(RendererError):
    """An image, a video or a sound could not be accepted: it cannot be read, or a subclass names another reason.

    `message_index` and `part_index` name the place, once known; `digest` is that of the source, None before it is read.

    Cure: correct or replace the medium at the place that the text names.
    """

    def __init__(self, reason: str, *, digest: str | None = None) -> None:
        self.reason = reason
        self.digest = digest
        self.message_index: int | None = None
        self.part_index: int | None = None
        super().__init__(reason)

    def at(self, message_index: int, part_index: int) -> Self:
        """A copy that names the content part of the medium; one error may be raised for several parts."""
        placed = copy.copy(self)
        placed.message_index = message_index
        placed.part_index = part_index
        placed.args = (f"message {message_index}, part {part_index}: {self.reason}",)
        return placed


class MediaPolicyError(MediaError):
    """The media policy does not allow this reference (a URL, a path) to be followed.

    Cure: allow the host or the directory in `MediaPolicy` if the author of the messages may read it, or pass the bytes
    of the file.
    """


class MediaFetchError(MediaError):
    """A medium could not be fetched: no such host, no connection, a status other than 200, a body cut short.

    Cure: check that this machine reaches the URL within the `timeout` of `MediaPolicy`, or pass the bytes of the file.
    """


class MediaLimitError(MediaError):
    """A medium is larger than the policy allows, in bytes, pixels, frames, aspect ratio, seconds or channels.

    Cure: make the medium smaller, or raise the limit in `MediaPolicy`.
    """


class OverlongPromptError(RendererError):
    """A prompt is longer than the server accepts. Programs look for "maximum context length" in its text.

    Cure: shorten the conversation, or serve the model with a longer context.
    """

    def __init__(self, *, prompt_len: int, max_prompt_len: int, is_least: bool = False) -> None:
        self.prompt_len = prompt_len
        self.max_prompt_len = max_prompt_len
        length = f"at least {prompt_len}" if is_least else prompt_len  # the text was not encoded
        super().__init__(
            f"the prompt length ({length}) exceeds the maximum context length ({max_prompt_len}); shorten the "
            "conversation"
        )


class MalformedGenerateResponseError(RendererError, ValueError):
    """A server returned a completion without a usable log-probability for each token, or without its prompt.

    Cure: request log-probabilities and the prompt's ids, from a server that returns both (`rollouts doctor` checks it).
    """


_PACKAGE = Path(__file__).parent


def check_package_files() -> None:
    """Raise an `ImportError` if PyPI's `renderers` is installed in the folder of this package.

    Which of its files are in use depends on the order of installation, and each imports names that the other lacks.
    """
    if (_PACKAGE / "_version.py").exists():  # every release of PyPI's package has this file, and this package never
        raise ImportError(
            f"{_PACKAGE} has files of PyPI's renderers and of mmrollouts, which cannot share an environment. Run `pip "
            "uninstall -y renderers mmrollouts`, then install mmrollouts and the distribution of packaging/renderers "
            "(docs/migrating-from-renderers.md)"
        )
