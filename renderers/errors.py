"""Every exception of `renderers`, under one root.

Each one carries what went wrong as attributes, says where (message, part, token) and ends with the cure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Self

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


class RendererError(Exception):
    """Root of every error that `renderers` raises on purpose.

    Its text can be printed, logged and stored, whatever it quotes: half a surrogate pair is escaped.
    """

    def __str__(self) -> str:
        return super().__str__().encode("utf-8", "backslashreplace").decode("utf-8")


class ConfigError(RendererError, ValueError):
    """An option of a renderer has a value that it cannot have."""

    def __init__(self, option: str, value: object, allowed: Iterable[str]) -> None:
        self.option = option
        self.value = value
        self.allowed = tuple(allowed)
        super().__init__(f"{option} is {short_repr(value)}; it can be {', '.join(self.allowed)}")


class LoadError(RendererError):
    """A renderer could not be built from what the directory or repository holds."""


class ModelNotFoundError(LoadError):
    """The name is neither a directory nor a reachable Hugging Face repository."""

    def __init__(self, name: str, reason: str) -> None:
        self.name = name
        self.reason = reason
        super().__init__(
            f"no model at {name!r}: {reason}. Pass a directory with tokenizer.json and chat_template.jinja, or the "
            "name of a repository that this machine can reach or has in its cache."
        )


class MissingFileError(LoadError):
    """The directory lacks a file without which no renderer can be built."""

    def __init__(self, directory: str, filename: str, cure: str) -> None:
        self.directory = directory
        self.filename = filename
        super().__init__(f"{directory} holds no {filename}: {cure}")


class InvalidFileError(LoadError):
    """A file of the model is there but does not hold what its name promises."""

    def __init__(self, path: str, reason: str) -> None:
        self.path = path
        self.reason = reason
        super().__init__(f"{path}: {reason}")


class MissingExtraError(LoadError, ImportError):
    """A feature needs packages that are not installed. `extra` is the extra of mmrollouts that installs them."""

    def __init__(self, feature: str, extra: str, missing: str) -> None:
        self.feature = feature
        self.extra = extra
        self.missing = missing
        super().__init__(f"{feature} needs {missing}, not installed here: pip install 'mmrollouts[{extra}]'")


class MissingTokenError(LoadError):
    """The template or the vision part needs a control token that the tokenizer does not have."""

    def __init__(self, token: str, model: str, needed_by: str) -> None:
        self.token = token
        self.model = model
        self.needed_by = needed_by
        super().__init__(
            f"the tokenizer of {model} has no token {token!r}, which {needed_by} needs: it would be spelled out as "
            "plain text. Add it to added_tokens in tokenizer.json, or load the tokenizer that belongs to this template."
        )


class UnknownFormatError(LoadError):
    """No family of formats goes by this name."""

    def __init__(self, name: str, known: Iterable[str]) -> None:
        self.name = name
        super().__init__(
            f"no format {name!r}; there are {', '.join(sorted(known))}. Pass one of them, or a Format of your own"
        )


class MessageError(RendererError):
    """A conversation is not one a renderer can read. `message_index` and `part_index` say where."""

    def __init__(self, reason: str, *, message_index: int | None = None, part_index: int | None = None) -> None:
        self.reason = reason
        self.message_index = message_index
        self.part_index = part_index
        place = "" if message_index is None else f"message {message_index}"
        if part_index is not None:
            place += f", part {part_index}"
        super().__init__(f"{place}: {reason}" if place else reason)


class UnknownRoleError(MessageError):
    """A message has a role that is not one of `messages.ROLES`."""


class UnknownPartError(MessageError):
    """A content part has a type that no renderer knows."""


class UnsupportedModalityError(MessageError):
    """An image or video was given to a model that cannot see it."""


class ControlTokenInContentError(MessageError):
    """Content spells a control token and the body policy of its role is `error`."""


class TemplateError(RendererError):
    """The chat template refused the conversation or failed on it.

    `template_message` is what the template said, `message_index` the message that it was at (None: before any).
    """

    def __init__(self, template_message: str, *, model: str, cure: str, message_index: int | None = None) -> None:
        self.template_message = template_message
        self.model = model
        self.message_index = message_index
        place = "" if message_index is None else f" at message {message_index}"
        super().__init__(f"the chat template of {model} says{place}: {template_message}. {cure}")


class TemplateLimitError(TemplateError):
    """The chat template would not come to an end, or would print more than memory holds."""

    def __init__(self, reason: str, *, model: str, message_index: int | None = None) -> None:
        super().__init__(
            f"stopped, because {reason}",
            model=model,
            cure="No conversation of ordinary shape does this with the template that the model was published with: "
            "load that one, and pass as text what is nested deeply.",
            message_index=message_index,
        )


class WorkLimitError(RendererError):
    """One run of a template exceeded its work limit; `ChatTemplate` turns this into a `TemplateLimitError`."""


class PromptRefusedError(RendererError):
    """A prompt function cannot print the conversation; `PythonTemplate` turns this into a `TemplateError`."""

    def __init__(self, reason: str, *, cure: str, message_index: int | None = None) -> None:
        self.reason = reason
        self.cure = cure
        self.message_index = message_index
        place = "" if message_index is None else f"message {message_index}: "
        super().__init__(f"{place}{reason}. {cure}")


class TemplateSyntaxError(LoadError):
    """The chat template is not valid Jinja."""

    def __init__(self, reason: str, *, model: str, line: int) -> None:
        self.line = line
        super().__init__(f"the chat template of {model} is not valid Jinja, line {line}: {reason}")


class TokenizerError(RendererError):
    """Text could not be turned into the ids that it stands for."""


class PlaceholderCountError(RendererError):
    """The template printed another number of media placeholders than the message holds media parts.

    `parts` are (part index, source digest) of the message's parts of that modality; `expected` is their number.
    """

    def __init__(self, message_index: int, parts: Sequence[tuple[int, str]], actual: int, modality: str) -> None:
        self.message_index = message_index
        self.parts = tuple(parts)
        self.expected = len(parts)
        self.actual = actual
        self.modality = modality
        held = "".join(f", part {index} {digest[:12]}" for index, digest in parts)
        super().__init__(
            f"message {message_index}{held}: it holds {self.expected} {modality} part(s) but the chat template printed "
            f"{actual} {modality} placeholder(s). This template does not show {modality}s there: move them to a role "
            "that it does (usually user), or use a template that handles them."
        )

    def relative_to(self, first_message: int) -> Self:
        """The same error with message `first_message` of the printed conversation as message 0."""
        return type(self)(self.message_index - first_message, self.parts, self.actual, self.modality)


class LogicalIdsError(RendererError):
    """The ids with one marker for each item are not known."""

    def __init__(self) -> None:
        super().__init__(
            "text that the processor puts around an image merges with the text beside it into one token, so the ids "
            "without the expansion cannot be read off those with it; send the features instead of raw media"
        )


class MediaError(RendererError):
    """An image or a video could not be accepted.

    `message_index` and `part_index` say where, once known; `digest` names the source, where there is one already.
    """

    def __init__(self, reason: str, *, digest: str | None = None) -> None:
        self.reason = reason
        self.digest = digest
        self.message_index: int | None = None
        self.part_index: int | None = None
        super().__init__(reason)

    def at(self, message_index: int, part_index: int) -> Self:
        """A copy that names the content part that holds the medium; one error may be that of several parts."""
        placed = type(self).__new__(type(self))
        placed.__dict__.update(self.__dict__)
        placed.message_index = message_index
        placed.part_index = part_index
        placed.args = (f"message {message_index}, part {part_index}: {self.reason}",)
        return placed


class MediaPolicyError(MediaError):
    """The media policy does not allow this reference (a URL, a path) to be followed."""


class MediaAddressError(MediaPolicyError):
    """A host of a URL has an address that is not public: loopback, private, link-local, metadata, multicast."""


class MediaFetchError(MediaError):
    """A medium could not be fetched: no such host, no connection, a status other than 200, a body cut short."""


class MediaTimeoutError(MediaFetchError):
    """Fetching took longer than the policy allows."""


class BlockingFetchError(MediaFetchError):
    """A URL would have to be fetched on the thread of a running event loop, which would stand still meanwhile."""


class MediaLimitError(MediaError):
    """A medium is larger than the policy allows, in bytes, pixels, frames or aspect ratio."""


class MediaDecodeError(MediaError):
    """The bytes are not an image or a video that can be read."""


class MediaTypeError(MediaDecodeError):
    """The bytes are something else than was announced or is expected: a page, a drawing program, an archive."""


class MediaStoreError(MediaError):
    """The directory of a store cannot be used."""


class MediaDigestError(MediaError):
    """Source bytes, or the pixels made from them, do not match the digest they travel under."""

    def __init__(self, expected: str, actual: str, what: str = "media source") -> None:
        self.expected = expected
        self.actual = actual
        super().__init__(
            f"{what} announced as {expected} is {actual} here: the bytes changed on the way, or the two sides run "
            "different processors. Compare the processor fingerprints, then ship the source again."
        )


class TrainingSampleError(RendererError):
    """A conversation cannot be made into training samples as asked."""


class UnreachableTurnError(TrainingSampleError):
    """The model could not have sampled a turn as the template prints it. `message_index` names the turn."""

    def __init__(self, message_index: int, reason: str) -> None:
        self.message_index = message_index
        self.reason = reason
        super().__init__(
            f"message {message_index} is not what the model would have sampled there: {reason}. Take its loss away "
            "with message_loss_mask, or use build_training_sample, which trains on history as the template prints it."
        )


class MessageLossMaskError(TrainingSampleError):
    """`message_loss_mask` does not say for each message whether it carries loss."""


class NoTrainedTokensError(TrainingSampleError):
    """Nothing of the conversation would carry loss."""


class PoolClosedError(RendererError):
    """The pool was closed before it took the call."""

    def __init__(self) -> None:
        super().__init__("this RendererPool is closed; make calls before close(), or inside its `with` block")
