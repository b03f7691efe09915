"""Errors of `rollouts serve`: of starting the server, and of requests that it refuses."""

from __future__ import annotations

from rollouts.errors import RolloutsError


class ServeError(RolloutsError):
    """Root of the errors of `rollouts serve`.

    Cure: that of the class that was raised.
    """


class PortUnavailableError(ServeError):
    """The server cannot listen on this address.

    Cure: pass another port, or `--port 0` for any that is free.
    """

    def __init__(self, host: str, port: int, reason: str) -> None:
        self.host = host
        self.port = port
        super().__init__(f"cannot listen on {host} port {port}: {reason}. Pass --port 0 for any free port, or another")


class UnprotectedAddressError(ServeError):
    """Other machines would reach a server without an API key.

    Cure: pass `--api-key-file`, or `--host 127.0.0.1`.
    """

    def __init__(self, host: str) -> None:
        self.host = host
        super().__init__(
            f"{host} is not an address of this machine alone, and there is no API key: anyone who reaches the port "
            "could use the model and replace its weights. Pass --api-key-file, or --host 127.0.0.1"
        )


class ApiKeyFileError(ServeError):
    """The file with the API key cannot be used. `path` is the file.

    Cure: pass a readable file that holds the key alone.
    """

    def __init__(self, path: object, reason: str) -> None:
        self.path = path
        super().__init__(f"--api-key-file {path}: {reason}")


class RequestError(ServeError):
    """The response to a request is an error. `status` is that of HTTP; `kind` and `param` as in vLLM's errors.

    Cure: correct the field of the request that the response names.
    """

    def __init__(self, status: int, message: str, kind: str = "BadRequestError", param: str | None = None) -> None:
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        super().__init__(f"HTTP {status} {kind}: {message}")
