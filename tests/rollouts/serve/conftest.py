from collections.abc import Iterator
from typing import Any

import pytest
from served_in_thread import ServedInThread

from renderers import TemplateRenderer
from rollouts.serve.app import create_app
from rollouts.serve.gateway.limits import GatewayLimits
from rollouts.serve.gateway.routes import Gateway
from rollouts.testing import ScriptedEngine


def _app(renderer: TemplateRenderer, limits: GatewayLimits | None = None, **options: Any) -> Any:
    engine = ScriptedEngine(lambda request: "x", renderer=renderer)
    return create_app(Gateway(engine, renderer, limits=limits), **options)


@pytest.fixture(scope="session")
def open_server(renderer: TemplateRenderer) -> Iterator[ServedInThread]:
    """A gateway without a key, which tests share."""
    with ServedInThread(_app(renderer)) as server:
        yield server


@pytest.fixture(scope="session")
def guarded(renderer: TemplateRenderer) -> Iterator[ServedInThread]:
    """A gateway with the key "secret", which takes bodies of 100,000 bytes."""
    app = _app(renderer, GatewayLimits(max_body_bytes=100_000), api_key="secret")
    with ServedInThread(app) as server:
        yield server
