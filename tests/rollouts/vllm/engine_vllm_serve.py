"""A checkpoint behind vLLM's wire as a program: python engine_vllm_serve.py serve DIR ... --port PORT ...

Prints its address once it answers.
"""

import asyncio
import sys
from pathlib import Path

from engine_server import EngineVLLM


async def main(directory: str, port: str) -> None:
    async with EngineVLLM(Path(directory), port=int(port)) as server:
        print(server.base_url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[2], sys.argv[sys.argv.index("--port") + 1]))
