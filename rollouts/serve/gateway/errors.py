"""Errors that the gateway answers with an HTTP status and an error object in OpenAI's form."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from rollouts.error_texts import describe_exception
from rollouts.errors import RolloutsError


class GatewayError(RolloutsError):
    """A request is refused. `param` names the field of the request that is the reason; None where there is none.

    Cure: correct the request; `param` names the field.
    """

    status: ClassVar[int] = 400
    type: ClassVar[str] = "invalid_request_error"
    code: ClassVar[str | None] = None

    def __init__(self, message: str, param: str | None = None) -> None:
        self.param = param
        super().__init__(message)


class InvalidChatRequestError(GatewayError):
    """A field of a request has a wrong type or value, or is unknown.

    Cure: correct the field that the text names.
    """


class UnsupportedFieldError(GatewayError):
    """A field of a request has a value that this server cannot honour.

    Cure: leave the field out, or give it the value that the text names.
    """

    code = "unsupported_parameter"


class InvalidMessageError(GatewayError):
    """A message of a request, or an image in it, cannot be rendered.

    Cure: correct the message or the image at the place that the text names.
    """

    code = "invalid_message"


class UnknownModelError(GatewayError):
    """A request names a model that is not served. `models` are the names of the model that is.

    Cure: request one of the listed models, or start the server with `--any-model`.
    """

    status = 404
    code = "model_not_found"

    def __init__(self, model: str, models: tuple[str, ...]) -> None:
        self.models = models
        super().__init__(f"the model {model[:200]!r} does not exist; this server has {', '.join(models)}", "model")


class UnknownSessionError(GatewayError):
    """There is no session of this id.

    Cure: send a chat completion with this id first, or correct the id.
    """

    status = 404
    code = "session_not_found"

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        super().__init__(f"there is no session {session_id!r}; a chat completion with this id begins it")


class EvictedSessionError(GatewayError):
    """The session was removed. `reason` says why.

    Cure: begin another session, with another id; fetch trajectories before they are evicted, or raise the limits of the
    gateway.
    """

    status = 410
    code = "session_gone"

    def __init__(self, session_id: str, reason: str) -> None:
        self.session_id = session_id
        self.reason = reason
        super().__init__(f"the session {session_id!r} is gone: {reason}. Begin another one, with another id")


class EndedSessionError(GatewayError):
    """The session has ended: its trajectory can be read, and does not change any more.

    Cure: begin another session, with another id.
    """

    status = 409
    code = "session_ended"

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        super().__init__(f"the session {session_id!r} has ended; begin another one, with another id")


class ExistingSessionError(GatewayError):
    """A session of this id exists.

    Cure: use another id.
    """

    status = 409
    code = "session_exists"

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        super().__init__(f"there is a session {session_id!r} already; use another id")


class SessionNotDeliveredError(GatewayError):
    """`on_session_end` did not accept the trajectories of the sessions `session_ids`, which are kept.

    Cure: remove the cause that the text names, and end the sessions again.
    """

    status = 500
    type = "server_error"
    code = "session_not_delivered"

    def __init__(self, session_ids: Sequence[str], error: BaseException) -> None:
        self.session_ids = tuple(session_ids)
        self.reason = describe_exception(error)
        shown = ", ".join(self.session_ids[:5]) + (" and others" if len(self.session_ids) > 5 else "")
        count = f"the trajectories of {len(self.session_ids)} sessions" if len(self.session_ids) > 1 else "a trajectory"
        super().__init__(
            f"{count} ({shown}) could not be handed over: {self.reason}. Nothing of it is lost yet: "
            "remove the cause, and end the session again"
        )


class GatewayFullError(GatewayError):
    """The sessions have reached a limit of the gateway.

    Cure: fetch and delete sessions that have ended, or raise `max_sessions` and `max_bytes`.
    """

    status = 503
    type = "server_error"
    code = "gateway_full"


class BodyTooLargeError(GatewayError):
    """The body of a request is longer than `limit` bytes.

    Cure: send less or smaller images, or raise `max_body_bytes` of the gateway.
    """

    status = 413
    code = "body_too_large"

    def __init__(self, limit: int) -> None:
        self.limit = limit
        super().__init__(f"the body of the request is longer than max_body_bytes={limit}; send less, or smaller images")


class BodyTimeoutError(GatewayError):
    """The body of a request did not arrive in time.

    Cure: send the body without pauses, or over a faster connection.
    """

    status = 408
    code = "body_timeout"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(f"the body of the request did not arrive within {seconds:g} s")


class ContentTypeError(GatewayError):
    """The body of a request is not declared as JSON.

    Cure: send `Content-Type: application/json`.
    """

    status = 415
    code = "unsupported_media_type"

    def __init__(self, content_type: str) -> None:
        self.content_type = content_type
        super().__init__(f"the content type is {content_type[:100]!r}; send application/json")


class GenerationTimeoutError(GatewayError):
    """The engine did not finish a completion in time.

    Cure: raise `request_seconds`, lower `max_tokens`, or send fewer requests at once.
    """

    status = 504
    type = "server_error"
    code = "timeout"

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        super().__init__(f"no completion within request_seconds={seconds:g}; nothing of it is recorded")


class ClientDisconnectedError(GatewayError):
    """The client closed the connection before its completion was finished.

    Cure: none is needed: the request was aborted. A client that gives up too early needs a longer timeout.
    """

    status = 499
    code = "client_disconnected"

    def __init__(self, session_id: str) -> None:
        self.session_id = session_id
        super().__init__(f"the client of session {session_id!r} closed the connection; the request was aborted")
