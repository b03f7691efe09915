"""The scripted server with the routes of `ServerControl`: sleeping, counting, reloading, resetting."""

from __future__ import annotations

from fake_http import json_response
from fake_responses import answer
from fake_server import FakeVLLM

from rollouts.engines.vllm.capabilities import ServerCapabilities

RELOAD, PREFIX, MM, ENCODER, LABEL = (
    "/collective_rpc",
    "/reset_prefix_cache",
    "/reset_mm_cache",
    "/reset_encoder_cache",
    "/update_weight_version",
)
WATCHING = ("/metrics", "/is_paused", "/v1/models")


class Controlled(FakeVLLM):
    """With the routes of sleeping, counting and reloading. `bad` are the directories that its workers cannot read."""

    def __init__(self, root, **options):
        super().__init__(**options)
        self.root = str(root)
        self.loaded = [self.root]
        self.bad = set()
        self.level = 0
        self.busy = 0  # requests that run, as it counts them
        self.takes_media = True
        self.started = 1000.0
        self.events = []

    async def respond(self, seen):
        if seen.path not in WATCHING:
            self.events.append(seen.path)
        match seen.path:
            case "/metrics":
                states = {
                    "awake": self.level == 0,
                    "weights_offloaded": self.level == 1,
                    "discard_all": self.level == 2,
                }
                lines = [f'vllm:engine_sleep_state{{sleep_state="{name}"}} {value:d}' for name, value in states.items()]
                lines += [f"vllm:num_requests_running {self.busy}", f"process_start_time_seconds {self.started}"]
                return await answer(body="\n".join(lines).encode())(self, seen, None)
            case "/v1/models":
                return json_response({"data": [{"id": self.model, "max_model_len": 4096, "root": self.root}]})
            case "/pause" if seen.query["mode"] != "keep":
                self.busy = 0
            case "/sleep":
                self.level = int(seen.query["level"])
                self._running.clear()
                return json_response({"status": "sleeping"})
            case "/wake_up":
                partly = seen.query.get("tags") == "weights"
                if not partly:
                    self.level = 0
                    self._running.set()
                return json_response({"status": "sleeping" if partly else "awake"})
            case "/collective_rpc":
                directory = seen.json["kwargs"]["weights_path"]
                if directory in self.bad:
                    return json_response({"error": {"message": "Worker failed", "type": "x", "code": 500}}, 500)
                self.loaded.append(directory)
                return json_response({"results": [None, None]})
            case "/reset_prefix_cache":
                return json_response({"success": self.busy == 0 or seen.query["reset_running_requests"] == "true"})
            case "/get_world_size":
                return json_response({"world_size": 4})
            case "/load":
                return json_response({"server_load": 2})
        return await super().respond(seen)


def capabilities_of(server):
    async def capabilities():
        pixels = "uint8" if server.takes_media else None
        return ServerCapabilities("0.32.0", server.model, 4096, True, pixels, {}, 4, server.control)

    return capabilities
