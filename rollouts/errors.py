"""The exceptions of `rollouts` under one root, `RolloutsError`.

Exceptions of one subpackage stand in an `errors.py` of its own: `rollouts.episodes.errors`, `rollouts.errors`.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Self

from renderers.errors import Copyable


def is_unicode(text: str) -> bool:
    """Whether UTF-8 can encode the text. It cannot encode half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def as_unicode(text: str) -> str:
    r"""The text with each half of a surrogate pair written as `\udxxx`."""
    return text if is_unicode(text) else text.encode(errors="backslashreplace").decode()


def short_repr(value: object, limit: int = 80) -> str:
    """The `repr` of a value in at most `limit` characters; the name of its type if `repr` raises."""
    try:
        text = as_unicode(repr(value))
    except Exception:  # noqa: BLE001  an object of a user may raise anything from its __repr__
        return f"a {type(value).__name__}"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def describe_exception(error: BaseException) -> str:
    """The type and the text of an exception."""
    return f"{type(error).__name__}: {exception_text(error)}"


def text_with_notes(error: BaseException, text: str) -> str:
    """`text` of an exception, and the notes that it was given (`add_note`)."""
    return "; ".join([text, *map(str, getattr(error, "__notes__", ()))])


def exception_text(error: BaseException) -> str:
    """The text of an exception; a note about the failure if its `__str__` raises."""
    try:
        return as_unicode(str(error))
    except Exception as problem:  # noqa: BLE001  an exception of a user may raise anything from its __str__
        return f"(no text: its __str__ raised {type(problem).__name__})"


#: Each of the errors that pydantic lists takes a kilobyte, and a body of megabytes may have a million.
_MOST_LISTED: Final = 1000


def validation_errors(error: Any) -> list[Any]:
    """The errors of a `pydantic.ValidationError`; one that counts them in place of more than 1,000."""
    if (count := error.error_count()) > _MOST_LISTED:
        reason = f"{count} of the keys and values are unknown, missing or wrong"
        return [{"type": "too_many", "loc": (), "msg": reason, "input": "all of it"}]
    errors: list[Any] = error.errors(include_url=False)
    return errors


class RolloutsError(Copyable, Exception):
    """Root of every error that `rollouts` raises on purpose.

    Cure: what the text says; where one class has errors of one cure, its docstring has it.
    """


class ArgumentError(RolloutsError, ValueError):
    """An argument has a wrong value. `name` is the argument.

    Cure: pass a value as the text says.
    """

    def __init__(self, name: str, value: object, rule: str) -> None:
        self.name = name
        super().__init__(f"{name} is {short_repr(value)}; {rule}")


# Trajectories.


class TrajectoryError(RolloutsError, ValueError):
    """Values of a turn or a trajectory contradict each other, or are out of range.

    Decoding reports this error as a `transport.MalformedError`.

    Cure: pass the prompt as it was rendered and the completion as the engine returned it.
    """


class TrajectoryFinishedError(TrajectoryError):
    """A finished episode cannot be changed.

    Cure: make changes before `finish`, or copy what is needed.
    """

    def __init__(self, episode_id: str, field: str) -> None:
        self.episode_id = episode_id
        super().__init__(f"episode {episode_id} is finished; {field} cannot change any more. Copy what you need")


# Engines.


class ServerRelatedError(RolloutsError):
    """Root of the errors that may concern servers.

    `servers` are their addresses, without credentials. A note of the error (`__notes__`) has the command for each;
    tracebacks, commands and `Trajectory.error` show notes after the text.

    Cure: what the text says; the command in the note checks the server.
    """

    servers: tuple[str, ...] = ()

    def concern(self, *servers: str) -> Self:
        """Add addresses of servers, without credentials, and their notes. Returns the error itself."""
        for server in servers:
            if server not in self.servers:
                self.servers = (*self.servers, server)
                if len(self.servers) <= 3:  # further ones have no command
                    self.add_note(f"to check the server: rollouts doctor {server} --model DIR")
        return self

    def redact(self, shown: Callable[[str], str]) -> None:
        """Replace each text of the error, and of those that caused it, by what `shown` makes of it."""
        chain: list[BaseException | None] = [self]
        while (error := chain[-1]) is not None and error not in chain[:-1]:
            error.args = tuple(shown(each) if isinstance(each, str) else each for each in error.args)
            vars(error).update({name: shown(each) for name, each in vars(error).items() if isinstance(each, str)})
            chain.append(error.__cause__ or error.__context__)

    def concern_servers_of(self, errors: Iterable[object]) -> Self:
        """Add the servers that other errors concern. Returns the error itself."""
        of_servers = (error for error in errors if isinstance(error, ServerRelatedError))
        return self.concern(*(server for error in of_servers for server in error.servers))


class EngineError(ServerRelatedError):
    """An engine could not answer a request, or a server a control call.

    `request_id` names the request or the control call. `server` is the address of the server that it was for, without
    credentials; None where no server is concerned, or several are.

    Cure: what the text says; `rollouts doctor` checks a server.
    """

    def __init__(self, request_id: str, reason: str) -> None:
        self.request_id = request_id
        self.reason = reason
        self.server: str | None = None
        super().__init__(f"request {request_id}: {reason}")

    def __str__(self) -> str:
        unnamed = self.server is not None and self.server not in self.reason
        return f"request {self.request_id}{f' at {self.server}' if unnamed else ''}: {self.reason}"

    def for_request(self, request_id: str) -> Self:
        """The error of the request `request_id`, which needed the one that failed with this error. A new object."""
        error = copy.copy(self)
        error.request_id = request_id
        error.reason = f"the request `{self.request_id}` that it needed failed: {self.reason}"
        error.args = (str(error),)
        return error


class InvalidRequestError(EngineError, ValueError):
    """A request was refused before it reached the model.

    Cure: correct the field of the request or of `SamplingParams` that the text names.
    """


class ContextLengthError(InvalidRequestError):
    """The prompt leaves no room for a single new token.

    `prompt_tokens` and `limit` are None where a server refuses the prompt without naming them; `message` is then its.

    Cure: shorten the conversation, end the episode earlier (`EpisodeLimits`), or serve the model with a longer context.
    """

    def __init__(self, request_id: str, prompt_tokens: int | None, limit: int | None, message: str = "") -> None:
        self.prompt_tokens = prompt_tokens
        self.limit = limit
        prompt = "the prompt" if prompt_tokens is None else f"a prompt of {prompt_tokens} tokens"
        context = "context" if limit is None else str(limit)
        super().__init__(
            request_id,
            f"{prompt} leaves no room within the model's {context}{f' ({message})' if message else ''}; shorten the "
            "conversation or start a new episode",
        )


class EngineFailedError(EngineError):
    """An engine raised something of its own, which is chained.

    Cure: correct the engine; the chained exception has its traceback.
    """


class GenerationInterruptedError(EngineError):
    """An engine ended a completion with the finish reason "abort" or "error".

    Cure: repeat the episode (`RetryPolicy` does); if it happens often, find out who aborts requests at the server.
    """


class EngineStartError(EngineError):
    """An engine could not be started. The text has its command and the end of its log.

    Cure: read the end of the log in the text; usually the command, the model's directory or the memory is the reason.
    """

    def __init__(self, command: str, reason: str, last_lines: str, log: object) -> None:
        end = f". The end of its log ({log}):\n{last_lines}" if last_lines else ""
        super().__init__("start", f"{command}: {reason}{end}")


class UnknownAdapterError(InvalidRequestError):
    """A server does not have the LoRA adapter of a request. `adapter` is its name, `loaded` has those of the others.

    Cure: load the adapter with `load_adapter(name, directory)`.
    """

    def __init__(self, request_id: str, adapter: str, loaded: Iterable[str]) -> None:
        self.adapter = adapter
        self.loaded = sorted(loaded)
        listed = ", ".join(map(repr, self.loaded)) or "none"
        super().__init__(
            request_id,
            f"the adapter {adapter!r} is not loaded (loaded: {listed}); load it with load_adapter(name, directory)",
        )


class MissingLogProbsError(EngineError):
    """An engine returned tokens without a usable log-probability for each of them.

    Cure: configure the engine to return its own log-probability, before temperature and top-k, for every sampled token.
    """

    def __init__(self, request_id: str, reason: str) -> None:
        super().__init__(
            request_id,
            f"{reason}. Without them the loss would be wrong and no error would show it; configure the engine to "
            "return the model's own, before temperature and top-k, for every sampled token",
        )


class MalformedResultError(EngineError):
    """An engine returned something other than what was asked for.

    Cure: correct the engine, or update the server to a supported version (`rollouts doctor` checks it).
    """


class EngineClosedError(EngineError):
    """The engine was closed before the request was answered.

    Cure: keep the engine open until its requests are answered.
    """


class ServerUnreachableError(EngineError):
    """No server answered: refused, reset, or gone in the middle of an answer, after all retries.

    Cure: start the server, or correct its address.
    """


def no_server(request_id: str, reasons: Mapping[str, object]) -> ServerUnreachableError:
    """The error of a fleet none of whose members could answer; `reasons`, by the name of each member, say why not."""
    listed = "; ".join(f"{name}: {getattr(reason, 'reason', reason)}" for name, reason in reasons.items())
    text = f"no member of the fleet could answer ({listed}). Start a server, or add one"
    error = ServerUnreachableError(request_id, text if listed else "the fleet has no members; add one")
    return error.concern_servers_of(reasons.values())


class FleetMismatchError(EngineError):
    """A member of a fleet serves something else than the others.

    Cure: start the member's server with the options of the others, or put it into a fleet of its own.
    """

    def __init__(self, member: str, field: str, value: object, other: str, expected: object) -> None:
        super().__init__(
            "check",
            f"{member} has {field} {short_repr(value)}, {other} has {short_repr(expected)}: one fleet serves one model "
            "with one configuration. Start the server with the options of the others, or use a fleet of its own",
        )


class FleetControlError(EngineError):
    """A control call of a fleet failed at some members. `errors` has what each raised, `results` what others returned.

    `undone` names the members at which the call was taken back.

    Cure: repair or remove the members that the text names, then repeat the call.
    """

    def __init__(
        self, call: str, errors: Mapping[str, Exception], results: Mapping[str, object], undone: Sequence[str] = ()
    ) -> None:
        self.errors = dict(errors)
        self.results = dict(results)
        self.undone = tuple(undone)
        failed = "; ".join(f"{name}: {error}" for name, error in errors.items())
        done = [name for name in results if name not in self.undone]
        reason = f"{len(errors)} of {len(errors) + len(results)} members failed ({failed})"
        if undone:
            reason += f". It was taken back at {', '.join(undone)}"
        if done:
            reason += f". It is done at {', '.join(done)}"
        super().__init__(call, reason)
        self.concern_servers_of(errors.values())


class ServerTimeoutError(EngineError):
    """A deadline passed. Whether the server did what was asked is unknown.

    Cure: raise the deadline in the engine's limits, or send fewer requests at once; read the server's log if it does
    not answer at all.
    """


class ServerError(EngineError):
    """A server answered with an error. `status` is the HTTP status, `body` the beginning of what it said.

    Cure: read the body in the text and the server's log; `rollouts doctor` checks the server.
    """

    def __init__(self, request_id: str, reason: str, *, status: int, body: str) -> None:
        self.status = status
        self.body = body
        super().__init__(request_id, f"{reason}: HTTP {status} {body}")


class CapabilityError(EngineError):
    """The server, as it was started, cannot do what is asked, or contradicts the configuration; nothing was sent.

    Cure: start the server with the option that the text names, or correct the configuration here; `rollouts doctor`
    lists what the server lacks.
    """


class ApiKeyError(CapabilityError):
    """A server refuses the API key that it was given, or wants one.

    Cure: pass the server's key as `api_key`, or to commands with `--api-key-env`.
    """


class WeightUpdateError(ServerRelatedError):
    """New weights could not be taken. Nothing was changed, unless the text says what state was left.

    Cure: await the update that runs, or update again with weights of the served model and a new version; the text says
    what was left.
    """


# Training.


class SampleError(RolloutsError, ValueError):
    """A training sample or a batch contradicts itself, or batches cannot be combined. `sample` names the sample.
    It is None for a batch. Decoding reports this error as a `transport.MalformedError`.

    Cure: give each column one value for each token, with ids of the tokenizer and finite numbers; make rows and batches
    alike in what the text names.
    """

    def __init__(self, sample: str | None, reason: str) -> None:
        self.sample = sample
        super().__init__(reason if sample is None else f"sample {sample}: {reason}")


class PixelMismatchError(RolloutsError):
    """Pixels or features derived again from a source are not those that the sampler saw.

    Cure: use the same preprocessor_config.json and the same versions of the decoders on both sides.
    """

    def __init__(self, expected: str, actual: str) -> None:
        super().__init__(
            f"the sampler saw {expected}, this side derives {actual}: the processor fingerprints (the part behind the "
            "dash) differ. Use the same preprocessor_config.json and versions of Pillow, PyAV, soundfile and soxr on "
            "both sides."
        )


class UnsupportedModelError(RolloutsError):
    """Something that runs a model by itself does not know this architecture. `model_type` names it.

    Cure: use what the text offers instead, such as `layout="padded"` or a model that transformers supports.
    """

    def __init__(self, model_type: str, reason: str) -> None:
        self.model_type = model_type
        self.reason = reason
        super().__init__(f"model type {model_type!r}: {reason}")


class CommandFileError(RolloutsError):
    """A path given to a command cannot be read or written, or does not hold what the command needs.

    `line` (from 1) is the place in it if there is one.

    Cure: pass a path that exists and can be read, or, for an output, one that does not exist yet and can be written.
    """

    def __init__(self, path: Path, reason: str, *, line: int | None = None) -> None:
        self.line = line
        super().__init__(f"{path}{'' if line is None else f', line {line}'}: {reason}")
