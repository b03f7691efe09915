"""The ASGI application of `rollouts serve`: an engine and a renderer behind vLLM's routes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager

from renderers import TemplateRenderer
from rollouts.errors import MissingExtraError

try:
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.middleware import Middleware
    from starlette.routing import BaseRoute
except ImportError as error:
    raise MissingExtraError("rollouts serve", "serve", "starlette") from error

from rollouts.serve.access import ApiKeyMiddleware, BodyLimitMiddleware, BrowserMiddleware
from rollouts.serve.errors import ANSWERED, on_error, on_unrouted
from rollouts.serve.pausable_engine import PausableEngine
from rollouts.serve.routes.control import ControlRoutes
from rollouts.serve.routes.generation import GenerationRoutes
from rollouts.serve.routes.monitoring import MonitoringRoutes
from rollouts.serve.routes.rendering import RenderingRoutes
from rollouts.serve.routes.weights import WeightRoutes
from rollouts.serve.served_model import ServedModel
from rollouts.serve.server_state import ServerState

#: Room for some tens of images as features.
DEFAULT_MAX_BODY_BYTES = 256 * 2**20


def create_app(
    engine: PausableEngine,
    renderer: TemplateRenderer,
    model: ServedModel,
    *,
    api_key: str | None = None,
    control: bool = True,
    hosts: Sequence[str] = (),
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
    routes: Sequence[BaseRoute] = (),
    on_shutdown: Sequence[Callable[[], Awaitable[None]]] = (),
) -> Starlette:
    """The application. Its shutdown calls `on_shutdown` in order, then closes the engine, whatever these calls raise.

    `routes` are further routes, with the same checks of access; they should sample from `engine`, so that pauses and
    aborts concern their requests. With `api_key`, every request needs it as its bearer token, but for `/health` and
    `/ping`. Without one, requests are answered that name this machine, or one of `hosts`, in their Host header, and
    that no web page of another origin sends. `control` False leaves out the routes that pause the server and replace
    its weights. Bodies of more than `max_body_bytes` get status 413.
    """
    state = ServerState(engine, renderer, model)
    served = [*GenerationRoutes(state).routes, *RenderingRoutes(state).routes, *MonitoringRoutes(state).routes]
    if control:
        served += [*ControlRoutes(state).routes, *WeightRoutes(state).routes]
    middleware = [Middleware(BodyLimitMiddleware, max_bytes=max_body_bytes)]
    if api_key is None:
        middleware.insert(0, Middleware(BrowserMiddleware, hosts=hosts))
    else:
        middleware.insert(0, Middleware(ApiKeyMiddleware, api_key=api_key))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        async with AsyncExitStack() as at_end:
            for call in (engine.close, *reversed(on_shutdown)):
                at_end.push_async_callback(call)
            yield

    return Starlette(
        routes=[*served, *routes],
        middleware=middleware,
        exception_handlers={
            **dict.fromkeys((*ANSWERED, Exception), on_error),
            HTTPException: on_unrouted,
        },
        lifespan=lifespan,
    )
