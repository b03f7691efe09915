"""A scripted server as a program: python fake_vllm_serve.py PORT [EXIT_STATUS]

Serves until it is ended; with a status it prints two lines and ends at once. It starts a child process, whose id it
prints, as servers do. The child ignores the end of its parent, as a server's child may; it ends by itself in 300 s.
"""

import asyncio
import subprocess
import sys

from fake_server import FakeVLLM


async def main(port: int) -> None:
    async with FakeVLLM(port=port):
        await asyncio.Event().wait()


if __name__ == "__main__":
    if len(sys.argv) > 2:
        print("loading the model\nRuntimeError: out of memory", flush=True)
        sys.exit(int(sys.argv[2]))
    child = subprocess.Popen([sys.executable, "-c", "import signal; signal.alarm(300); signal.pause()"])
    print(f"child {child.pid}", flush=True)
    asyncio.run(main(int(sys.argv[1])))
