"""The LoRA adapters of a vLLM server: loaded and unloaded by name while it serves, and chosen for each request.

vLLM can replace the weights behind a name (`load_inplace`), but requests that run then continue with the new weights
without any label of it, and its prefix cache keeps what the old weights computed. Here a name stands for one set of
weights: new weights are loaded under another name, such as "policy@4" beside "policy@3", and requests in flight keep
theirs. The prefix cache of vLLM distinguishes adapters by name.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from rollouts.engines.http.connection import ServerConnection
from rollouts.engines.http.responses import HttpResponse, response_error
from rollouts.engines.lora import adapter_exists_error, adapter_labels, listed_adapters
from rollouts.engines.protocol import Completion, check_adapter_name
from rollouts.engines.vllm.capabilities import ServerCapabilities
from rollouts.engines.vllm.probe_requests import json_object
from rollouts.engines.vllm.server_state import ControlRoutes
from rollouts.errors import CapabilityError, UnknownAdapterError, WeightUpdateError

_CONFIG = "adapter_config.json"
_WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")


class ServerAdapters:
    """The adapters of one server. `base_version` returns the label of the weights that they adapt."""

    def __init__(
        self,
        connection: ServerConnection,
        capabilities: Callable[[], Awaitable[ServerCapabilities]],
        base_version: Callable[[], str],
    ) -> None:
        self._connection = connection
        self._routes = ControlRoutes(connection, capabilities)
        self._base_version = base_version
        self._base_versions: dict[str, str] = {}  # by adapter: the label of the base weights when it was first seen
        self._in_use: Counter[str] = Counter()

    def forget(self) -> None:
        """The server may be another process, which has loaded none of the adapters."""
        self._base_versions.clear()

    async def loaded(self) -> Mapping[str, str]:
        """The adapters that the server has: the directory of each, by its name. Raises `ServerError`."""
        path = "/v1/models"
        response = self._routes.checked(await self._routes.request("GET", path), path, "listing the adapters")
        adapters = listed_adapters(json_object(response))
        for name in self._base_versions.keys() - adapters.keys():
            self._base_versions.pop(name, None)
        for name in adapters:
            self._base_versions.setdefault(name, self._base_version())
        return adapters

    async def load(self, name: str, directory: str | os.PathLike[str], *, check: bool = True) -> None:
        """Load the adapter of a directory under a name that the server does not have.

        Raises as `VLLMEngine.load_adapter` does.
        """
        check_adapter_name(name)
        path = await asyncio.to_thread(_checked_directory, directory) if check else str(directory)
        if (present := (await self.loaded()).get(name)) is not None:
            raise adapter_exists_error(f"{self._connection.base_url} has", name, present)
        response = await self._call("/v1/load_lora_adapter", {"lora_name": name, "lora_path": path})
        if response.status != 200:
            error = response_error("load_adapter", response, f"loading the adapter {name!r} of {path}")
            raise WeightUpdateError(f"{self._connection.base_url} has not loaded an adapter: {error.reason}") from error
        self._base_versions[name] = self._base_version()

    async def unload(self, name: str) -> None:
        """Unload an adapter, after the requests of this engine with it have ended.

        Raises as `VLLMEngine.unload_adapter` does.
        """
        while self._in_use[name]:  # noqa: ASYNC110  an event for each adapter would be a second record of its requests
            # How often it is looked whether the requests with an adapter have ended.
            await asyncio.sleep(0.02)
        response = await self._call("/v1/unload_lora_adapter", {"lora_name": name})
        if response.status == 404:
            raise UnknownAdapterError("unload_adapter", name, await self.loaded())
        if response.status != 200:
            raise response_error("unload_adapter", response, f"unloading the adapter {name!r}")
        self._base_versions.pop(name, None)

    async def require(self, request_id: str, name: str) -> None:
        """Raise `UnknownAdapterError` unless the server has the adapter."""
        if name not in self._base_versions and name not in (loaded := await self.loaded()):
            raise UnknownAdapterError(request_id, name, loaded)

    async def require_after_refusal(self, request_id: str, name: str) -> None:
        """As `require`, after the server has refused a request with an adapter that it was known to have."""
        self._base_versions.pop(name, None)
        await self.require(request_id, name)

    @contextmanager
    def in_use(self, name: str | None) -> Iterator[None]:
        """Keep an adapter from being unloaded inside the block."""
        if name is None:
            yield
            return
        self._in_use[name] += 1
        try:
            yield
        finally:
            self._in_use[name] -= 1

    def labelled(self, completions: Iterable[Completion], name: str) -> list[Completion]:
        """The completions with the name of the adapter as the version of their tokens, as in `adapter_labels`."""
        return adapter_labels(completions, name, self._base_versions.get(name))

    async def _call(self, path: str, content: Mapping[str, str]) -> HttpResponse:
        """Call one of the two routes. Raises `CapabilityError` where the server does not have them."""
        response = await self._routes.request("POST", path, content=content)
        error = json_object(response).get("error") if response.status in (404, 405) else {}
        if not isinstance(error, dict):  # an unknown route: without an error of vLLM
            raise CapabilityError(
                path.rpartition("/")[2],
                f"{self._connection.base_url} has no {path}: start it with `vllm serve --enable-lora` and "
                "VLLM_ALLOW_RUNTIME_LORA_UPDATING=True in its environment, and let nobody but the trainer "
                "reach it",
            )
        return response


def _checked_directory(directory: str | os.PathLike[str]) -> str:
    """The absolute path of a directory with an adapter. Raises `WeightUpdateError`."""
    path = Path(directory).absolute()
    absent = [] if (path / _CONFIG).is_file() else [_CONFIG]
    if not any((path / name).is_file() for name in _WEIGHTS):
        absent.append(_WEIGHTS[0])
    if absent:
        raise WeightUpdateError(
            f"{path} holds no adapter: it lacks {' and '.join(absent)}. Pass a directory that `save_pretrained` of "
            "peft has written. Where the server sees other files than this process, check=False leaves out this check"
        )
    return str(path)
