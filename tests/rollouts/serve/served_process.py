"""`rollouts serve` as a process of its own."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import NamedTuple

SECONDS = 120  # far more than a start takes


class ServedProcess(NamedTuple):
    base_url: str
    process: asyncio.subprocess.Process

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


async def _start(*arguments: str) -> asyncio.subprocess.Process:
    program = [sys.executable, "-c", "from rollouts.cli.main import main; main()", "serve", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*program, stdout=pipe, stderr=pipe, env=environment)


@asynccontextmanager
async def served_process(directory: Path, *arguments: str) -> AsyncIterator[ServedProcess]:
    """A server of a directory on a free port, once it answers."""
    process = await _start("--model", str(directory), "--port", "0", *arguments)
    try:
        line = (await asyncio.wait_for(process.stdout.readline(), SECONDS)).decode()
        match = re.search(r" at (http://\S+)", line)
        assert match is not None, line + (await process.stderr.read()).decode()
        yield ServedProcess(match[1], process)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
