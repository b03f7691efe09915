"""Loading other weights into a running vLLM server, and what is done when that fails.

vLLM's own reload leaves caches of the old weights, and one that fails leaves weights without storage: the server then
reports that it is healthy and dies with the next request. A server is therefore resumed only with weights that
loaded.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import NoReturn

from rollouts.engines.http.address import redacted
from rollouts.engines.protocol import check_update_arguments, check_version
from rollouts.engines.vllm.caches import CacheControl, PauseMode
from rollouts.engines.vllm.checkpoint_files import check_checkpoint
from rollouts.engines.vllm.probe_requests import json_object
from rollouts.engines.vllm.server_state import required_field
from rollouts.errors import EngineError, MalformedResultError, ServerUnreachableError, WeightUpdateError

log = logging.getLogger("rollouts.engines.vllm")


class WeightControl(CacheControl):
    """Loads other weights into a server, and labels them."""

    async def reload_weights(self, directory: str | os.PathLike[str], *, check: bool = True) -> None:
        """Load a checkpoint of the same model into a paused server, and empty every cache.

        The server reads the directory itself. `check` first checks the files from this process, which needs the same
        file system here; without it (the server is elsewhere, or loads another format) a wrong directory leaves a
        server that has to be restarted. Where the server takes media, requests that a pause has left in it ("keep") end
        first, as by "abort"; a `VLLMEngine` continues them after `resume`. Raises `WeightUpdateError`: nothing was
        changed, or the text says what was; `EngineError` if the server is not paused, or sleeps and its weights
        have no memory.
        """
        with self._state.exclusive_update("reload_weights"):
            path = await self._path_to_load(directory, check)
            if not await self.is_paused():
                raise EngineError(
                    "reload_weights", "requests would continue with mixed weights and a stale cache; pause first"
                )
            await self._state.refuse_while_weights_sleep("reload_weights")
            with self._media_forgotten():
                if await self._routes.takes_media():
                    await self._send_pause("abort", clear_cache=False)
                await self._load(path)
                await self._reset_all()

    async def update_weight_version(self, version: str) -> None:
        """Label tokens sampled from now on."""
        check_version("version", version)
        content = {"new_version": version}
        await self._routes.call("POST", "/update_weight_version", "labelling the weights", content=content)
        self._on_weight_version(version)

    async def weight_version(self) -> str:
        """The label of the weights that the server has ("default" until one is set)."""
        response = await self._routes.call("GET", "/weight_info", "reading the weight version")
        return str(required_field(response, "weight_version"))

    async def update_weights_from_directory(
        self, directory: str | os.PathLike[str], version: str, in_flight: PauseMode = "abort", *, check: bool = True
    ) -> None:
        """A complete weight update: pause, load, empty every cache, label, resume.

        `in_flight` decides about running requests: "abort" ends them and every `VLLMEngine` continues its own from the
        tokens that they have, with the new weights; "wait" finishes them with the old ones; "keep" leaves them in the
        server, which computes them again and continues with the new weights. A server that takes media would die of
        that: there "keep" does the same as "abort". Cached results of the old weights are never used with the new
        ones. A server that was paused before stays paused.

        Raises `WeightUpdateError` where the weights are not those of `directory` afterwards; its text says which they
        are and whether the server runs. A cancelled call still completes the update before it raises `CancelledError`.
        """
        task = asyncio.ensure_future(self._update_weights(directory, version, in_flight, check))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            await asyncio.wait([task])
            if not task.cancelled() and (error := task.exception()) is not None:
                log.warning("a cancelled update of the weights failed: %s", error)
            raise

    async def world_size(self) -> int:
        """How many workers (GPUs) the model is spread over, data parallelism included."""
        response = await self._routes.call("GET", "/get_world_size", "reading the world size")
        return int(required_field(response, "world_size"))

    async def _update_weights(
        self, directory: str | os.PathLike[str], version: str, in_flight: PauseMode, check: bool
    ) -> None:
        name = "update_weights_from_directory"
        check_update_arguments(version, in_flight)
        with self._state.exclusive_update(name):
            path = await self._path_to_load(directory, check)
            await self._state.refuse_while_weights_sleep(name)
            stays_paused, in_flight = await self._stays_paused(), await self._possible(in_flight)
            with self._media_forgotten():
                previous = await self._pause_for_update(in_flight, stays_paused)
                try:
                    await self._load(path)
                except WeightUpdateError as failure:
                    await self._restore(previous, failure, stays_paused)
                await self._complete_update(version)
            if not stays_paused:
                await self._send_resume()

    async def _complete_update(self, version: str) -> None:
        """Empty every cache of a server that has the new weights, and label them."""
        try:
            await self._reset_all()
            await self.update_weight_version(version)
        except EngineError as error:
            raise WeightUpdateError(
                f"{self.base_url} has the weights {version!r}, but may still hold cached results or the label of the "
                f"weights before, and was left paused: {error}. Repeat the update"
            ) from error

    async def _stays_paused(self) -> bool:
        """Whether the server is paused by somebody else than an update that failed, and so stays paused."""
        return await self.is_paused() and not self._state.paused_by_update

    async def _possible(self, in_flight: PauseMode) -> PauseMode:
        """A server that takes media would die of requests that are kept: they are ended and continued."""
        if in_flight == "keep" and await self._routes.takes_media():
            log.info("%s takes media: requests in flight are ended and continued, not kept", self.base_url)
            return "abort"
        return in_flight

    async def _pause_for_update(self, mode: PauseMode, stays_paused: bool) -> str | None:
        """Pause the server; the directory of the weights that it has, None where it is not known."""
        try:
            await self.pause(mode, clear_cache=True)
            self._state.paused_by_update = not stays_paused
        except ServerUnreachableError:
            raise
        except EngineError:
            # The pause may have taken effect. Requests with the old weights may continue.
            if not stays_paused:
                try:
                    await self._send_resume()
                except EngineError as error:
                    log.warning("%s may be left paused: %s", self.base_url, error)
            raise
        return None if self._state.was_transferred else self._state.loaded_directory or await self.initial_directory()

    async def _load(self, path: str) -> None:
        """Let the workers read a checkpoint. After a `WeightUpdateError` the server's weights are unusable."""
        content = {"method": "reload_weights", "kwargs": {"weights_path": path}}
        self._state.unusable_weights = f"a reload of {path} was begun and not seen to end"
        try:
            response = await self._routes.call("POST", "/collective_rpc", "reloading the weights", content=content)
            results = required_field(response, "results")
            if not isinstance(results, list) or any(result is not None for result in results):
                raise MalformedResultError("reload_weights", f"the workers returned {redacted(str(results))[:200]}")
        except ServerUnreachableError as error:
            raise WeightUpdateError(
                f"{self.base_url} could not be reached while it was to load {path}: {error}. If it has ended, "
                "start it again, with whatever weights its command line names, and repeat the update"
            ) from error
        except EngineError as error:
            self._state.unusable_weights = f"a reload of {path} failed and may have left weights without storage"
            raise WeightUpdateError(
                f"the weights of {path} were not loaded by {self.base_url}: {error}. With the weights that it "
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
            await self._reset_all()
        except (EngineError, WeightUpdateError) as error:
            raise WeightUpdateError(
                f"{failure} (the weights of before, in {previous}, could not be loaded either: restart it)"
            ) from error
        if not stays_paused:
            await self._send_resume()
        raise WeightUpdateError(
            f"the weights of {self.base_url} were not updated, and those of {previous} were loaded again; the "
            f"server {'is paused as before' if stays_paused else 'runs'} with them. The cause: {failure.__cause__}"
        ) from failure

    async def _path_to_load(self, directory: str | os.PathLike[str], check: bool) -> str:
        """The path that is sent to the server. `check`: absolute, and its files were checked."""
        await self._state.forget_if_restarted()
        if not check:
            return str(directory)
        initial = await self.initial_directory()  # later checkpoints may lack tensors
        path = await asyncio.to_thread(Path(directory).absolute)
        await asyncio.to_thread(check_checkpoint, path, like=None if initial is None else Path(initial))
        return str(path)

    async def initial_directory(self) -> str | None:
        """The checkpoint that the server was started with, by its own path; None where it does not report it."""
        model = (await self._routes.capabilities()).model
        response = await self._routes.request("GET", "/v1/models")
        cards = json_object(response).get("data") if response.status == 200 else None
        roots = [card.get("root") for card in cards or () if isinstance(card, dict) and card.get("id") == model]
        return roots[0] if roots and isinstance(roots[0], str) else None
