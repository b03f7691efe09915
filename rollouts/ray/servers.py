"""Servers of engines, each started by an actor on the node where Ray places it."""

import asyncio
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from rollouts.calls import StartAndClose
from rollouts.engines.http.connection import ServerConnection
from rollouts.engines.lazy.server_process import ServerProcess
from rollouts.errors import ArgumentError, EngineError, RolloutsError
from rollouts.ray.cluster import end_actor, loss_reason, require_connection
from rollouts.values import check_integer


class RayServers(StartAndClose):
    """Starts a server in each of `num_servers` actors; Ray chooses their nodes, and starts those of lost nodes again.

        command = ["vllm", "serve", model, "--host", "{host}", "--port", "{port}", "--enable-scale-out"]
        async with RayServers(command, num_servers=4, actor_options={"num_gpus": 1}) as servers:
            fleet = EngineFleet.from_ray(servers.names)

    In the command, `{host}` is replaced by the address of the node and `{port}` by a free port there; the
    server is ready when GET /health answers with 200. What the server prints is in a file of its node, whose
    last lines are in the error of a failed start. A server that has ended is started again when its address
    is asked for, as a fleet does. The actors are named `name`-0, `name`-1... in the namespace of the program,
    and end with it.

    `actor_options` are those of Ray's `ActorClass.options`; `environment` is added to that of the server.
    Raises `ArgumentError`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        num_servers: int,
        name: str = "server",
        actor_options: Mapping[str, Any] | None = None,
        environment: Mapping[str, str] | None = None,
        start_seconds: float = 900.0,
    ) -> None:
        if isinstance(command, str) or not any("{port}" in part for part in command):
            raise ArgumentError("command", command, "pass a list of texts, {port} where the server is told its port")
        check_integer("num_servers", num_servers)
        self._arguments = (tuple(command), dict(environment or {}), start_seconds)
        self._options = {"num_cpus": 1, "max_restarts": -1, **(actor_options or {})}
        self.names = tuple(f"{name}-{number}" for number in range(num_servers))
        self._actors: list[Any] = []

    async def start(self) -> None:
        """Start the servers, and return when all are ready.

        Raises `RolloutsError` where this process is not connected, and for the first server that does not
        start.
        """
        require_connection()
        make = ray.remote(ServerActor)
        for name in self.names:
            self._actors.append(make.options(name=name, **self._options).remote(*self._arguments))
        for name, actor in zip(self.names, self._actors, strict=True):
            try:
                await actor.base_url.remote()
            except RayError as error:
                reason = str(error.cause) if isinstance(error, RayTaskError) else loss_reason(error)
                raise RolloutsError(f"server {name:.80} did not start: {reason}") from error

    async def close(self) -> None:
        """End the servers and their actors. A second call does nothing."""
        actors, self._actors = self._actors, []
        await asyncio.gather(*(end_actor(actor, 30.0) for actor in actors))


class ServerActor:
    """What runs in an actor of `RayServers`: the process of a server, which ends with the actor."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], start_seconds: float) -> None:
        self._command = command
        self._environment = environment
        self._start_seconds = start_seconds
        # The address by which the cluster knows this node; `ray.util.get_node_ip_address` has that of the machine, also
        # where the cluster is on the loopback address alone.
        own = ray.get_runtime_context().get_node_id()
        self._host = next(str(node["NodeManagerAddress"]) for node in ray.nodes() if node["NodeID"] == own)
        self._process: ServerProcess | None = None
        self._url = ""
        self._starting = asyncio.Lock()

    async def base_url(self) -> str:
        """The address of the server, which is started where it does not run. Raises `EngineStartError`."""
        async with self._starting:
            if self._process is None or not self._process.is_running:
                await self._start()
            return self._url

    async def stop(self) -> None:
        """End the server."""
        if self._process is not None:
            await self._process.stop()

    async def _start(self) -> None:
        port = _free_port(self._host)
        command = [part.replace("{host}", self._host).replace("{port}", str(port)) for part in self._command]
        url = f"http://{f'[{self._host}]' if ':' in self._host else self._host}:{port}"
        process, connection = ServerProcess(command, environment=self._environment), ServerConnection(url)

        async def is_healthy() -> bool:
            try:
                response = await connection.request("GET", "/health", name="health", seconds=2.0, retry=False)
            except EngineError:
                return False
            return response.status == 200

        try:
            await process.start(is_healthy, self._start_seconds)
        finally:
            await connection.close()
        self._process, self._url = process, url


def _free_port(host: str) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.bind((host, 0))
        return int(probe.getsockname()[1])
