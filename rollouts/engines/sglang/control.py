"""What a trainer does with an SGLang server except generating."""

import asyncio
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rollouts.engines.http.control import HttpControl, MemoryTag, call_name, check_tags
from rollouts.engines.http.error_context import name_errors_after_methods
from rollouts.engines.http.metrics import Metrics
from rollouts.engines.http.responses import HttpResponse, response_error
from rollouts.engines.protocol import check_version
from rollouts.engines.sglang.capabilities import model_info, server_info
from rollouts.errors import (
    CapabilityError,
    InvalidRequestError,
    MalformedResultError,
    ServerError,
    WeightUpdateError,
)
from rollouts.values import check_choice

#: "abort": running requests end, with the tokens they have. "keep": they stay on the server without their KV
#: cache, which is computed again with the weights that it has then.
PauseMode = Literal["abort", "keep"]


@name_errors_after_methods
class SGLangControl(HttpControl):
    """The control calls of one server. `on_weight_version` is called with each new label.

    All calls raise `CapabilityError` where the server has no such route, `ServerError` where it refuses, and
    the errors of a server that does not answer.
    """

    # Pausing.

    async def pause(self, mode: PauseMode = "abort", *, clear_cache: bool | None = None) -> None:
        """Stop sampling until `resume`, and empty the prefix cache if `clear_cache`. /health is then 503."""
        check_choice("mode", mode, PauseMode)
        await self._call("/pause_generation", {"mode": "abort" if mode == "abort" else "retract"}, "pausing")
        if clear_cache:
            await self.reset_prefix_cache()

    async def resume(self) -> None:
        """Sample again."""
        await self._call("/continue_generation", {}, "continuing after a pause")

    # Weights.

    async def served_version(self) -> str:
        """The label of the weights in use."""
        return str((await model_info(self._connection)).get("weight_version") or "default")

    async def update_weights(
        self, directory: str | os.PathLike[str], version: str, in_flight: PauseMode = "abort", *, check: bool = True
    ) -> None:
        """Load a checkpoint directory that the server reads itself, between a pause and the end of that pause.

        `check` first looks for its files from this process. The prefix cache is emptied. Raises
        `WeightUpdateError` with the server's own words about which weights are in use.
        """
        check_version("version", version)
        check_choice("in_flight", in_flight, PauseMode)
        path = await asyncio.to_thread(os.path.abspath, directory)
        if check and not await asyncio.to_thread((Path(path) / "config.json").is_file):
            raise WeightUpdateError(
                f"{path} holds no checkpoint: it has no config.json. Where the server sees other files than "
                "this process, check=False leaves out this check"
            )
        await self.pause(in_flight)
        try:
            content = {"model_path": path, "weight_version": version, "flush_cache": True}
            await self._updated("/update_weights_from_disk", content, f"loading the weights of {path}")
        finally:
            await self.resume()
        self._on_weight_version(version)

    # LoRA adapters.

    async def load_adapter(self, name: str, path: str) -> None:
        """Load the LoRA adapter of a directory under a name. Raises `WeightUpdateError`."""
        await self._updated(
            "/load_lora_adapter", {"lora_name": name, "lora_path": path}, f"loading the adapter {name!r}"
        )

    async def unload_adapter(self, name: str) -> None:
        """Unload an adapter; the server waits until its requests have ended. Raises `WeightUpdateError`."""
        await self._updated("/unload_lora_adapter", {"lora_name": name}, f"unloading the adapter {name!r}")

    # Memory and caches.

    async def reset_prefix_cache(self) -> None:
        """Empty the prefix cache. With requests on the server SGLang refuses: `ServerError`."""
        await self._call("/flush_cache", None, "emptying the prefix cache")

    async def sleep(self, level: int = 1) -> None:
        """Pause, and free the memory of the KV cache and the weights for a trainer on the same device.

        Level 1 keeps the weights in the host's memory, for which the server needs
        --enable-weights-cpu-backup; after level 2 they have to be loaded again. Raises `CapabilityError`
        where the server was not started with --enable-memory-saver: it would answer with success and free
        nothing.
        """
        if level not in (1, 2):
            raise InvalidRequestError("sleep", f"level is {level!r}, not 1 or 2")
        server = await server_info(self._connection)
        options = ["enable_memory_saver", *(["enable_weights_cpu_backup"] if level == 1 else [])]
        if missing := [f"--{option.replace('_', '-')}" for option in options if server.get(option) is not True]:
            raise CapabilityError("sleep", f"{self.base_url} was started without {' and '.join(missing)}")
        await self.pause("abort")  # with a request that runs, the call below would end the server
        await self._call("/release_memory_occupation", {}, "freeing memory")

    async def wake_up(self, tags: Sequence[MemoryTag] | None = None) -> None:
        """Allocate memory again, all of it or that of `tags`; samples again once the KV cache has its memory back."""
        check_tags(tags)
        content = {} if tags is None else {"tags": list(tags)}
        await self._call("/resume_memory_occupation", content, "allocating memory")
        if tags is None or "kv_cache" in tags:
            await self.resume()

    # Ending requests.

    async def abort(self, request_ids: Iterable[str]) -> None:
        """End requests by their ids; each returns the tokens it has. Ids that do not run are ignored."""
        for request_id in request_ids:
            await self._call("/abort_request", {"rid": request_id}, "aborting a request")

    # Monitoring.

    async def metrics(self) -> Metrics:
        """Every counter and gauge of the server, which needs --enable-metrics."""
        response = await self._request("GET", "/metrics")
        if response.status in (404, 405):
            raise CapabilityError("metrics", f"{self.base_url} has no /metrics; start it with --enable-metrics")
        content = self._checked(response, "/metrics", "reading the metrics").body
        return Metrics.parse(content.decode("utf-8", "replace"))

    async def _updated(self, path: str, content: Mapping[str, Any], action: str) -> None:
        try:
            await self._call(path, content, action)
        except ServerError as error:
            raise WeightUpdateError(f"{self.base_url} failed at {action}: {error.reason}") from error

    async def _call(self, path: str, content: Mapping[str, Any] | None, action: str) -> HttpResponse:
        return self._checked(await self._request("POST", path, content=content, retry=False), path, action)

    def _checked(self, response: HttpResponse, path: str, action: str) -> HttpResponse:
        name = call_name(path)
        if response.status in (404, 405):
            raise CapabilityError(name, f"{self.base_url} has no {path}: this SGLang is older than the route")
        if response.status != 200:
            raise response_error(name, response, action)
        try:
            content = response.json() if response.body.startswith(b"{") else {}
        except MalformedResultError:
            content = {}
        if isinstance(content, dict) and content.get("success") is False:
            raise ServerError(name, action, status=response.status, body=str(content.get("message"))[:500])
        return response
