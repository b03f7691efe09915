"""Runs an application of `rollouts serve` with uvicorn, in a thread."""

from __future__ import annotations

import json
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, NamedTuple, Self

import uvicorn

from renderers import load_renderer
from rollouts.serve.app import create_app
from rollouts.serve.pausable_engine import PausableEngine
from rollouts.serve.served_model import served_model
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


def local_app(directory: Path, *, name: str | None = None, model: Any = None, **options: Any) -> Any:
    """The application over a `LocalEngine` of a directory, or of `model`, which was loaded from it."""
    from rollouts.engines.local import LocalEngine

    renderer = load_renderer(directory)
    if model is None:
        engine = LocalEngine.from_pretrained(directory, weight_version="default")
    else:
        engine = LocalEngine(model, weight_version="default")
    served = served_model(
        directory,
        renderer,
        name=name,
        max_model_len=engine.max_model_len,
        vocab_size=engine.vocab_size,
        dtype=engine.dtype,
    )
    return create_app(PausableEngine(engine, max_model_len=engine.max_model_len), renderer, served, **options)


def serve_directory(directory: Path, **options: Any) -> ServedInThread:
    """`options` are those of `local_app`."""
    return ServedInThread(local_app(directory, **options))
