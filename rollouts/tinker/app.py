"""The ASGI application of `rollouts tinker`: the routes of the Tinker API over a `Service`."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, Final, TypeVar

import tinker.types as types
from pydantic import BaseModel
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp

from rollouts.errors import RolloutsError
from rollouts.serve.access import BodyLimitMiddleware, BrowserMiddleware
from rollouts.serve.bodies import (
    MAX_JSON_VALUES,
    has_more_values,
    read_body,
    read_model,
    read_object,
    unless_disconnected,
)
from rollouts.serve.errors import RequestError
from rollouts.tinker.access import KeyDispatch
from rollouts.tinker.futures import failure
from rollouts.tinker.rest_routes import rest_routes
from rollouts.tinker.service import Service
from rollouts.tinker.wire import PROTOBUF, decompressed, read_train_request

log = logging.getLogger("rollouts.tinker")
Body = TypeVar("Body", bound=BaseModel)
#: How long a request for a result is held while there is none. The client waits for 45 s.
_HOLD_SECONDS: Final = 20.0
_TIDY_SECONDS: Final = 10.0
#: Chunks of rows as large as the client makes them have 5 MB, unless one row is larger.
DEFAULT_MAX_BODY_BYTES: Final = 256 * 2**20


def create_app(
    services: Service | Mapping[str, Service],
    *,
    hosts: Sequence[str] = (),
    max_body_bytes: int = DEFAULT_MAX_BODY_BYTES,
) -> Starlette:
    """The application; its shutdown closes the services.

    A mapping has the service of each API key, which requests must carry; the services may share a trainer.
    Without keys, requests are answered that name this machine or one of `hosts` in their Host header, and
    that no web page of another origin sends. Bodies of more than `max_body_bytes`, also after they are
    decompressed, get status 413.
    """
    keyed = services if isinstance(services, Mapping) else {"": services}
    handlers: dict[Any, Any] = {
        **dict.fromkeys((RolloutsError, Exception), _on_error),
        HTTPException: _on_unrouted,
        ClientDisconnect: lambda request, error: Response(status_code=499),  # nginx's; nobody receives it
    }
    apps = {
        key: (
            service,
            Starlette(
                routes=[*_Routes(service, max_body_bytes).routes(), *rest_routes(service.directory, service)],
                exception_handlers=handlers,
            ),
        )
        for key, service in keyed.items()
    }
    middleware = [Middleware(BodyLimitMiddleware, max_bytes=max_body_bytes)]
    if isinstance(services, Mapping):
        app: ASGIApp = KeyDispatch(apps)
    else:
        app = apps[""][1]
        middleware.insert(0, Middleware(BrowserMiddleware, hosts=hosts))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        tidying = asyncio.create_task(_tidy(list(keyed.values())))
        yield
        tidying.cancel()
        for service in keyed.values():
            await service.close()
        for backend in {service.backend for service in keyed.values()}:
            await backend.close()

    return Starlette(
        routes=[Mount("/", app)],
        middleware=middleware,
        exception_handlers={RequestError: _on_error, HTTPException: _on_unrouted},
        lifespan=lifespan,
    )


async def _tidy(services: Sequence[Service]) -> None:
    while True:
        await asyncio.sleep(_TIDY_SECONDS)
        for service in services:
            try:
                await service.tidy()
            except Exception:  # the next time all of them are tried again
                log.exception("what idle sessions hold could not be released")


class _Routes:
    def __init__(self, service: Service, max_body_bytes: int) -> None:
        self._service = service
        self._max_body_bytes = max_body_bytes

    def routes(self) -> list[Route]:
        service = self._service
        models, sampling = service.requests, service.sampling
        of_bodies: dict[type[BaseModel], Callable[[Any], Any]] = {
            types.CreateSessionRequest: service.create_session,
            types.SessionHeartbeatRequest: service.heartbeat,
            types.CreateModelRequest: service.create_model,
            types.GetInfoRequest: service.info,
            types.UnloadModelRequest: service.unload,
            types.OptimStepRequest: models.optim_step,
            types.SaveWeightsRequest: models.save_weights,
            types.SaveWeightsExternalRequest: models.save_external,
            types.LoadWeightsRequest: models.load_weights,
            types.SaveWeightsForSamplerRequest: models.save_for_sampler,
            types.CreateSamplingSessionRequest: sampling.create_session,
        }
        posts: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "client/config": self._answers({}),
            "client/dynamic_config": self._answers({"sample_cancel_enabled": True}),
            "telemetry": self._answers({"status": "accepted"}),
            **{kind.model_fields["type"].default: self._with(kind, call) for kind, call in of_bodies.items()},
            "forward_backward": self._train,
            "asample": self._with(types.SampleRequest, sampling.sample),
            "retrieve_future": self._retrieve,
            "cancel_future": self._cancel,
        }
        gets = {"healthz": self._answers({"status": "ok"}), "get_server_capabilities": self._capabilities}
        return [
            *(Route(f"/api/v1/{path}", call, methods=["POST"]) for path, call in posts.items()),
            *(Route(f"/api/v1/{path}", call, methods=["GET"]) for path, call in gets.items()),
        ]

    @staticmethod
    def _answers(content: dict[str, Any]) -> Callable[[Request], Awaitable[Response]]:
        async def answer(request: Request) -> Response:
            return JSONResponse(content)

        return answer

    def _with(self, kind: type[Body], call: Callable[[Any], Any]) -> Callable[[Request], Awaitable[Response]]:
        """The route that calls `call` with the body, which is of a type of the client."""

        async def route(request: Request) -> Response:
            body: Any = None
            try:
                body = await read_model(request, kind)
                answer = call(body)
            except RequestError as error:
                if body is None and error.status == 400:  # others are raised before the whole body is there
                    body = await read_body(request, _numbered, only_json=False)
                answer = self._refused(body, error)
            return JSONResponse(await answer if asyncio.iscoroutine(answer) else answer)

        return route

    def _refused(self, body: Any, error: RequestError) -> dict[str, object]:
        """The answer to a request that cannot be done, or read: one of a model has its turn and fails then.

        The client has counted it, and later ones would wait for it. Raises the error for others.
        """
        model_id, seq_id = getattr(body, "model_id", None), getattr(body, "seq_id", None)
        if error.status != 400 or model_id is None or seq_id is None:
            raise error
        return self._service.requests.refuse(model_id, seq_id, error)

    async def _capabilities(self, request: Request) -> Response:
        length = self._service.trainer.max_length
        return JSONResponse(
            {
                "supported_models": [
                    {"model_name": name, "max_context_length": length, "trainable": True, "sampleable": True}
                    for name in self._service.backend.names
                ]
            }
        )

    async def _train(self, request: Request) -> Response:
        if request.headers.get("content-type", "").partition(";")[0] != PROTOBUF:
            raise RequestError(415, f"forward_backward takes {PROTOBUF}, as clients from 0.38 on send it")
        encoding = request.headers.get("content-encoding", "")
        message = await read_body(
            request,
            lambda data: read_train_request(decompressed(data, encoding, self._max_body_bytes)),
            only_json=False,
        )
        if message.problem is not None:
            return JSONResponse(self._refused(message, message.problem))
        return JSONResponse(self._service.requests.train(message))

    # Sampling and results.

    async def _retrieve(self, request: Request) -> Response:
        request_id = _request_id(await read_object(request))
        self._service.session_of(request_id)  # a client that asks is alive
        outcome = await unless_disconnected(request, self._service.futures.result(request_id, _HOLD_SECONDS))
        if outcome is None:
            body = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
            return JSONResponse(body, 408)
        if isinstance(outcome, bytes):
            return Response(outcome, media_type=PROTOBUF)
        return JSONResponse(outcome)

    async def _cancel(self, request: Request) -> Response:
        self._service.futures.cancel(_request_id(await read_object(request)))  # training runs to its end
        return JSONResponse({})


def _numbered(data: bytes) -> Any:
    """The `model_id` of a refused body and its number there, `seq_id`; None where it does not say them."""
    try:
        fields = {} if has_more_values(data, MAX_JSON_VALUES) else json.loads(data)
        found = SimpleNamespace(model_id=fields["model_id"], seq_id=fields["seq_id"])
    except (ValueError, TypeError, KeyError, RecursionError):
        return None
    return found if isinstance(found.model_id, str) and type(found.seq_id) is int else None


def _request_id(body: dict[str, Any]) -> str:
    request_id = body.get("request_id")
    if not isinstance(request_id, str):
        raise RequestError(400, "request_id is missing; send the one of the answer to the request")
    return request_id


def _on_error(request: Request, error: Exception) -> Response:
    outcome = failure(error)
    status = error.status if isinstance(error, RequestError) else 400 if outcome["category"] == "user" else 500
    return JSONResponse({"detail": outcome["error"], **outcome}, status)


def _on_unrouted(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    path = request.url.path[:200]
    return JSONResponse({"detail": f"{error.detail}: {path} is no route of this server"}, error.status_code)
