"""A `FakeVLLM` that loads LoRA adapters, as vLLM 0.32.0 does, and adapters for it."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, ClassVar

from fake_http import Response, Seen, error_response, json_response
from fake_server import FakeVLLM

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class AdapterVLLM(FakeVLLM):
    """`adapters` maps the name of each loaded adapter to its directory."""

    more_routes: ClassVar = {LOAD: ("POST", "_load_adapter"), UNLOAD: ("POST", "_unload_adapter")}

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.adapters: dict[str, str] = {}

    async def _load_adapter(self, seen: Seen) -> Response:
        name, directory = seen.json["lora_name"], seen.json["lora_path"]
        if name in self.adapters:
            return error_response(400, f"The lora adapter '{name}' has already been loaded.", "InvalidUserInput")
        if not os.path.exists(f"{directory}/adapter_config.json"):  # noqa: ASYNC240
            return error_response(404, f"Loading lora {name} failed: No adapter found for <path>", "NotFoundError")
        self.adapters[name] = directory
        return Response(body=b"Success")

    async def _unload_adapter(self, seen: Seen) -> Response:
        if self.adapters.pop(seen.json["lora_name"], None) is None:
            return error_response(404, "The lora adapter cannot be found.", "NotFoundError")
        return Response(body=b"Success")

    async def _models(self, seen: Seen) -> Response:
        base = {"id": self.model, "root": self.weights_path, "parent": None, "max_model_len": self.max_model_len}
        loaded = [
            {"id": name, "root": directory, "parent": self.model, "max_model_len": None}
            for name, directory in self.adapters.items()
        ]
        return json_response({"object": "list", "data": [base, *loaded]})

    def _refused(self, body: dict[str, Any]) -> Response | None:
        if body.get("model") in self.adapters:
            body = body | {"model": self.model}
        return super()._refused(body)


def write_adapter(directory: Path) -> Path:
    """A directory with the names of the files of an adapter."""
    directory.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (directory / name).touch()
    return directory
