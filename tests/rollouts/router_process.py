"""A real vllm-router in front of servers, as a process of its own."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
from reserved_ports import reserved_port

START_SECONDS = 120  # far more than a start takes


@asynccontextmanager
async def router_process(urls: Sequence[str], log_path: Path, policy: str = "consistent_hash") -> AsyncIterator[str]:
    """The address of a router of this policy, once it answers. It does not retry: that would hide what servers lack."""
    port, metrics_port = reserved_port(), reserved_port()
    command = [sys.executable, "-m", "vllm_router.launch_router", "--worker-urls", *urls, "--disable-retries"]
    command += ["--policy", policy, "--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(metrics_port)]
    with log_path.open("wb") as log:
        router = subprocess.Popen(command, stdout=log, stderr=log)  # noqa: ASYNC220  it runs beside the event loop
    try:
        await _answers(f"http://127.0.0.1:{port}/v1/models", router)
        yield f"http://127.0.0.1:{port}"
    finally:
        router.kill()
        await asyncio.to_thread(router.wait)


async def _answers(url: str, router: subprocess.Popen[bytes]) -> None:
    async with asyncio.timeout(START_SECONDS), httpx.AsyncClient() as client:
        while router.poll() is None:
            try:
                if (await client.get(url)).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            await asyncio.sleep(0.05)
    raise AssertionError(f"the router has ended with status {router.poll()}")
