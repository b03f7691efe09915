"""The routes of vLLM's development mode but for those of the weights: pausing, sleeping, caches, the configuration."""

from __future__ import annotations

from typing import cast, get_args

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rollouts.serve.bodies import read_object
from rollouts.serve.errors import RequestError
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
            raise RequestError(400, f"mode is {mode[:100]!r}, not one of {modes}", "query.mode", kind="Bad Request")
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
            raise RequestError(400, "request_ids must be a list of texts", "body.request_ids", kind="Bad Request")
        return JSONResponse({"status": "aborted", "aborted": count})

    async def _sleep(self, request: Request) -> Response:
        level = request.query_params.get("level", "1")
        if level not in ("0", "1", "2"):
            raise RequestError(400, f"level is {level[:100]!r}, not 0, 1 or 2", "query.level", kind="Bad Request")
        await self._state.engine.pause("abort")
        if level != "0":
            self._state.sleep_level = int(level)
            self._state.asleep = set(_MEMORY)
            self._state.clear_media()
        return JSONResponse({"status": "sleeping", "level": int(level)})

    async def _wake_up(self, request: Request) -> Response:
        tags = request.query_params.getlist("tags") or None
        if unknown := [tag for tag in tags or () if tag not in _MEMORY]:
            raise RequestError(400, f"tag {unknown[0][:100]!r} is not one of {', '.join(_MEMORY)}", kind="Bad Request")
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

    async def _server_info(self, request: Request) -> Response:
        """The parts of vLLM's configuration that clients read: the dtype, and how images are taken."""
        model = self._state.model
        if request.query_params.get("config_format", "text") != "json":
            text = f"model='{model.directory}', dtype=torch.{model.dtype}, max_seq_len={model.max_model_len}"
            return JSONResponse({"vllm_config": text if model.dtype else text.replace("dtype=torch.None, ", "")})
        multimodal = None
        if (images := model.media.get("image")) is not None:
            multimodal = {"mm_device_do_normalize": images.pixel_dtype == "uint8", "language_model_only": False}
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
