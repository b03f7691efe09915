"""A scripted server in a process of its own, to be killed: python killable_server.py MODEL_DIR [PATH]

Prints its address, then "held" once a request to PATH has come, which it never answers; a streamed one gets a token.
"""

import asyncio
import sys

from fake_responses import hold
from fake_server import GENERATE, FakeVLLM


async def main(model_dir: str, path: str | None) -> None:
    async with FakeVLLM(root=model_dir) as server:
        arrived = asyncio.Event()
        if path is not None:
            server.script[path] += [hold(asyncio.Event(), arrived)] * 64
        print(server.base_url, flush=True)
        await arrived.wait()
        if path == GENERATE:
            await asyncio.sleep(0.2)  # for the first token to be on its way
        print("held", flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None))
