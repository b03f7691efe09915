"""The routes of vLLM's development mode: pausing, sleeping, caches, and the weights."""

from __future__ import annotations

import asyncio
import os
from typing import cast, get_args

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollouts.engines.protocol import is_relabelled, is_updatable
from rollouts.serve.errors import RequestError
from rollouts.serve.json_bodies import read_object
from rollouts.serve.pausable_engine import PauseMode
from rollouts.serve.server_state import ServerState

_MEMORY = ("weights", "kv_cache")
_TRUE = ("true", "1", "yes", "on", "t", "y")


class ControlRoutes:
    """Routes with which a trainer controls the server. Sleep frees no memory; it holds requests back."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        gets = {
            "/is_paused": self._is_paused,
            "/is_sleeping": self._is_sleeping,
            "/weight_info": self._weight_info,
            "/get_world_size": self._world_size,
            "/server_info": self._server_info,
        }
        posts = {
            "/pause": self._pause,
            "/resume": self._resume,
            "/abort_requests": self._abort_requests,
            "/sleep": self._sleep,
            "/wake_up": self._wake_up,
            "/reset_prefix_cache": self._reset_prefix_cache,
            "/reset_mm_cache": self._reset_media,
            "/reset_encoder_cache": self._reset_encoder_cache,
            "/collective_rpc": self._collective_rpc,
            "/update_weight_version": self._update_weight_version,
            "/init_weight_transfer_engine": self._no_weight_transfer,
            "/start_weight_update": self._no_weight_transfer,
            "/update_weights": self._no_weight_transfer,
            "/finish_weight_update": self._no_weight_transfer,
        }
        self.routes = [
            *(Route(path, handler, methods=["GET"]) for path, handler in gets.items()),
            *(Route(path, handler, methods=["POST"]) for path, handler in posts.items()),
        ]

    # Pausing and sleeping.

    async def _pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")
        if mode not in get_args(PauseMode):
            modes = ", ".join(get_args(PauseMode))
            raise RequestError(400, f"mode is {mode[:100]!r}, not one of {modes}", "Bad Request", "query.mode")
        clears = _flag(request, "clear_cache", default=True)
        await self._state.engine.pause(cast(PauseMode, mode))
        if clears and mode != "keep":
            self._state.clear_media()
        return JSONResponse({"status": "paused"})

    async def _resume(self, request: Request) -> Response:
        if self._state.asleep:
            return JSONResponse({"error": "the server sleeps; use /wake_up"}, 400)
        self._state.engine.resume()
        return JSONResponse({"status": "resumed"})

    async def _is_paused(self, request: Request) -> Response:
        return JSONResponse({"is_paused": self._state.engine.is_paused})

    async def _abort_requests(self, request: Request) -> Response:
        request_ids = (await read_object(request)).get("request_ids")
        if not request_ids:
            count = await self._state.engine.abort_all()
        elif isinstance(request_ids, list):
            count = len(request_ids)
            await self._state.engine.abort(map(str, request_ids))
        else:
            raise RequestError(400, "request_ids must be a list of texts", "Bad Request", "body.request_ids")
        return JSONResponse({"status": "aborted", "aborted": count})

    async def _sleep(self, request: Request) -> Response:
        level = request.query_params.get("level", "1")
        if level not in ("0", "1", "2"):
            raise RequestError(400, f"level is {level[:100]!r}, not 0, 1 or 2", "Bad Request", "query.level")
        await self._state.engine.pause("abort")
        if level != "0":
            self._state.sleep_level = int(level)
            self._state.asleep = set(_MEMORY)
            self._state.clear_media()
        return JSONResponse({"status": "sleeping", "level": int(level)})

    async def _wake_up(self, request: Request) -> Response:
        tags = request.query_params.getlist("tags") or None
        if unknown := [tag for tag in tags or () if tag not in _MEMORY]:
            raise RequestError(400, f"tag {unknown[0][:100]!r} is not one of {', '.join(_MEMORY)}", "Bad Request")
        self._state.asleep -= set(tags or _MEMORY)
        if not self._state.asleep:
            self._state.sleep_level = 0
            self._state.engine.resume()
        return JSONResponse({"status": "sleeping" if self._state.asleep else "awake", "tags": tags})

    async def _is_sleeping(self, request: Request) -> Response:
        return JSONResponse({"is_sleeping": self._state.engine.is_paused})  # vLLM reports a pause as sleep, too

    # Caches. Nothing of a prompt is kept between requests.

    async def _reset_prefix_cache(self, request: Request) -> Response:
        return JSONResponse({"success": True})

    async def _reset_media(self, request: Request) -> Response:
        self._state.clear_media()
        return Response()

    async def _reset_encoder_cache(self, request: Request) -> Response:
        return Response()

    # Weights.

    async def _collective_rpc(self, request: Request) -> Response:
        body = await read_object(request)
        method, options = body.get("method"), body.get("kwargs") or {}
        if method is None:
            raise RequestError(400, "Missing 'method' in request body", "Bad Request")
        if method != "reload_weights" or not isinstance(options, dict) or options.keys() - {"weights_path"}:
            message = "this server has no workers; of their methods it has reload_weights, with weights_path"
            raise RequestError(501, message, "NotImplementedError")
        path = options.get("weights_path", str(self._state.model.directory))
        engine = self._state.engine.engine
        if not is_updatable(engine):
            raise RequestError(501, f"{type(engine).__name__} cannot replace its weights", "NotImplementedError")
        # Only a directory of this machine: any other text would be looked up in a hub.
        if not isinstance(path, str) or not await asyncio.to_thread(os.path.isdir, path):
            raise RequestError(500, f"{str(path)[:200]} is no directory of this machine", "InternalServerError")
        # The label stays, as in vLLM: /update_weight_version sets it.
        await engine.update_weights(path, engine.weight_version)
        return JSONResponse({"results": [None]})

    async def _update_weight_version(self, request: Request) -> Response:
        version = (await read_object(request)).get("new_version")
        if not isinstance(version, str) or not version:
            raise RequestError(400, "new_version must be a text", "Bad Request", "body.new_version")
        engine = self._state.engine.engine
        if not is_relabelled(engine):
            raise RequestError(501, f"{type(engine).__name__} has no label of its weights", "NotImplementedError")
        await engine.update_weight_version(version)
        return JSONResponse({"success": True, "new_version": version})

    async def _weight_info(self, request: Request) -> Response:
        version = getattr(self._state.engine.engine, "weight_version", "default")
        return JSONResponse({"weight_version": version})

    async def _world_size(self, request: Request) -> Response:
        return JSONResponse({"world_size": 1})

    async def _no_weight_transfer(self, request: Request) -> Response:
        message = "Weight transfer not configured; this server loads weights from directories, with /collective_rpc"
        raise RequestError(500, message, "InternalServerError")

    async def _server_info(self, request: Request) -> Response:
        """The parts of vLLM's configuration that clients read: the dtype, and how images are taken."""
        model = self._state.model
        if request.query_params.get("config_format", "text") != "json":
            text = f"model='{model.directory}', dtype=torch.{model.dtype}, max_seq_len={model.max_model_len}"
            return JSONResponse({"vllm_config": text if model.dtype else text.replace("dtype=torch.None, ", "")})
        multimodal = None
        if model.images is not None:
            multimodal = {"mm_device_do_normalize": model.images.pixel_dtype == "uint8", "language_model_only": False}
        config = {
            "model": str(model.directory),
            "max_model_len": model.max_model_len,
            "dtype": None if model.dtype is None else f"torch.{model.dtype}",
            "multimodal_config": multimodal,
        }
        return JSONResponse({"vllm_config": {"model_config": config}})


def _flag(request: Request, name: str, *, default: bool) -> bool:
    value = request.query_params.get(name)
    return default if value is None else value.lower() in _TRUE
