"""The ASGI application of `rollouts serve`: a gateway, its health and metrics, and who is answered."""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from renderers.errors import MissingExtraError

try:
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, Gauge, generate_latest
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError as error:
    package = (error.name or "starlette").partition(".")[0]
    raise MissingExtraError("rollouts serve", "serve", package) from error

from rollouts.serve.access import ApiKeyMiddleware, BrowserMiddleware
from rollouts.serve.errors import ANSWERED, on_error, on_unrouted
from rollouts.serve.gateway.routes import Gateway


def create_app(
    gateway: Gateway,
    *,
    api_key: str | None = None,
    hosts: Sequence[str] = (),
    on_shutdown: Sequence[Callable[[], Awaitable[None]]] = (),
) -> Starlette:
    """The application. Its shutdown calls `on_shutdown` in order, whatever these calls raise.

    With `api_key`, every request needs it as its bearer token, but for `/health`. Without one, requests are
    answered that name this machine, or one of `hosts`, in their Host header, and that no web page of another
    origin sends.
    """

    async def health(request: Request) -> Response:
        return Response(status_code=200 if await gateway.is_healthy() else 503)

    registry, started = CollectorRegistry(), time.time()
    gauges: dict[str, tuple[str, Callable[[], float]]] = {
        "process_start_time_seconds": ("Start of the server, in seconds since 1970.", lambda: started),
        "mmrollouts_gateway_sessions": ("Sessions that the gateway keeps.", lambda: len(gateway.sessions())),
        "mmrollouts_gateway_requests_in_flight": (
            "Completions in progress.",
            lambda: sum(session.in_flight for session in gateway.sessions()),
        ),
        "mmrollouts_gateway_session_bytes": (
            "Estimated bytes of the sessions.",
            lambda: sum(session.nbytes for session in gateway.sessions()),
        ),
    }
    for name, (meaning, value) in gauges.items():
        Gauge(name, meaning, registry=registry).set_function(value)

    async def metrics(request: Request) -> Response:
        return Response(generate_latest(registry), headers={"Content-Type": CONTENT_TYPE_LATEST})

    if api_key is None:
        middleware = Middleware(BrowserMiddleware, hosts=hosts)
    else:
        middleware = Middleware(ApiKeyMiddleware, api_key=api_key)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as at_end:
            for call in reversed(on_shutdown):
                at_end.push_async_callback(call)
            yield

    return Starlette(
        routes=[
            *gateway.routes(),
            Route("/health", health, methods=["GET"]),
            Route("/metrics", metrics, methods=["GET"]),
        ],
        middleware=[middleware],
        exception_handlers={
            **dict.fromkeys((*ANSWERED, Exception), on_error),
            HTTPException: on_unrouted,
        },
        lifespan=lifespan,
    )
