"""Loading other weights into a running vLLM server, and what is done when that fails.

vLLM's own reload leaves caches of the old weights, and one that fails leaves weights without storage: the server then
reports that it is healthy and dies with the next request. A server is therefore resumed only with weights that loaded.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from rollouts.engines.vllm.control.caches import PauseMode, ServerCaches, check_pause_mode
from rollouts.engines.vllm.control.checkpoint_files import check_checkpoint
from rollouts.engines.vllm.control.routes import ControlRoutes, json_object, required_field
from rollouts.engines.vllm.control.server_state import ServerState
from rollouts.errors import (
    EngineError,
    InvalidRequestError,
    MalformedResultError,
    ServerUnreachableError,
    UnsafeControlError,
    WeightUpdateError,
)

log = logging.getLogger("rollouts.engines.vllm")


class WeightUpdates:
    """Reloads the weights of a server and labels them; `ServerControl` documents each call."""

    def __init__(
        self,
        routes: ControlRoutes,
        caches: ServerCaches,
        state: ServerState,
        on_weight_version: Callable[[str], None],
    ) -> None:
        self._routes = routes
        self._caches = caches
        self._state = state
        self._on_weight_version = on_weight_version

    async def reload(self, directory: str | os.PathLike[str], check: bool) -> None:
        with self._state.exclusive_update("reload_weights"):
            path = await self._path_to_load(directory, check)
            if not await self._caches.is_paused():
                raise UnsafeControlError(
                    "reload_weights", "requests would continue with mixed weights and a stale cache; pause first"
                )
            await self._state.refuse_while_weights_sleep("reload_weights")
            with self._caches.media_forgotten():
                if await self._routes.takes_media():
                    await self._caches.send_pause("abort", clear_cache=False)
                await self._load(path)
                await self._caches.reset_all()

    async def set_version(self, version: str) -> None:
        if not version:
            raise InvalidRequestError("update_weight_version", "the version is empty")
        path = "/update_weight_version"
        await self._routes.require(path)
        response = await self._routes.request("POST", path, content={"new_version": version})
        if response.status != 404:
            self._routes.checked(response, path, "labelling the weights")
        self._on_weight_version(version)

    async def update(
        self, name: str, directory: str | os.PathLike[str], version: str, in_flight: PauseMode, check: bool
    ) -> None:
        """The whole update. `name` is that of the call, for errors."""
        check_pause_mode(name, in_flight)
        if not version:
            raise InvalidRequestError(name, "the version is empty")
        with self._state.exclusive_update(name):
            path = await self._path_to_load(directory, check)
            await self._state.refuse_while_weights_sleep(name)
            stays_paused = await self._caches.is_paused()
            if in_flight == "keep" and await self._routes.takes_media():
                log.info("%s takes media: requests in flight are ended and continued, not kept", self._routes.base_url)
                in_flight = "abort"
            with self._caches.media_forgotten():
                await self._pause(in_flight, stays_paused)
                previous = self._state.loaded_directory or await self._initial_directory()
                try:
                    await self._load(path)
                except WeightUpdateError as failure:
                    await self._restore(previous, failure, stays_paused)
                try:
                    await self._caches.reset_all()
                    await self.set_version(version)
                except EngineError as error:
                    raise WeightUpdateError(
                        f"{self._routes.base_url} has loaded the weights of {path}, but may still hold cached results "
                        f"or the label of the weights before, and was left paused: {error}. Repeat the update"
                    ) from error
            if not stays_paused:
                await self._caches.send_resume()

    async def _pause(self, mode: PauseMode, stays_paused: bool) -> None:
        try:
            await self._caches.pause(mode, clear_cache=True)
        except ServerUnreachableError:
            raise
        except EngineError:
            # The pause may have taken effect. Requests with the old weights may continue.
            if not stays_paused:
                try:
                    await self._caches.send_resume()
                except EngineError as error:
                    log.warning("%s may be left paused: %s", self._routes.base_url, error)
            raise

    async def _load(self, path: str) -> None:
        """Let the workers read a checkpoint. After a `WeightUpdateError` the server's weights are unusable."""
        content = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        self._state.unusable_weights = f"a reload of {path} was begun and not seen to end"
        try:
            response = await self._routes.call("POST", "/collective_rpc", "reloading the weights", content=content)
            results = required_field(response, "results")
            if not isinstance(results, list) or any(result is not None for result in results):
                raise MalformedResultError("reload_weights", f"the workers returned {str(results)[:200]}")
        except ServerUnreachableError as error:
            raise WeightUpdateError(
                f"{self._routes.base_url} could not be reached while it was to load {path}: {error}. If it has ended, "
                "start it again, with whatever weights its command line names, and repeat the update"
            ) from error
        except EngineError as error:
            self._state.unusable_weights = f"a reload of {path} failed and may have left weights without storage"
            raise WeightUpdateError(
                f"the weights of {path} were not loaded by {self._routes.base_url}: {error}. With the weights that it "
                "holds now, the server would die or generate garbage; it is left paused. Load a checkpoint that is "
                "known to be good, or restart the server"
            ) from error
        self._state.record_load(path)

    async def _restore(self, previous: str | None, failure: WeightUpdateError, stays_paused: bool) -> NoReturn:
        """Load the weights from before a failed load again, where they are known, and raise `WeightUpdateError`."""
        if previous is None or isinstance(failure.__cause__, ServerUnreachableError):
            raise failure
        try:
            await self._load(previous)
            await self._caches.reset_all()
        except (EngineError, WeightUpdateError) as error:
            raise WeightUpdateError(
                f"{failure} (the weights of before, in {previous}, could not be loaded either: restart it)"
            ) from error
        if not stays_paused:
            await self._caches.send_resume()
        raise WeightUpdateError(
            f"the weights of {self._routes.base_url} were not updated, and those of {previous} were loaded again; the "
            f"server {'is paused as before' if stays_paused else 'runs'} with them. The cause: {failure.__cause__}"
        ) from failure

    async def _path_to_load(self, directory: str | os.PathLike[str], check: bool) -> str:
        """The path that is sent to the server. `check`: absolute, and its files were checked."""
        await self._state.forget_if_restarted()
        if not check:
            return str(directory)
        initial = await self._initial_directory()
        return await asyncio.to_thread(_checked_path, Path(directory), None if initial is None else Path(initial))

    async def _initial_directory(self) -> str | None:
        """The checkpoint that the server was started with, by its own path; later checkpoints may lack tensors."""
        model = (await self._routes.capabilities()).model
        response = await self._routes.request("GET", "/v1/models")
        cards = json_object(response).get("data") if response.status == 200 else None
        roots = [card.get("root") for card in cards or () if isinstance(card, dict) and card.get("id") == model]
        return roots[0] if roots and isinstance(roots[0], str) else None


def _checked_path(directory: Path, initial: Path | None) -> str:
    path = directory.absolute()
    check_checkpoint(path, like=initial)
    return str(path)
