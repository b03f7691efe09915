"""Errors of environments and episodes, and the conversion of exceptions from user code into them."""

import asyncio
import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NoReturn, TypeAlias

from renderers import Message
from renderers.errors import MediaError, MediaFetchError, MessageError
from rollouts.errors import (
    EngineError,
    EngineFailedError,
    GenerationInterruptedError,
    RolloutsError,
    ServerError,
    ServerTimeoutError,
    ServerUnreachableError,
    describe_exception,
    short_repr,
)
from rollouts.trajectory.tree import Trajectory
from transport import wire_type

#: Kinds of errors that another attempt may not have (`RetryPolicy`).
ErrorKind: TypeAlias = Literal["engine", "media", "environment"]


class EpisodeError(RolloutsError):
    """An episode failed. `trajectory` holds the completed turns; the cause is chained.

    Cure: that of the chained error; the completed turns are in `trajectory`.
    """

    def __init__(self, reason: str, trajectory: Trajectory) -> None:
        self.reason = reason
        self.trajectory = trajectory
        turns = "1 completed turn" if trajectory.num_turns == 1 else f"{trajectory.num_turns} completed turns"
        super().__init__(f"episode {trajectory.episode_id} failed after {turns}: {reason}")


class EpisodesError(RolloutsError):
    """Episodes of a run failed, and the other episodes of the run were stopped.

    `errors` holds the `EpisodeError` of each episode that failed; the first is chained. `trajectories` holds one
    trajectory per spec, in order, with the completed turns; `error` is not empty on the trajectories of episodes that
    failed, were stopped or did not begin.

    Cure: that of each error in `errors`; to keep the other episodes running, use `Runner`, which keeps failed episodes
    with their error.
    """

    def __init__(self, errors: Sequence[EpisodeError], trajectories: Sequence[Trajectory]) -> None:
        self.errors = list(errors)
        self.trajectories = list(trajectories)
        more = f"; {len(errors) - 1} more failed" if len(errors) > 1 else ""
        super().__init__(f"{errors[0]}{more}; the other episodes were stopped. trajectories holds the completed turns")


class EpisodeLimitError(RolloutsError):
    """An episode has reached one of its limits and gets no further completion; it ends `truncated`.

    `limit` is the name of the limit, `reason` what reached it. An environment that calls the policy through its
    `EpisodeContext` may catch this error, to return a last reward.

    Cure: none is needed: the episode is kept as truncated. Raise the limit if episodes are to be longer.
    """

    def __init__(self, limit: str, reason: str) -> None:
        self.limit = limit
        self.reason = f"{limit}: {reason}"
        super().__init__(f"the episode has reached its limit {self.reason}; it gets no further completion")


class ScoringError(RolloutsError):
    """An episode has ended, and its teacher has not scored it. The error of the last attempt is chained.

    It is no error of the kinds that `RetryPolicy` repeats: the episode is not run again for it.

    Cure: that of the chained error; the episode has its turns, and `score` can score it later. `rollouts run --resume
    --rerun-failed` runs its task again.
    """


class EnvironmentProtocolError(RolloutsError):
    """An environment returned a value that its protocol does not allow.

    Cure: return what `Environment` describes: messages from `reset`, a `StepResult` from `step`, an instance from
    `make_environment`.
    """


class EnvironmentFailedError(RolloutsError):
    """An environment raised an exception, which is chained.

    Cure: correct the environment; the chained exception has its traceback.
    """

    def __init__(self, environment: str, method: str, error: BaseException) -> None:
        super().__init__(f"{f'{environment}.{method}' if environment else method} raised {describe_exception(error)}")


class RendererFailedError(RolloutsError):
    """A renderer raised an exception other than a `RendererError`; it is chained.

    Cure: correct the renderer class; the chained exception has its traceback.
    """

    def __init__(self, renderer: str, method: str, error: BaseException) -> None:
        super().__init__(f"{renderer}.{method} raised {describe_exception(error)}")


@wire_type("rollouts.EpisodeFailure")
@dataclass(frozen=True, slots=True)
class EpisodeFailure:
    """Why an attempt failed: the class of the exception, its text, its kind for `RetryPolicy`, and a traceback.

    `kind` None: another attempt would have it, too. `trace` is empty for exceptions that no code of a user raised.
    `is_outage`: the engine could not be reached.
    """

    error_type: str
    reason: str
    kind: ErrorKind | None
    trace: str = ""
    is_outage: bool = False


class RemoteFailureError(RolloutsError):
    """The exception with which an episode ended in another process, as `failure` describes it: it may be of any class.

    Cure: that of the exception which it names; the log of the other process has the traceback.
    """

    def __init__(self, failure: EpisodeFailure) -> None:
        self.failure = failure
        super().__init__(failure.reason)


def raise_naming_origin(error: MediaError | MessageError, origin: str, messages: Sequence[Message]) -> NoReturn:
    """Raise an error whose text, if it names one of `messages` by its index, begins with where it comes from."""
    named = error
    try:
        if error.message_index is None:
            raise error
        # A copy: one error may be raised for several episodes.
        named = copy.copy(error)
        named.args = (f"{origin}{_tool_of(error.message_index, messages)}: {error}",)
        raise named from error
    finally:
        del error, named  # they refer to this frame


def _tool_of(index: int, messages: Sequence[Message]) -> str:
    """The tool whose result a message is, to be added to a place; empty for other messages."""
    message = messages[index] if 0 <= index < len(messages) else None
    if not isinstance(message, Mapping) or message.get("role") != "tool" or not message.get("name"):
        return ""
    return f", the result of tool {short_repr(message['name'])}"


def ends_task(error: BaseException) -> bool:
    """Whether an exception is for the current task or the process, and not a failure of the call that raised it.

    A `CancelledError` is for the task if the task is being cancelled. Otherwise the call waited for something that was
    cancelled, which is a failure like any other; so is a `BaseException` of a library, as that of a panic in Rust, and
    the `SystemExit` of code that is written as a program: one episode must not end all others.
    """
    if any(isinstance(single, KeyboardInterrupt | GeneratorExit) for single in single_errors(error)):
        return True
    if not any(isinstance(single, asyncio.CancelledError) for single in single_errors(error)):
        return False
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def ends_process(error: BaseException) -> bool:
    """Whether an exception, or one of its group, is for the process."""
    return any(isinstance(single, KeyboardInterrupt | SystemExit) for single in single_errors(error))


def single_errors(error: BaseException) -> Iterator[BaseException]:
    """The exceptions of a group and of the groups in it; any other exception itself."""
    if isinstance(error, BaseExceptionGroup):
        for part in error.exceptions:
            yield from single_errors(part)
    else:
        yield error


@contextmanager
def wrap_exceptions(
    make_error: Callable[[BaseException], RolloutsError], *, unchanged: tuple[type[Exception], ...] = ()
) -> Iterator[None]:
    """Replaces an exception from the block by `make_error(exception)`; the types `unchanged` are not replaced.

    Nor is one for which `ends_task`.
    """
    try:
        yield
    except BaseException as error:  # an environment, engine or renderer of a user may raise anything
        if isinstance(error, unchanged) or ends_task(error):
            raise
        raise make_error(error) from error


def error_kind(error: BaseException) -> ErrorKind | None:
    """The kind of the error of an episode; None for one that another attempt would have, too."""
    if isinstance(error, RemoteFailureError):
        return error.failure.kind
    if isinstance(error, EnvironmentFailedError):
        # An environment may call engines: the policy's for a sub-agent, or that of a judge.
        cause = _raised_by_environment(error)
        if isinstance(cause, EngineError | EnvironmentFailedError | MediaFetchError):
            return error_kind(cause)
        return "environment"
    if isinstance(error, MediaFetchError):
        return "media"
    if isinstance(error, ServerError):
        return "engine" if error.status == 429 or error.status >= 500 else None  # 429: too many requests
    is_io_error = isinstance(error, EngineFailedError) and isinstance(error.__cause__, OSError)
    is_passing = isinstance(error, ServerUnreachableError | ServerTimeoutError | GenerationInterruptedError)
    return "engine" if is_io_error or is_passing else None


def is_outage(error: BaseException) -> bool:
    """Whether an episode failed because its engine cannot be reached at all, as while a server is started again."""
    if isinstance(error, RemoteFailureError):
        return error.failure.is_outage
    if isinstance(error, EnvironmentFailedError):
        cause = _raised_by_environment(error)
        return cause is not None and is_outage(cause)
    if isinstance(error, ServerError):
        return error.status in (502, 503)  # from a proxy or a router; a server that is starting says 503, too
    if isinstance(error, EngineFailedError):
        return isinstance(error.__cause__, ConnectionError)
    return isinstance(error, ServerUnreachableError)


def _raised_by_environment(error: EnvironmentFailedError) -> BaseException | None:
    """What an environment raised; for the error that names a reward function which failed, what that raised."""
    cause = error.__cause__
    while type(cause) is RolloutsError and cause.__cause__ is not None:
        cause = cause.__cause__
    return cause
