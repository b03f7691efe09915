"""Runs an ASGI application with uvicorn, in a thread."""

import json
import threading
import urllib.error
import urllib.request
from typing import Any, NamedTuple, Self

import uvicorn

from rollouts.serve.server import HttpProtocol, base_url, bound_socket


class Answer(NamedTuple):
    status: int
    headers: Any
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class ServedInThread:
    """A running server, with a client that checks nothing."""

    def __init__(self, app: Any, http: type[HttpProtocol] = HttpProtocol) -> None:
        self.app = app
        self._socket = bound_socket("127.0.0.1", 0)
        self.base_url = base_url(self._socket)
        config = uvicorn.Config(app, log_level="error", timeout_graceful_shutdown=1, http=http)
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._server.run, kwargs={"sockets": [self._socket]}, daemon=True)
        self._socket.listen()  # requests wait in the queue until the server takes them
        self._thread.start()

    def stop(self) -> None:
        self._server.should_exit = True
        self._thread.join(30)
        self._socket.close()
        assert not self._thread.is_alive()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def get(self, path: str, headers: dict[str, str] | None = None) -> Answer:
        return self._send(urllib.request.Request(self.base_url + path, headers=headers or {}))

    def post(self, path: str, body: Any = None, headers: dict[str, str] | None = None) -> Answer:
        data = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json", **(headers or {})}
        return self._send(urllib.request.Request(self.base_url + path, data=data, headers=sent, method="POST"))

    def _send(self, request: urllib.request.Request) -> Answer:
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return Answer(response.status, response.headers, response.read())
        except urllib.error.HTTPError as error:
            with error:
                return Answer(error.code, error.headers, error.read())
