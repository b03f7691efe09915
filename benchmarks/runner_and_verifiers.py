"""What a turn costs in verifiers' own loop and in our `Runner`: turns per second and CPU of the client process.

    python tests/dropin/main.py stock --suite verifiers-0.4.0      # makes the environment of verifiers, once
    python benchmarks/runner_and_verifiers.py

Both sides run the same conversations, one after another in alternation, against one server in this process that answers
every request at once with the same completion. verifiers 0.4.0 has its train client with PyPI's `renderers`, and a
harness that runs in its process; ours is a `Runner` with a `VLLMEngine`. Responses have the form of vLLM 0.31, because
PyPI's package cannot read those of 0.32. The server shares the machine with the client, so that turns per second depend
on the number of cores; the CPU of the client process does not.
"""

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path

from aiohttp import web

_TESTS = Path(__file__).resolve().parents[1] / "tests"
sys.path[:0] = [str(_TESTS / "dropin"), str(_TESTS / "renderers")]  # the environments and the models by name

from environments import Environment  # noqa: E402
from sources import CACHE  # noqa: E402

MODEL = "Qwen/Qwen3-8B"


class Server:
    """Answers every prompt with the same completion, as vLLM 0.31 does for a text model."""

    def __init__(self) -> None:
        # 15 times "Done", "." and "<|im_end|>" in the vocabulary of Qwen.
        completion = [17453] * 15 + [13, 151645]
        content = [{"token": f"token_id:{token}", "logprob": -0.5} for token in completion]
        choice = {"index": 0, "token_ids": completion, "logprobs": {"content": content}, "finish_reason": "stop"}
        self._response = json.dumps({"request_id": "r", "choices": [choice]}).encode()

    async def generate(self, request: web.Request) -> web.Response:
        if b'"sampling_params"' not in await request.read():  # the request with which our engine asks for the fields
            return web.json_response({"detail": [{"loc": ["body", "sampling_params"], "msg": "missing"}]}, status=422)
        return web.Response(body=self._response, content_type="application/json")

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": MODEL, "max_model_len": 10**6}]})

    async def version(self, request: web.Request) -> web.Response:
        return web.json_response({"version": "0.31.0"})

    async def run(self) -> tuple[web.AppRunner, str]:
        app = web.Application(client_max_size=2**30)
        app.add_routes([
            web.post("/inference/v1/generate", self.generate),
            web.get("/v1/models", self.models),
            web.get("/version", self.version),
        ])  # fmt: skip
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0, backlog=4096).start()
        return runner, f"http://127.0.0.1:{runner.addresses[0][1]}"


async def measure(side: str, url: str, options: argparse.Namespace) -> tuple[float, float]:
    """Turns per second, and CPU seconds of the client process per turn."""
    ours = side == "ours"
    python = Path(sys.executable) if ours else Environment("verifiers-0.4.0", "stock").python
    if not python.is_file():
        raise SystemExit(f"{python} is missing: run `python tests/dropin/main.py stock --suite verifiers-0.4.0` first")
    script = Path(__file__).with_name("runner_side.py" if ours else "verifiers_side.py")
    child = await asyncio.create_subprocess_exec(
        str(python), str(script), url, MODEL, str(options.turns), str(options.episodes), str(options.concurrency),
        env={**os.environ, "HF_HUB_CACHE": str(CACHE / "hub" / "hub"), "HF_HUB_OFFLINE": "1"},
        stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    output, _ = await child.communicate()
    if child.returncode:
        raise SystemExit(f"the client of {side} failed")
    turns, seconds, cpu = json.loads(output.splitlines()[-1])
    return turns / seconds, cpu / turns


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=8, help="of an episode")
    parser.add_argument("--episodes", type=int, default=128)
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    runner, url = await Server().run()
    figures: dict[str, list[tuple[float, float]]] = {"verifiers": [], "ours": []}
    for _ in range(options.rounds):
        for side, found in figures.items():
            found.append(await measure(side, url, options))
    await runner.cleanup()
    # Other programs on the machine only slow a run down: the best is the most exact.
    rate = {side: max(rate for rate, _ in found) for side, found in figures.items()}
    cpu = {side: min(cpu for _, cpu in found) for side, found in figures.items()}
    print(
        f"{options.episodes} episodes of {options.turns} turns, {options.concurrency} at once; "
        f"best of {options.rounds} rounds\n"
        f"{'':24}{'verifiers 0.4.0':>16}{'Runner':>12}\n"
        f"{'turns/s':24}{rate['verifiers']:16,.0f}{rate['ours']:12,.0f}   {rate['ours'] / rate['verifiers']:.1f}x\n"
        f"{'CPU per turn (ms)':24}{1e3 * cpu['verifiers']:16.2f}{1e3 * cpu['ours']:12.2f}"
        f"   {cpu['ours'] / cpu['verifiers']:.2f}x"
    )


if __name__ == "__main__":
    asyncio.run(main())
