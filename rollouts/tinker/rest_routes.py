"""The routes that list, change and hand out what a server has: runs, checkpoints, sessions and sampling sessions."""

from __future__ import annotations

import hashlib
import hmac
import json
import secrets
from collections.abc import Awaitable, Callable, Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote, urlencode

from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response
from starlette.routing import Route

from rollouts.errors import short_repr
from rollouts.serve.bodies import read_object
from rollouts.serve.errors import RequestError
from rollouts.tinker.run_directory import Checkpoint, Kind, RunDirectory, TrainingRun

if TYPE_CHECKING:
    from rollouts.tinker.service import Service
    from rollouts.tinker.sessions import Session

_API: Final = "/api/v1"
#: Requests below this path need no key: their URLs are signed.
FILES_PATH: Final = f"{_API}/checkpoint_files/"
#: Programs that wait for a server ask for it without a key.
HEALTH_PATH: Final = f"{_API}/healthz"
_URL_LIFETIME: Final = timedelta(hours=1)
_TYPES: Final[Mapping[Kind, str]] = {
    "weights": "training",
    "sampler_weights": "sampler",
    "external_weights": "external",
}
_CHECKPOINT: Final = "/training_runs/{model_id}/checkpoints/{kind}/{name}"

#: Routes of the service that this server has not. The status is 404, because clients send a request again for
#: minutes after a 409 or a 5xx.
_REFUSED: Final[Mapping[tuple[str, str], str]] = {
    ("GET", "/audit"): "this server keeps no audit log; its own log has the requests",
    ("GET", "/billing/usage/events"): "this server counts no costs",
    ("GET", "/billing/usage/checkpoints/current"): "this server counts no costs; list the checkpoints with their sizes",
    ("POST", "/copy_weights"): "this server has no projects to copy to; load the weights where they are",
    ("POST", "/sessions/search"): "this server does not search sessions; list them",
    ("PUT", "/sessions/{session_id}/project"): "this server has no projects",
    ("GET", "/sessions/{session_id}/trace_export"): "this server exports no traces",
    ("POST", "/auth/token"): "this server makes no tokens; send its key",
    ("GET", "/auth/apikey/me"): "this server knows nothing about its keys; they are in its --api-key-file",
    ("DELETE", "/auth/apikey/me"): "keys of this server are deleted from its --api-key-file",
    (
        "POST",
        f"{_CHECKPOINT}/publish",
    ): "this server publishes nothing: whoever has its key can load every checkpoint; download it to hand it on",
    ("DELETE", f"{_CHECKPOINT}/publish"): "this server has published nothing",
}


def rest_routes(directory: RunDirectory, service: Service) -> list[Route]:
    """The routes, below /api/v1. Their errors, `RequestError` and `ArgumentError`, are answered by the application.

    Files of checkpoints are fetched from signed URLs below `FILES_PATH`, without a key, for an hour and while
    this server runs.
    """
    rest = _Rest(directory, service)
    routes: dict[tuple[str, str], Callable[[Request], Awaitable[Response]]] = {
        ("GET", "/training_runs"): rest.runs,
        ("GET", "/training_runs/{model_id}"): rest.run,
        ("GET", "/training_runs/{model_id}/checkpoints"): rest.checkpoints,
        ("GET", "/checkpoints"): rest.all_checkpoints,
        ("POST", "/weights_info"): rest.weights_info,
        ("DELETE", _CHECKPOINT): rest.delete,
        ("PUT", f"{_CHECKPOINT}/ttl"): rest.set_ttl,
        ("GET", f"{_CHECKPOINT}/external_weights_urls"): rest.urls,
        ("GET", "/checkpoint_files/{model_id}/{kind}/{name}/{file:path}"): rest.file,
        ("GET", "/sessions"): rest.sessions,
        ("GET", "/sessions/{session_id}"): rest.session,
        ("POST", "/sessions/{session_id}/finish"): rest.finish,
        ("GET", "/samplers/{sampler_id}"): rest.sampler,
        **{route: _refusing(reason) for route, reason in _REFUSED.items()},
    }
    return [Route(f"{_API}{path}", handler, methods=[method]) for (method, path), handler in routes.items()]


class _Rest:
    """The handlers of `rest_routes`, for sessions of this server and earlier ones with training runs."""

    def __init__(self, directory: RunDirectory, service: Service) -> None:
        self._directory = directory
        self._service = service
        self._secret = secrets.token_bytes(32)

    # Runs and their checkpoints.

    async def runs(self, request: Request) -> Response:
        limit, offset = _page(request, limit=20)

        def listed() -> dict[str, Any]:
            runs = self._directory.training_runs()
            shown = [self._fields(run) for run in runs[offset : offset + limit]]
            return {"training_runs": shown, "cursor": _cursor(limit, offset, len(runs))}

        return JSONResponse(await run_in_threadpool(listed))

    async def run(self, request: Request) -> Response:
        model_id = request.path_params["model_id"]
        return JSONResponse(await run_in_threadpool(lambda: self._fields(self._directory.training_run(model_id))))

    async def checkpoints(self, request: Request) -> Response:
        found = await run_in_threadpool(self._directory.checkpoints, request.path_params["model_id"])
        return JSONResponse({"checkpoints": [_checkpoint_fields(each) for each in found]})

    async def all_checkpoints(self, request: Request) -> Response:
        limit, offset = _page(request, limit=100)
        found = await run_in_threadpool(self._directory.all_checkpoints)
        shown = [_checkpoint_fields(each) for each in found[offset : offset + limit]]
        return JSONResponse({"checkpoints": shown, "cursor": _cursor(limit, offset, len(found))})

    async def weights_info(self, request: Request) -> Response:
        """What a client asks before it loads a checkpoint; no LoRA means that all parameters were trained."""
        uri = (await read_object(request)).get("tinker_path")
        if not isinstance(uri, str):
            raise RequestError(400, f"tinker_path is {short_repr(uri)}; send the URI of a checkpoint", "tinker_path")
        found = await run_in_threadpool(self._directory.find, uri)
        run = await run_in_threadpool(self._directory.training_run, found.model_id)
        lora = run.lora or {}
        trained = {name: lora.get(name) for name in ("train_unembed", "train_mlp", "train_attn")}
        return JSONResponse(
            {"base_model": run.base_model, "is_lora": run.lora is not None, "lora_rank": lora.get("rank"), **trained}
        )

    async def delete(self, request: Request) -> Response:
        await run_in_threadpool(lambda: self._directory.delete(self._directory.checkpoint(**request.path_params)))
        return Response(status_code=204)

    async def set_ttl(self, request: Request) -> Response:
        body = await read_object(request)
        if "ttl_seconds" not in body:
            raise RequestError(400, "the body has no ttl_seconds; send seconds, or null for ever", "ttl_seconds")

        def changed() -> None:
            self._directory.set_ttl(self._directory.checkpoint(**request.path_params), body["ttl_seconds"])

        await run_in_threadpool(changed)
        return Response(status_code=204)

    def _fields(self, run: TrainingRun) -> dict[str, Any]:
        """The newest checkpoints of two kinds are with a run."""
        newest: dict[str, dict[str, Any]] = {}
        for each in self._directory.checkpoints(run.model_id):
            newest.setdefault(each.kind, _checkpoint_fields(each))
        return {
            "training_run_id": run.model_id,
            "base_model": run.base_model,
            "model_owner": "local",
            "is_lora": run.lora is not None,
            "lora_rank": (run.lora or {}).get("rank"),
            "last_request_time": self._directory.last_change(run.model_id).isoformat(),
            "last_checkpoint": newest.get("weights"),
            "last_sampler_checkpoint": newest.get("sampler_weights"),
            "user_metadata": run.user_metadata,
        }

    # Files of checkpoints.

    async def urls(self, request: Request) -> Response:
        def signed() -> dict[str, str]:
            found = self._directory.checkpoint(**request.path_params)
            urls = {}
            for file in self._directory.files(found):
                path = quote(f"{found.model_id}/{found.kind}/{found.name}/{file}")
                query = urlencode({"expires": expires, "signature": self._signature(found.uri, file, expires)})
                urls[file] = f"{str(request.base_url).rstrip('/')}{FILES_PATH}{path}?{query}"
            return urls

        until = datetime.now(UTC) + _URL_LIFETIME
        expires = str(int(until.timestamp()))
        return JSONResponse({"urls": await run_in_threadpool(signed), "expires": until.isoformat()})

    async def file(self, request: Request) -> Response:
        file = request.path_params.pop("file")
        expires = request.query_params.get("expires", "")

        def path() -> str:
            checkpoint = self._directory.checkpoint(**request.path_params)
            signature = self._signature(checkpoint.uri, file, expires).encode()
            is_ours = hmac.compare_digest(signature, request.query_params.get("signature", "").encode())
            if not is_ours or int(expires) < datetime.now(UTC).timestamp():
                reason = "has expired" if is_ours else "is not signed by this server as it runs now"
                raise RequestError(403, f"this URL {reason}; ask for URLs again")
            found = self._directory.files(checkpoint).get(file)
            if found is None:
                raise RequestError(404, f"{checkpoint.uri} has no file {file!r:.200}")
            return str(found)

        return FileResponse(await run_in_threadpool(path), media_type="application/octet-stream")

    def _signature(self, uri: str, file: str, expires: str) -> str:
        signed = json.dumps([uri, file, expires]).encode()
        return hmac.new(self._secret, signed, hashlib.sha256).hexdigest()

    # Sessions.

    async def sessions(self, request: Request) -> Response:
        limit, offset = _page(request, limit=20)
        runs = await run_in_threadpool(self._directory.training_runs)
        running = [each.session_id for each in self._service.sessions()]
        found = list(dict.fromkeys([*reversed(running), *(run.session_id for run in runs)]))
        return JSONResponse({"sessions": found[offset : offset + limit]})

    async def session(self, request: Request) -> Response:
        session, run_ids = await self._find(request)
        fields: dict[str, Any] = {"training_run_ids": run_ids, "sampler_ids": []}
        if session is not None:
            fields["sampler_ids"] = list(session.samplers)
            fields |= {"user_metadata": session.user_metadata, "display_name": session.display_name}
        return JSONResponse(fields)

    async def finish(self, request: Request) -> Response:
        session, _ = await self._find(request)
        if session is not None:
            self._service.finish_session(session.session_id)
        return Response(status_code=204)

    async def sampler(self, request: Request) -> Response:
        sampler_id = request.path_params["sampler_id"]
        found = self._service.sampling.session(sampler_id)
        if found is None:
            raise RequestError(404, f"there is no sampling session {sampler_id!r:.200} here; create one")
        return JSONResponse({"sampler_id": sampler_id, "base_model": found.base_model, "model_path": found.model_path})

    async def _find(self, request: Request) -> tuple[Session | None, list[str]]:
        """The session, None if it is of an earlier server, and the ids of its training runs."""
        session_id = request.path_params["session_id"]
        runs = await run_in_threadpool(self._directory.training_runs)
        run_ids = [run.model_id for run in reversed(runs) if run.session_id == session_id]
        session = next((each for each in self._service.sessions() if each.session_id == session_id), None)
        if session is None and not run_ids:
            raise RequestError(404, f"there is no session {session_id!r:.200} here; create one")
        return session, run_ids


def _checkpoint_fields(checkpoint: Checkpoint) -> dict[str, Any]:
    expires_at = checkpoint.expires_at
    return {
        "checkpoint_id": f"{checkpoint.kind}/{checkpoint.name}",
        "checkpoint_type": _TYPES[checkpoint.kind],
        "time": checkpoint.created.isoformat(),
        "tinker_path": checkpoint.uri,
        "size_bytes": checkpoint.size_bytes,
        "public": False,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": None if expires_at is None else expires_at.isoformat(),
    }


def _page(request: Request, *, limit: int) -> tuple[int, int]:
    """The limit, by default `limit`, and the offset of a listing. Raises `RequestError` (400), for a project too."""
    numbers = []
    for name, default, least in (("limit", limit, 1), ("offset", 0, 0)):
        text = request.query_params.get(name, str(default))
        if not (text.isascii() and text.isdecimal() and least <= int(text[:20]) < 2**31):
            raise RequestError(400, f"{name} is {text[:80]!r}; send an integer from {least} to 2**31 - 1", name)
        numbers.append(int(text[:20]))
    if "project_id" in request.query_params:
        raise RequestError(400, "this server has no projects; leave project_id out", "project_id")
    return numbers[0], numbers[1]


def _cursor(limit: int, offset: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}


def _refusing(reason: str) -> Callable[[Request], Awaitable[Response]]:
    async def refuse(_: Request) -> Response:
        raise RequestError(404, reason)

    return refuse
