"""The endpoints of `FakeVLLM` that pause it and change its weights."""

from __future__ import annotations

from typing import ClassVar

from fake_generation import first_of
from fake_http import Response, Seen, json_response


class Control:
    """Control calls of a `FakeVLLM`, whose attributes it uses."""

    CONTROL_ROUTES: ClassVar = {
        "/abort_requests": ("POST", "_abort_any"),
        "/pause": ("POST", "_pause"),
        "/resume": ("POST", "_resume"),
        "/is_paused": ("GET", "_is_paused"),
        "/reset_mm_cache": ("POST", "_reset_images"),
        "/reset_encoder_cache": ("POST", "_reset_images"),
        "/reset_prefix_cache": ("POST", "_health"),
        "/collective_rpc": ("POST", "_collective_rpc"),
        "/weight_info": ("GET", "_weight_info"),
        "/update_weight_version": ("POST", "_update_weight_version"),
    }

    async def _abort_any(self, seen: Seen) -> Response:
        request_ids = seen.json.get("request_ids") or None
        if self.rust_frontend is not None:  # without a prefix, and without a response
            self.abort(request_ids and [f"generate-tokens-{request_id}" for request_id in request_ids])
            return Response()
        return json_response({"status": "aborted", "aborted": self.abort(request_ids)})

    async def _pause(self, seen: Seen) -> Response:
        mode = seen.query.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            return json_response({"error": f"unknown mode {mode}"}, 400)
        self._running.clear()
        if mode == "abort":
            self.abort()
        if mode == "wait":
            for other in list(self._in_flight):
                await first_of(other.answered, other.disconnected)
        if seen.query.get("clear_cache", "true") == "true":
            self.forget_images()
        return json_response({"status": "paused"})

    async def _resume(self, seen: Seen) -> Response:
        self._running.set()
        return json_response({"status": "resumed"})

    async def _is_paused(self, seen: Seen) -> Response:
        return json_response({"is_paused": self.paused})

    async def _reset_images(self, seen: Seen) -> Response:
        self.forget_images()
        return Response()

    async def _collective_rpc(self, seen: Seen) -> Response:
        if seen.json["method"] == "reload_weights":
            self.weights_path = seen.json["kwargs"]["weights_path"]
        return json_response({"results": [None]})

    async def _weight_info(self, seen: Seen) -> Response:
        return json_response({"weight_version": self.weight_version})

    async def _update_weight_version(self, seen: Seen) -> Response:
        self.weight_version = seen.json["new_version"]
        return json_response({"success": True, "new_version": self.weight_version})
