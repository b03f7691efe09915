"""The HTTP routes of the gateway."""

import asyncio
import time
import uuid
from collections.abc import Collection
from functools import partial
from typing import Annotated, Any, Final

from pydantic import Field, FiniteFloat
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from renderers import Renderer, RendererPool
from rollouts.engines.protocol import Engine, SamplingParams
from rollouts.episodes.episode import check_on_end, check_settings
from rollouts.episodes.limits import EpisodeLimits
from rollouts.episodes.turns import EpisodeSettings
from rollouts.errors import ArgumentError, EngineError
from rollouts.serve.access import BodyLimitMiddleware
from rollouts.serve.bodies import (
    Body,
    Strict,
    read_body,
    read_object,
    streamed_response,
    unless_disconnected,
    validated,
)
from rollouts.serve.errors import Handler, RequestError, answering_errors, invalid_field
from rollouts.serve.gateway.chat import CHAT
from rollouts.serve.gateway.completions import complete_turn, decoder, prompt_of, token_texts_of
from rollouts.serve.gateway.dialect import Dialect, Head, Reading, TurnCompletion, TurnRequest
from rollouts.serve.gateway.limits import GatewayLimits, kept_bytes
from rollouts.serve.gateway.messages import MESSAGES
from rollouts.serve.gateway.request_checks import OWN_TOOLS, Text, check_tool_results, read_turn
from rollouts.serve.gateway.responses import RESPONSES, ResponsesRequest
from rollouts.serve.gateway.session import Session, StoredResponse
from rollouts.serve.gateway.session_store import (
    OnSessionEnd,
    SessionStore,
    record_file,
    session_object,
    snapshot,
)
from rollouts.serve.gateway.turn_stream import TurnStream
from rollouts.trajectory.plain_json import trajectory_json
from rollouts.trajectory.tree import Trajectory

_SESSION_HEADER: Final = "X-Session-ID"
_DIALECTS: Final = (CHAT, MESSAGES, RESPONSES)
_FORMATS: Final = ("records", "json")


class _SessionBody(Strict):
    session_id: Text | None = None
    group_id: Text = ""
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None


class _RewardBody(Strict):
    reward: FiniteFloat
    turn: int | None = None
    info: dict[str, Any] = Field({})


class _EndBody(Strict):
    group_id: Text = ""
    done: bool | None = None
    truncated: bool = False
    error: Text = ""
    metrics: dict[Text, FiniteFloat] = Field({})


class Gateway:
    """Agents' APIs in front of an engine and a renderer; each session is recorded as a trajectory.

    A request's messages are matched to the recorded conversations of its session. The request continues the
    longest one that it begins with: tokens of the history are those that the engine has seen and sampled, and
    only what is new is rendered. Where there is none, its conversation is rendered in full, as a branch or a
    new root of the tree.

    `model` is the name that requests have to give; None accepts and returns any name. The name of a LoRA
    adapter that the engine has loaded (`VLLMEngine.load_adapter`) is accepted too, and samples with the
    adapter. `sampling` has the options that a request leaves out. `allow_media_urls` lets http(s) URLs of
    media through to the renderer, whose `MediaPolicy` decides about them; otherwise media are data URLs.
    `ignored_tools` are types of tools, such as `web_search`, that are left out of requests and counted in the
    figures of a session. `on_session_end` is called with the trajectory of every session that ends, is deleted or
    is evicted. Where it raises, the session is kept, and it is called again when the session is ended or deleted
    once more, would be evicted, and by `close`. One event loop serves a gateway. Raises `ArgumentError`.
    """

    def __init__(
        self,
        engine: Engine,
        renderer: Renderer | RendererPool,
        *,
        model: str | None = None,
        sampling: SamplingParams | None = None,
        limits: GatewayLimits | None = None,
        allow_media_urls: bool = False,
        ignored_tools: Collection[str] = (),
        on_session_end: OnSessionEnd | None = None,
    ) -> None:
        sampling = sampling or SamplingParams(max_tokens=4096)
        check_settings(engine, renderer, sampling, 1)
        check_on_end(on_session_end, "on_session_end")
        if own := OWN_TOOLS.keys() & ignored_tools:
            rule = "clients run these tools themselves; pass types of tools that a service runs, such as web_search"
            raise ArgumentError("ignored_tools", min(own), rule)
        pool = renderer if isinstance(renderer, RendererPool) else RendererPool(renderer)
        self._owned_pool = None if pool is renderer else pool
        self._engine = engine
        self._model = model
        self._limits = limits or GatewayLimits()
        self._known_adapters: Collection[str] = ()
        self._reading = Reading(
            sampling=sampling,
            limits=self._limits,
            allow_urls=allow_media_urls,
            ignored_tools=frozenset(ignored_tools),
        )
        self._pool = pool
        self._settings = EpisodeSettings(engine, pool, SamplingParams(), EpisodeLimits())
        self._sessions = SessionStore(self._settings, self._limits, on_session_end)
        self._token_texts = token_texts_of(getattr(pool.renderer, "tokenizer", None))

    def routes(self) -> list[BaseRoute]:
        """The routes for an application of Starlette."""
        session = "/sessions/{session_id}"
        bound = Middleware(
            BodyLimitMiddleware,
            max_bytes=self._limits.max_body_bytes,
            seconds=self._limits.body_seconds,
            option="--max-body-mb of `rollouts serve` (max_body_bytes of the gateway)",
        )
        agents: list[tuple[str, str, Handler]] = [  # each also below a session
            *(("POST", f"/v1/{dialect.path}", partial(self._turn, dialect=dialect)) for dialect in _DIALECTS),
            ("POST", "/v1/messages/count_tokens", self._count_tokens),
            ("GET", "/v1/responses/{response_id}", self._get_response),
            ("DELETE", "/v1/responses/{response_id}", self._delete_response),
            ("GET", "/v1/models", self._models),
        ]
        routes: list[tuple[str, str, Handler]] = [
            *agents,
            *((method, session + path, handler) for method, path, handler in agents),
            ("GET", "/sessions", self._list_sessions),
            ("POST", "/sessions", self._begin_session),
            ("GET", session, self._get_session),
            ("DELETE", session, self._delete_session),
            ("GET", f"{session}/trajectory", self._trajectory),
            ("POST", f"{session}/reward", self._reward),
            ("POST", f"{session}/end", self._end_session),
        ]
        return [
            Route(path, answering_errors(handler), methods=[method], middleware=[bound])
            for method, path, handler in routes
        ]

    def sessions(self) -> list[Session]:
        """The sessions that it keeps now."""
        return list(self._sessions)

    async def is_healthy(self) -> bool:
        """Whether the engine could serve a request now, as far as it can tell."""
        try:
            await self._engine.check_health()
        except EngineError:
            return False
        return True

    def trajectory(self, session_id: str) -> Trajectory:
        """The trajectory of a session as it is now. Raises `RequestError`."""
        return snapshot(self._sessions.get(session_id).trajectory)

    async def close(self) -> None:
        """End all sessions, and the threads of a renderer that was passed without a pool. The engine stays open.

        Raises `SessionNotDeliveredError` after all have ended, with the sessions that `on_session_end` did
        not accept; `trajectory` still returns them, and another `close` delivers them again.
        """
        try:
            await self._sessions.close()
        finally:
            if self._owned_pool is not None:
                await self._owned_pool.aclose()

    # Completions.

    async def _turn(self, request: Request, dialect: Dialect) -> Response:
        session_id = _session_id(request)
        with self._sessions.counting_refusals(session_id):
            session_id, turn = await self._read(request, dialect, session_id)
            if turn.stop or getattr(turn.body, "logprobs", False):
                decoder(self._pool.renderer)
            model, adapter = await self._checked_model(turn.body.model)
            session = self._sessions.for_request(session_id, turn.history)
            head = Head(uuid.uuid4().hex, int(time.time()), model, session.id)
            writer = dialect.writer(turn, head, self._token_texts)
        for name in turn.ignored_tools:
            session.increment(f"ignored_tools/{name}")
        headers = {_SESSION_HEADER: session.id}
        complete = partial(complete_turn, session, turn, self._sessions, adapter, self._limits.request_seconds)

        def keep(completion: TurnCompletion) -> None:
            if isinstance(turn, ResponsesRequest) and turn.body.store:
                kept = StoredResponse(writer.answer, completion.choices[0].turn, turn.num_instructions)
                self._sessions.keep_response(session, kept)

        if turn.body.stream:
            parses = self._pool.shares_one_renderer and hasattr(self._pool.renderer, "response_parser")
            is_live = parses and self._engine.streams  # the text is sent while it is sampled
            stream = TurnStream(complete, keep, writer, self._pool.renderer if is_live else None)
            return await streamed_response(request, stream.events(), headers)
        completion = await unless_disconnected(request, complete())
        answer = writer.whole(completion)
        keep(completion)
        return JSONResponse(answer, headers=headers)

    async def _count_tokens(self, request: Request) -> Response:
        """The tokens of the prompt that a request would have now. Begins no session."""
        session_id = _session_id(request)
        with self._sessions.counting_refusals(session_id):
            session_id, turn = await self._read(request, MESSAGES, session_id)
        session = self._sessions.find(session_id, turn.history) or self._sessions.begin(None)
        with self._sessions.request(session):
            prompt, _ = await prompt_of(session, turn)
        return JSONResponse({"input_tokens": len(prompt.rendered)})

    async def _get_response(self, request: Request) -> Response:
        session, stored = self._sessions.response(request.path_params["response_id"])
        return JSONResponse(stored.response, headers={_SESSION_HEADER: session.id})

    async def _delete_response(self, request: Request) -> Response:
        response_id = request.path_params["response_id"]
        self._sessions.delete_response(response_id)
        return JSONResponse({"id": response_id, "object": "response", "deleted": True})

    async def _read(self, request: Request, dialect: Dialect, session_id: str | None) -> tuple[str | None, TurnRequest]:
        """The request, and its session: that which it names, or that of the response which it names."""
        turn = await read_body(request, partial(read_turn, dialect=dialect, reading=self._reading))
        if isinstance(turn, ResponsesRequest) and turn.body.previous_response_id is not None:
            session, stored = self._sessions.response(turn.body.previous_response_id, "previous_response_id")
            if session_id not in (None, session.id):
                reason = f"previous_response_id is of the session {session.id!r}, not of {session_id!r}"
                raise invalid_field(reason, "previous_response_id")
            turn = turn.after(stored, *session.conversation(stored.turn), self._limits.max_parts)
            session_id = session.id
        check_tool_results(turn)
        return session_id, turn

    async def _checked_model(self, name: str | None) -> tuple[str, str | None]:
        """The name of the model that the client receives, and the adapter to sample with."""
        if name is None or name == self._model:
            return self._model or "model", None
        # Asked again about a name that the engine did not have before: adapters are loaded while it serves.
        # One that was unloaded since is an error of the engine when it samples.
        if name in self._known_adapters or name in await self._adapters():
            return name, name
        if self._model is None:
            return name, None
        served = ", ".join((self._model, *await self._adapters()))
        message = f"the model {name[:200]!r} does not exist; this server has {served}"
        raise RequestError(404, message, "model", code="model_not_found")

    async def _adapters(self) -> list[str]:
        """The LoRA adapters that the engine has now. Raises `EngineError`."""
        self._known_adapters = frozenset(await self._engine.adapters())
        return sorted(self._known_adapters)

    async def _models(self, request: Request) -> Response:
        base = self._model or "model"
        names = (base, *await self._adapters())
        # The fields of OpenAI's API, and those of Anthropic's.
        entry = {"object": "model", "created": 0, "owned_by": "mmrollouts", "parent": base}
        entry |= {"type": "model", "created_at": "1970-01-01T00:00:00Z", "lifecycle": "active"}
        models = [{**entry, "id": name, "display_name": name} for name in names]
        models[0].pop("parent")
        page = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return JSONResponse({"object": "list", "data": models, **page})

    # Sessions.

    async def _list_sessions(self, request: Request) -> Response:
        return JSONResponse({"sessions": [session_object(session) for session in self._sessions]})

    async def _begin_session(self, request: Request) -> Response:
        read = await self._read_fields(request, _SessionBody)
        session = self._sessions.begin(read.session_id, group_id=read.group_id, seed=read.seed)
        return self._session_response(session, 201)

    async def _get_session(self, request: Request) -> Response:
        return self._session_response(self._session(request))

    async def _delete_session(self, request: Request) -> Response:
        await self._sessions.delete(self._session(request))
        return Response(status_code=204)

    async def _end_session(self, request: Request) -> Response:
        session = self._session(request)
        read = await self._read_fields(request, _EndBody)
        if not session.trajectory.finished:
            session.trajectory.group_id = read.group_id or session.trajectory.group_id
            session.end(done=read.done, truncated=read.truncated, error=read.error, metrics=read.metrics)
        await self._sessions.end(session)
        return self._session_response(session)

    async def _reward(self, request: Request) -> Response:
        session = self._session(request)
        read = await self._read_fields(request, _RewardBody)
        if read.info:
            self._sessions.check_room()
        session.record_reward(read.reward, read.info, read.turn)
        return self._session_response(session)

    async def _trajectory(self, request: Request) -> Response:
        session = self._session(request)
        if (form := request.query_params.get("format", _FORMATS[0])) not in _FORMATS:
            raise invalid_field(f"format is {form[:80]!r}; it is one of {', '.join(_FORMATS)}", "format")
        trajectory = snapshot(session.trajectory)
        if form == "json":
            return await asyncio.to_thread(lambda: JSONResponse(trajectory_json(trajectory)))
        records = await asyncio.to_thread(record_file, trajectory)
        return Response(records, media_type="application/octet-stream")

    def _session(self, request: Request) -> Session:
        return self._sessions.get(request.path_params["session_id"])

    def _session_response(self, session: Session, status: int = 200) -> Response:
        return JSONResponse(session_object(session), status, {_SESSION_HEADER: session.id})

    async def _read_fields(self, request: Request, kind: type[Body]) -> Body:
        """The fields of a request about a session. A body may be left out. Raises `RequestError`."""
        fields: dict[str, Any] = {}
        if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
            fields = await read_object(request)
        for name in kind.model_fields.keys() & fields.keys() - {"session_id"}:
            if (nbytes := kept_bytes(fields[name])) > self._limits.max_field_bytes:
                raise invalid_field(
                    f"{name} takes {nbytes} bytes in memory; this server keeps at most max_field_bytes="
                    f"{self._limits.max_field_bytes}. Keep what is longer elsewhere, under a short name",
                    name,
                )
        return validated(kind, fields)


def _session_id(request: Request) -> str | None:
    """The session of a request, from its path or from its header. Raises `RequestError`."""
    from_path = request.path_params.get("session_id")
    named = {value for value in (from_path, *request.headers.getlist(_SESSION_HEADER)) if value}
    if len(named) > 1:
        raise invalid_field(f"path and headers {_SESSION_HEADER} name {len(named)} sessions; name one", _SESSION_HEADER)
    return next(iter(named), None)
