"""What a turn of a program on `renderers` costs with PyPI's package and with this one: CPU of the client, bytes sent.

    python tests/dropin/main.py stock --suite verifiers-0.4.0      # makes the two environments, once
    python benchmarks/dropin.py

Both sides run `benchmarks/dropin_client.py`, the loop of verifiers' client (bridge, else render; `generate` with the
openai client), one after another in alternation, against one server in this process that answers at once with a fixed
completion. Its responses have the form of vLLM 0.31, because PyPI's package cannot read those of 0.32.

The floor is what neither side can avoid, because verifiers and prime-rl pass an openai client that `generate` must use:
that client posts the ids of each prompt, and nothing is rendered or parsed. Where the floor alone is more than the
target's share of PyPI's CPU, the target applies to the CPU above the floor.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

from aiohttp import web

_BENCH = Path(__file__).resolve().parents[1] / "tests" / "dropin"
sys.path[:0] = [str(_BENCH), str(_BENCH.parent / "renderers")]  # the environments and the models by name

from environments import Environment  # noqa: E402
from sources import CACHE  # noqa: E402

TEXT_MODEL, IMAGE_MODEL = "Qwen/Qwen3-8B", "Qwen/Qwen3-VL-4B-Instruct"
# Images in the history -> the most CPU and bytes of a turn, as a share of PyPI's.
TARGETS = {0: (0.5, 1.01), 1: (0.2, 1.0), 20: (0.2, 1 / 20)}


class Server:
    """Answers every prompt with the same completion and counts the bytes that arrive."""

    def __init__(self) -> None:
        self.bytes = 0
        # "Done.<|im_end|>" in the vocabulary of Qwen.
        self.completion = [17453, 13, 151645]

    async def generate(self, request: web.Request) -> web.Response:
        raw = await request.read()
        if request.headers["X-Turn"] != "0":
            self.bytes += len(raw)
        body = json.loads(raw)
        content = [{"token": f"token_id:{token}", "logprob": -0.5} for token in self.completion]
        choice = {"token_ids": self.completion, "logprobs": {"content": content}, "finish_reason": "stop"}
        response = {"request_id": "r", "choices": [choice]}
        if "content_parts" in body:
            response |= {"prompt_token_ids": body["token_ids"], "mm_placeholders": {"image": []}}
        return web.json_response(response)

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"data": [{"id": model, "max_model_len": 10**6} for model in (TEXT_MODEL, IMAGE_MODEL)]}
        )

    async def start_counting(self, request: web.Request) -> web.Response:
        self.bytes = 0
        return web.json_response({})

    async def run(self) -> tuple[web.AppRunner, str]:
        app = web.Application(client_max_size=2**30)
        app.add_routes([
            web.post("/inference/v1/generate", self.generate),
            web.get("/v1/models", self.models),
            web.get("/v1/count", self.start_counting),
        ])  # fmt: skip
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        return runner, f"http://127.0.0.1:{port}"


async def measure(server: Server, url: str, side: str, images: int, turns: int, episodes: int) -> tuple[float, float]:
    """CPU seconds of one turn, in the episode that took the least, and its bytes. `side`: "stock", "ours", "floor"."""
    environment = Environment("verifiers-0.4.0", "stock" if side == "stock" else "ours")
    variables = {**os.environ, "HF_HUB_CACHE": str(CACHE / "hub" / "hub"), "HF_HUB_OFFLINE": "1"}
    child = await asyncio.create_subprocess_exec(
        str(environment.python), str(Path(__file__).with_name("dropin_client.py")),
        url, IMAGE_MODEL if images else TEXT_MODEL, str(images), str(turns), str(episodes),
        "post" if side == "floor" else "play",
        env=variables, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await child.communicate()
    if child.returncode:
        raise SystemExit(f"the client of {side} failed")
    return min(json.loads(output)), server.bytes / (episodes * (turns - 1))


async def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=20)
    parser.add_argument("--episodes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    server = Server()
    runner, url = await server.run()
    missed = False
    print(
        f"{options.turns} turns an episode; least CPU of the client process and bytes sent, per turn behind the first"
    )
    for images, (most_cpu, most_bytes) in TARGETS.items():
        found: dict[str, list[tuple[float, float]]] = {"stock": [], "ours": [], "floor": []}
        for _ in range(options.rounds):
            for side, figures in found.items():
                figures.append(await measure(server, url, side, images, options.turns, options.episodes))
        # Other programs on the machine only add to the CPU time: the least is the most exact.
        cpu = {side: min(seconds for seconds, _ in figures) for side, figures in found.items()}
        sent = {side: figures[0][1] for side, figures in found.items()}
        of_cpu, of_bytes = cpu["ours"] / cpu["stock"], sent["ours"] / sent["stock"]
        above_floor = (cpu["ours"] - cpu["floor"]) / (cpu["stock"] - cpu["floor"])
        is_reachable = cpu["floor"] / cpu["stock"] < most_cpu
        print(
            f"{images:2} images   PyPI {1e3 * cpu['stock']:7.2f} ms {sent['stock'] / 1e3:9.1f} kB   "
            f"ours {1e3 * cpu['ours']:7.2f} ms {sent['ours'] / 1e3:7.1f} kB   floor {1e3 * cpu['floor']:7.2f} ms   "
            f"CPU {of_cpu:.2f}x, above the floor {above_floor:.2f}x "
            f"({'in all' if is_reachable else 'above the floor'} at most {most_cpu})   "
            f"bytes {of_bytes:.4f}x (at most {most_bytes})"
        )
        missed |= (of_cpu if is_reachable else above_floor) > most_cpu or of_bytes > most_bytes
    await runner.cleanup()
    return int(missed)


if __name__ == "__main__":
    sys.exit(asyncio.run(main()))
