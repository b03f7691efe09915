"""Routes that replace weights: checkpoints of directories, tensors of a trainer, LoRA adapters; and their labels."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from rollouts.engines.protocol import is_relabelled, is_updatable
from rollouts.errors import ArgumentError, UnknownAdapterError
from rollouts.serve.bodies import read_model, read_object
from rollouts.serve.errors import RequestError
from rollouts.serve.server_state import ServerState
from rollouts.serve.weight_receiver import WeightReceiver


class _InitBody(BaseModel):
    init_info: dict[str, Any]


class _UpdateBody(BaseModel):
    update_info: dict[str, Any]


class _FinishBody(BaseModel):
    weight_version: str | None = None


class _LoadAdapterBody(BaseModel):
    lora_name: str
    lora_path: str
    load_inplace: bool = False


class _UnloadAdapterBody(BaseModel):
    lora_name: str


class WeightRoutes:
    """Routes with which a trainer gives the server other weights."""

    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._receiver = WeightReceiver(state.model.directory)
        self._transfer = asyncio.Lock()  # of the calls of the receiver
        posts = {
            "/collective_rpc": self._collective_rpc,
            "/update_weight_version": self._update_weight_version,
            "/init_weight_transfer_engine": self._init_transfer,
            "/start_weight_update": self._start_transfer,
            "/update_weights": self._receive_weights,
            "/finish_weight_update": self._finish_transfer,
            "/shutdown_weight_transfer_engine": self._shut_transfer_down,
            "/v1/load_lora_adapter": self._load_adapter,
            "/v1/unload_lora_adapter": self._unload_adapter,
        }
        self.routes = [
            Route("/weight_info", self._weight_info, methods=["GET"]),
            Route("/get_world_size", self._world_size, methods=["GET"]),
            *(Route(path, handler, methods=["POST"]) for path, handler in posts.items()),
        ]

    # Directories and labels.

    async def _collective_rpc(self, request: Request) -> Response:
        body = await read_object(request)
        method, options = body.get("method"), body.get("kwargs") or {}
        if method is None:
            raise RequestError(400, "Missing 'method' in request body", kind="Bad Request")
        if method != "reload_weights" or not isinstance(options, dict) or options.keys() - {"weights_path"}:
            message = "this server has no workers; of their methods it has reload_weights, with weights_path"
            raise RequestError(501, message)
        path = options.get("weights_path", str(self._state.model.directory))
        engine = self._state.engine.engine
        if not is_updatable(engine):
            raise RequestError(501, f"{type(engine).__name__} cannot replace its weights")
        # Only a directory of this machine: any other text would be looked up in a hub.
        if not isinstance(path, str) or not await asyncio.to_thread(os.path.isdir, path):
            raise RequestError(500, f"{str(path)[:200]} is no directory of this machine")
        # The label stays, as in vLLM: /update_weight_version sets it.
        await engine.update_weights(path, engine.weight_version)
        return JSONResponse({"results": [None]})

    async def _update_weight_version(self, request: Request) -> Response:
        version = (await read_object(request)).get("new_version")
        if not isinstance(version, str) or not version:
            raise RequestError(400, "new_version must be a text", "body.new_version", kind="Bad Request")
        engine = self._state.engine.engine
        if not is_relabelled(engine):
            raise RequestError(501, f"{type(engine).__name__} has no label of its weights")
        await engine.update_weight_version(version)
        return JSONResponse({"success": True, "new_version": version})

    async def _weight_info(self, request: Request) -> Response:
        version = getattr(self._state.engine.engine, "weight_version", "default")
        return JSONResponse({"weight_version": version})

    async def _world_size(self, request: Request) -> Response:
        return JSONResponse({"world_size": 1})

    # Tensors of a trainer.

    async def _init_transfer(self, request: Request) -> Response:
        self._engine_for_tensors()
        body = await read_model(request, _InitBody)
        async with self._transfer:
            self._receiver.join(body.init_info)
        return JSONResponse({"message": "Weight transfer initialized"})

    async def _start_transfer(self, request: Request) -> Response:
        self._engine_for_tensors()
        async with self._transfer:
            await asyncio.to_thread(self._receiver.start)
        return JSONResponse({"message": "Weight update started"})

    async def _receive_weights(self, request: Request) -> Response:
        body = await read_model(request, _UpdateBody)
        async with self._transfer:
            await asyncio.to_thread(self._receiver.receive, body.update_info)
        return JSONResponse({"message": "Weights updated"})

    async def _finish_transfer(self, request: Request) -> Response:
        version = (await read_model(request, _FinishBody)).weight_version if await request.body() else None
        engine = self._engine_for_tensors()
        async with self._transfer:
            await engine.update_weights(self._receiver.finish(), version or engine.weight_version)
        return JSONResponse({"message": "Weight update finished"})

    async def _shut_transfer_down(self, request: Request) -> Response:
        async with self._transfer:
            self._receiver.leave()
        return JSONResponse({"message": "Weight transfer shut down"})

    def _engine_for_tensors(self) -> Any:
        engine = self._state.engine.engine
        if not getattr(engine, "takes_tensors", False):
            message = f"Weight transfer not configured; {type(engine).__name__} takes no tensors"
            raise RequestError(500, message)
        return engine

    # Adapters.

    async def _load_adapter(self, request: Request) -> Response:
        body = await read_model(request, _LoadAdapterBody)
        name, path = body.lora_name, Path(body.lora_path)
        if not name or not body.lora_path:
            raise _invalid("Both 'lora_name' and 'lora_path' must be provided.")
        engine = self._engine_with_adapters()
        if body.load_inplace:
            raise _invalid("load_inplace is not supported by this server: load the new weights under another name.")
        if name == self._state.model.name:
            raise _invalid(f"The lora adapter '{name[:200]}' conflicts with a served base model.")
        if await self._state.adapters.has(name):
            raise _invalid(f"The lora adapter '{name[:200]}' has already been loaded.")
        # Only a directory of this machine: vLLM would look any other text up in a hub.
        if not await asyncio.to_thread(os.path.isfile, path / "adapter_config.json"):
            place = "<path>" if path.is_absolute() else body.lora_path[:200]
            message = f"Loading lora {name[:200]} failed: No adapter found for {place}"
            raise RequestError(404, message)
        try:
            await engine.load_adapter(name, path)
        except ArgumentError as error:  # the name
            raise _invalid(str(error)) from error
        await self._state.adapters.names()  # which notes the label of the weights below it
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def _unload_adapter(self, request: Request) -> Response:
        name = (await read_model(request, _UnloadAdapterBody)).lora_name
        if not name:
            raise _invalid("'lora_name' needs to be provided to unload a LoRA adapter.")
        engine = self._engine_with_adapters()
        try:
            await self._state.engine.until_unused(name)
            await engine.unload_adapter(name)
        except UnknownAdapterError as error:
            message = f"The lora adapter '{name[:200]}' cannot be found."
            raise RequestError(404, message) from error
        await self._state.adapters.names()
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    def _engine_with_adapters(self) -> Any:
        engine = self._state.engine.engine
        if not hasattr(engine, "load_adapter"):
            raise RequestError(501, f"{type(engine).__name__} has no adapters")
        return engine


def _invalid(message: str) -> RequestError:
    return RequestError(400, message, kind="InvalidUserInput")
