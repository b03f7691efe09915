"""A process that has imported vLLM and is forked for each server, so that the import, most of a start, happens once.

Each line of its input is one server, in JSON: `arguments` of the program `vllm`, its `environment`, and the file `log`.
It prints the id of the process of each server. What a server does is the same: the program's own `main`.
"""

import json
import os
import sys

import vllm.entrypoints.openai.api_server
import vllm.v1.worker.cpu_worker  # noqa: F401 imported for the servers
from vllm.entrypoints.cli.main import main
from vllm.model_executor.models import registry


def become_server(arguments, environment, log):
    """Be as a program that was started with these arguments, in a session of its own."""
    os.setsid()
    nothing, output = os.open(os.devnull, os.O_RDONLY), os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    for descriptor, opened in ((0, nothing), (1, output), (2, output)):
        os.dup2(opened, descriptor)
    os.close(nothing)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments


def reap():
    """Remove the processes of servers that have ended. Until then, nothing else can have their ids."""
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:  # there are none
        pass


def serve_requests():
    """Fork a server for each line; returns in a server, and ends the template where the input ends."""
    for line in sys.stdin:
        reap()
        if (process_id := os.fork()) == 0:
            become_server(**json.loads(line))
            return
        print(process_id, flush=True)
    sys.exit()


if __name__ == "__main__":
    # vLLM looks at each class of models in a process that imports vLLM again, since its import may initialise CUDA.
    registry._run_in_subprocess = lambda function: function()
    sys.argv[0] = "vllm"
    serve_requests()
    sys.exit(main())
